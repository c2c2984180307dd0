"""Who holds the device in which phase. The only place that knows about sharing devices.

| phase    | trainers (actor, ref) | rollout                      |
| -------- | --------------------- | ---------------------------- |
| generate | offloaded             | weights + KV cache           |
| learn    | on the device         | asleep                       |
| sync     | on the device         | weights only, no KV cache    |
| save     | on the device         | asleep                       |
| build    | offloaded             | asleep; a lost one is built  |

Asleep is level 2 (weights are dropped: a sync brings them all), or level 1 (weights wait in host memory) where a sync
brings adapters alone.

Trainers hand the device back before the KV cache takes it: `enter("generate")` waits until *all* ranks have
offloaded. A sync enters it by itself, between the two halves of its behaviour probe (rlctl/sync.py). "save" leaves the
rollout without weights that were verified: another sync comes before the next token (rlctl/revive.py). When the roles
do not share devices every move is a no-op and everything stays where it is.

Each move is measured (GiB of the device, or of the host where the role runs on the CPU; the largest of its ranks), and
the step's metrics have it. What is held after a role has left the device must not grow (rlctl/memory_watch.py).

    mem/ROLE_before_offload_GiB     mem/ROLE_offloaded_GiB            learned and synced; the device is free
    mem/ROLE_before_onload_GiB      mem/ROLE_onloaded_GiB             about to learn
    mem/rollout_before_sleep_GiB    mem/rollout_asleep_GiB            sampled; the device is free
    mem/rollout_before_wake_GiB     mem/rollout_awake_GiB             the last of two wakes: weights, then KV cache
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from rlctl.calls import RanksLost
from specs.messages import Verb

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rlctl.groups import Group
    from specs.messages import Message
    from specs.schema import Spec

Phase = Literal["generate", "learn", "sync", "save", "build"]

# (trainers hold the device, tags that the rollout holds)
TABLE: dict[Phase, tuple[bool, frozenset[str]]] = {
    "generate": (False, frozenset({"weights", "kv_cache"})),
    "learn": (True, frozenset()),
    "sync": (True, frozenset({"weights"})),
    "save": (True, frozenset()),
    "build": (False, frozenset()),
}
SLEEP_LEVEL = 2  # weights are dropped: a sync always follows before the next token


def sleep_level(spec: Spec) -> int:
    """How deep the rollout sleeps while others learn."""
    return 1 if spec.rollout_applies_adapters else SLEEP_LEVEL


class Residency:
    """Moves roles between phases. On shared devices it starts with the trainers awake and the rollout asleep."""

    def __init__(self, shared: bool, trainers: list[Group], rollout: Group, level: int = SLEEP_LEVEL) -> None:
        self.shared, self.level = shared, level
        self.trainers, self.rollout = trainers, rollout
        self.trainers_on = True
        self.tags: frozenset[str] = frozenset()
        self.phase: Phase | None = None
        self._memory: dict[str, float] = {}

    def enter(self, phase: Phase, *, step: int | None = None) -> None:
        """Bring every role to where `phase` wants it; leavers move before comers."""
        self.phase = phase
        if not self.shared:
            return
        want_trainers, want_tags = TABLE[phase]
        if self.trainers_on and not want_trainers:
            self._move_trainers(Verb.OFFLOAD, step)
            self.trainers_on = False
        if not want_tags and self.tags:
            answers = self._move_rollout(Verb.SLEEP, {"level": self.level}, step)
            self._note("rollout", "before_sleep", "asleep", answers)
            self.tags = frozenset()
        if want_trainers and not self.trainers_on:
            self._move_trainers(Verb.ONLOAD, step)
            self.trainers_on = True
        missing = want_tags - self.tags
        if missing:
            answers = self._move_rollout(Verb.WAKE, {"tags": sorted(missing)}, step)
            self._note("rollout", "before_wake", "awake", answers)
            self.tags = self.tags | missing

    def take_memory(self) -> dict[str, float]:
        """Metrics of the moves since the last call; of several moves the last."""
        taken, self._memory = self._memory, {}
        return taken

    def _move_trainers(self, verb: Verb, step: int | None) -> None:
        calls = [(group.role, group.post(verb, step=step)) for group in self.trainers]
        for role, call in calls:
            self._note(role, f"before_{verb}", f"{verb}ed", call.result())

    def _move_rollout(self, verb: Verb, body: dict[str, Any], step: int | None) -> Sequence[Message]:
        """Answers of the replicas that live. One that was lost is brought here when it is back (rlctl/revive.py)."""
        try:
            return self.rollout.call(verb, body, step=step)
        except RanksLost as lost:
            return [*lost.call.answers.values()]

    def _note(self, role: str, before: str, after: str, answers: Sequence[Message]) -> None:
        if not answers:
            return
        for what, key in ((before, "before_GiB"), (after, "after_GiB")):
            self._memory[f"mem/{role}_{what}_GiB"] = max(float(answer.body[key]) for answer in answers)
