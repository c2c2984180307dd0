"""Rollout ranks that crash where a test wants it: a `sitecustomize` for the roles of a real run, steered by a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import warm

CODE = """
import json, os, signal, sys, time
from functools import wraps
from importlib import import_module
from pathlib import Path

HERE = Path(__file__).parent
ROLE = next((word for before, word in zip(sys.orig_argv, sys.orig_argv[1:]) if before == "--role"), "")
RANK = int(os.environ.get("RLCTL_RANK", "0"))
CRASHES = json.loads((HERE / "crashes.json").read_text())
CALLS = {}  # of each method, in this process


def happened(number):
    marks = HERE / f"crash{number}"
    return len(marks.read_text()) if marks.exists() else 0


def crash(number, how, victim):
    with (HERE / f"crash{number}").open("a") as marks:
        marks.write(".")
    if how == "other model":
        return
    if how == "died":
        from specs.errors import SamplerDied

        raise SamplerDied("the engine's own process ended")
    if how == "sleep":
        time.sleep(600)
    if how == "late":
        while not (HERE / "journal").exists():
            time.sleep(0.01)
        return
    pid = int((HERE / f"pid_{victim}").read_text())
    os.kill(pid, signal.SIGSTOP if how == "stop" else signal.SIGKILL)
    while moves(pid):
        time.sleep(0.01)


def moves(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZXTt"
    except OSError:
        return False


def graded():
    file = HERE / "graded"
    return set(file.read_text().split()) if file.exists() else set()


def wrap(owner, name):
    inner = getattr(owner, name)
    of_verb = "generate" if owner.__name__ == "Completions" else name  # made once in each call of the verb

    @wraps(inner)
    def method(*args, **named):
        what = f"score {args[1].body.what}" if (ROLE, name) == ("reward", "score") else of_verb
        CALLS[what] = CALLS.get(what, 0) + 1
        due = []
        for number, one in enumerate(CRASHES):
            mine = one["role"] == ROLE and one["method"] == what and one.get("rank", 0) == RANK
            if mine and CALLS[what] >= one["call"] and happened(number) < one.get("times", 1):
                if "after" not in one or happened(one["after"]):
                    victim = one.get("victim", f"{ROLE} {RANK}")
                    due.append((number, one.get("how", "kill"), victim, one.get("parts", 0)))
        if what == "generate":
            self, prompts, sampling, emit = args
            with (HERE / "journal").open("a") as journal:
                journal.write(json.dumps({"rank": RANK, "pid": os.getpid(), "ids": prompts["id_B"].tolist()}) + "\\n")
            sent = []

            def emit_and_crash(batch):
                emit(batch)
                sent.append(batch["id_B"])
                for number, how, victim, parts in due:
                    if len(sent) == parts:
                        while not {str(each) for ids in sent for each in ids} <= graded():
                            time.sleep(0.01)
                        crash(number, how, victim)

            due_now = [one for one in due if one[3] == 0]
            args = (self, prompts, sampling, emit_and_crash)
        else:
            due_now = due
        for number, how, victim, _ in due_now:
            crash(number, how, victim)
        found = inner(*args, **named)
        other = any(how == "other model" for _, how, _, _ in due_now)
        return found.model_copy(update={"parameters": found.parameters + 1}) if other else found

    setattr(owner, name, method if name != "build" else staticmethod(method))


def tell_what_is_graded(reward):
    inner = reward.score

    @wraps(inner)
    def score(self, call, emit):
        with (HERE / "graded").open("a") as file:
            print(*call.tensors["id_B"], file=file)
        return inner(self, call, emit)

    reward.score = score


if ROLE in ("rollout", "reward"):
    (HERE / f"pid_{ROLE} {RANK}").write_text(str(os.getpid()))
if ROLE == "reward":
    tell_what_is_graded(import_module("workers.roles.reward").Reward)
for module, name, methods in json.loads((HERE / "engines.json").read_text()).get(ROLE, ()):
    for method in methods:
        wrap(getattr(import_module(module), name), method)
"""

ROLLOUT_METHODS = ["build", "built", "import_weight", "finish_import", "score", "sleep", "wake"]
GENERATE = ["backends.completions", "Completions", ["__init__"]]
FAKE = {
    "rollout": [["backends.fake.fake_rollout", "FakeRolloutEngine", ROLLOUT_METHODS], GENERATE],
    "actor": [["backends.fake.fake_train", "FakeTrainEngine", ["forward_backward", "save"]]],
    "reward": [["workers.roles.reward", "Reward", ["score"]], ["workers.grading.pool", "GraderPool", ["wait_ready"]]],
}
TORCH = {
    "rollout": [["backends.torch_rollout.engine", "TorchRolloutEngine", ROLLOUT_METHODS], GENERATE],
}
VLLM = {
    "rollout": [["backends.vllm_rollout.engine", "VllmRolloutEngine", ROLLOUT_METHODS], GENERATE],
}


def install(folder: Path, crashes: list[dict[str, Any]], engines: dict[str, Any] = FAKE) -> list[str]:
    """Write what makes roles crash into `folder`; returns the options of `rlctl train` that put it on their path.

    A crash: `role`, `rank` and `method` of the engine in whose call number `call` (of its process; or a later one) it
    happens, `parts` sent and being graded before, `times`, `how` ("kill", "stop", "sleep", "died", "other model",
    "late": it goes on when another rank has been asked to generate), `victim` (role and rank of a rollout or reward,
    when it is not this rank), `after` (the number of another crash that must have happened).
    """
    folder.mkdir(parents=True)
    (folder / "sitecustomize.py").write_text(warm.PATCHES + CODE)
    (folder / "crashes.json").write_text(json.dumps(crashes))
    (folder / "engines.json").write_text(json.dumps(engines))
    return [part for role in ("actor", "rollout", "reward") for part in ("--set", f'{role}.env.PYTHONPATH="{folder}"')]


def happened(folder: Path) -> list[int]:
    """How often each crash happened."""
    numbers = range(len(json.loads((folder / "crashes.json").read_text())))
    marks = [folder / f"crash{number}" for number in numbers]
    return [len(mark.read_text()) if mark.exists() else 0 for mark in marks]


def journal(folder: Path) -> list[dict[str, Any]]:
    """Every call of `generate`: rank, pid, ids of the samples asked for."""
    return [json.loads(line) for line in (folder / "journal").read_text().splitlines()]
