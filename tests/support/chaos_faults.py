"""The faults of `scripts/chaos`: who is hit by what, in which phase, and how that run must end.

A fault happens while the run is held in a phase: one role's rank waits at the beginning of a verb of that phase until
its process, or another one, was hit (`HOLD`).
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

SIGNALS = ("SIGKILL", "SIGTERM", "SIGSTOP")


@dataclass(frozen=True)
class Moment:
    """The call of a verb's handler in which the run is held."""

    role: str
    method: str
    call: int


# In a run that saves every second step: one checkpoint is there when the run is held in `rollout`, `train` or `sync`.
PHASES = {
    "build": Moment("actor", "build", 1),
    "rollout": Moment("rollout", "generate", 3),
    "train": Moment("actor", "update", 3),
    "sync": Moment("rollout", "import_begin", 4),
    "save": Moment("actor", "save", 1),
}


@dataclass(frozen=True)
class Fault:
    """`kind`: a signal; "Ctrl-C ×N"; "hang-up"; "sleep" or "spin" (the held rank itself); "full disk"; or what the
    reward function does ("raise", "hang", "exit", "huge", "escapes").
    `victim`: "driver", "launcher", "grader", or a role and its rank. `late_s`: how long after the run was let go on."""

    engine: str
    phase: str
    kind: str
    victim: str = ""
    late_s: float = 0.0

    @property
    def moment(self) -> Moment | None:
        """None: nothing is held."""
        return PHASES.get(self.phase)

    @property
    def restarts(self) -> bool:
        """The loss of a sampler, from its first sync on, does not end the run."""
        return self.victim.startswith("rollout") and self.phase != "build"

    @property
    def who(self) -> str:
        """What the error must name: "actor rank 1"; of a launcher the role."""
        names = {"launcher": "actor rank", "grader": "reward rank 0"}
        return names.get(self.victim) or self.victim.replace(" ", " rank ")


# What each does to one completion in so many, and what the run must say of it.
REWARDS = {
    "raise": ('raise ValueError("no \\x1b]0;score\\x07")', "exceptions"),
    "hang": ("time.sleep(600)", "timeouts"),
    "exit": ("os._exit(3)", "crashes"),
    "huge": ("return 1e300", "bad values"),
    "escapes": ('print("\\x1b[2J\\x1b]0;owned\\x07", flush=True); raise ValueError("\\x1b[31m")', "exceptions"),
}
REWARD_CODE = """
import os, time
def score(prompt, completion, row):
    if sum(map(ord, completion)) % 29 == 0:
        {what}
    return len(completion) / 10
"""

HOLD = """
import json, os, sys, time
from importlib import import_module
from pathlib import Path

HERE = Path(__file__).parent
ROLE = next((word for before, word in zip(sys.orig_argv, sys.orig_argv[1:]) if before == "--role"), "")
PLAN = json.loads((HERE / "hold.json").read_text())
RANK = int(os.environ.get("RLCTL_RANK", os.environ.get("RANK", "-1")))
CALLS = []


def hold():
    (HERE / "held").touch()
    if PLAN["kind"] == "sleep":
        time.sleep(600)
    while PLAN["kind"] == "spin":
        pass
    until = time.monotonic() + 30
    while not (HERE / "go").exists() and time.monotonic() < until:
        time.sleep(0.005)


if (ROLE, RANK) == (PLAN["role"], 0):
    owner = getattr(import_module(f"workers.roles.{ROLE}"), ROLE.title())
    inner = getattr(owner, PLAN["method"])

    def method(self, call, emit):
        CALLS.append(1)
        if len(CALLS) == PLAN["call"] and not (HERE / "held").exists():
            hold()
        return inner(self, call, emit)

    setattr(owner, PLAN["method"], method)
"""


def victims(engine: str, launched: bool) -> list[str]:
    ranks = ["actor 0"] if engine == "fake" else ["actor 0", "actor 1"]
    return [
        *("driver", "data 0", "reward 0", "grader", "rollout 0", "rollout 1"),
        *ranks,
        *(["launcher"] if launched else []),
    ]


def all_faults(engine: str, launched: bool) -> list[Fault]:
    """Every fault of an engine, in a fixed order."""
    signals = [
        Fault(engine, phase, kind, victim)
        for phase, kind, victim in itertools.product(PHASES, SIGNALS, victims(engine, launched))
    ]
    bursts = [Fault(engine, phase, f"Ctrl-C ×{times}", "driver") for phase in PHASES for times in (1, 2, 5)]
    others = [Fault(engine, phase, "hang-up", "driver") for phase in PHASES]
    stuck = [
        Fault(engine, phase, kind, f"{PHASES[phase].role} 0")
        for phase, kind in itertools.product(("rollout", "train", "sync"), ("sleep", "spin"))
    ]
    disks = [Fault(engine, f"{KiB} KiB", "full disk", "driver") for KiB in DISKS_KIB] if engine == "fake" else []
    rewards = [Fault(engine, "rollout", kind, "rewards") for kind in REWARDS] if engine == "fake" else []
    return [*signals, *bursts, *others, *stuck, *disks, *[replace(one, phase="every step") for one in rewards]]


DISKS_KIB = (24, 40, 64, 80, 96)


def chosen(engines: Sequence[str], launched: Sequence[str], count: int, seed: int) -> list[Fault]:
    """`count` faults of these engines in random order, late ones too: all kinds that are no signal, and of the signals
    as many as there is room for, in turn from each engine."""
    rng = random.Random(seed)
    by_engine = []
    for engine in engines:
        faults = all_faults(engine, engine in launched)
        rng.shuffle(faults)
        if engine == engines[0]:  # the quickest: all of its rarer kinds, first
            faults.sort(key=lambda fault: fault.kind in SIGNALS)
        by_engine.append(faults)
    taken: list[Fault] = []
    share = {engine: 1.0 if engine == engines[0] else 1 / 3 for engine in engines}
    credit = dict.fromkeys(engines, 0.0)
    while len(taken) < count and any(by_engine):
        for engine, faults in zip(engines, by_engine, strict=True):
            credit[engine] += share[engine]
            if credit[engine] >= 1 and faults and len(taken) < count:
                credit[engine] -= 1
                late_s = rng.choice((0.0, 0.0, 0.01, 0.05))
                taken.append(replace(faults.pop(0), late_s=late_s))
    rng.shuffle(taken)
    return taken


def write_hold(folder: Path, fault: Fault) -> list[str]:
    """Put the code that holds a run into `folder`; returns the options of `rlctl train` that bring it in."""
    moment = fault.moment
    assert moment is not None
    folder.mkdir(parents=True)
    (folder / "sitecustomize.py").write_text(HOLD)
    (folder / "hold.json").write_text(
        json.dumps({"role": moment.role, "method": moment.method, "call": moment.call, "kind": fault.kind})
    )
    return ["--set", f'{moment.role}.env.PYTHONPATH="{folder}"']
