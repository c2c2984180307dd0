"""Exporting a checkpoint that holds LoRA adapters: merged into the base model's weights, or as peft's own folder."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from backends.export.hf_folder import file_dtype
from backends.hf.adapter_names import down_of, peft_name, up_of
from backends.hf.language_model import is_composite
from backends.train.hf_weights import aliases_of, filler_of
from backends.train.lora import CONFIG_FILE, add_adapter, read_config
from backends.train.tensor_shards import Shard, ShardReader
from backends.weights.tensor_bytes import named_weights
from backends.weights.tensor_files import LazyTensor, write_file
from specs.errors import ExportError
from specs.wire.role_config import ModelConfig

ADAPTER_FILE = "adapter_model.safetensors"


def holds_adapters(checkpoint: Path) -> bool:
    return (checkpoint / CONFIG_FILE).is_file()


def merged_weights(
    checkpoint: Path, model: PreTrainedModel, model_path: str, trust_remote_code: bool, dtype: torch.dtype
) -> list[LazyTensor]:
    """The base model's weights with the adapters added in fp32, and a score layer as it was trained, by the model's own
    names; each made when it is loaded.

    `model` is the base model on the meta device."""
    reader, config = ShardReader(checkpoint, "model"), read_config(checkpoint)
    aliases = {name: each for name, each in aliases_of(model).items() if name not in reader.shapes}  # what is not there
    scale, base = config["lora_alpha"] / config["r"], _base_config(model_path, trust_remote_code)
    from_base = cache(lambda: filler_of(base, aliases))
    transposed = {name for name, module in model.named_modules() if isinstance(module, Conv1D)}

    def lazy(name: str, own: Tensor) -> LazyTensor:
        if name in reader.shapes:  # it learned whole
            return LazyTensor(name, reader.shapes[name], dtype, lambda: reader.tensor(name).to(dtype))
        layer, shape = name.removesuffix(".weight"), tuple(own.shape)
        adapted = name.endswith(".weight") and up_of(layer) in reader.shapes
        cast = file_dtype(model, name, own.dtype, dtype)

        def load() -> Tensor:
            weight = torch.empty(shape, dtype=torch.float32 if own.dtype.is_floating_point else own.dtype)
            from_base()(Shard(name, shape, 0, weight.view(-1)))
            if adapted:
                down, up = reader.tensor(down_of(layer)), reader.tensor(up_of(layer))
                add_adapter(weight.T if layer in transposed else weight, down, up, scale)
            return weight.to(cast)

        return LazyTensor(name, shape, cast, load)

    return [lazy(name, own) for name, own in named_weights(model).items()]


def _base_config(path: str, trust_remote_code: bool) -> ModelConfig:
    """A run with adapters always starts from weights on disk (`specs/rules/all_rules.py`)."""
    return ModelConfig(
        path=path, from_scratch=False, seed=0, dtype="fp32", attn_implementation="eager",
        trust_remote_code=trust_remote_code, device="cpu", max_sequence_tokens=1,
    )  # fmt: skip


def write_adapters(checkpoint: Path, out: Path, model_path: str, trust_remote_code: bool) -> None:
    """The folder that `PeftModel.from_pretrained` loads: the adapters in fp32, as trained, and their configuration.

    Raises ExportError where there are none, or where they fit a part of what transformers loads from `model_path`."""
    if not holds_adapters(checkpoint):
        raise ExportError("the checkpoint holds no adapters", hint="leave --adapter-only out")
    config = AutoConfig.from_pretrained(model_path, trust_remote_code=trust_remote_code)
    made = [MODEL_FOR_CAUSAL_LM_MAPPING.get(type(each), None) for each in (config, config.get_text_config())]
    if is_composite(config) and made[0] is not made[1]:
        raise ExportError(
            f"the adapters fit the language model of {model_path} alone, which AutoModelForCausalLM does not load from "
            "this folder of several models",
            hint="leave --adapter-only out: they are merged into the whole folder",
        )
    tensors = adapter_weights(checkpoint)
    write_file(out / ADAPTER_FILE, tensors, {"format": "pt"})
    shutil.copyfile(checkpoint / CONFIG_FILE, out / CONFIG_FILE)


def adapter_weights(checkpoint: Path) -> list[LazyTensor]:
    """Return the adapters under peft's names, sorted."""
    reader = ShardReader(checkpoint, "model")

    def lazy(name: str) -> LazyTensor:
        return LazyTensor(peft_name(name), reader.shapes[name], reader.dtypes[name], lambda: reader.tensor(name))

    return sorted((lazy(name) for name in reader.shapes), key=lambda tensor: tensor.name)


def load_adapted(model_path: str, out: Path, dtype: torch.dtype, trust_remote_code: bool) -> Any:
    """The base model with the exported adapters, as a user of peft loads them."""
    from peft import PeftModel

    base = AutoModelForCausalLM.from_pretrained(model_path, dtype=dtype, trust_remote_code=trust_remote_code)
    return PeftModel.from_pretrained(base, out)


def compare_adapters(model: Any, wanted: Sequence[LazyTensor]) -> None:
    """Raise ExportError unless peft loaded what was trained, to the bit."""
    from peft import get_peft_model_state_dict

    loaded = get_peft_model_state_dict(model)
    odd = sorted(loaded.keys() ^ {tensor.name for tensor in wanted})
    if odd:
        raise ExportError(f"{odd[0]} is in only one of the checkpoint and the loaded adapters")
    for tensor in wanted:
        if not torch.equal(loaded[tensor.name].float(), tensor.load()):
            raise ExportError(f"{tensor.name} has other values in the loaded adapters than in the checkpoint")
