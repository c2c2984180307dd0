"""Continuous batching: requests come and go while others are decoded.

The host keeps track of slots, lengths and sampled tokens; the device holds
the cache. Per step one small array goes to the device and one token and log-prob per sequence come back.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Sequence, Set
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from backends import activity
from backends.completions import Completion, SampleRequest
from backends.packed.staging import Staging
from backends.packed.state_layers import use_rows
from backends.rollout.uniform import request_keys, uniform
from backends.torch_rollout.decode_graphs import DecodeGraphs
from backends.torch_rollout.kept_prefixes import KeptPrefix, KeptPrefixes
from backends.torch_rollout.kv_cache import KvCache, Order, PromptBlock, ReadyPrompt
from backends.torch_rollout.runner import Forward, prefill
from backends.torch_rollout.sampler import sample
from specs.errors import RlctlError
from specs.wire.role_config import Sampling

# Prompts that go through together even if there is no slot for them yet: a forward pass for one is dear.
PREFILL_AHEAD = 8


class QueuedRequest(NamedTuple):
    """A request without a slot. `prefix`: the same for those that were added together and share their prompt."""

    request: SampleRequest
    key: np.uint64
    prefix: tuple[int, int]


class SequenceRows:
    """The sequences that have a slot, each in a row of its own, whichever slot it is moved to."""

    def __init__(self) -> None:
        self.free: list[int] = []
        self.requests: dict[int, SampleRequest] = {}  # by row
        self.key_N = np.zeros(0, dtype=np.uint64)
        none = np.zeros(0, dtype=np.int64)
        self.drawn_N = self.prompt_N = self.limit_N = self.written_N = self.way_N = none
        self.token_N, self.logprob_N = np.zeros((0, 0), dtype=np.int64), np.zeros((0, 0), dtype=np.float32)

    def take(self, members: Sequence[QueuedRequest], ways: Sequence[int]) -> list[int]:
        """Return the rows of sequences that get a slot."""
        rows, requests = [self.free.pop() for _ in members], [member.request for member in members]
        self.requests.update(zip(rows, requests, strict=True))
        self.key_N[rows], self.way_N[rows] = [member.key for member in members], ways
        self.drawn_N[rows] = [request.position for request in requests]
        self.prompt_N[rows] = [len(request.tokens) for request in requests]
        self.limit_N[rows] = [request.sampling.max_response_tokens for request in requests]
        self.written_N[rows] = 0
        return rows

    def release(self, row: int) -> None:
        self.free.append(row)
        del self.requests[row]

    def make_room(self, rows: int, limit: int) -> None:
        """Make room for so many sequences, and for completions of so many tokens."""
        held, width = self.token_N.shape
        if rows > held:
            self.free = [*range(held, rows)][::-1] + self.free
            for name in ("key_N", "drawn_N", "prompt_N", "limit_N", "written_N", "way_N"):
                setattr(self, name, np.pad(getattr(self, name), (0, rows - held)))
        if rows > held or limit > width:
            # Untouched pages of these cost nothing, so the full rectangle is free of padding in practice.
            token_N = np.empty((max(rows, held), max(limit, width)), dtype=np.int64)
            logprob_N = np.empty(token_N.shape, dtype=np.float32)
            token_N[:held, :width], logprob_N[:held, :width] = self.token_N, self.logprob_N
            self.token_N, self.logprob_N = token_N, logprob_N


class Decoder:
    """Completes requests. Slots 0 … active-1 hold the sequences being decoded."""

    def __init__(
        self,
        forward: Forward,
        cache: KvCache,
        stops: Set[int],
        prefill_tokens: int,
        counts: Counter[str],
        kept: KeptPrefixes,
        graphs: DecodeGraphs | None = None,
    ) -> None:
        """`counts` gets steps and tokens. `kept`: prefixes of earlier turns, which gets those of later ones. `graphs`:
        of this cache; None decodes every step eagerly."""
        self.forward, self.cache, self.prefill_tokens, self.counts = forward, cache, prefill_tokens, counts
        self.kept, self.graphs = kept, graphs
        self.staging = Staging(cache.device)
        self.stops = np.array(sorted(stops), dtype=np.int64)
        self.queue: deque[QueuedRequest] = deque()
        self.ready: dict[tuple[int, int], ReadyPrompt] = {}
        self.order = Order()
        self.active = self.additions = 0
        self.rows = SequenceRows()
        self.row_B = np.zeros(0, dtype=np.int64)  # which row each slot holds
        self.ways: dict[tuple[bool, float, float, int], int] = {}  # how to sample → its number
        self.samplings: list[Sampling] = []  # one of each way
        self.done: list[Completion] = []

    def add(self, requests: Sequence[SampleRequest]) -> None:
        """Put requests in line."""
        self.additions += 1
        for request, key in zip(requests, request_keys(requests), strict=True):
            self.queue.append(QueuedRequest(request, key, (self.additions, request.prefix)))
        self.rows.make_room(self.cache.slots, max(request.sampling.max_response_tokens for request in requests))
        self.row_B = np.pad(self.row_B, (0, self.cache.slots - len(self.row_B)))

    def step(self) -> list[Completion]:
        """Give free slots to those in line, then write a token of every active sequence; return what has finished."""
        while self.queue and self.active < self.cache.slots:
            self._admit()
        if self.active:
            self._decode()
        done, self.done = self.done, []
        return done

    def drop(self, ids: Collection[int]) -> None:
        """Forget requests."""
        self.queue = deque(waiting for waiting in self.queue if waiting.request.id not in ids)
        left = {waiting.prefix for waiting in self.queue}
        self.ready = {prefix: prompt for prefix, prompt in self.ready.items() if prefix in left}
        rows = self.row_B[: self.active].tolist()
        self._close([slot for slot, row in enumerate(rows) if self.rows.requests[row].id in ids])

    def written(self) -> list[Completion]:
        """Return what has been written of the requests that have a slot."""
        found = []
        for row in self.row_B[: self.active].tolist():
            count, request = self.rows.written_N[row], self.rows.requests[row]
            tokens, logprobs = self.rows.token_N[row, :count].copy(), self.rows.logprob_N[row, :count].copy()
            found.append(Completion(request.id, tokens, logprobs, False))
        return found

    # ── coming ────────────────────────────────────────────────────────────────────────────────────

    def _admit(self) -> None:
        """Give free slots to the next sequences whose prompts were prefilled, and sample their first token."""
        members: list[QueuedRequest] = []
        while self.queue and self.active + len(members) < self.cache.slots:
            if self.queue[0].prefix not in self.ready:
                if members:
                    break
                self._prefill_next()
            members.append(self.queue.popleft())
        self.kept.forget([member.request.id for member in members])  # of one that shares another's prompt
        waiting = {self.queue[0].prefix} if self.queue else set()
        start, logits = self.active, []
        for block, run in _runs([self.ready[member.prefix] for member in members]):
            self.cache.fill(start, run)
            numbers = torch.tensor([prompt.number for prompt in run], device=self.cache.device)
            logits.append(block.logits.index_select(0, numbers))
            start += len(run)
        for prefix in {member.prefix for member in members} - waiting:
            del self.ready[prefix]
        self.row_B[self.active : start] = self.rows.take(members, [self._way(one.request.sampling) for one in members])
        first, self.active = self.active, start
        self._sample(torch.cat(logits), first)

    def _prefill_next(self) -> None:
        """The next prompts of the queue, as many as there are slots for (at least PREFILL_AHEAD), within the budget."""
        chosen: dict[tuple[int, int], SampleRequest] = {}
        tokens, free = 0, self.cache.slots - self.active
        for place, waiting in enumerate(self.queue):
            if waiting.prefix in chosen:
                continue
            prompt = waiting.request.tokens
            enough = place >= free and len(chosen) >= PREFILL_AHEAD
            if chosen and (enough or tokens + len(prompt) > self.prefill_tokens):
                break
            chosen[waiting.prefix] = waiting.request
            tokens += len(prompt)
        kept = [self.kept.take(request) for request in chosen.values()]
        reused = sum(len(prefix.tokens) for prefix in kept if prefix is not None)
        self.counts["prefilled_tokens"] += tokens - reused
        self.counts["reused_tokens"] += reused
        prompts = [request.tokens for request in chosen.values()]
        self.ready.update(zip(chosen, prefill(prompts, self.forward, self.cache.device, kept), strict=True))

    def _way(self, sampling: Sampling) -> int:
        """Return the number of a way to sample."""
        key = (sampling.greedy, sampling.temperature, sampling.top_p, sampling.top_k)
        if key not in self.ways:
            self.ways[key] = len(self.samplings)
            self.samplings.append(sampling)
        return self.ways[key]

    # ── decoding ──────────────────────────────────────────────────────────────────────────────────

    def _decode(self) -> None:
        """One token for every active sequence."""
        self.counts["decode_steps"] += 1
        packed = self._packed()
        logits = None if self.graphs is None else self.graphs.run(packed, self.staging)
        self._sample(self._eagerly(packed) if logits is None else logits, 0)

    def _packed(self) -> NDArray[np.int64]:
        """Return the token that each active slot puts in, and its position: [2, n]."""
        rows, at = self.row_B[: self.active], self.rows
        written_B = at.written_N[rows]
        return np.stack([at.token_N[rows, written_B - 1], at.prompt_N[rows] + written_B - 1])

    def _eagerly(self, packed: NDArray[np.int64]) -> torch.Tensor:
        """Return the logits of a step in which slots of much different lengths are read apart."""
        read_B = packed[1] + 1  # positions that each slot reads: all so far, with the token that goes in
        segments, order = self.order.plan(read_B)
        if order is not None:
            self.cache.permute(order, int(read_B.max()))
            self.row_B[: self.active] = self.row_B[order]
            packed = packed.take(order, axis=1)
        tokens, positions = self._on_device(packed).unbind()
        self.cache.begin_step(packed[1], positions, segments)
        with use_rows(self.cache.states):
            return self.forward(tokens, positions, self.cache)

    def _on_device(self, array: NDArray[Any]) -> torch.Tensor:
        """Return an array that is on its way to the device, for which the host does not wait."""
        there = self.staging.put(array)
        self.staging.send()
        return there

    def _sample(self, logits: torch.Tensor, first: int) -> None:
        """Sample for slots first … active-1, record the tokens, and retire finished sequences."""
        rows, at = self.row_B[first : self.active], self.rows
        written_B = at.written_N[rows]
        drawn = self._on_device(uniform(at.key_N[rows], at.drawn_N[rows] + written_B))
        token, logprob = self._draw(logits, drawn, at.way_N[rows])
        token_B, logprob_B = token.cpu().numpy(), logprob.cpu().numpy()
        if not np.isfinite(logprob_B).all():
            raise RlctlError(
                f"the sampler's model gives log-probs that are not finite ({logprob_B[~np.isfinite(logprob_B)][0]})",
                hint="the actor's weights have probably diverged: look at actor/grad_norm, lower the learning rate",
            )
        at.token_N[rows, written_B] = token_B
        at.logprob_N[rows, written_B] = logprob_B
        at.written_N[rows] = written_B + 1
        activity.count("token", len(rows))
        stopped = (token_B[:, None] == self.stops).any(1)
        done = stopped | (written_B + 1 >= at.limit_N[rows])
        if done.any():
            self._retire(first + np.flatnonzero(done), stopped[done])

    def _draw(
        self, logits: torch.Tensor, uniform_B: torch.Tensor, way_B: NDArray[np.int64]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a token of each row and its log-prob, drawn in the row's own way."""
        if (way_B == way_B[0]).all():
            return sample(logits, uniform_B, self.samplings[way_B[0]])
        token_B = torch.empty(len(way_B), dtype=torch.int64, device=logits.device)
        logprob_B = torch.empty(len(way_B), dtype=torch.float32, device=logits.device)
        for way in np.unique(way_B):
            of = torch.from_numpy(np.flatnonzero(way_B == way)).to(logits.device)
            token_B[of], logprob_B[of] = sample(logits[of], uniform_B[of], self.samplings[way])
        return token_B, logprob_B

    # ── going ─────────────────────────────────────────────────────────────────────────────────────

    def _retire(self, slots: NDArray[np.int64], stopped: NDArray[np.bool_]) -> None:
        """Hand in the completions of `slots`."""
        rows = self.row_B[slots]
        counts = self.rows.written_N[rows].tolist()
        token_BT, logprob_BT = self.rows.token_N[rows, : max(counts)], self.rows.logprob_N[rows, : max(counts)]
        for index, (row, count, by_itself) in enumerate(zip(rows.tolist(), counts, stopped.tolist(), strict=True)):
            tokens, logprobs, request = token_BT[index, :count], logprob_BT[index, :count], self.rows.requests[row]
            self.done.append(Completion(request.id, tokens, logprobs, by_itself))
            if request.keep and self.forward.keeps_prefixes:
                seen = np.concatenate([request.tokens, tokens[:-1]])  # the last one never went in
                self.kept.put(request.id, KeptPrefix(seen, self.cache.copy_of(int(slots[index]), len(seen))))
        self._close(slots.tolist())

    def _close(self, closed: Sequence[int]) -> None:
        """Free these slots, and close the gaps with the last sequences."""
        for slot in closed:
            self.rows.release(int(self.row_B[slot]))
        slots = np.array(closed, dtype=np.int64)
        stay = self.active - len(slots)
        gaps = slots[slots < stay]
        movers = np.setdiff1d(np.arange(stay, self.active), slots, assume_unique=True)
        if len(gaps):
            moved = self.row_B[movers]
            length = int((self.rows.prompt_N[moved] + self.rows.written_N[moved]).max())
            self.cache.move(gaps, movers, min(length, self.cache.max_len))
            self.row_B[gaps] = moved
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
