"""Parses replies of /generate. Checks every field that rlctl uses.

A reply: {"output_ids": […], "meta_info": {"finish_reason": {"type": "stop" | "length" | "abort", …},
"completion_tokens": n, "cached_tokens": n, "output_token_logprobs": [[logprob, token, null], …],
"output_token_ids_logprobs": [[[logprob, token, null], …], …]}}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from backends.sglang_rollout.client import ServerError


@dataclass(frozen=True)
class ServerSample:
    """One completion: tokens with the end token, if any, their log-probs, whether it ended by itself."""

    tokens: NDArray[np.int64]
    logprobs: NDArray[np.float32]
    finished: bool
    cached_tokens: int  # of the prompt, found in the prefix cache


def parse_sample(reply: Mapping[str, Any], max_new_tokens: int) -> ServerSample:
    """Raises ServerError for a completion that was aborted, cut short, or does not add up."""
    meta = reply["meta_info"]
    reason, pairs = meta["finish_reason"], meta["output_token_logprobs"]
    tokens = np.array([token for _, token, *_ in pairs], dtype=np.int64)
    logprobs = np.array([logprob for logprob, *_ in pairs], dtype=np.float32)
    if reason["type"] not in ("stop", "length"):
        raise ServerError(f"the SGLang server aborted a completion: {reason.get('message', reason)}")
    finished = reason["type"] == "stop"
    if finished and reason["matched"] != (int(tokens[-1]) if len(tokens) else None):
        # Also what SGLang reports for a completion whose logits were not numbers.
        raise ServerError(
            f"a completion of the SGLang server ended at {reason['matched']!r}, which is not its last token"
        )
    if len(tokens) != meta["completion_tokens"]:
        raise ServerError(f"{len(tokens)} log-probs came with a completion of {meta['completion_tokens']} tokens")
    if not finished and len(tokens) != max_new_tokens:
        raise ServerError(
            f"a completion ended at {len(tokens)} tokens, though {max_new_tokens} were allowed",
            hint="the server's KV cache is too small for a whole sequence: raise rollout.engine.memory_fraction",
        )
    if not np.isfinite(logprobs).all():
        raise ServerError("the SGLang server returned a log-prob that is not a finite number")
    return ServerSample(tokens, logprobs, finished, int(meta.get("cached_tokens", 0)))


def parse_scores(replies: Sequence[Mapping[str, Any]], tokens: Sequence[int]) -> list[float]:
    """Log-prob of the token that was asked for in each reply. Raises ServerError where it is another's."""
    if not isinstance(replies, list) or len(replies) != len(tokens):
        raise ServerError(f"the SGLang server did not return {len(tokens)} replies")
    found = []
    for reply, token in zip(replies, tokens, strict=True):
        logprob, named, *_ = reply["meta_info"]["output_token_ids_logprobs"][0][0]
        if named != token:
            raise ServerError(f"expected the log-prob of token {token}, the SGLang server returned that of {named}")
        found.append(float(logprob))
    return found
