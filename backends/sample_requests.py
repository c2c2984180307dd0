"""A request to a rollout engine and its answer: one completion of one sample."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specs.wire.role_config import Sampling


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """One completion to draw.

    `tokens` are all so far: of a later turn also earlier completions and what tools replied. Token i of the completion
    is drawn with the random number of (`sampling.seed`, `id`, `position` + i), so that a later turn continues and does
    not repeat; an engine that draws with a generator of its own seeds it with (seed, id, position).
    `sampling.max_response_tokens` limits the new tokens, however many were drawn before. Requests that are added
    together and have the same `prefix` are equal token by token and may share their computation. `keep`: a later turn
    of the same id may follow, so an engine may keep what it computed, until `RolloutEngine.forget`.
    """

    id: int
    tokens: NDArray[np.int64]
    sampling: Sampling
    position: int = 0
    prefix: int = 0
    keep: bool = False


@dataclass(frozen=True, slots=True)
class Completion:
    """The new tokens of a request, their log-probs under the distribution drawn from, and whether a stop token, which
    is the last of them, ended it rather than the limit."""

    id: int
    tokens: NDArray[np.int64]
    logprobs: NDArray[np.float32]
    finished: bool
