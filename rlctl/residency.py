"""Who holds the device in which phase. The only place that knows about sharing devices.

| phase    | trainers (actor, ref) | rollout                      |
| -------- | --------------------- | ---------------------------- |
| generate | offloaded             | weights + KV cache           |
| learn    | on the device         | asleep, level 2              |
| sync     | on the device         | weights only, no KV cache    |

Trainers hand the device back before the KV cache takes it: `enter("generate")` waits until *all* ranks have
offloaded. When the roles do not share devices every move is a no-op and everything stays where it is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from specs.messages import Verb

if TYPE_CHECKING:
    from rlctl.groups import Group

Phase = Literal["generate", "learn", "sync"]

# (trainers hold the device, tags that the rollout holds)
TABLE: dict[Phase, tuple[bool, frozenset[str]]] = {
    "generate": (False, frozenset({"weights", "kv_cache"})),
    "learn": (True, frozenset()),
    "sync": (True, frozenset({"weights"})),
}
SLEEP_LEVEL = 2  # weights are dropped: a sync always follows before the next token


class Residency:
    """Moves roles between phases. On shared devices it starts with the trainers awake and the rollout asleep."""

    def __init__(self, shared: bool, trainers: list[Group], rollout: Group) -> None:
        self.shared = shared
        self.trainers, self.rollout = trainers, rollout
        self.trainers_on = True
        self.tags: frozenset[str] = frozenset()
        self.phase: Phase | None = None

    def enter(self, phase: Phase, *, step: int | None = None) -> None:
        """Bring every role to where `phase` wants it; leavers move before comers."""
        self.phase = phase
        if not self.shared:
            return
        want_trainers, want_tags = TABLE[phase]
        if self.trainers_on and not want_trainers:
            calls = [group.post(Verb.OFFLOAD, step=step) for group in self.trainers]
            for call in calls:
                call.result()
            self.trainers_on = False
        if not want_tags and self.tags:
            self.rollout.call(Verb.SLEEP, {"level": SLEEP_LEVEL}, step=step)
            self.tags = frozenset()
        if want_trainers and not self.trainers_on:
            calls = [group.post(Verb.ONLOAD, step=step) for group in self.trainers]
            for call in calls:
                call.result()
            self.trainers_on = True
        missing = want_tags - self.tags
        if missing:
            self.rollout.call(Verb.WAKE, {"tags": sorted(missing)}, step=step)
            self.tags = self.tags | missing
