"""What every rollout engine refuses, in the same words."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from specs.errors import BatchError, RlctlError, SyncError
from specs.role_config import Sampling


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
    """Raises BatchError where a prompt and its longest answer are over `limit` tokens."""
    total = longest_prompt + sampling.max_response_tokens
    if total > limit:
        raise BatchError(
            f"a prompt of {longest_prompt} tokens with an answer of up to {sampling.max_response_tokens} makes {total} "
            f"tokens; the rollout was built for {limit}"
        )
