"""The roles whose model gives numbers: a critic for each token, a reward model for each sequence, in its own tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from backends.protocol import Rank
from specs.wire.batch import Batch
from workers.roles import handlers_of
from workers.roles.learner import Learner
from workers.serve import Handlers


class ScoreLearner(Learner):
    """A rank whose model has a head of one output."""

    def proof(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> Mapping[str, Any]:
        """The value before each token of the prompts but the first, and in which precision."""
        length_B = np.array([len(prompt) for prompt in prompts])
        tokens_T = np.concatenate([np.asarray(prompt, dtype=np.int64) for prompt in prompts])
        batch = Batch({"tokens_T": tokens_T, "length_B": length_B})
        value_T = self.engine.values(batch.with_columns(loss_mask_T=batch.predicted_T))
        pieces = np.split(value_T, batch.offsets[1:-1])
        return {"values": [piece[1:].tolist() for piece in pieces], "dtype": self.config.model.dtype}


def handlers(rank: Rank) -> Handlers:
    return handlers_of(ScoreLearner(rank))
