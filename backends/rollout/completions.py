"""Bookkeeping of one `generate` call: waiting prompts, finished completions, and groups to emit."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from specs.errors import BatchError
from specs.wire.batch import Batch
from specs.wire.messages import IDENTITY_COLUMNS, PROMPT_COLUMNS, Verb
from specs.wire.role_config import Sampling


class Completions:
    """Takes finished completions one by one and emits them in whole groups, each sample exactly once.

    Samples are known by their index in `prompts`. `queue` is the order in which to work: prefixes by first appearance,
    samples that share one next to each other, so that it is computed once for all of them.
    """

    def __init__(self, prompts: Batch, emit: Callable[[Batch], None]) -> None:
        prompts.require(PROMPT_COLUMNS, Verb.GENERATE)
        self.prompts = prompts
        self.prompt_tokens = prompts.sequences("tokens_T")
        self._emit = emit
        self._completions: list[tuple[NDArray[np.int64], NDArray[np.float32], bool] | None] = [None] * len(prompts)
        self._members = _indices_by(prompts["group_B"])
        self.prefixes = list(_indices_by(prompts["prefix_B"]).values())  # samples that share their whole prompt
        self._check_prompts()
        self._waiting = {group: len(members) for group, members in self._members.items()}
        self._complete: list[int] = []
        self.queue = [index for members in self.prefixes for index in members]
        self.generated_tokens = 0
        greedy_B = prompts["greedy_B"] if "greedy_B" in prompts else np.zeros(len(prompts))
        self.greedy_B: NDArray[np.bool_] = greedy_B.astype(bool)  # samples that take the likeliest token

    def sampling_of(self, index: int, sampling: Sampling) -> Sampling:
        """How sample `index` is drawn."""
        return sampling.model_copy(update={"greedy": True}) if self.greedy_B[index] else sampling

    def _check_prompts(self) -> None:
        for index, tokens in enumerate(self.prompt_tokens):
            if len(tokens) == 0:
                raise BatchError(
                    f"prompt {self.prompts['id_B'][index]} is empty; a completion needs a token to start from"
                )
        for members in self.prefixes:
            first = self.prompt_tokens[members[0]]
            for index in members[1:]:
                if not np.array_equal(first, self.prompt_tokens[index]):
                    raise BatchError(
                        f"samples {self.prompts['id_B'][members[0]]} and {self.prompts['id_B'][index]} have prefix_B "
                        f"{self.prompts['prefix_B'][index]} but different prompts; a prefix needs equal prompts"
                    )
        if (self.prompts["position_B"] < 0).any():
            raise BatchError("position_B is negative; it counts the tokens that a sample has drawn so far")

    def finish(self, index: int, tokens: NDArray[np.int64], logprobs: NDArray[np.float32], finished: bool) -> None:
        """Sample `index` is done. `finished`: it ended by itself, not at the limit."""
        assert self._completions[index] is None, f"sample {index} was completed twice"
        self._completions[index] = (tokens, logprobs, finished)
        self.generated_tokens += len(tokens)
        group = int(self.prompts["group_B"][index])
        self._waiting[group] -= 1
        if self._waiting[group] == 0:
            self._complete.extend(self._members[group])

    def flush(self) -> None:
        """Emit the groups that are complete, if any."""
        if self._complete:
            chosen, self._complete = self._complete, []
            self._emit(self._batch(chosen))

    def close(self) -> None:
        """Emit the rest; every sample must be done."""
        self.flush()
        left = sum(self._waiting.values())
        assert left == 0, f"{left} samples were never completed"

    def _batch(self, chosen: list[int]) -> Batch:
        tokens, mask, logprobs, lengths, finished = [], [], [], [], []
        for index in chosen:
            prompt, written = self.prompt_tokens[index], self._completions[index]
            assert written is not None
            self._completions[index] = (written[0][:0], written[1][:0], written[2])  # sent: the tokens are dropped
            tokens += [prompt, written[0]]
            mask += [np.zeros(len(prompt), np.uint8), np.ones(len(written[0]), np.uint8)]
            logprobs += [np.zeros(len(prompt), np.float32), written[1]]
            lengths.append(len(prompt) + len(written[0]))
            finished.append(written[2])
        ids = {name: self.prompts[name][chosen] for name in IDENTITY_COLUMNS}
        return Batch(
            {
                "tokens_T": np.concatenate(tokens).astype(np.int64),
                "loss_mask_T": np.concatenate(mask),
                "rollout_logprob_T": np.concatenate(logprobs).astype(np.float32),
                "length_B": np.array(lengths, dtype=np.int64),
                "finished_B": np.array(finished, dtype=np.uint8),
                **ids,
            }
        )


def _indices_by(name_B: NDArray[np.int64]) -> dict[int, list[int]]:
    """Indices that have the same name, in the order of first appearance."""
    found: dict[int, list[int]] = {}
    for index, name in enumerate(name_B.tolist()):
        found.setdefault(name, []).append(index)
    return found
