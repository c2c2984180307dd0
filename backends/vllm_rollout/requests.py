"""Translates sampling settings to vLLM's, and vLLM's outputs to completions."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from specs.errors import ModelError
from specs.wire.role_config import Sampling

if TYPE_CHECKING:
    from vllm import RequestOutput, SamplingParams
    from vllm.logprobs import FlatLogprobs


def sampling_params(sampling: Sampling, seed: int, stops: Collection[int]) -> SamplingParams:
    """`sampling` as vLLM's parameters. `seed` has 63 bits: vLLM's are signed."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    choice: dict[str, Any] = {"temperature": 0.0}
    if not sampling.greedy:
        choice = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "seed": seed,
        }
    return SamplingParams(
        **choice,
        max_tokens=sampling.max_response_tokens,
        stop_token_ids=sorted(stops),
        ignore_eos=True,  # the stops have it
        logprobs=0,
        flat_logprobs=True,  # else an object per token
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def completion_of(output: RequestOutput) -> tuple[NDArray[np.int64], NDArray[np.float32], bool]:
    """Tokens, their log-probs, and whether a stop token ended them."""
    completion = output.outputs[0]
    if completion.finish_reason not in ("stop", "length"):
        raise ModelError(f"vLLM ended a request by itself: {completion.finish_reason}")
    tokens = list(completion.token_ids)
    logprobs = logprobs_of(completion.logprobs, tokens)
    return np.array(tokens, dtype=np.int64), logprobs, completion.finish_reason == "stop"


def logprobs_of(flat: FlatLogprobs, tokens: list[int]) -> NDArray[np.float32]:
    """Log-prob of each of `tokens`, where vLLM was asked for no other tokens' (`logprobs=0`)."""
    if flat.token_ids != tokens:
        raise ModelError("vLLM's log-probs are of other tokens than its completion")
    return np.array(flat.logprobs, dtype=np.float32)
