"""The checkpoint of a critic or reward model as a folder that transformers loads, proven by its values, and as
another one's start."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families import VOCAB
from stock_model import write_family
from train_helpers import (
    build_engine,
    largest_gap,
    make_batch,
    make_units,
    objective,
    scale_of,
    train_config,
    unit_scale,
    weights_of,
)
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from backends.export.model_export import Source, prove, write_model
from backends.protocol import TrainEngine
from specs.errors import ExportError
from specs.schema.algorithms.algorithm_tables import ValueLoss
from specs.schema.role_section import Lora
from specs.schema.roles import HeadKind
from specs.wire.batch import Batch

pytestmark = pytest.mark.slow
PROMPTS = [[3, 1, 4, 1, 5], [5, 9]]
MANY = 2**40  # bytes of memory: everything fits


def critic(
    folder: Path, dtype: str = "fp32", kind: str = "ddp", lora: Lora | None = None, head: str = "value", **changes: Any
) -> TrainEngine:
    model = {"head": head, "from_scratch": False, "dtype": dtype}
    return build_engine(train_config(folder, kind, model=model, role="critic", lora=lora, **changes))


def of_prompts() -> Batch:
    tokens_T = np.concatenate(PROMPTS).astype(np.int32)
    batch = Batch({"length_B": np.array([len(prompt) for prompt in PROMPTS]), "tokens_T": tokens_T})
    mask_T = np.ones(len(tokens_T), dtype=np.int8)
    mask_T[batch.offsets[:-1]] = 0
    return batch.with_columns(loss_mask_T=mask_T)


def trained(
    folder: Path,
    dtype: str = "fp32",
    kind: str = "ddp",
    family: str = "llama",
    lora: Lora | None = None,
    head: str = "value",
) -> tuple[TrainEngine, Path]:
    """A critic, or reward model, after three updates, and what it saved."""
    engine = critic(write_family(folder / "model", family), dtype, kind, lora, head)
    for step in range(3):
        batch = make_batch(seed=step)
        batch = batch.with_columns(value_T=batch["ref_logprob_T"], return_T=batch["advantage_T"])
        if head == "reward":
            pairs = make_units(seed=step)
            engine.forward_backward(pairs, objective("bradley_terry"), unit_scale(pairs))
        else:
            engine.forward_backward(batch, ValueLoss(), scale_of(batch))
        engine.optim_step()
    checkpoint = folder / "checkpoint"
    checkpoint.mkdir()
    engine.save(checkpoint)
    batch = of_prompts()
    values = [piece[1:].tolist() for piece in np.split(engine.values(batch), batch.offsets[1:-1])]
    (checkpoint / "value_proof.json").write_text(json.dumps({"prompts": PROMPTS, "values": values, "dtype": dtype}))
    return engine, checkpoint


def source_of(checkpoint: Path, dtype: str = "fp32", head: HeadKind = "value") -> Source:
    return Source(checkpoint, str(checkpoint.parent / "model"), dtype, False, head)


def proven(source: Source, out: Path, memory_bytes: int = MANY) -> Any:
    return prove(source, out, source.checkpoint / "value_proof.json", memory_bytes, lambda *_: None)


def exported(checkpoint: Path, dtype: str = "fp32", head: HeadKind = "value") -> Path:
    out = checkpoint.parent / "out"
    out.mkdir()
    write_model(source_of(checkpoint, dtype, head), out, 10_000, lambda *_: None)
    return out


@pytest.mark.parametrize(
    ("kind", "family", "head"),
    [
        ("ddp", "llama", "value"),
        ("fsdp2", "gemma3_text", "value"),
        ("ddp", "qwen3_moe", "value"),
        ("ddp", "qwen2", "reward"),
    ],
)
def test_it_loads_as_a_classifier_with_one_output_and_starts_another(
    tmp_path: Path, kind: str, family: str, head: HeadKind
) -> None:
    engine, checkpoint = trained(tmp_path, kind=kind, family=family, head=head)
    out = exported(checkpoint, head=head)
    proof = proven(source_of(checkpoint, head=head), out)
    assert (proof.values, proof.greedy_tokens, proof.loaded) == (5, 0, "memory")
    assert proof.parameters == engine.built().parameters
    model = AutoModelForSequenceClassification.from_pretrained(out).eval()
    assert model.config.num_labels == 1
    assert not (out / "generation_config.json").exists()
    model.config.pad_token_id = None
    scores = [model(input_ids=torch.tensor([prompt])).logits.item() for prompt in PROMPTS]
    np.testing.assert_allclose(engine.scores(of_prompts()), scores, atol=2e-5)
    assert abs(scores[0] - scores[1]) > 1e-3
    again = critic(out, kind=kind, head=head, **({"optimizer": None} if head == "reward" else {}))
    assert not again.built().new_head
    assert largest_gap(weights_of(again), weights_of(engine)) == 0
    np.testing.assert_array_equal(again.values(of_prompts()), engine.values(of_prompts()))


@pytest.mark.parametrize("pad", [None, "7", ""])
def test_a_padded_batch_is_scored_where_the_tokenizer_has_a_token_for_it(tmp_path: Path, pad: str | None) -> None:
    """But not by the end of sequence, as which `pad` is None here: scores were trained at it. "": the files name none,
    and the tokenizer's class adds one that the model does not have."""
    engine, checkpoint = trained(tmp_path, head="reward")
    file = tmp_path / "model" / "tokenizer_config.json"
    named = json.loads(file.read_text()) | ({} if pad is None else {"pad_token": pad})
    file.write_text(json.dumps({name: one for name, one in named.items() if one != ""}))
    content = json.loads((file := file.with_name("tokenizer.json")).read_text())
    content["added_tokens"] += [content["added_tokens"][0] | {"id": n, "content": f"<{n}>"} for n in range(15, VOCAB)]
    file.write_text(json.dumps(content))
    out = exported(checkpoint, head="reward")
    model = AutoModelForSequenceClassification.from_pretrained(out).eval()
    assert (model.config.pad_token_id is None) == (not pad)
    assert "<|endoftext|>" not in (out / "tokenizer.json").read_text()
    if pad:
        batch = AutoTokenizer.from_pretrained(out).pad({"input_ids": PROMPTS}, return_tensors="pt")
        assert proven(source_of(checkpoint, head="reward"), out).values == 5
        np.testing.assert_allclose(model(**batch).logits[:, 0].tolist(), engine.scores(of_prompts()), atol=2e-5)


@pytest.mark.parametrize("family", ["llama", "qwen2"])  # the second ties its embeddings: its files lack any head
def test_one_with_adapters_is_exported_merged(tmp_path: Path, family: str) -> None:
    engine, checkpoint = trained(tmp_path, kind="fsdp2", family=family, lora=Lora(rank=4))
    out = exported(checkpoint)
    assert proven(source_of(checkpoint), out).values == 5
    again = critic(out, kind="fsdp2")
    assert not again.built().new_head
    assert largest_gap(weights_of(again), weights_of(engine)) < 1e-7
    start = weights_of(critic(tmp_path / "model", kind="fsdp2"))
    changed = {name for name, value in weights_of(again).items() if np.abs(value - start[name]).max() > 1e-4}
    assert {"score.weight", "model.layers.0.self_attn.q_proj.weight"} <= changed
    assert not any("norm" in name or "embed" in name for name in changed)


def test_other_values_are_found(tmp_path: Path) -> None:
    _, checkpoint = trained(tmp_path)
    out, path = exported(checkpoint), checkpoint / "value_proof.json"
    proof = json.loads(path.read_text())
    proof["values"][0][2] += 0.01 * max(abs(value) for values in proof["values"] for value in values)
    path.write_text(json.dumps(proof))
    with pytest.raises(ExportError, match="the value before token 3 of proof prompt 0 differs"):
        proven(source_of(checkpoint), out)
