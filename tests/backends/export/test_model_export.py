"""Exports: files of bounded size with bounded memory, proven against the checkpoint whatever went wrong."""

from __future__ import annotations

import dataclasses
import errno
import json
import shutil
from pathlib import Path

import pytest
import torch
from families import FAMILIES
from safetensors.torch import load_file, save_file
from stock_model import PROMPTS, write_family
from train_helpers import build_engine, learn, train_config
from transformers import AutoConfig, AutoModelForCausalLM

from backends.export.model_export import Source, as_published, prove, trained_weights, write_model
from backends.hf.hf_model import named_weights
from backends.train.tensor_shards import Shard, write_shards
from backends.weights.tensor_files import LazyTensor, TensorFile, write_file
from rlctl.models.paths import BUILTIN_FOLDER
from specs.errors import ExportError
from specs.schema.role_section import Lora

MANY = 2**40  # bytes of memory: everything fits
SIZE = {"vocab_size": 32, "num_hidden_layers": 3}
QWEN2 = {**FAMILIES["qwen2"].config, **SIZE}
MIXTRAL = {**FAMILIES["mixtral"].config, **SIZE, "num_local_experts": 3}


def ignore(*_: object) -> None:
    """Nobody watches the progress."""


def trained(folder: Path, config: dict, ranks: int = 2) -> Path:
    """A model folder, and a checkpoint of random weights that `ranks` ranks left, every tensor cut among them."""
    for path in (BUILTIN_FOLDER / "tiny-digits").iterdir():
        shutil.copy(path, folder)
    (folder / "config.json").write_text(json.dumps(config))
    torch.manual_seed(1)
    model = _random(folder)
    checkpoint = folder / "checkpoint"
    checkpoint.mkdir()
    weights = {name: tensor.detach() for name, tensor in named_weights(model).items()}
    for rank in range(ranks):
        shards = []
        for name, tensor in weights.items():
            start, stop = (tensor.numel() * each // ranks for each in (rank, rank + 1))
            shards.append(Shard(name, tuple(tensor.shape), start, tensor.view(-1)[start:stop]))
        write_shards(checkpoint, "model", rank, ranks, shards)
    prompts = [[3, 1, 4, 1], [5, 9]]
    answers = [_continued(model, prompt) for prompt in prompts]
    (checkpoint / "greedy_proof.json").write_text(json.dumps({"prompts": prompts, "answers": answers}))
    return checkpoint


def _random(folder: Path):
    return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32).eval()


@torch.no_grad()
def _continued(model, prompt: list[int]) -> dict:
    tokens, margins = [], []
    for _ in range(6):
        best, token = model(torch.tensor([prompt + tokens])).logits[0, -1].topk(2)
        tokens.append(int(token[0]))
        margins.append(float(best[0] - best[1]))
    return {"tokens": tokens, "margins": margins}


def export(checkpoint: Path, dtype: str = "fp32", shard_bytes: int = 10_000, memory_bytes: int = MANY):
    source = Source(checkpoint, str(checkpoint.parent), dtype, False)
    out = checkpoint.parent / "out"
    out.mkdir()
    write_model(source, out, shard_bytes, ignore)
    return out, prove(source, out, checkpoint / "greedy_proof.json", memory_bytes, ignore)


@pytest.mark.parametrize(
    "config", [QWEN2, {**QWEN2, "tie_word_embeddings": False}, MIXTRAL], ids=["tied", "untied", "moe"]
)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_every_value_comes_back(tmp_path, config, dtype):
    """Loaded by transformers as a user would; from a checkpoint that three ranks wrote, into several files."""
    checkpoint = trained(tmp_path, config, ranks=3)
    out, proof = export(checkpoint, dtype)
    assert proof.greedy_tokens > 0
    assert proof.greedy_tokens + proof.undecided_tokens == 12
    assert len(list(out.glob("*.safetensors"))) > 2
    assert json.loads((out / "config.json").read_text())["dtype"] == {"fp32": "float32", "bf16": "bfloat16"}[dtype]
    loaded = named_weights(AutoModelForCausalLM.from_pretrained(out))
    torch.manual_seed(1)
    wanted = named_weights(_random(tmp_path))
    assert loaded.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(loaded[name], tensor.to(loaded[name].dtype)), name
        assert loaded[name].dtype == {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]


def test_what_transformers_reads_in_fp32_lies_so_in_files_of_bf16(tmp_path):
    """A bias by which experts are chosen."""
    out, _ = export(trained(tmp_path, FAMILIES["deepseek_v3"].config), "bf16", shard_bytes=MANY)
    entries = TensorFile(out / "model.safetensors").header.entries
    kept = {name for name, entry in entries.items() if entry.dtype == "F32"}
    assert kept == {"model.layers.1.mlp.gate.e_score_correction_bias"}


def test_names_and_files_are_those_of_transformers(tmp_path):
    """Also where a mixture's experts lie one by one in files and joined in the model."""
    checkpoint = trained(tmp_path, MIXTRAL)
    out, _ = export(checkpoint)
    torch.manual_seed(1)
    _random(tmp_path).save_pretrained(tmp_path / "theirs", max_shard_size=10_000)
    theirs = json.loads((tmp_path / "theirs" / "model.safetensors.index.json").read_text())
    ours = json.loads((out / "model.safetensors.index.json").read_text())
    assert ours["weight_map"].keys() == theirs["weight_map"].keys()
    assert "model.layers.0.block_sparse_moe.experts.2.w1.weight" in ours["weight_map"]
    assert ours["metadata"]["total_size"] == theirs["metadata"]["total_size"]
    for name, file in ours["weight_map"].items():
        assert torch.equal(
            TensorFile(out / file).tensor(name),
            TensorFile(tmp_path / "theirs" / theirs["weight_map"][name]).tensor(name),
        )


@pytest.mark.parametrize("config", [QWEN2, MIXTRAL], ids=["tied", "moe"])
def test_a_model_larger_than_memory_is_proven_from_the_disk(tmp_path, config):
    checkpoint = trained(tmp_path, config)
    out, proof = export(checkpoint, memory_bytes=60_000)
    assert proof.loaded == "disk"
    assert proof.greedy_tokens >= 8
    source = Source(checkpoint, str(tmp_path), "fp32", False)
    in_memory = prove(source, out, checkpoint / "greedy_proof.json", MANY, ignore)
    assert dataclasses.replace(proof, loaded="memory") == in_memory
    spoil_greedy(checkpoint)
    with pytest.raises(ExportError, match="greedy token 0 differs"):
        prove(source, out, checkpoint / "greedy_proof.json", 60_000, ignore)
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith("tmp")) == []


# ── what the proof must notice ────────────────────────────────────────────────────────────────────


def spoil_greedy(checkpoint: Path) -> None:
    proof = json.loads((checkpoint / "greedy_proof.json").read_text())
    for answer in proof["answers"]:
        answer["tokens"] = [(token + 1) % 16 for token in answer["tokens"]]
        answer["margins"] = [9.0] * len(answer["margins"])
    (checkpoint / "greedy_proof.json").write_text(json.dumps(proof))


def rewrite(out: Path, change) -> None:
    """Have `change` edit the name → tensor mapping of the file that holds the last layer's norm."""
    path = next(p for p in sorted(out.glob("*.safetensors")) if NORM in TensorFile(p).header.entries)
    file = TensorFile(path)
    tensors = {name: file.tensor(name) for name in file.header.entries}
    change(tensors)
    lazy = [LazyTensor(name, tuple(t.shape), t.dtype, lambda t=t: t) for name, t in tensors.items()]
    write_file(path, lazy, {"format": "pt"})


NORM = "model.norm.weight"
FAULTS = {
    "one bit": (lambda t: t[NORM].view(torch.int32)[3:4].bitwise_xor_(1), "norm.weight has other values"),
    "minus zero": (lambda t: t.update({NORM: t[NORM] * 1.0000002}), "norm.weight has other values"),
    "shape": (lambda t: t.update({NORM: t[NORM].view(4, 8)}), "norm.weight has other values"),
    "dtype": (lambda t: t.update({NORM: t[NORM].half()}), "norm.weight has other values"),
    "missing": (lambda t: t.pop(NORM), "norm.weight"),
    "unknown": (lambda t: t.update({"model.extra": torch.zeros(2)}), "model.extra"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_file_is_found(tmp_path, fault):
    checkpoint = trained(tmp_path, QWEN2)
    out, _ = export(checkpoint)
    change, words = FAULTS[fault]
    rewrite(out, change)
    source = Source(checkpoint, str(tmp_path), "fp32", False)
    with pytest.raises(ExportError, match=words):
        prove(source, out, checkpoint / "greedy_proof.json", 60_000, ignore)


def test_joined_tensors_are_taken_apart_one_at_a_time(tmp_path, monkeypatch):
    """A mixture's layer is never held twice, and no two layers are."""
    checkpoint = trained(tmp_path, MIXTRAL)
    source = Source(checkpoint, str(tmp_path), "fp32", False)
    with torch.device("meta"):
        model = _random(tmp_path)
    loaded = []
    weights = trained_weights(source)
    for piece in as_published(model, [_noting(weight, loaded) for weight in weights]):
        assert tuple(piece.load().shape) == piece.shape
    assert sorted(loaded) == sorted(weight.name for weight in weights)


def _noting(weight, loaded: list[str]):
    def load():
        loaded.append(weight.name)
        return weight.load()

    return dataclasses.replace(weight, load=load)


def test_a_base_model_under_other_names_is_loaded_once_for_writing_and_once_for_comparing(tmp_path, capfd):
    """And not for each weight that adapters are merged into."""
    folder = write_family(tmp_path / "model", "mixtral")
    weights = load_file(folder / "model.safetensors")
    weights = {name.removeprefix("model."): weight for name, weight in weights.items()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    engine = build_engine(train_config(folder, lora=Lora(rank=4), model={"from_scratch": False}))
    learn(engine, 1)
    checkpoint = folder / "checkpoint"
    checkpoint.mkdir()
    engine.save(checkpoint)
    answers = [dataclasses.asdict(answer) for answer in engine.greedy(PROMPTS, 4)]
    (checkpoint / "greedy_proof.json").write_text(json.dumps({"prompts": PROMPTS, "answers": answers}))
    capfd.readouterr()
    _, proof = export(checkpoint)
    assert proof.greedy_tokens > 0
    assert capfd.readouterr().err.count("the whole model is loaded on the host first") == 2


def test_a_disk_that_is_full_at_the_tokenizer_is_told_as_at_the_weights(tmp_path: Path) -> None:
    """What tokenizers raises there has no `errno`."""
    checkpoint = trained(tmp_path, QWEN2)
    (out := tmp_path / "out").mkdir()
    (out / "tokenizer.json").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space") as refused:
        write_model(Source(checkpoint, str(tmp_path), "fp32", False), out, 10_000, ignore)
    assert refused.value.errno == errno.ENOSPC
