"""Every train engine computes objectives of rows as padded models do, whatever the split and the chunks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from train_helpers import (
    GEMMA2,
    QWEN2,
    build_engine,
    largest_gap,
    make_units,
    objective,
    train_config,
    unit_scale,
    weights_of,
    write_model,
)
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from backends.packed.packing import Budget
from backends.protocol import ENGINE_MAXIMA, ENGINE_SUMS, UNIT_SUMS, TrainEngine
from rlctl.loop.step_metrics import RankReport, update_metrics
from specs.errors import BatchError, ModelError
from specs.schema.objectives import Objective
from specs.schema.role_section import Lora
from specs.wire.batch import Batch
from specs.wire.bodies import Stepped

Make = Callable[..., TrainEngine]
PAIRS = [{"kind": "dpo"}, {"kind": "nll", "weight": 0.5, "loss_aggregation": "seq-mean-token-mean"}]
OBJECTIVES = [
    objective("nll", loss_aggregation="seq-mean-token-mean"),
    objective("dft"),
    objective("mixture", mixture=PAIRS),
    objective("orpo", beta=0.5),
    objective("kto", undesirable_weight=1.5),
]
BT = objective("bradley_terry", center_coef=0.05)
REWARD = {"role": "reward_model", "model": {"head": "reward"}}


def rows_of(given: Objective, seed: int = 0) -> Batch:
    """Pairs, or as many single sequences with a label."""
    batch = make_units(seed=seed)
    single = {"unit_B": np.arange(len(batch))} if given.unit == "sequence" else {}
    return Batch({**batch.columns, **single})


def padded(batch: Batch) -> tuple[Tensor, Tensor]:
    """Tokens and mask, [B, L], zeros behind each sequence."""
    tokens, masks = (
        torch.nn.utils.rnn.pad_sequence(
            [torch.from_numpy(each.astype(np.int64)) for each in batch.sequences(name)], True
        )
        for name in ("tokens_T", "loss_mask_T")
    )
    return tokens, masks


def slow_loss(model: Any, batch: Batch, given: Objective) -> tuple[Tensor, dict[str, float]]:
    """The objective as its paper has it, of full logits of a padded batch, by plain autograd; and metrics."""
    tokens_BL, mask_BL = padded(batch)
    chosen = torch.from_numpy(batch["chosen_B"] != 0)
    if given.of_scores:
        hidden = model.base_model(tokens_BL).last_hidden_state
        score_B = model.score(hidden)[torch.arange(len(batch)), torch.from_numpy(batch["length_B"]) - 1, 0]
        margin = score_B[chosen] - score_B[~chosen]
        loss = -F.logsigmoid(margin - torch.from_numpy(batch["margin_B"])[chosen]).mean()
        loss = loss + 0.05 * (score_B[chosen] + score_B[~chosen]).square().mean()
        return loss, {"margin": margin.mean().item(), "accuracy": (margin > 0).float().mean().item()}
    logits = model(tokens_BL).logits[:, :-1].float() / 0.7
    logprob = logits.log_softmax(-1).gather(-1, tokens_BL[:, 1:, None])[..., 0]
    mask = mask_BL[:, 1:].float()
    metrics = {"token_accuracy": ((logits.argmax(-1) == tokens_BL[:, 1:]) * mask).sum().item() / mask.sum().item()}
    sums, counts = (logprob * mask).sum(1), mask.sum(1)
    if given.kind == "nll":
        return -(sums / counts).mean(), metrics
    if given.kind == "dft":
        return -(logprob.exp().detach() * logprob * mask).sum() / mask.sum(), metrics
    ref_T = np.split(np.nan_to_num(batch["ref_logprob_T"]).astype(np.float64), batch.offsets[1:-1])
    ratio = sums - torch.tensor([each.sum() for each in ref_T], dtype=torch.float32)
    if given.kind == "kto":
        gain = 1 - torch.sigmoid(torch.where(chosen, 0.1, -0.1) * (ratio - 0.4))
        metrics["chosen_reward"] = 0.1 * ratio[chosen].mean().item()
        return (torch.where(chosen, 1.0, 1.5) * gain).mean(), metrics
    if given.kind == "orpo":
        p = (sums / counts).exp()
        odds = (p / (1 - p)).log()
        nll = -(sums[chosen].sum() / counts[chosen].sum())
        return nll - 0.5 * F.logsigmoid(odds[chosen] - odds[~chosen]).mean(), metrics
    metrics["reward_margin"] = 0.1 * (ratio[chosen] - ratio[~chosen]).mean().item()
    metrics["reward_accuracy"] = (ratio[chosen] > ratio[~chosen]).float().mean().item()
    nll = -(sums[chosen] / counts[chosen]).mean()
    return -F.logsigmoid(0.1 * (ratio[chosen] - ratio[~chosen])).mean() + 0.5 * nll, metrics


def step_metrics(engine: TrainEngine, batch: Batch, given: Objective) -> dict[str, float]:
    """Return what the driver makes of an update whose units are given in two calls."""
    half = int(np.searchsorted(batch["unit_B"], 4))
    shares = [batch.select(range(half)), batch.select(range(half, len(batch)))]
    sums = [engine.forward_backward(share.only(given.columns), given, unit_scale(batch)) for share in shares]
    stepped = Stepped(grad_norm=1.0, lr=0.1, skipped=False, peak_GiB=0.0)
    return update_metrics("actor", given, [[RankReport(each, stepped) for each in sums]])


@pytest.mark.parametrize(
    ("given", "config"),
    [*((given, QWEN2) for given in (*OBJECTIVES, BT)), (OBJECTIVES[2], GEMMA2)],  # whose logits have a soft cap
    ids=lambda value: getattr(value, "kind", None) or value["model_type"],
)
def test_loss_and_gradients_are_those_of_padded_rows(tmp_path: Path, given: Objective, config: dict[str, Any]) -> None:
    """All weights get them, packed with shared prompts, in one micro-batch and chunk of logits as in many of both."""
    folder, batch = write_model(tmp_path, config), rows_of(given)
    changes = REWARD if given.of_scores else {}
    engine: Any = build_engine(train_config(folder, "ddp", micro_batch_tokens=10_000, **changes))
    auto: Any = AutoModelForSequenceClassification if given.of_scores else AutoModelForCausalLM
    stock = auto.from_config(AutoConfig.from_pretrained(folder, num_labels=1), attn_implementation="eager").eval()
    if given.of_scores:  # zeros would hide the model below
        with torch.no_grad():
            engine.policy.model.score.weight.normal_(0, 0.5, generator=torch.Generator().manual_seed(0))
    stock.load_state_dict({name: torch.from_numpy(each) for name, each in weights_of(engine).items()}, strict=False)
    loss, metrics = slow_loss(stock, batch, given)
    loss.backward()
    for limit, chunk in ((10_000, 1000), (40, 3)):
        engine._packing = replace(engine._packing, budget=Budget(limit))
        if not given.of_scores:
            engine.policy.head.chunk = chunk
        engine._zero_gradients()
        found = step_metrics(engine, batch, given)
        assert found[f"{given.metrics[0].name}"] == pytest.approx(loss.item(), rel=1e-5)
        for name, value in metrics.items():
            assert found[f"{given.metrics[0].name.partition('/')[0]}/{name}"] == pytest.approx(
                value, rel=1e-4, abs=1e-5
            )
        named = dict(engine.policy.model.named_parameters())
        largest = max(float(parameter.grad.abs().max()) for parameter in stock.parameters())
        for name, parameter in stock.named_parameters():
            torch.testing.assert_close(named[name].grad, parameter.grad, rtol=1e-4, atol=1e-5 * largest, msg=name)


@pytest.mark.parametrize("given", [*OBJECTIVES, BT], ids=lambda given: given.kind)
def test_the_split_into_micro_batches_changes_nothing(make: Make, given: Objective) -> None:
    results = []
    for limit in (10_000, 40):
        engine, seen = make(micro_batch_tokens=limit, **(REWARD if given.of_scores else {})), []
        for step in range(3):
            batch = rows_of(given, step)
            asked = batch.only(given.columns), given, unit_scale(batch)
            measured = engine.evaluate(*asked) if limit == 40 else None
            sums = engine.forward_backward(*asked)
            assert measured in (None, sums), "the same numbers without gradients, and no trace of them"
            units = () if given.unit == "token" else UNIT_SUMS
            assert set(sums) == {*given.summed(), *ENGINE_SUMS, *ENGINE_MAXIMA, *units}
            seen += [sums[name] for name in given.summed()] + [engine.optim_step().grad_norm]
        assert (sums["micro_batches"] > 1) == (limit == 40)
        results.append((seen, weights_of(engine)))
    assert results[0][0] == pytest.approx(results[1][0], rel=2e-4, abs=1e-5)
    assert largest_gap(results[0][1], results[1][1]) < 2e-5


def test_a_new_reward_model_learns_from_a_tie(make: Make) -> None:
    """A head of zeros: all scores are 0, the loss is ln 2, half of the pairs are right; then it learns them."""
    given, batch = objective("bradley_terry"), make_units()
    batch["margin_B"][:] = 0
    engine, history = make(**REWARD), []
    for _ in range(12):
        history.append(step_metrics(engine, batch, given))
        engine.optim_step()
    assert history[0]["reward_model/loss"] == pytest.approx(np.log(2))
    assert (history[0]["reward_model/accuracy"], history[0]["reward_model/margin"]) == (0.5, 0)
    assert history[-1]["reward_model/loss"] < 0.6
    assert history[-1]["reward_model/accuracy"] > 0.8
    score_B = engine.scores(batch)
    assert history[-1]["reward_model/margin"] <= (score_B[::2] - score_B[1::2]).mean()


@pytest.mark.parametrize("lora", [None, Lora(rank=4, alpha=12.0)], ids=["whole", "adapters"])
def test_a_policy_that_is_its_reference(tmp_path: Path, lora: Lora | None) -> None:
    """They are the papers' before the first step; with adapters the reference is the model without them."""
    folder, rows = write_model(tmp_path, QWEN2), make_units()
    for kind, value in (("dpo", np.log(2)), ("ipo", 25), ("hinge", 1), ("apo_zero", 1), ("sppo", 50), ("kto", 0.5)):
        engine, given = build_engine(train_config(folder, lora=lora, micro_batch_tokens=40)), objective(kind)
        ref_T = engine.forward(rows.only(["tokens_T", "loss_mask_T"]), adapters=lora is None)
        batch = rows_of(given)
        columns = {"ref_logprob_T": ref_T, "kl_B": np.zeros(len(batch), dtype=np.float32)}
        found = step_metrics(engine, Batch({**batch.columns, **columns}), given)
        assert found["actor/loss"] == pytest.approx(value, rel=1e-5), kind
        assert abs(found["actor/chosen_reward"]) < 1e-6
        assert engine.optim_step().grad_norm > 0.01


def test_what_is_refused(make: Make) -> None:
    batch, engine, critic = make_units(), make(), make(**REWARD)
    longest = int(batch["length_B"].max())
    for wrong, given, error in (
        (lambda given: engine.forward_backward(batch, given, unit_scale(batch)), BT, ModelError),
        (lambda given: critic.forward_backward(batch, given, unit_scale(batch)), OBJECTIVES[0], ModelError),
        (lambda given: engine.forward_backward(batch.only(["tokens_T"]), given, unit_scale(batch)), BT, BatchError),
        (
            lambda given: make(micro_batch_tokens=longest).forward_backward(batch, given, unit_scale(batch)),
            OBJECTIVES[2],
            BatchError,
        ),
    ):
        with pytest.raises(error):
            wrong(given)


def test_an_empty_batch_is_legal(make: Make) -> None:
    engine, batch = make(), make_units()
    for given in OBJECTIVES:
        sums = engine.forward_backward(batch.select([]).only(given.columns), given, unit_scale(batch))
        assert all(value == 0 for value in sums.values())
    assert engine.optim_step().grad_norm == 0
