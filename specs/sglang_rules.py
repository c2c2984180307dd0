"""Rules of the SGLang rollout engine: where it runs, and what its log-probs describe."""

from __future__ import annotations

from collections.abc import Iterator

from specs.engine_tables import SglangEngine
from specs.errors import Problem
from specs.explain import show
from specs.schema import Spec

_SET_BY_THE_ENGINE = ("SGLANG_RETURN_ORIGINAL_LOGPROB", "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN")


def sglang_problems(spec: Spec) -> Iterator[Problem]:
    """Everything that is wrong with a rollout by SGLang."""
    rollout = spec.rollout
    if not isinstance(rollout.engine, SglangEngine):
        return
    if not rollout.devices:
        message = "needs a GPU, and rollout runs on the CPU: SGLang publishes no packages for it"
        hint = 'name GPUs in rollout.devices, or use rollout.engine.kind = "torch" or "vllm"'
        yield Problem("rollout.engine.kind", message, hint, '"sglang"')
    for key, off in (("top_p", 1.0), ("top_k", 0)):
        if getattr(rollout, key) != off:
            message = "the log-probs that SGLang returns leave it out, so they would not be those of the samples"
            hint = f'set rollout.{key} = {off:g}, or use rollout.engine.kind = "torch" or "vllm"'
            yield Problem(f"rollout.{key}", message, hint, show(getattr(rollout, key)))
    for name in _SET_BY_THE_ENGINE:
        if name in rollout.env:
            yield Problem(
                f"rollout.env.{name}", "rlctl sets this one itself", "remove the key", show(rollout.env[name])
            )
