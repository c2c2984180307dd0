"""Continuous batching: one `generate` from its first prompt to its last completion.

The host keeps track of slots, lengths and sampled tokens; the device holds
the cache. Per step one small array goes to the device and one token and log-prob per sequence come back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence, Set

import numpy as np
import torch
from numpy.typing import NDArray

from backends import activity
from backends.packed.state_layers import use_rows
from backends.rollout.completions import Completions
from backends.rollout.uniform import sample_keys, uniform
from backends.torch_rollout.kv_cache import KvCache, Order, PromptBlock, ReadyPrompt
from backends.torch_rollout.runner import Forward, prefill
from backends.torch_rollout.sampler import sample
from specs.errors import RlctlError
from specs.wire.role_config import Sampling

PREFILL_AHEAD = (
    8  # prompts that go through together even if there is no slot for them yet: a forward pass for one is dear
)


class Decoder:
    """Completes every prompt of a `Completions`. Slots 0 … active-1 hold the sequences being decoded."""

    def __init__(
        self,
        forward: Forward,
        cache: KvCache,
        completions: Completions,
        sampling: Sampling,
        stops: Set[int],
        prefill_tokens: int,
    ) -> None:
        self.forward, self.cache, self.completions, self.sampling = forward, cache, completions, sampling
        self.prefill_tokens = prefill_tokens
        self.stops = np.array(sorted(stops), dtype=np.int64)
        self.queue = deque(completions.queue)
        self.ready: dict[int, ReadyPrompt] = {}
        self.order = Order()
        self.active = self.decode_steps = self.prefilled_tokens = 0
        prompts = completions.prompts
        self.prefix_N = prompts["prefix_B"].astype(np.int64)
        self.key_N = sample_keys(sampling.seed, prompts["id_B"].astype(np.int64))
        self.drawn_N = prompts["position_B"].astype(np.int64)  # in earlier calls
        self.prompt_length_N = prompts["length_B"].astype(np.int64)
        # Untouched pages of these cost nothing, so the full rectangle is free of padding in practice.
        limit = sampling.max_response_tokens
        self.token_N = np.empty((len(prompts), limit), dtype=np.int64)
        self.logprob_N = np.empty((len(prompts), limit), dtype=np.float32)
        self.written_N = np.zeros(len(prompts), dtype=np.int64)
        self.sequence_B = np.zeros(cache.slots, dtype=np.int64)  # which sequence each slot holds

    def run(self) -> None:
        """Run until every prompt is completed."""
        while self.queue or self.active:
            while self.queue and self.active < self.cache.slots:
                self._admit()
            self.completions.flush()
            if self.active:
                self._step()
            self.completions.flush()

    # ── coming ────────────────────────────────────────────────────────────────────────────────────

    def _admit(self) -> None:
        """Give free slots to the next sequences whose prompts were prefilled, and sample their first token."""
        members: list[int] = []
        while self.queue and self.active + len(members) < self.cache.slots:
            prefix = int(self.prefix_N[self.queue[0]])
            if prefix not in self.ready:
                if members:
                    break
                self._prefill_next()
            members.append(self.queue.popleft())
        waiting = {int(self.prefix_N[self.queue[0]])} if self.queue else set()
        start, logits = self.active, []
        for block, run in _runs([self.ready[int(self.prefix_N[index])] for index in members]):
            self.cache.fill(start, run)
            numbers = torch.tensor([prompt.number for prompt in run], device=self.cache.device)
            logits.append(block.logits.index_select(0, numbers))
            start += len(run)
        for prefix in {int(self.prefix_N[index]) for index in members} - waiting:
            del self.ready[prefix]
        self.sequence_B[self.active : start] = members
        first, self.active = self.active, start
        self._sample(torch.cat(logits), first)

    def _prefill_next(self) -> None:
        """The next prompts of the queue, as many as there are slots for (at least PREFILL_AHEAD), within the budget."""
        prefixes: dict[int, NDArray[np.int64]] = {}
        tokens, free = 0, self.cache.slots - self.active
        for place, index in enumerate(self.queue):
            prefix = int(self.prefix_N[index])
            if prefix in prefixes:
                continue
            prompt = self.completions.prompt_tokens[index].astype(np.int64)
            enough = place >= free and len(prefixes) >= PREFILL_AHEAD
            if prefixes and (enough or tokens + len(prompt) > self.prefill_tokens):
                break
            prefixes[prefix] = prompt
            tokens += len(prompt)
        self.prefilled_tokens += tokens
        self.ready.update(zip(prefixes, prefill(list(prefixes.values()), self.forward, self.cache.device), strict=True))

    # ── decoding ──────────────────────────────────────────────────────────────────────────────────

    def _step(self) -> None:
        """One token for every active sequence."""
        read_B = self._read_B()
        segments, order = self.order.plan(read_B)
        if order is not None:
            self.cache.permute(order, int(read_B.max()))
            self.sequence_B[: self.active] = self.sequence_B[order]
            read_B = read_B[order]
        sequences = self.sequence_B[: self.active]
        packed = np.stack([self.token_N[sequences, self.written_N[sequences] - 1], read_B - 1])
        tokens, positions = torch.from_numpy(packed).to(self.cache.device).unbind()
        self.cache.begin_step(packed[1], positions, segments)
        self.decode_steps += 1
        with use_rows(self.cache.states):
            logits = self.forward(tokens, positions, self.cache)
        self._sample(logits, 0)

    def _read_B(self) -> NDArray[np.int64]:
        """Positions that each active slot reads in the next step: all so far, with the token that goes in."""
        sequences = self.sequence_B[: self.active]
        length_B: NDArray[np.int64] = self.prompt_length_N[sequences] + self.written_N[sequences]
        return length_B

    def _sample(self, logits: torch.Tensor, first: int) -> None:
        """Sample for slots first … active-1, record the tokens, and retire finished sequences."""
        sequences = self.sequence_B[first : self.active]
        said = self.written_N[sequences]
        drawn = uniform(self.key_N[sequences], self.drawn_N[sequences] + said)
        uniforms = torch.from_numpy(drawn).to(self.cache.device)
        greedy_B = self.completions.greedy_B[sequences]
        greedy = torch.from_numpy(greedy_B).to(self.cache.device) if greedy_B.any() else None
        token, logprob = sample(logits, uniforms, self.sampling, greedy)
        token_B, logprob_B = token.cpu().numpy(), logprob.cpu().numpy()
        if not np.isfinite(logprob_B).all():
            raise RlctlError(
                f"the sampler's model gives log-probs that are not finite ({_first_bad(logprob_B)})",
                hint="the actor's weights have probably diverged: look at actor/grad_norm, lower the learning rate",
            )
        self.token_N[sequences, said] = token_B
        self.logprob_N[sequences, said] = logprob_B
        self.written_N[sequences] = said + 1
        activity.count("token", len(sequences))
        stopped = (token_B[:, None] == self.stops).any(1)
        done = stopped | (said + 1 >= self.sampling.max_response_tokens)
        if done.any():
            self._retire(first + np.flatnonzero(done), stopped[done])

    # ── going ─────────────────────────────────────────────────────────────────────────────────────

    def _retire(self, slots: NDArray[np.int64], stopped: NDArray[np.bool_]) -> None:
        """Hand in the completions of `slots` and close the gaps with the last sequences."""
        for slot, by_itself in zip(slots.tolist(), stopped.tolist(), strict=True):
            sequence = int(self.sequence_B[slot])
            count = int(self.written_N[sequence])
            tokens, logprobs = self.token_N[sequence, :count], self.logprob_N[sequence, :count]
            self.completions.finish(sequence, tokens, logprobs, by_itself)
        stay = self.active - len(slots)
        gaps = slots[slots < stay]
        movers = np.setdiff1d(np.arange(stay, self.active), slots, assume_unique=True)
        if len(gaps):
            moved = self.sequence_B[movers]
            length = int((self.prompt_length_N[moved] + self.written_N[moved]).max())
            self.cache.move(gaps, movers, min(length, self.cache.max_len))
            self.sequence_B[gaps] = moved
        self.active = stay


def _runs(prompts: Sequence[ReadyPrompt]) -> list[tuple[PromptBlock, list[ReadyPrompt]]]:
    """Neighbours of the same block together."""
    runs: list[tuple[PromptBlock, list[ReadyPrompt]]] = []
    for prompt in prompts:
        if runs and runs[-1][0] is prompt.block:
            runs[-1][1].append(prompt)
        else:
            runs.append((prompt.block, [prompt]))
    return runs


def _first_bad(values: NDArray[np.float32]) -> str:
    return str(values[~np.isfinite(values)][0])
