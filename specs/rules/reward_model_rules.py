"""Rules of the reward model: a term that asks it, and the section that says which."""

from __future__ import annotations

from collections.abc import Iterator

from specs.errors import Problem
from specs.schema.rewards import ModelScore
from specs.schema.roles import REWARD_MODEL
from specs.schema.spec import Spec


def reward_model_problems(spec: Spec) -> Iterator[Problem]:
    asking = [index for index, term in enumerate(spec.reward.terms) if isinstance(term, ModelScore)]
    section = spec.reward_model
    if section is None:
        if asking:
            message = "no model is named"
            hint = f'add a section [{REWARD_MODEL}] with model = "…", a sequence-classification checkpoint'
            yield Problem(f"reward.terms.{asking[0]}", message, hint, 'kind = "model"')
        return
    if not asking:
        hint = 'add { kind = "model" } to reward.terms, or remove the section'
        yield Problem(f"[{REWARD_MODEL}]", "has no effect: no term of reward.terms asks it", hint)
        return
    for index in asking[1:]:
        hint = f"change the weight of reward.terms.{asking[0]} instead"
        yield Problem(f"reward.terms.{index}", "asks the same model again", hint, 'kind = "model"')
    if getattr(spec.algorithm, "dynamic_sampling", False) and spec.colocated:
        message = (
            "refills are sampled after groups were scored, and the reward model takes the sampler's device for that"
        )
        hint = 'set it to false, or give rollout devices of its own (and leave run.colocate = "always" out)'
        yield Problem("algorithm.dynamic_sampling", message, hint, "true")
