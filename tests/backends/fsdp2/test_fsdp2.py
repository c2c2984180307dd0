"""The fsdp2 engine on one rank: loading without ever being whole, precision, memory, models it must refuse."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from families import FAMILIES
from safetensors.torch import load_file, save_file
from train_helpers import (
    GEMMA2,
    GPT2,
    QWEN2,
    build_engine,
    grpo,
    largest_gap,
    learn,
    make_batch,
    model_config,
    scale_of,
    train_config,
    weights_of,
    write_model,
)

from backends.hf.hf_model import build_model, build_on_meta, named_weights
from backends.train import engine as train_engine
from backends.train import hf_weights
from backends.train.hf_weights import aliases_of, stream_into
from backends.train.tensor_shards import Shard
from backends.weights.tensor_files import TensorFile
from specs.errors import ModelError

LOSS = grpo(kl_coef=0.1, entropy_coef=0.05)
MODELS = {"qwen2": QWEN2, "gpt2": GPT2, "gemma2": GEMMA2}
MODELS |= {"experts one by one": FAMILIES["qwen3_moe"].config, "names of Mixtral": FAMILIES["mixtral"].config}

MINIMAX = {
    **FAMILIES["mixtral"].config,
    **{"model_type": "minimax_m2", "architectures": ["MiniMaxM2ForCausalLM"], "head_dim": 8},
}
GRANITE = {**FAMILIES["granitemoehybrid"].config, "num_local_experts": 4, "num_experts_per_tok": 2}
ERNIE = {
    **FAMILIES["qwen2"].config,
    **{"model_type": "ernie4_5_moe", "architectures": ["Ernie4_5_MoeForCausalLM"]},
    **{"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16},
}


def saved_model(folder: Path, config: dict[str, Any] = QWEN2, shard_bytes: str = "5GB") -> Path:
    """Weights on disk as transformers writes them."""
    drawn = write_model(folder / "config", config)
    build_model(model_config(drawn, attn_implementation="eager"), load_weights=True).save_pretrained(
        folder / "disk", max_shard_size=shard_bytes
    )
    return folder / "disk"


def engine_of(folder: Path, kind: str = "fsdp2", **changes: Any) -> Any:
    return build_engine(train_config(folder, kind, **changes))


def test_rounds_follow_the_rank_with_the_most_work(qwen2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What each gets changes, and nothing that is computed."""
    batch, engine = make_batch(30), engine_of(qwen2)
    before, told = engine.forward(batch), []

    def twice(work: Sequence[float], device: torch.device) -> list[float]:
        told.append(work)
        return [2 * each for each in work]

    monkeypatch.setattr(train_engine, "heaviest_of_any_rank", twice)
    after = engine.forward(batch)
    micros = engine._packing.micro_batches(batch)
    assert len(told[0]) == micros.rounds > 2
    assert micros.tokens[0] > 3 * micros.tokens[-1], "the first rounds are full now, and the last ones hardly"
    np.testing.assert_allclose(after, before, rtol=0, atol=1e-5)


# ── models ────────────────────────────────────────────────────────────────────────────────────────


def test_learns_as_ddp_does(tmp_path: Path) -> None:
    """The same numbers from the same weights on disk, with layers that are stored transposed."""
    folder = saved_model(tmp_path, GPT2)
    engines = [engine_of(folder, kind, model={"from_scratch": False}) for kind in ("ddp", "fsdp2")]
    built = [engine.built() for engine in engines]
    assert built[0].weights_checksum == built[1].weights_checksum
    assert built[1].mesh == {"replicate": 1, "shard": 1}
    assert built[0].model_copy(update={"mesh": built[1].mesh}) == built[1]
    batch = make_batch(seed=9)
    np.testing.assert_allclose(engines[0].forward(batch), engines[1].forward(batch), rtol=0, atol=1e-6)
    assert learn(engines[1], 2, loss=LOSS) == pytest.approx(learn(engines[0], 2, loss=LOSS), rel=1e-6)
    assert largest_gap(weights_of(engines[0]), weights_of(engines[1])) < 1e-6


def test_bf16_learns_as_ddp_does(qwen2: Path) -> None:
    """fp32 masters, bf16 passes; nothing of the loss (advantages, log-probs) is rounded on the way in."""
    ddp, fsdp2 = (engine_of(qwen2, kind, model={"dtype": "bf16"}) for kind in ("ddp", "fsdp2"))
    assert fsdp2.built().dtype == "bf16"
    assert fsdp2.built().weights_checksum == ddp.built().weights_checksum
    assert {kind[1] for kind in fsdp2._weight_kinds().values()} == {torch.float32}
    assert learn(fsdp2, 2, loss=LOSS) == learn(ddp, 2, loss=LOSS)
    assert largest_gap(weights_of(ddp), weights_of(fsdp2)) == 0


def test_weights_that_change_are_gathered_anew(qwen2: Path, tmp_path: Path) -> None:
    """After a forward pass without a backward FSDP keeps the root gathered: load and step must not leave it stale."""
    engine, other = engine_of(qwen2), engine_of(qwen2, model={"seed": 99})
    batch = make_batch()
    (tmp_path / "saved").mkdir()
    other.save(tmp_path / "saved")
    engine.forward(batch)
    engine.load(tmp_path / "saved")
    assert (engine.forward(batch) == other.forward(batch)).all()
    for each in (engine, other):
        each.forward_backward(batch, grpo(), scale_of(batch))
    engine.forward(batch)
    for each in (engine, other):
        each.optim_step()
    assert (engine.forward(batch) == other.forward(batch)).all()


# ── loading ───────────────────────────────────────────────────────────────────────────────────────


def pieces(model: Any, parts: int, part: int) -> list[Shard]:
    """What rank `part` of `parts` would hold, cut anywhere, filled with numbers that are not there."""
    shards = []
    for name, tensor in named_weights(model).items():
        count = tensor.numel()
        start, stop = part * count // parts, (part + 1) * count // parts
        shards.append(Shard(name, tuple(tensor.shape), start, torch.full((stop - start,), math.nan)))
    return shards


@pytest.mark.parametrize("family", MODELS)
def test_streamed_weights_are_those_on_disk(tmp_path: Path, family: str) -> None:
    """Many files, tied or not, cut in three: element by element what transformers loads."""
    folder = saved_model(tmp_path, MODELS[family], "10KB")
    config = model_config(folder, from_scratch=False, attn_implementation="eager")
    expected = named_weights(build_model(config, load_weights=True))
    empty = build_on_meta(config)
    assert {parameter.device.type for parameter in empty.parameters()} == {"meta"}
    for part in range(3):
        shards = pieces(empty, 3, part)
        stream_into(config, aliases_of(empty), shards)
        for shard in shards:
            stop = shard.start + shard.flat.numel()
            assert torch.equal(shard.flat, expected[shard.name].detach().flatten()[shard.start : stop]), shard.name


class CountedFile(TensorFile):
    """A safetensors file that counts the elements asked of it."""

    elements: ClassVar[list[int]] = []

    def read_into(self, target: torch.Tensor, name: str, start: int = 0) -> None:
        self.elements.append(len(target))
        super().read_into(target, name, start)


@pytest.fixture
def elements_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Elements of every read from a file. Building the model is not to be had."""
    monkeypatch.setattr(CountedFile, "elements", [])
    monkeypatch.setattr(hf_weights, "TensorFile", CountedFile)
    monkeypatch.setattr(hf_weights, "build_model", None)
    return CountedFile.elements


@pytest.mark.parametrize("family", ["qwen2", "experts one by one", "names of Mixtral"])
def test_the_engine_streams_when_it_can(family: str, tmp_path: Path, elements_read: list[int]) -> None:
    engine = engine_of(saved_model(tmp_path, MODELS[family]), model={"from_scratch": False})
    assert sum(elements_read) == engine.built().parameters


@pytest.mark.parametrize(
    ("config", "own_name"),
    [
        (MINIMAX, "block_sparse_moe.e_score"),
        (GRANITE, "block_sparse_moe.input_linear"),
        (ERNIE, "mlp.moe_statics"),
        (FAMILIES["nemotron_h"].config, "backbone.layers.3.mixer.experts.0.up_proj"),
    ],
)
def test_files_with_names_of_their_own_are_streamed(
    config: dict[str, Any], own_name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = saved_model(tmp_path, config)
    assert any(own_name in name for name in load_file(folder / "model.safetensors"))
    engine = engine_of(folder, model={"from_scratch": False})
    assert "loaded on the host first" not in capfd.readouterr().err
    assert (
        engine.built().weights_checksum
        == engine_of(folder, "ddp", model={"from_scratch": False}).built().weights_checksum
    )


def test_names_that_transformers_converts_load_whole(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """GPT-2 files from its authors lack the prefix that the model has."""
    folder = saved_model(tmp_path, GPT2)
    path = folder / "model.safetensors"
    weights = {name.removeprefix("transformer."): tensor for name, tensor in load_file(path).items()}
    save_file(weights, path, {"format": "pt"})
    engine = engine_of(folder, model={"from_scratch": False})
    assert "loaded on the host first" in capfd.readouterr().err
    assert (
        engine.built().weights_checksum
        == engine_of(folder, "ddp", model={"from_scratch": False}).built().weights_checksum
    )


def test_weights_in_fp8_are_read(tmp_path: Path) -> None:
    folder, norm = saved_model(tmp_path), "model.norm.weight"
    weights = load_file(folder / "model.safetensors")
    save_file({**weights, norm: weights[norm].to(torch.float8_e4m3fn)}, folder / "model.safetensors", {"format": "pt"})
    engine = engine_of(folder, model={"from_scratch": False})
    assert torch.equal(engine.weights[norm].tensor.full_tensor(), weights[norm])


def test_wrong_files_are_named(tmp_path: Path) -> None:
    folder = saved_model(tmp_path)
    path, weights = folder / "model.safetensors", load_file(folder / "model.safetensors")
    norm, embedding = "model.norm.weight", "model.embed_tokens.weight"

    def refusal(changed: dict[str, torch.Tensor]) -> str:
        save_file(changed, path, {"format": "pt"})
        with pytest.raises(ModelError) as caught:
            engine_of(folder, model={"from_scratch": False})
        return str(caught.value)

    assert f"lacks 1 weights, first {norm}" in refusal({n: t for n, t in weights.items() if n != norm})
    assert f"{norm} has shape [7] on disk" in refusal({**weights, norm: torch.ones(7)})
    tied = refusal({**weights, "lm_head.weight": weights[embedding] + 1})
    assert f"{embedding} and lm_head.weight are tied by config.json, but differ" in tied
    path.write_bytes(b"torn")
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        engine_of(folder, model={"from_scratch": False})
