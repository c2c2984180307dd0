"""From a checkpoint to a Hugging Face folder, and the proof that it is one."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel

from backends.train.shards import ShardReader
from specs.errors import CheckpointError, ExportError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# A greedy choice counts as decided when it led by more than this many nats: rounding cannot turn it round.
DECIDED = {"fp32": 1e-3, "bf16": 0.25}


@dataclass(frozen=True)
class Proof:
    """What the loaded folder was seen to do."""

    tensors: int
    parameters: int
    greedy_tokens: int  # compared with the trainer's
    undecided_tokens: int  # left out: the trainer itself was torn between two tokens


def write_model(checkpoint: Path, model_path: str, out: Path, dtype: str, trust_remote_code: bool) -> None:
    """Write safetensors, config, tokenizer and generation config into `out`."""
    config = AutoConfig.from_pretrained(model_path, trust_remote_code=trust_remote_code)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=DTYPES[dtype], trust_remote_code=trust_remote_code)
    state = {name: _cast(tensor, dtype) for name, tensor in ShardReader(checkpoint, "model").tensors()}
    _, unexpected = model.load_state_dict(state, strict=False, assign=True)
    model.tie_weights()
    still_meta = [name for name, tensor in model.state_dict().items() if tensor.is_meta]
    if still_meta or unexpected:
        raise CheckpointError(
            f"the checkpoint does not fit the model at {model_path}: "
            f"missing {still_meta[:3]}, unknown {unexpected[:3]}",
            hint="the model folder changed since the run; put back the one that the run was started with",
        )
    model.config.dtype = DTYPES[dtype]
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(model_path, trust_remote_code=trust_remote_code).save_pretrained(out)
    _generation_config(model_path, config).save_pretrained(out)


def _cast(tensor: torch.Tensor, dtype: str) -> torch.Tensor:
    return tensor.to(DTYPES[dtype]) if tensor.is_floating_point() else tensor


def _generation_config(model_path: str, config: Any) -> GenerationConfig:
    try:
        return GenerationConfig.from_pretrained(model_path)
    except OSError:  # the model ships none
        return GenerationConfig.from_model_config(config)


def prove(out: Path, checkpoint: Path, proof_file: Path, dtype: str, trust_remote_code: bool) -> Proof:
    """Load `out` as anybody would and compare it with the checkpoint. Raises ExportError on any difference."""
    model, info = AutoModelForCausalLM.from_pretrained(
        out, dtype=DTYPES[dtype], trust_remote_code=trust_remote_code, output_loading_info=True
    )
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if info[what]:
            raise ExportError(f"the exported folder loads with {what.replace('_', ' ')}: {sorted(info[what])[:5]}")
    loaded = model.state_dict()
    saved = dict(ShardReader(checkpoint, "model").tensors())
    for name, tensor in saved.items():
        if name not in loaded:
            raise ExportError(f"{name} is in the checkpoint but not in the exported model")
        if loaded[name].shape != tensor.shape:
            raise ExportError(f"{name} was exported as {list(loaded[name].shape)}, trained as {list(tensor.shape)}")
        if not torch.equal(loaded[name], _cast(tensor, dtype)):
            raise ExportError(f"{name} has other values in the exported model than in the checkpoint")
    AutoTokenizer.from_pretrained(out, trust_remote_code=trust_remote_code)
    compared, undecided = _greedy(model, json.loads(proof_file.read_text()), DECIDED[dtype])
    return Proof(len(saved), sum(p.numel() for p in model.parameters()), compared, undecided)


@torch.no_grad()
def _greedy(model: PreTrainedModel, proof: dict[str, Any], decided: float) -> tuple[int, int]:
    """The trainer's greedy tokens must be this model's too: at every place, given the same tokens before it.

    That is the same as generating greedily, place by place, and says where it first goes another way.
    """
    compared = undecided = 0
    model.eval()
    for prompt, answer in zip(proof["prompts"], proof["answers"], strict=True):
        row = torch.tensor([prompt + answer["tokens"]], device=model.device)
        choice = model(row).logits[0].argmax(-1).tolist()
        for place, (token, margin) in enumerate(zip(answer["tokens"], answer["margins"], strict=True)):
            if margin <= decided:
                undecided += 1
                continue
            compared += 1
            got = choice[len(prompt) + place - 1]
            if got != token:
                raise ExportError(
                    f"greedy token {place} differs: the trainer chose {token} (ahead by {margin:.3g}), the export {got}"
                )
    return compared, undecided
