"""Tools that hang, crash, fork, print and fill memory: each takes only its own episode with it."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from environment_pools import LIMIT_S, make_pool, opened, started, written
from process_ends import ended

from specs.errors import RewardError
from workers.environments.environment_pool import (
    Described,
    Environment,
    EnvironmentLost,
    EnvironmentPool,
    EnvironmentReply,
)
from workers.grading import output_log

CODE = '''
    import asyncio, ctypes, json, os, signal, subprocess, sys, threading, time

    class Naughty:
        episodes = 0

        def reset(self):
            Naughty.episodes += 1
            return f"{Naughty.episodes} {os.getpid()}"

        def do(self, what: str) -> object:
            """Do something bad."""
            return getattr(self, "_" + what)()

        def _hang(self):
            while True:
                pass

        def _fork(self):
            """Leave processes behind: of this group, of another session, without variables, forked without exec."""
            sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
            pids = [subprocess.Popen(sleep).pid, subprocess.Popen(sleep, start_new_session=True, env={}).pid]
            read, write = os.pipe()
            if os.fork() == 0:
                os.setsid()
                if pid := os.fork():
                    os.write(write, str(pid).encode())
                    os._exit(0)
                time.sleep(600)
            os.wait()
            return pids + [int(os.read(read, 100))]

        def _fork_and_hang(self):
            print("left", json.dumps(self._fork()), flush=True)
            self._hang()

        def _return_twice(self):
            if pid := os.fork():
                os.waitpid(pid, 0)
            return "parent" if pid else "child"

        def _fill(self):
            filled = []
            for size in (1 << 24, 1 << 16, 1 << 10, 1):
                try:
                    while True:
                        filled.append(bytearray(size))
                except MemoryError:
                    pass
            raise MemoryError

        def _fill_in_a_child(self):
            code = "filled = []\\nwhile True: filled.append(bytearray(1 << 24))"
            return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stderr[-12:]

        def _exit(self):
            os._exit(3)

        def _sys_exit(self):
            sys.exit(5)

        def _segfault(self):
            ctypes.string_at(0)

        def _close(self):
            os.closerange(3, 256)

        def _print(self):
            print('{"text": "a lie", "reward": 9, "done": true, "error": false}')
            os.write(1, b'{"text": "another lie", "reward": 9, "done": true, "error": false}\\n')
            print("x" * 1_000_000, "\\x1b]0;title\\x07")
            return sys.stdin.read()

        def _forge(self):
            for number in range(3, 64):
                try:
                    os.write(number, b'{"text": "a lie", "reward": 9, "done": true, "error": false}\\n')
                except OSError:
                    pass

        def _long(self):
            return "x" * 3_000_000

        def _recurse(self):
            return self._recurse()

        def _raise_itself(self):
            class Odd(BaseException):
                def __str__(self):
                    raise self
            raise Odd

        def _leave_a_thread(self):
            threading.Thread(target=time.sleep, args=(600,), daemon=True).start()

        async def _leave_work(self):
            asyncio.get_running_loop().run_in_executor(None, time.sleep, 600)

        def _leave_memory(self):
            Naughty.left = bytearray(200 << 20)

        async def _in_a_thread(self):
            return await asyncio.to_thread(str, "done")

        def _zygote(self):
            return os.getppid()

        def _move(self):
            before = [os.getcwd(), os.environ.get("MOVED"), os.environ.pop("HOME", None), signal.alarm(600)]
            os.chdir(os.path.dirname(__file__))
            os.environ["MOVED"] = "1"
            return before
'''


def naughty(folder: Path, **options: int) -> EnvironmentPool:
    return make_pool(folder, path=written(folder, CODE) + ":Naughty", **options)


@asynccontextmanager
async def naughty_pool(folder: Path, **options: int) -> AsyncIterator[EnvironmentPool]:
    pool = naughty(folder, **options)
    async with started(pool):
        yield pool


async def does(environment: Environment, what: str) -> EnvironmentReply:
    return await environment.call("do", {"what": what})


async def test_a_crash_says_how_the_process_ended(tmp_path: Path) -> None:
    ends = {
        "exit": "the process ended with status 3",
        "segfault": "the process was killed by SIGSEGV",
        "close": "the process ended with status 1",
        "forge": "its code wrote to the socket that answers",
    }
    async with naughty_pool(tmp_path, processes=1) as pool:
        for what, text in ends.items():
            async with opened(pool) as environment:
                with pytest.raises(EnvironmentLost) as caught:
                    await does(environment, what)
                assert (caught.value.cause, caught.value.text) == ("crash", text)
                with pytest.raises(EnvironmentLost, match="the process is gone"):
                    await does(environment, "print")
            async with opened(pool) as environment:
                assert (await does(environment, "print")).text == ""


async def test_errors_of_a_tool_are_for_the_model_and_its_prints_for_the_log(tmp_path: Path) -> None:
    async with naughty_pool(tmp_path, memory_MiB=128) as pool, opened(pool) as environment:
        for what, text in {
            "sys_exit": "SystemExit: 5",
            "fill": "MemoryError:",
            "recurse": "RecursionError: maximum recursion depth exceeded",
            "raise_itself": "Odd",
        }.items():
            reply = await does(environment, what)
            assert isinstance(reply.text, str)
            assert reply.text.startswith(text)
            assert reply.error
        assert await does(environment, "print") == EnvironmentReply("", None, done=False)
        assert "MemoryError" in str((await does(environment, "fill_in_a_child")).text)
        text = (await does(environment, "long")).text
        assert len(text) < 1_100_000
        assert str(text).endswith("(the first 1048576 of 3000000 characters)")
    log = (tmp_path / "output.log").read_text()
    assert "another lie" in log
    assert "SystemExit: 5" in log
    assert "\x1b" not in log


def left_lines(folder: Path) -> list[str]:
    return [line for line in (folder / "output.log").read_text().splitlines(True) if re.match("left.*\n", line)]


async def test_what_an_episode_leaves_running_is_killed(tmp_path: Path) -> None:
    async with naughty_pool(tmp_path) as pool:
        async with opened(pool) as environment:
            pids = json.loads(str((await does(environment, "fork")).text))
            assert (await does(environment, "return_twice")).text == "parent"
        assert all(map(ended, pids))
        async with opened(pool) as environment:
            forking = asyncio.create_task(does(environment, "fork_and_hang"))
            while not (lines := left_lines(tmp_path)):
                await asyncio.sleep(0.02)
            forking.cancel()
        pids = json.loads(lines[0].removeprefix("left"))
        assert len(pids) == 3
        assert all(map(ended, pids))


async def test_a_process_serves_the_next_episode_unless_told_otherwise(tmp_path: Path) -> None:
    async with naughty_pool(tmp_path, processes=1) as pool:
        contents = []
        for reuse in (True, False, True):
            environment = await pool.open()
            contents.append(str(await environment.reset({}, 0)).split())
            await environment.close(reuse=reuse)
            await environment.close(reuse=reuse)  # a second time does nothing
        numbers, pids = zip(*contents, strict=True)
        assert numbers == ("1", "2", "1")
        assert pids[0] == pids[1] != pids[2]
        assert ended(int(pids[0]))


async def test_a_thread_or_memory_that_an_episode_leaves_ends_with_it(tmp_path: Path) -> None:
    """Its process serves no other episode, unless the thread only waits for work from asyncio."""
    async with naughty_pool(tmp_path, processes=1, memory_MiB=256) as pool:
        numbers = []
        lefts = ("leave_a_thread", "in_a_thread", "leave_work", "leave_memory", "leave_memory")
        for what in ("in_a_thread", *lefts):
            environment = await pool.open()
            numbers.append(str(await environment.reset({}, 0)).split()[0])
            assert not (await does(environment, what)).error
            await environment.close()
        assert numbers == ["1", "2", "1", "2", "1", "1"]


async def test_where_an_episode_went_and_what_it_set_ends_with_it(tmp_path: Path) -> None:
    """The next one in its process finds the working directory, the variables and no alarm, as it did."""
    async with naughty_pool(tmp_path, processes=1) as pool:
        found = []
        for _ in range(2):
            environment = await pool.open()
            pid = str(await environment.reset({}, 0)).split()[1]
            found.append((pid, (await environment.call("do", {"what": "move"})).text))
            await environment.close()
        assert found[0] == found[1]
        assert str(tmp_path) not in found[0][1]


async def test_a_cancelled_call_frees_its_slot(tmp_path: Path) -> None:
    async with naughty_pool(tmp_path, processes=1) as pool:

        async def episode() -> None:
            async with opened(pool) as environment:
                await does(environment, "hang")

        async def wait_for_a_slot() -> None:
            await (await pool.open()).close()

        async with opened(pool) as environment:
            pid = int(str(await environment.reset({}, 0)).split()[1])
            hanging = asyncio.create_task(does(environment, "hang"))
            waiting = asyncio.create_task(wait_for_a_slot())
            await asyncio.sleep(0.2)
            assert not waiting.done()
            waiting.cancel()
            hanging.cancel()
        assert ended(pid)
        for delay_s in (0.0, 0.001, 0.003, 0.01, 0.1):
            task = asyncio.create_task(episode())
            await asyncio.sleep(delay_s)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        await asyncio.wait_for(wait_for_a_slot(), LIMIT_S)


async def test_the_process_that_forks_is_replaced(tmp_path: Path) -> None:
    async with naughty_pool(tmp_path) as pool:
        async with opened(pool) as environment:
            zygote = int(str((await does(environment, "zygote")).text))
            os.kill(zygote, signal.SIGKILL)
            with pytest.raises(EnvironmentLost) as caught:
                await does(environment, "hang")
            assert caught.value.text == "the process was killed by SIGKILL"
        async with opened(pool), opened(pool) as environment:
            assert (await does(environment, "zygote")).text != str(zygote)


async def test_episodes_that_begin_as_the_process_that_forks_ends_are_lost(tmp_path: Path) -> None:
    async with naughty_pool(tmp_path, processes=4) as pool, opened(pool) as environment:
        zygote = int(str((await does(environment, "zygote")).text))
        os.kill(zygote, signal.SIGKILL)
        assert ended(zygote)
        found = await asyncio.gather(*(pool.open() for _ in range(3)), return_exceptions=True)
        assert {type(each) for each in found} <= {EnvironmentLost, Environment}, found
        assert EnvironmentLost in map(type, found)
        for each in found:
            if isinstance(each, Environment):
                await each.close()


async def test_the_log_has_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_log, "LOG_BYTES", 100_000)
    async with naughty_pool(tmp_path) as pool:
        for _ in range(2):
            async with opened(pool) as environment:
                await does(environment, "print")
                assert (tmp_path / "output.log").stat().st_size < 100_000
        assert (tmp_path / "output.log").stat().st_size < 100_000
    assert "bytes that were printed before this are left out" in (tmp_path / "output.log").read_text()


def test_everything_ends_with_the_parent(tmp_path: Path) -> None:
    written(tmp_path, CODE)
    parent = f"""
        import asyncio, sys
        sys.path.append({str(Path(__file__).parents[2] / "support")!r})
        from environment_pools import make_pool
        from pathlib import Path

        async def main():
            pool = make_pool(Path({str(tmp_path)!r}), path="users.py:Naughty")
            await pool.start()
            environment = await pool.open()
            content = await environment.reset({{}}, 0)
            reply = await environment.call("do", {{"what": "fork"}})
            zygote = await environment.call("do", {{"what": "zygote"}})
            print([int(content.split()[1]), int(zygote.text), *__import__("json").loads(reply.text)], flush=True)
            await asyncio.sleep(600)

        asyncio.run(main())
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(parent)],
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[3],
        text=True,
    )
    assert process.stdout is not None
    pids = json.loads(process.stdout.readline())
    process.kill()
    process.wait()
    process.stdout.close()
    assert len(pids) == 5
    assert all(map(ended, pids))


async def test_a_closed_pool_opens_nothing_and_open_environments_end(tmp_path: Path) -> None:
    pool = naughty(tmp_path)
    async with started(pool):
        environment = await pool.open()
        await environment.reset({}, 0)
    with pytest.raises(EnvironmentLost, match="the process is gone"):
        await does(environment, "print")
    await environment.close()
    with pytest.raises(RewardError, match="the pool is closed"):
        await pool.open()


def test_a_file_that_hangs_or_exits_when_it_is_imported(tmp_path: Path) -> None:
    async def start(code: str, timeout_s: float) -> Described:
        pool = make_pool(tmp_path, path=written(tmp_path, code) + ":Shop")
        pool.start_timeout_s = timeout_s
        return await pool.start()

    with pytest.raises(RewardError, match=r"the environment cannot start: not ready after 0\.5 s"):
        asyncio.run(start("import time; time.sleep(600)", 0.5))
    with pytest.raises(RewardError, match=r"the environment cannot start: the process ended with status 7"):
        asyncio.run(start("import os; os._exit(7)", LIMIT_S))
