"""The roles of a run: what each holds, when it is built, where it runs, what it leaves behind.

Everything that asks "which roles are there?" asks this table, by `Spec.roles` and `Spec.sections`; everything that
treats roles differently asks for a property of the role, not for its name. CONTRIBUTING.md, "Adding a role", lists the
files that a new one opens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

RoleName = str
"""A key of `ROLES`."""

Holds = Literal["learner", "frozen", "score_model", "sampler", "data", "scorer"]
"""Kinds of what a role holds: a model that learns, one that never changes, a frozen one that gives scores and has
tokens of its own, one that samples with a learner's weights, the prompts, or what scores completions."""

# What a model ends in: logits of the next token; or one number for each token, which is a critic's value of what comes
# after it, or, at a sequence's last token, a reward model's score.
HeadKind = Literal["lm", "value", "reward"]
HEADS_OF_FILES: frozenset[HeadKind] = frozenset({"reward"})  # those that are built from scratch only to learn
# File of a checkpoint with what an exported model must repeat.
PROOF_FILES: dict[HeadKind, str] = {
    "lm": "greedy_proof.json",
    "value": "value_proof.json",
    "reward": "value_proof.json",
}


@dataclass(frozen=True)
class Role:
    """Facts about a role that need no spec.

    `wave` orders the starts; where roles share devices, those with a model are built wave by wave.
    `inherits` is the role whose section stands in where the spec has none for this one.
    `needed_if` is the property of a `Spec` that says whether the run has the role at all; empty: always.
    `head` is what its model ends in.
    `worker` is the `module:function` that makes its handlers from a rank; empty: `workers.roles.<name>:handlers`.
    """

    name: RoleName
    holds: Holds
    title: str  # as messages call it
    wave: int
    inherits: RoleName = ""
    needed_if: str = ""
    head: HeadKind = "lm"
    worker: str = ""

    @property
    def samples(self) -> bool:
        return self.holds == "sampler"

    @property
    def holds_model(self) -> bool:
        """Whether it builds a language model with an engine, on devices of its own section."""
        return self.holds in ("learner", "frozen", "score_model", "sampler")

    @property
    def is_trainer(self) -> bool:
        """Whether its model is held by a train engine."""
        return self.holds in ("learner", "frozen", "score_model")

    @property
    def same_tokens(self) -> bool:
        """Whether it reads the actor's tokens; else it has a tokenizer of its own."""
        return self.holds != "score_model"

    @property
    def together(self) -> bool:
        """Whether its ranks compute together, and need a launcher on several hosts; else each works by itself."""
        return self.is_trainer

    @property
    def spreads(self) -> bool:
        """Whether its section may name several hosts."""
        return self.together or self.samples or self.holds == "scorer"

    @property
    def several(self) -> str:
        """The word for its ranks in messages."""
        return "replicas" if self.samples else "processes"


ACTOR, REF, CRITIC, ROLLOUT, DATA, REWARD = "actor", "ref", "critic", "rollout", "data", "reward"
REWARD_MODEL = "reward_model"
_FROZEN, _SCORES = "workers.roles.trainer:handlers", "workers.roles.score_learner:handlers"

# In the order in which problems name them: what is wished for a trainer's model is said before what follows from it.
ROLES: dict[RoleName, Role] = {
    role.name: role
    for role in (
        Role(ACTOR, "learner", "the actor", wave=2),
        Role(REF, "frozen", "the reference", wave=2, inherits=ACTOR, needed_if="needs_ref_role", worker=_FROZEN),
        Role(CRITIC, "learner", "the critic", 2, ACTOR, needed_if="needs_critic", head="value", worker=_SCORES),
        # Built first: on shared devices it has left before a rollout measures what is free.
        Role(REWARD_MODEL, "score_model", "the reward model", 0, "", "needs_reward_model", "reward", worker=_SCORES),
        Role(ROLLOUT, "sampler", "the rollout", wave=1, needed_if="generates"),
        # [data] says what it reads, [reward] where it runs.
        Role(DATA, "data", "the data role", wave=0, inherits=REWARD),
        Role(REWARD, "scorer", "the reward role", wave=0, needed_if="generates"),
    )
}


def build_waves(roles: tuple[RoleName, ...]) -> list[list[RoleName]]:
    """Roles that may be built at the same time where those with a model share devices; the others come first."""
    waves: dict[int, list[RoleName]] = {}
    first = min(ROLES[role].wave for role in roles if ROLES[role].holds_model)
    for role in roles:
        waves.setdefault(ROLES[role].wave if ROLES[role].holds_model else first, []).append(role)
    return [waves[wave] for wave in sorted(waves)]
