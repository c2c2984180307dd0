"""Requests to a rollout engine and its answers: of a batch of prompts, and as batches of whole groups."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specs.wire.batch import Batch
from specs.wire.messages import IDENTITY_COLUMNS, PROMPT_COLUMNS, Verb
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


class Completions:
    """Takes finished completions one by one and emits them in whole groups, each sample exactly once."""

    def __init__(
        self, prompts: Batch, sampling: Sampling, emit: Callable[[Batch], None], *, keep: bool = False
    ) -> None:
        """`keep`: later turns of the same samples will follow."""
        prompts.require(PROMPT_COLUMNS, Verb.GENERATE)
        self.prompts, self.sampling, self._emit, self.keep = prompts, sampling, emit, keep
        self._samplings: dict[tuple[bool, int], Sampling] = {}
        self._prompt_tokens = prompts.sequences("tokens_T")
        self._index = {id_: index for index, id_ in enumerate(prompts["id_B"].tolist())}
        self._found: dict[int, Completion] = {}  # that wait for others of their group, by index
        self._members = _indices_by(prompts["group_B"])
        self._waiting = {group: len(members) for group, members in self._members.items()}
        self._complete: list[int] = []
        self.generated_tokens = 0

    def requests(self) -> list[SampleRequest]:
        """Return the requests in the order in which to work: prefixes by first appearance, samples that share one next
        to each other. `greedy_B` marks samples that take the likeliest token, whatever the sampling says, and `limit_B`
        is the most that each may write."""
        prompts, none = self.prompts, np.zeros(len(self.prompts), np.int64)
        ids, positions, prefixes = (prompts[name].tolist() for name in ("id_B", "position_B", "prefix_B"))
        special = zip(*(prompts.columns.get(name, none).tolist() for name in ("greedy_B", "limit_B")), strict=True)
        samplings = [self._sampling_of(bool(greedy), limit) for greedy, limit in special]
        order = [index for members in _indices_by(prompts["prefix_B"]).values() for index in members]
        return [
            SampleRequest(
                ids[index],
                self._prompt_tokens[index],
                samplings[index],
                positions[index],
                prefixes[index],
                self.keep,
            )
            for index in order
        ]

    def _sampling_of(self, greedy: bool, limit: int) -> Sampling:
        """Return how a request is drawn. `limit`: 0 for none of its own."""
        if (greedy, limit) not in self._samplings:
            own = {**({"greedy": True} if greedy else {}), **({"max_response_tokens": limit} if limit else {})}
            self._samplings[greedy, limit] = self.sampling.model_copy(update=own) if own else self.sampling
        return self._samplings[greedy, limit]

    def finish(self, completion: Completion) -> None:
        """Take a completion."""
        index = self._index[completion.id]
        assert index not in self._found, f"sample {completion.id} was completed twice"
        self._found[index] = completion
        self.generated_tokens += len(completion.tokens)
        group = int(self.prompts["group_B"][index])
        self._waiting[group] -= 1
        if self._waiting[group] == 0:
            self._complete.extend(self._members[group])

    def flush(self) -> None:
        """Emit the groups that are complete, if any."""
        if self._complete:
            chosen, self._complete = self._complete, []
            self._emit(self._batch(chosen))

    def _batch(self, chosen: list[int]) -> Batch:
        tokens, mask, logprobs, lengths, finished = [], [], [], [], []
        for index in chosen:
            prompt, written = self._prompt_tokens[index], self._found.pop(index)
            tokens += [prompt, written.tokens]
            mask += [np.zeros(len(prompt), np.uint8), np.ones(len(written.tokens), np.uint8)]
            logprobs += [np.zeros(len(prompt), np.float32), written.logprobs]
            lengths.append(len(prompt) + len(written.tokens))
            finished.append(written.finished)
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
