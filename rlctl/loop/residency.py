"""Decide who holds the device in which phase: the only place that knows about sharing devices.

`TABLE` says it by kind of holder (specs/schema/roles.py, `Holds`), so that another kind is a row here and in `MOVES`.
Releases happen before acquisitions: `enter` waits until *all* ranks of all roles that leave have left, and only then do
others take their place, kind after kind in the order of the table. A holder that stays keeps what it has. When the
roles do not share devices every move is a no-op and everything stays where it is.

A reward model has the device when every completion is there, and before anything learns from them; a run without one
has no phase "score". Asleep is level 2 (weights are dropped: a sync brings them all), or level 1 (weights wait in host
memory) where a sync brings adapters alone. A sync enters "rollout" by itself, between the two halves of its behaviour
probe (rlctl/loop/sync.py). "save" leaves the rollout without weights that were verified: another sync comes before the
next token (`resend_if_asleep` in rlctl/loop/recovery.py).

Each move is measured (GiB of the device, or of the host where the role runs on the CPU; the largest of its ranks), and
the step's metrics have the last of each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast, get_args

from rlctl.processes.calls import answers_of
from specs.phases import Phase
from specs.schema.metric import Metric
from specs.schema.roles import ROLES, Holds, RoleName
from specs.wire.bodies import Level, Moved, Sleep, Tag, Wake
from specs.wire.messages import Verb

if TYPE_CHECKING:
    from rlctl.processes.calls import Call
    from rlctl.processes.group import Group
    from specs.schema.recipes import SamplingSpec
    from specs.wire.messages import Message

State = frozenset[str]
"""The parts that a holder has on the device; empty: nothing."""

NOTHING: State = frozenset()
NO_DEVICES: frozenset[tuple[int, int]] = frozenset()
MODEL: State = frozenset({"model"})  # of a trainer, with gradients and optimizer where it learns
WEIGHTS, WEIGHTS_AND_CACHE = frozenset({"weights"}), frozenset({"weights", "kv_cache"})


def _row(**held: State) -> Mapping[Phase, State]:
    """Return what a kind of holder has in each phase: nothing where it is not named."""
    return {phase: held.get(phase, NOTHING) for phase in get_args(Phase)}


TABLE: dict[Holds, Mapping[Phase, State]] = {
    "learner": _row(train=MODEL, sync=MODEL, save=MODEL),
    "frozen": _row(train=MODEL, sync=MODEL, save=MODEL),
    "score_model": _row(score=MODEL),
    "sampler": _row(rollout=WEIGHTS_AND_CACHE, sync=WEIGHTS),  # "build": a lost one is built
}


@dataclass(frozen=True)
class Moves:
    """How a kind of holder leaves the device and comes back. `released` and `acquired` are the words of its metrics,
    `after_build` is what it has of a shared device once all are built. `in_parts`: it takes single parts, by their
    names (`tags`), and is told how deep to sleep (`level`)."""

    release: Verb
    acquire: Verb
    released: str
    acquired: str
    after_build: State
    in_parts: bool = False

    def leaving(self, level: Level) -> Sleep | None:
        """Body of `release`."""
        return Sleep(level=level) if self.in_parts else None

    def coming(self, parts: State) -> Wake | None:
        """Body of `acquire`."""
        return Wake(tags=cast(list[Tag], sorted(parts))) if self.in_parts else None


_OF_TRAINERS = Moves(Verb.OFFLOAD, Verb.ONLOAD, "offloaded", "onloaded", after_build=MODEL)
MOVES: dict[Holds, Moves] = {
    "learner": _OF_TRAINERS,
    "frozen": _OF_TRAINERS,
    "score_model": Moves(Verb.OFFLOAD, Verb.ONLOAD, "offloaded", "onloaded", after_build=NOTHING),
    "sampler": Moves(Verb.SLEEP, Verb.WAKE, "asleep", "awake", after_build=NOTHING, in_parts=True),
}
METRICS: tuple[Metric, ...] = tuple(
    Metric(
        name=f"mem/<role>_{moment}_GiB",
        unit="GiB",
        meaning=f"Held by the largest rank {when} its last {verb}.",
        when="roles share devices",
    )
    for verb, after in dict.fromkeys(
        pair for moves in MOVES.values() for pair in ((moves.release, moves.released), (moves.acquire, moves.acquired))
    )
    for moment, when in ((f"before_{verb}", "before"), (after, "after"))
)
SLEEP_LEVEL: Level = 2  # weights are dropped: a sync always follows before the next token


def sleep_level(spec: SamplingSpec) -> Level:
    """How deep the rollout sleeps while others train."""
    return 1 if spec.rollout_applies_adapters else SLEEP_LEVEL


class Residency:
    """Moves roles between phases. On shared devices it starts with every holder as `MOVES` says of it `after_build`."""

    def __init__(
        self,
        shared: bool,
        groups: Sequence[Group],
        level: Level = SLEEP_LEVEL,
        devices: Mapping[RoleName, frozenset[tuple[int, int]]] | None = None,
    ) -> None:
        """`groups`: of all roles that hold a device. `level`: how deep samplers sleep. `devices`: GPUs of
        each role, as `Spec.gpus` names them."""
        self.shared, self.level, self.devices = shared, level, devices or {}
        self.holders = [group for holds in TABLE for group in groups if ROLES[group.role].holds == holds]
        self.states: dict[RoleName, State] = {group.role: _moves(group).after_build for group in self.holders}
        self.phase: Phase | None = None
        self._memory: dict[str, float] = {}

    def enter(self, phase: Phase, *, step: int | None = None) -> None:
        """Bring every role to where `phase` wants it; releases happen before acquisitions."""
        self.phase = phase
        if not self.shared:
            return
        wanted = {group.role: TABLE[ROLES[group.role].holds][phase] for group in self.holders}
        leaving = [group for group in self.holders if self.states[group.role] and not wanted[group.role]]
        self._release(leaving, step, self.level)
        for holds in TABLE:
            here = [group for group in self.holders if ROLES[group.role].holds == holds]
            self._acquire({group: wanted[group.role] - self.states[group.role] for group in here}, step)

    def leave_after_build(self, roles: Sequence[Group]) -> None:
        """Roles that have just been built on a shared device, and have nothing of it `after_build`, leave it."""
        leaving = [group for group in roles if group in self.holders and not _moves(group).after_build]
        if self.shared:
            self._release(leaving, None, SLEEP_LEVEL)
            self.take_memory()

    @property
    def sampler_asleep(self) -> bool:
        """Return whether a sampler holds nothing of a shared device."""
        return self.shared and any(ROLES[role].samples and not state for role, state in self.states.items())

    def turns(self, groups: Sequence[Group]) -> list[list[Group]]:
        """Groups that may compute at the same time, together: those that share a device take turns, in their order."""
        turns: list[list[Group]] = []
        for group in dict.fromkeys(groups):
            meets = [any(self._share(group, other) for other in turn) for turn in turns]
            first = len(meets) - meets[::-1].index(True) if True in meets else 0
            if first == len(turns):
                turns.append([])
            turns[first].append(group)
        return turns

    def _share(self, one: Group, other: Group) -> bool:
        return self.shared or bool(self.devices.get(one.role, NO_DEVICES) & self.devices.get(other.role, NO_DEVICES))

    def take_memory(self) -> dict[str, float]:
        """Metrics of the moves since the last call; of several moves the last."""
        taken, self._memory = self._memory, {}
        return taken

    def _release(self, groups: Sequence[Group], step: int | None, level: Level) -> None:
        """All leave at the same time; returns when the last rank has left."""
        calls: dict[Group, Call] = {}
        for group in groups:
            calls[group] = group.post(_moves(group).release, _moves(group).leaving(level), step=step)
            self.states[group.role] = NOTHING  # once sent it will happen, also when Ctrl-C ends the wait
        for group, call in calls.items():
            self._note(group, _moves(group).release, _moves(group).released, answers_of(call))

    def _acquire(self, missing: Mapping[Group, State], step: int | None) -> None:
        """Holders of one kind take what they lack."""
        calls: dict[Group, Call] = {}
        for group, parts in missing.items():
            if parts:
                calls[group] = group.post(_moves(group).acquire, _moves(group).coming(parts), step=step)
                self.states[group.role] |= parts
        for group, call in calls.items():
            self._note(group, _moves(group).acquire, _moves(group).acquired, answers_of(call))

    def _note(self, group: Group, verb: Verb, after: str, answers: Sequence[Message]) -> None:
        if not answers:
            return
        moved = [Moved.of(answer) for answer in answers]
        self._memory[f"mem/{group.role}_before_{verb}_GiB"] = max(each.before_GiB for each in moved)
        self._memory[f"mem/{group.role}_{after}_GiB"] = max(each.after_GiB for each in moved)


def _moves(group: Group) -> Moves:
    return MOVES[ROLES[group.role].holds]
