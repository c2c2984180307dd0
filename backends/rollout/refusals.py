"""Checks that all rollout engines share, with their error messages."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from backends.protocol import WeightSpec
from specs.errors import BatchError, RlctlError, SyncError
from specs.wire.role_config import Sampling


def check_usable(verb: str, needs: Iterable[str], awake: Collection[str], ready: bool) -> None:
    """Raises RlctlError where a tag that `verb` needs is asleep, SyncError where the weights are not all there."""
    for tag in needs:
        if tag not in awake:
            raise RlctlError(f"the rollout cannot {verb}: its {tag} are asleep", hint=f'call wake(["{tag}"]) first')
    if not ready:
        raise SyncError(
            f"the rollout cannot {verb}: it holds no complete set of weights", hint="sync the weights first"
        )


def check_lengths(longest_prompt: int, sampling: Sampling, limit: int) -> None:
    """Raises BatchError where a prompt and its longest completion are over `limit` tokens."""
    total = longest_prompt + sampling.max_response_tokens
    if total > limit:
        raise BatchError(
            f"a prompt of {longest_prompt} tokens with a completion of up to {sampling.max_response_tokens} makes "
            f"{total} tokens; the rollout was built for {limit}"
        )


def check_arrival(spec: WeightSpec, nbytes: int, held: WeightSpec | None, holder: str, *, awake: bool) -> WeightSpec:
    """`held`, what the engine holds under the name of a weight that arrives in `nbytes` bytes; `holder` names the model
    in words. Raises SyncError where there is none, where the weights are not `awake`, or where it does not fit."""
    if held is None:
        raise SyncError(f"weight {spec.name} arrived, but {holder} has none of that name")
    if not awake:
        raise SyncError(f"weight {spec.name} arrived while the weights are asleep", hint='call wake(["weights"]) first')
    if (spec.dtype, tuple(spec.shape), nbytes) != (held.dtype, held.shape, held.nbytes):
        raise SyncError(
            f"weight {spec.name} arrived as {spec.dtype} {list(spec.shape)}, {nbytes} bytes; "
            f"the rollout holds {held.dtype} {list(held.shape)}, {held.nbytes} bytes"
        )
    return held


def check_complete(needed: Iterable[str], imported: Collection[str]) -> None:
    """Raises SyncError where a weight has not arrived."""
    missing = [name for name in needed if name not in imported]
    if missing:
        raise SyncError(f"{len(missing)} weights did not arrive, first {missing[0]}")
