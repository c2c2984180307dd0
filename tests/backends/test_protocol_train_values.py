"""What every train engine with a value head must do: values, scores, and the clipped value loss."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from train_helpers import (
    ENGINES,
    QWEN2,
    build_engine,
    grpo,
    largest_gap,
    make_batch,
    make_grouped_batch,
    scale_of,
    train_config,
    weights_of,
    write_model,
)

from backends.protocol import TrainEngine
from specs.errors import ModelError
from specs.schema.algorithms.algorithm_tables import ValueLoss
from specs.wire.batch import Batch

Make = Callable[..., TrainEngine]


@pytest.fixture(params=list(ENGINES))
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    folder = write_model(tmp_path / "model", QWEN2)

    def made(**changes):
        model = {"head": "value", **changes.pop("model", {})}
        return build_engine(train_config(folder, request.param, **{"role": "critic", **changes, "model": model}))

    return made


def critics_batch(seed: int = 0, make: Callable[..., Batch] = make_batch) -> Batch:
    batch, rng = make(seed=seed), np.random.default_rng(seed)
    total = batch.num_tokens
    return batch.with_columns(
        value_T=rng.normal(size=total).astype(np.float32), return_T=rng.normal(size=total).astype(np.float32)
    )


def learned(make: Make, **changes: object) -> TrainEngine:
    """An engine whose head is no longer of zeros."""
    engine = make(**changes)
    for step in range(3):
        batch = critics_batch(step)
        engine.forward_backward(batch, ValueLoss(), scale_of(batch))
        engine.optim_step()
    return engine


def test_a_new_head_says_zero(make: Make) -> None:
    engine, batch = make(), make_batch()
    assert not engine.values(batch).any()
    assert not engine.scores(batch).any()
    assert not weights_of(engine)["score.weight"].any()


def test_a_value_is_of_the_tokens_before(make: Make) -> None:
    """Changing a token changes the values of later tokens alone, its own least of all."""
    engine, batch = learned(make), make_grouped_batch()
    value_T = engine.values(batch)
    mask_T = batch["loss_mask_T"] != 0
    assert value_T.dtype == np.float32
    assert (value_T[~mask_T] == 0).all()
    assert (value_T[mask_T] != 0).all()
    at = int(np.flatnonzero(mask_T)[3])
    changed = Batch({**batch.columns, "tokens_T": batch["tokens_T"].copy()})
    changed["tokens_T"][at] = (changed["tokens_T"][at] + 1) % 23
    differ = np.flatnonzero(np.abs(engine.values(changed) - value_T) > 1e-6)
    assert differ.size
    assert differ.min() > at
    assert differ.max() < batch.offsets[np.searchsorted(batch.offsets, at, side="right")]


def test_a_score_is_that_of_the_last_token(make: Make) -> None:
    """As the value of a token behind it; the batch's own loss mask does not matter, nor does the split."""
    engine, batch = learned(make), make_grouped_batch()
    score_B = engine.scores(batch.only(["tokens_T"]))
    longer = [np.append(tokens, 0) for tokens in batch.sequences("tokens_T")]
    masks = [np.append(np.zeros(len(tokens) - 1), 1) for tokens in longer]
    behind = Batch(
        {
            "length_B": batch["length_B"] + 1,
            "tokens_T": np.concatenate(longer).astype(np.int32),
            "loss_mask_T": np.concatenate(masks).astype(np.int8),
        }
    )
    np.testing.assert_allclose(score_B, engine.values(behind)[behind.offsets[1:] - 1], atol=1e-6)
    assert len(set(score_B.tolist())) > 3
    few = learned(make, micro_batch_tokens=24)
    np.testing.assert_allclose(few.scores(batch.select([5, 1])), few.scores(batch)[[5, 1]], atol=1e-6)
    empty = Batch({"length_B": np.array([0, 2, 0]), "tokens_T": np.array([1, 2], dtype=np.int32)})
    assert engine.scores(empty)[[0, 2]].tolist() == [0, 0]
    assert engine.scores(empty)[1] != 0
    assert engine.scores(empty.select([])).shape == engine.values(make_batch().select([])).shape == (0,)


@pytest.mark.parametrize(
    ("aggregation", "batches"),
    [("token-mean", make_batch), ("seq-mean-token-mean", make_grouped_batch)],
    ids=["ragged", "shared prompts"],
)
def test_the_split_into_micro_batches_changes_nothing(
    make: Make, aggregation: str, batches: Callable[..., Batch]
) -> None:
    loss, results = ValueLoss(value_clip=0.2, loss_aggregation=aggregation), []
    for limit in (10_000, 21):
        engine, seen = make(micro_batch_tokens=limit), []
        for step in range(3):
            batch = critics_batch(step, batches)
            sums = engine.forward_backward(batch, loss, scale_of(batch))
            seen += [sums["loss"], sums["value"], engine.optim_step().grad_norm]
        results.append((seen, weights_of(engine)))
    assert results[0][0] == pytest.approx(results[1][0], rel=2e-4, abs=1e-4)
    assert largest_gap(results[0][1], results[1][1]) < 2e-5


def test_heads_do_only_what_is_theirs(make: Make) -> None:
    critic, actor, batch = make(), make(model={"head": "lm"}), critics_batch()
    for wrong in (
        lambda: actor.values(batch),
        lambda: actor.scores(batch),
        lambda: actor.forward_backward(batch, ValueLoss(), scale_of(batch)),
        lambda: critic.forward(batch),
        lambda: critic.forward_backward(batch, grpo(), scale_of(batch)),
        lambda: critic.greedy([[1]], 1),
    ):
        with pytest.raises(ModelError):
            wrong()


def test_resume_is_exact_to_the_bit(make: Make, tmp_path: Path) -> None:
    (tmp_path / "saved").mkdir()
    straight = learned(make)
    straight.save(tmp_path / "saved")
    resumed = make()
    resumed.load(tmp_path / "saved")
    batch = critics_batch(9)
    for engine in (straight, resumed):
        engine.forward_backward(batch, ValueLoss(value_clip=0.5), scale_of(batch))
        engine.optim_step()
    assert largest_gap(weights_of(straight), weights_of(resumed)) == 0
    np.testing.assert_array_equal(straight.values(batch), resumed.values(batch))


def test_a_fake_critic_starts_from_what_the_folder_holds(tmp_path: Path) -> None:
    """A table of values is kept, what samples has none yet, and a reward model that does not learn must have one."""
    folder = write_model(tmp_path, QWEN2)

    def critic(head: str, **changes: object) -> TrainEngine:
        model = {"head": head, "from_scratch": False}
        return build_engine(train_config(folder, "fake", model=model, **changes))

    actor = build_engine(train_config(folder, "fake"))
    save_file(weights_of(actor), folder / "model.safetensors")
    assert not weights_of(critic("value"))["score.weight"].any()
    with pytest.raises(ModelError, match="does not hold a table of values"):
        critic("reward", optimizer=None)
    assert not weights_of(critic("reward"))["score.weight"].any(), "one that learns starts from zeros"
    save_file({"score.weight": np.full((1, 23), 2.5, dtype=np.float32)}, folder / "model.safetensors")
    for head in ("value", "reward"):
        assert weights_of(critic(head))["score.weight"].tolist() == [[2.5] * 23]
