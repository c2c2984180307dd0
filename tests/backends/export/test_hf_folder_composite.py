"""Language models of folders that hold more: trained alone, and exported in place with the rest as it came."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from families import COMPOSITES
from rollout_helpers import rollout_config
from safetensors.torch import load_file, save_file
from stock_model import ADAM, PROMPTS, TEMPERATURE, family_batch, logprobs
from train_helpers import build_engine, grpo, scale_of, train_config, weights_of
from transformers import AutoConfig

from backends.export.adapter_export import adapter_weights, compare_adapters, load_adapted, write_adapters
from backends.export.model_export import Source, prove, write_model
from backends.protocol import Rank
from backends.torch_rollout.engine import TorchRolloutEngine
from rlctl.models.paths import BUILTIN_FOLDER
from specs.errors import ExportError
from specs.model_shapes import language_model_names
from specs.schema.role_section import Lora

pytestmark = pytest.mark.slow


def write_composite(folder: Path, name: str) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model_type": name, **COMPOSITES[name]}))
    config = AutoConfig.from_pretrained(folder)
    torch.manual_seed(5)
    getattr(transformers, COMPOSITES[name]["architectures"][0])(config).save_pretrained(folder)
    for path in (BUILTIN_FOLDER / "tiny-digits").glob("tokenizer*"):
        shutil.copy(path, folder)
    (folder / "preprocessor_config.json").write_text("{}")
    return folder


def load(folder: Path, name: str) -> Any:
    return (
        getattr(transformers, COMPOSITES[name]["architectures"][0]).from_pretrained(folder, dtype=torch.float32).eval()
    )


@pytest.mark.parametrize(("name", "engine"), list(zip(COMPOSITES, ("ddp", "fsdp2", "ddp", "ddp"), strict=True)))
def test_it_trains_alone_and_comes_back_in_its_folder(tmp_path: Path, name: str, engine: str) -> None:
    folder, batch = write_composite(tmp_path / "model", name), family_batch()
    trainer = build_engine(
        train_config(folder, engine, model={"from_scratch": False}, optimizer=ADAM, temperature=TEMPERATURE)
    )
    with torch.no_grad():
        np.testing.assert_allclose(trainer.forward(batch), logprobs(load(folder, name), batch), rtol=0, atol=2e-5)
    trainer.forward_backward(batch, grpo(anchor="current"), scale_of(batch))
    trainer.optim_step()
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    trainer.save(checkpoint)
    written = [{"tokens": each.tokens, "margins": each.margins} for each in trainer.greedy(PROMPTS, 4)]
    proof_file = checkpoint / "greedy_proof.json"
    proof_file.write_text(json.dumps({"prompts": PROMPTS, "answers": written}))
    source, out = Source(checkpoint, str(folder), "fp32", False), tmp_path / "out"
    out.mkdir()
    write_model(source, out, 2**30, lambda *_: None)
    assert prove(source, out, proof_file, 2**40, lambda *_: None).greedy_tokens > 0

    before, after = load_file(folder / "model.safetensors"), load_file(out / "model.safetensors")
    own, trained = language_model_names(before), weights_of(trainer)
    assert after.keys() == before.keys()
    assert set(own.values()) == trained.keys()
    for key, tensor in after.items():
        want = torch.from_numpy(trained[own[key]]) if key in own else before[key]
        assert torch.equal(tensor, want), key
    assert {file.name for file in out.iterdir()} == {file.name for file in folder.iterdir()}
    assert (out / "config.json").read_bytes() == (folder / "config.json").read_bytes()
    with torch.no_grad():  # the whole, loaded back by its own class, gives the trainer's log-probs
        np.testing.assert_allclose(trainer.forward(batch), logprobs(load(out, name), batch), rtol=0, atol=2e-5)

    sampler = TorchRolloutEngine.build(rollout_config(folder), Rank())
    assert {spec.name for spec in sampler.weight_specs()} == trained.keys()

    key = next(key for key in before if key not in own)
    save_file({**after, key: before[key] + 1}, out / "model.safetensors", {"format": "pt"})
    with pytest.raises(ExportError, match=re.escape(f"{key} has other values")):
        prove(source, out, proof_file, 2**40, lambda *_: None)


@pytest.mark.parametrize(("name", "loads_alone"), [("qwen3_5", True), ("gemma3", False), ("mistral3", False)])
def test_adapters_are_exported_where_peft_finds_the_language_model(
    tmp_path: Path, name: str, loads_alone: bool
) -> None:
    """Of some folders transformers loads it alone; of others it makes the whole, with other names, or nothing."""
    folder, checkpoint, out = write_composite(tmp_path / "model", name), tmp_path / "checkpoint", tmp_path / "out"
    lora = Lora(rank=2, alpha=4.0, targets=("all-linear",))
    trainer = build_engine(train_config(folder, model={"from_scratch": False}, lora=lora))
    for made in (checkpoint, out):
        made.mkdir()
    trainer.save(checkpoint)
    if not loads_alone:
        with pytest.raises(ExportError, match=r"fit the language model of .* alone") as error:
            write_adapters(checkpoint, out, str(folder), False)
        assert "merged into the whole folder" in error.value.hint
        return
    write_adapters(checkpoint, out, str(folder), False)
    compare_adapters(load_adapted(str(folder), out, torch.float32, False), adapter_weights(checkpoint))
