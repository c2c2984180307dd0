"""Runs with an environment that talks for three turns, among random naps, and does to processes what a plan says."""

from __future__ import annotations

import json
import string
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from running import metrics, settings, warm_rlctl

CODE = '''
"""Replies that follow from the row and the turn. `plan.json` beside this file says what else happens, once each."""
import json, os, random, signal, time
from pathlib import Path

PLAN = json.loads(Path(__file__).with_name("plan.json").read_text())
CLOCK = random.SystemRandom()  # naps repeat in no run


def due(what):
    """Whether this is to happen, and has not yet: for the first who asks."""
    try:
        return what in PLAN and bool(os.close(os.open(PLAN[what], os.O_CREAT | os.O_EXCL)) or True)
    except FileExistsError:
        return False


def kill(log):
    """SIGKILL the role's process that writes this log, and see it end."""
    for each in Path("/proc").glob("[0-9]*"):
        try:
            found = os.readlink(each / "fd" / "1") == log
        except OSError:
            continue
        if found:
            os.kill(int(each.name), signal.SIGKILL)
            while each.exists() and (each / "stat").read_text().rpartition(")")[2].split()[0] not in "ZX":
                time.sleep(0.01)


class Talk:
    """Rewards digits; done after three turns."""

    def reset(self, number=0, seed=0):
        if number == 1 and due("lost at the start"):
            os.kill(os.getpid(), signal.SIGKILL)
        self.number, self.turns = number, 0
        return f" {seed % 10}"

    def step(self, text):
        time.sleep(CLOCK.uniform(0, PLAN["nap_s"]))
        self.turns += 1
        if self.number == 2 and self.turns == 2 and due("lost in between"):
            os.kill(os.getpid(), signal.SIGKILL)
        if self.turns == 2 and due("kill a rank"):
            kill(PLAN["log"])
        reward = PLAN.get("reward", sum(each.isdigit() for each in text))
        return "m" * (1 + self.number + self.turns), reward, self.turns == 3, False, {}


class Other(Talk):
    """Rewards nothing but the end."""

    def step(self, text):
        return "", 0.25, True, False, {}


def last_message(messages):
    """A reward for an episode that has a message: 0."""
    return 0.0 * len(messages[-1]["content"])


async def forgets(task, client):
    """Ask up to three times, each time without what was said before; the row says how often, and the reward."""
    reward = task["number"] % 3
    for turn in range(1 + reward):
        await client.chat([*task["messages"], {"role": "user", "content": str(turn)}])
    return {"reward": reward, "asked/for": reward + 1} if reward else 0


async def silent(task, client):
    """Give two rows of three a reward."""
    await client.chat(task["messages"])
    return task["number"] % 3 or None
'''
# Most characters end a turn, so that a model with random weights has several.
STOP = json.dumps(
    [one for one in string.digits + string.ascii_letters + string.punctuation if one not in "ABCDEFGHIJK"]
)
# A run that hangs names who waits for whom long before its test gives up.
SPEC = f"""
schema = 1
[run]
name = "talking"
steps = 4
stall_timeout_s = 100
[model]
path = "builtin:tiny-chat"
from_scratch = true
[data]
train = "rows.jsonl"
prompts_per_step = 4
max_prompt_tokens = 48
max_response_tokens = 8
[environment]
path = "talk.py:Talk"
max_turns = 4
max_episode_tokens = 128
processes = 6
[algorithm]
kind = "grpo"
group_size = 4
[actor]
engine = {{ kind = "fake" }}
optimizer = {{ lr = 0.05 }}
[rollout]
engine = {{ kind = "fake" }}
stop = {STOP}
[eval]
every = 2
prompts = 4
samples_per_prompt = 2
temperature = 1.0
[checkpoint]
every = 2
keep = 9
"""
TORCH = settings(
    'actor.engine={kind="ddp"}',
    'rollout.engine={kind="torch"}',
    "actor.micro_batch_tokens=4096",
    "actor.optimizer.lr=1e-3",
)
# What depends on clocks and on which process did the work.
_MEASURED = ("time/", "perf/", "mem/", "sync/", "rollout/overlap_s", "rollout/restarts", "reward/restarts")


def write(folder: Path, rows: Sequence[Mapping[str, Any]] = (), nap_s: float = 0.02, **plan: Any) -> Path:
    """Write the spec, its environment and its rows, 24 if there are none; return the spec. A plan's events get the file
    that says that they have happened."""
    rows = rows or [{"prompt": "ask", "number": number} for number in range(24)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "talk.py").write_text(CODE)
    events = {name: str(folder / f"{name}.happened") for name, value in plan.items() if value is True}
    (folder / "plan.json").write_text(json.dumps({"nap_s": nap_s, **plan, **events}))
    (folder / "talking.toml").write_text(SPEC)
    return folder / "talking.toml"


def refused(spec: Path, run: Path, *options: str) -> tuple[int, str]:
    done = warm_rlctl("train", spec, "--run-dir", run, *options)
    return done.returncode, (done.stdout + done.stderr).replace("\n", "")


def counted(run: Path) -> list[dict[str, Any]]:
    """The metrics of a run that must repeat to the bit."""
    return [
        {key: value for key, value in line.items() if not (key.startswith(_MEASURED) or key.endswith("environment_s"))}
        for line in metrics(run)
    ]


def spoken(run: Path) -> dict[tuple[int, int], list[dict[str, Any]]]:
    """The pieces of each evaluated episode, by step and sample."""
    lines = [json.loads(line) for line in (run / "eval.jsonl").read_text().splitlines()]
    return {(line["step"], line["id"]): line["pieces"] for line in lines}
