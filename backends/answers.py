"""The book of one `generate`: which prompts wait, which answers are done, which groups can go out."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from specs.batch import Batch
from specs.errors import BatchError
from specs.messages import PROMPT_COLUMNS, Verb


class Answers:
    """Takes finished answers one by one and emits them by whole groups, each sample exactly once.

    Samples are known by their index in `prompts`. `queue` is the order in which to work: groups by first appearance,
    members of a group next to each other, so that a prompt is computed once for all of them.
    """

    def __init__(self, prompts: Batch, emit: Callable[[Batch], None]) -> None:
        prompts.require(PROMPT_COLUMNS, Verb.GENERATE)
        self.prompts = prompts
        self.prompt_tokens = prompts.sequences("tokens_T")
        self._emit = emit
        self._answers: list[tuple[NDArray[np.int64], NDArray[np.float32], bool] | None] = [None] * len(prompts)
        self._members: dict[int, list[int]] = {}
        for index, group in enumerate(prompts["group_B"].tolist()):
            self._members.setdefault(group, []).append(index)
        self._check_groups()
        self._waiting = {group: len(members) for group, members in self._members.items()}
        self._complete: list[int] = []
        self.queue = [index for members in self._members.values() for index in members]
        self.generated_tokens = 0

    def _check_groups(self) -> None:
        for index, tokens in enumerate(self.prompt_tokens):
            if len(tokens) == 0:
                raise BatchError(
                    f"prompt {self.prompts['id_B'][index]} is empty; an answer needs a token to start from"
                )
        for group, members in self._members.items():
            first = self.prompt_tokens[members[0]]
            if not all(np.array_equal(first, self.prompt_tokens[index]) for index in members[1:]):
                raise BatchError(f"group {group} holds different prompts; samples of a group share their prompt")

    def finish(self, index: int, tokens: NDArray[np.int64], logprobs: NDArray[np.float32], finished: bool) -> None:
        """Sample `index` is done. `finished`: it ended by itself, not at the limit."""
        assert self._answers[index] is None, f"sample {index} was answered twice"
        self._answers[index] = (tokens, logprobs, finished)
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
        assert left == 0, f"{left} samples were never answered"

    def _batch(self, chosen: list[int]) -> Batch:
        tokens, mask, logprobs, lengths, finished = [], [], [], [], []
        for index in chosen:
            prompt, answer = self.prompt_tokens[index], self._answers[index]
            assert answer is not None
            self._answers[index] = (answer[0][:0], answer[1][:0], answer[2])  # sent: only the fact is kept
            tokens += [prompt, answer[0]]
            mask += [np.zeros(len(prompt), np.uint8), np.ones(len(answer[0]), np.uint8)]
            logprobs += [np.zeros(len(prompt), np.float32), answer[1]]
            lengths.append(len(prompt) + len(answer[0]))
            finished.append(answer[2])
        ids = {name: self.prompts[name][chosen] for name in ("group_B", "id_B", "row_B")}
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
