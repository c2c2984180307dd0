"""Agents that are programs: real processes that reach the model by the variables that they are given."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import re
import secrets
import subprocess
import sys
import tarfile
import textwrap
import zipfile
from pathlib import Path
from typing import Any

import psutil
import pytest
from agent_gateway import END, TASK, Sampler, chat

from specs.schema.environment import EnvironmentSection
from workers import watchdog
from workers.environments.environment_pool import EnvironmentPool
from workers.environments.harness import LOGGED_BYTES, OUTPUT_BYTES, Harness, HarnessRun
from workers.environments.replies import Lost
from workers.episodes import agent_episode
from workers.episodes.agent_episode import AgentEpisode
from workers.episodes.trajectory import Task, Trajectory
from workers.gateway.gateway_server import Gateway
from workers.watchdog import kill_marked

AGENT = """
    import json, os, subprocess, sys, threading, time, urllib.request

    def ask(*texts, timeout=None):
        body = {"messages": [{"role": "user", "content": text} for text in texts]}
        url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
        headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
        request = urllib.request.Request(url, json.dumps(body).encode(), headers)
        return json.loads(urllib.request.urlopen(request, timeout=timeout).read())["choices"][0]["message"]["content"]

    how, prompt = sys.argv[1:3]
    if how == "answers":
        open("answer.txt", "w").write(ask(prompt))
        files, home = sorted(os.listdir(".")), os.listdir(os.environ["HOME"])
        print(json.dumps({"env": dict(os.environ), "files": files, "home": home}))
        os.mkfifo("pipe")
    elif how == "fails":
        ask(prompt)
        print("x" * (10 << 20), flush=True)
        sys.exit("no idea")
    elif how == "crashes":
        ask(prompt)
        os.kill(os.getpid(), 9)
    elif how == "says nothing":
        print("cannot find my configuration")
    elif how == "refused":
        ask()
    elif how == "gives up":
        try:
            ask(prompt, timeout=0.5)  # after it was sent
        except TimeoutError:
            pass
    elif how == "wants a title":
        ask(prompt)
        try:
            ask("A title, please", timeout=0.5)
        except TimeoutError:
            pass
    elif how == "goes on":
        while True:
            ask(prompt, str(time.time()))
    elif how == "asks twice at once":
        threading.Thread(target=ask, args=(prompt,)).start()
        time.sleep(0.5)
        ask(prompt, "more")
        time.sleep(600)
    elif how == "leaves":
        ask(prompt)
        for _ in range(3):
            subprocess.Popen(["sleep", "654"], start_new_session=True)
        os.mkdir("locked")
        open("locked/file", "w").close()
        os.chmod("locked", 0o500)
    elif how == "hangs":
        ask(prompt)
        subprocess.Popen(["sleep", "654"], start_new_session=True)
        time.sleep(600)
    elif how == "fills":
        ask(prompt)
        filled = bytearray(1 << 30)
"""
REWARD = """
    def score(cwd, exit_code, output, messages, worth=1.0):
        text = open(cwd + "/answer.txt").read()
        return worth * (text == messages[-1]["content"] == "42") + exit_code + 0 * len(output)

    def none(cwd):
        return None
"""


class Bench:
    """Plays episodes of programs in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.log = folder, folder / "log"
        (folder / "agent.py").write_text(textwrap.dedent(AGENT))
        (folder / "reward.py").write_text(textwrap.dedent(REWARD))

    def play(
        self, how: str, *, wait_s: float = 0.0, row: dict[str, Any] | None = None, times: int = 1, **agent: Any
    ) -> Any:
        limits = {name: agent.pop(name) for name in ("max_turns", "episode_timeout_s", "memory_MiB") if name in agent}
        command = {"command": ["python", "{spec_dir}/agent.py", how, "{prompt}"], **agent}
        section = EnvironmentSection(agent=command, processes=4, call_timeout_s=30.0, **limits)
        return asyncio.run(self._play(section, wait_s, row or {}, times))

    async def _play(self, section: EnvironmentSection, wait_s: float, row: dict[str, Any], times: int) -> Any:
        gateway, self.sampler = Gateway(), Sampler([f"42{END}"], wait_s=wait_s)
        await gateway.start()
        self.pool = EnvironmentPool(section, str(self.folder), log_path=self.log)
        try:
            described = await self.pool.start()

            async def one() -> Trajectory:
                task = Task(7, 2, 5, 1, False, 11, [1], row, [{"role": "user", "content": TASK}], "environment")
                what = task, section, described, lambda tools: chat("tiny-chat", json.dumps(tools)), self.sampler, 50
                return await AgentEpisode(*what, gateway).run(self.pool)

            found = await asyncio.gather(*(one() for _ in range(times)))
            self.left = list(self.pool.folders.iterdir()) if self.pool.folders else []
            return found if times > 1 else found[0]
        finally:
            await self.pool.close()
            await gateway.close()


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def no_rename(*_: object) -> None:
    raise OSError(errno.EXDEV, "another file system")


def test_an_episode_of_a_program(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """It reaches the model, is given no more than it should, and its reward sees what it left."""
    monkeypatch.setenv("SECRET_OF_THIS_MACHINE", "x")
    monkeypatch.setattr(os, "rename", no_rename)
    env = {"GREETING": "{name}, {prompt}", "MODEL": "{model}", "LITERAL": "${HOME} {unknown} {}"}
    (bench.folder / "logs").mkdir()
    bench.log = bench.folder / "logs" / "log"
    row = {"name": "Ann", "worth": 2.0}
    found = bench.play("answers", env=env, reward="reward.py:score", row=row, keep_cwd=True)
    assert (found.why, found.stop, found.reward, found.turns) == ("", "completed", 2.0, 1)
    assert found.notes["exit_code"] == 0
    told = json.loads(found.notes["output"])
    assert (told["files"], told["home"]) == (["answer.txt"], [])
    assert told["env"]["GREETING"] == f"Ann, {TASK}"
    assert (told["env"]["MODEL"], told["env"]["LITERAL"]) == ("rlctl", "${HOME} {unknown} {}")
    assert told["env"]["ANTHROPIC_BASE_URL"].endswith(f"/s/{told['env']['ANTHROPIC_API_KEY']}")
    assert "SECRET_OF_THIS_MACHINE" not in told["env"]
    assert [sample.rewards for sample in found.samples] == [[(len(found.samples[0].tokens) - 1, 2.0)]]
    assert not bench.left, "its folders are gone"
    assert not bench.pool.folders.exists()
    assert (bench.folder / "agents" / "7" / "answer.txt").read_text() == "42"
    assert found.record()["cwd"] == str(bench.folder / "agents" / "7")


FAILED = {
    "crashes": "killed",
    "says nothing": "exit code 0 before it asked the model: cannot find my configuration",
    "refused": "its request was refused: there is no message for the model to answer",
    "gives up": "had not waited for the model's last reply",
    "no program": "cannot be run: No such file or directory",
}


@pytest.mark.parametrize("how", FAILED)
def test_a_program_that_fails_has_no_reward(bench: Bench, how: str) -> None:
    """No reward of 0 for what never answered."""
    more: dict[str, Any] = {"command": ["no-such-agent"]} if how == "no program" else {}
    found = bench.play(how, wait_s=2.0 if how == "gives up" else 0.0, **more)
    assert found.stop == "environment_lost"
    assert re.search(FAILED[how], found.why), found.why
    assert found.reward == 0.0
    assert not bench.left


def test_a_title_that_nobody_waited_for_is_no_loss(bench: Bench) -> None:
    found = bench.play("wants a title", wait_s=1.0)
    assert (found.stop, found.why, found.turns) == ("completed", "", 2)
    assert [any(sample.mask) for sample in found.samples] == [True, False]


def test_an_exit_code_is_for_the_reward_and_output_without_end_fills_no_disk(bench: Bench) -> None:
    found = bench.play("fails")
    assert (found.stop, found.notes["exit_code"], found.notes["output"][-10:]) == ("completed", 1, "x\nno idea\n")
    said = b"\n(%d bytes that it printed after this are left out)\n" % ((10 << 20) + 9 - LOGGED_BYTES)
    assert (len(found.notes["output"]), bench.log.read_bytes()[LOGGED_BYTES:]) == (OUTPUT_BYTES, said)


def test_a_program_that_does_not_stop_is_stopped(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """After its last turn it is told, and killed where it continues; the reward sees what it left."""
    monkeypatch.setattr(agent_episode, "_GRACE_S", 0.3)
    (bench.folder / "reward.py").write_text("def score(exit_code, cwd):\n    return float(exit_code)\n")
    found = bench.play("goes on", max_turns=3, reward="reward.py:score")
    assert (found.stop, found.turns, found.reward) == ("max_turns", 3, -9.0)
    assert len(bench.sampler.log) == 3


@pytest.mark.parametrize("wait_s", [1.0, 3.0])
def test_a_limit_is_met_while_another_turn_is_drawn(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, wait_s: float
) -> None:
    """That turn comes, or does not, before the program is killed: it was a limit that ended the episode."""
    monkeypatch.setattr(agent_episode, "_GRACE_S", 1.5)
    found = bench.play("asks twice at once", max_turns=1, wait_s=wait_s)
    assert (found.stop, found.why, found.turns) == ("max_turns", "", 1)


def test_one_that_is_stopped_before_it_has_started_is_stopped(tmp_path: Path) -> None:
    """On a busy machine the program may have used up its turns before the process that started it knows its number."""
    run = HarnessRun(Harness(("sleep", "600"), {}, "fresh", None), tmp_path / "run", str(tmp_path), {})

    async def stopped() -> dict[str, Any]:
        run.stop()
        return await asyncio.wait_for(run.run({}), 30)

    assert asyncio.run(stopped())["exit_code"] == -9


@pytest.mark.parametrize(
    ("how", "limits"), [("leaves", {}), ("hangs", {"episode_timeout_s": 1.5}), ("fills", {"memory_MiB": 200})]
)
def test_nothing_is_left_of_many(bench: Bench, how: str, limits: dict[str, Any]) -> None:
    """Processes in sessions of their own, folders that are locked, what was killed: all of it goes."""
    mine = psutil.Process()
    chat("tiny-chat", "[]")  # the tests' own process, whichever test comes first
    before = {process.pid for process in mine.children(recursive=True)}
    open_ = mine.num_fds()
    found = bench.play(how, times=6, **limits)
    stops = {"leaves": "completed", "hangs": "timeout", "fills": "completed"}
    assert {one.stop for one in found} == {stops[how]}
    if how == "fills":
        assert all("MemoryError" in one.notes["output"] for one in found)
    assert {process.pid for process in mine.children(recursive=True)} == before
    assert not [process for process in psutil.process_iter(["cmdline"]) if process.info["cmdline"] == ["sleep", "654"]]
    assert not bench.left
    assert not bench.pool.folders.exists()
    assert mine.num_fds() <= open_ + 2


OWNER = """
    import asyncio, sys
    from pathlib import Path
    from specs.schema.environment import EnvironmentSection
    from workers.environments.environment_pool import EnvironmentPool

    async def main():
        section = EnvironmentSection(agent={"command": ["true"]})
        pool = EnvironmentPool(section, ".", log_path=Path(sys.argv[1]))
        await pool.start()
        for number in range(2000):
            (pool.folders / str(number)).mkdir()
        print(pool.folders, flush=True)
        await asyncio.sleep(600)

    asyncio.run(main())
"""


def test_folders_go_also_where_their_owner_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that is left of a run is killed so at a Ctrl-C."""
    monkeypatch.setattr(watchdog, "_CLEANING_S", 60.0)
    mark = secrets.token_hex(8)
    command, env = [sys.executable, "-c", textwrap.dedent(OWNER), str(tmp_path / "log")], {"RLCTL_RUN_ID": mark}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **env}) as owner:
        assert owner.stdout is not None
        folder = Path(owner.stdout.readline().strip())
        assert len(list(folder.iterdir())) == 2000
        owner.kill()
    assert kill_marked(f"RLCTL_RUN_ID={mark}", 30) == []
    assert not folder.exists()


def test_working_directories(tmp_path: Path) -> None:
    """A folder, archives and a git bundle; names of the row's columns stand in it."""
    source = tmp_path / "repos" / "one"
    source.mkdir(parents=True)
    (source / "main.py").write_text("print(1)\n")
    with tarfile.open(tmp_path / "one.tar.gz", "w:gz") as tar:
        tar.add(source / "main.py", "main.py")
    with zipfile.ZipFile(tmp_path / "one.zip", "w") as archive:
        archive.write(source / "main.py", "main.py")
    git = ["git", "-C", str(source), "-c", "user.name=x", "-c", "user.email=x@x"]
    bundle = ["bundle", "create", "-q", str(tmp_path / "one.bundle"), "HEAD", "--all"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "x"], bundle):
        subprocess.run([*git, *command], check=True)
    (tmp_path / "bad.tar.gz").write_bytes(b"no archive")

    def printed(cwd: str) -> str:
        """Return what a program prints that empties its file, of which the source keeps its own."""
        harness = Harness(("sh", "-c", "cat main.py; echo > main.py"), {}, cwd, None)
        run = HarnessRun(harness, tmp_path / "runs" / cwd, str(tmp_path), {"name": "one"})
        return str(asyncio.run(run.run({}))["output"])

    for cwd in ("repos/{name}", "{name}.tar.gz", "one.zip", "one.bundle"):
        assert printed(cwd) == "print(1)\n", cwd
    assert (source / "main.py").read_text() == "print(1)\n"
    with pytest.raises(Lost, match="cannot be copied"):
        printed("bad.tar.gz")
    with pytest.raises(Lost, match=r"cwd = .*/repos/\{nobody\} cannot be copied: it does not exist"):
        printed("repos/{nobody}")
