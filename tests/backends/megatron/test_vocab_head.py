"""The head cut along the vocabulary against the whole one, on two ranks that are threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from threaded_group import ThreadedGroup, on_threads
from torch import nn
from train_helpers import objective

from backends.megatron import vocab_head
from backends.megatron.vocab_head import VocabPart
from backends.train.lm_head import Head, LogprobTask, LossTask, ObjectiveTask
from backends.train.losses import TokenColumns
from backends.train.objective_losses import ObjectiveColumns, UnitColumns
from backends.ulysses.sequence_group import ALONE
from specs.schema.algorithms.algorithm_tables import PpoClip

ROWS, HIDDEN, VOCAB = 11, 8, 13  # one row of padding on the second rank


class Config:
    vocab_size = VOCAB

    def get_text_config(self) -> Any:
        return self


class Model(nn.Module):
    """What `Head` reads of a model."""

    def __init__(self, weight_VE: torch.Tensor) -> None:
        super().__init__()
        self.config = Config()
        self.lm_head = nn.Linear(HIDDEN, VOCAB, bias=False)
        self.lm_head.weight.data = weight_VE.clone()

    def get_output_embeddings(self) -> nn.Linear:
        return self.lm_head


def task_of(target_N: torch.Tensor) -> LossTask:
    rng = np.random.default_rng(1)

    def column(low: float, high: float) -> torch.Tensor:
        return torch.from_numpy(rng.uniform(low, high, ROWS).astype(np.float32))

    columns = TokenColumns(column(0, 0.2), column(-1, 1), column(-4, -2), column(-4, -2), column(-4, -2))
    loss = PpoClip(anchor="trainer", kl_coef=0.1, entropy_coef=0.05)
    return LossTask(target_N, 0.7, columns, loss)


def pairs_of(target_N: torch.Tensor) -> ObjectiveTask:
    """Two pairs, of 5 and 6 tokens."""
    facts = torch.tensor([[3, 2, 4, 2], [-3, -2, -4, -2], [0] * 4, [0] * 4], dtype=torch.float64)
    places = torch.tensor([0, 2]), torch.tensor([1, 3])
    units = UnitColumns(facts[0].long(), facts, *places, num_units=2, group=ALONE)
    given = objective("mixture", mixture=[{"kind": "dpo"}, {"kind": "nll"}])
    return ObjectiveTask(target_N, 0.7, ObjectiveColumns(given, torch.full((ROWS,), 0.1), units))


@pytest.mark.parametrize("chunk", [4, 100])
@pytest.mark.parametrize("kind", [task_of, pairs_of])
def test_losses_and_gradients_are_those_of_the_whole_head(
    chunk: int, kind: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden_NE = torch.randn(ROWS, HIDDEN, generator=generator)
    weight_VE = torch.randn(VOCAB, HIDDEN, generator=generator)
    target_N = torch.randint(0, VOCAB, (ROWS,), generator=generator)
    task = kind(target_N)
    padded_VE = torch.cat([weight_VE, torch.full((1, HIDDEN), 100.0)])
    monkeypatch.setattr(vocab_head.dist, "all_reduce", ThreadedGroup.all_reduce)

    def on_rank(rank: int, group: ThreadedGroup) -> Any:
        part = VocabPart(group, start=7 * rank, real=min(7, VOCAB - 7 * rank), chunk=chunk)
        hidden = hidden_NE.clone().requires_grad_()
        own = padded_VE[7 * rank : 7 * (rank + 1)].clone().requires_grad_()
        told = vocab_head.logprobs(hidden.detach(), own.detach(), LogprobTask(target_N, 0.7), part)
        value, sums, maxima = vocab_head.loss(hidden, own, task, part)
        (2 * value).backward()
        return told, value.detach(), sums, maxima, hidden.grad, own.grad

    ours = on_threads(2, on_rank)
    model = Model(weight_VE)
    head = Head(model, 100)  # type: ignore[arg-type]
    whole = hidden_NE.clone().requires_grad_()
    value, sums, maxima = head.answer(whole, task)
    (2 * value).backward()
    for told, own_value, own_sums, own_maxima, grad_NE, _ in ours:
        torch.testing.assert_close(told, head.answer(hidden_NE, LogprobTask(target_N, 0.7)))
        for mine, theirs in zip((own_value, own_sums, own_maxima), (value.detach(), sums, maxima), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(grad_NE, whole.grad)
    grad_VE = torch.cat([each[-1] for each in ours])
    torch.testing.assert_close(grad_VE[:VOCAB], model.lm_head.weight.grad)
    assert not grad_VE[VOCAB:].any(), "padding never learns"
