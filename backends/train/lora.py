"""LoRA adapters (Hu et al. 2021) inside a Hugging Face model: y = W x + (alpha / rank) · B (A x), only A and B learn,
and a critic's head.

peft puts them into the model in place; the model stays what it is, with longer names (`backends/hf/adapter_names.py`).
Outside, adapters do not show: weights travel and are compared merged, under the names of the model without them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
import xxhash
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from backends.hf.adapted_layers import chosen_layers
from backends.hf.adapter_names import base_name, down_of, is_adapter, is_down, layer_of, up_of, wire_name
from backends.hf.score_layer import has_score_layer, score_names
from backends.train.tensor_shards import Shard, TensorKind
from specs.errors import CheckpointError, ModelError
from specs.schema.role_section import Lora
from specs.schema.spec import WeightForm

CONFIG_FILE = "adapter_config.json"
_FROZEN = ".base_layer.weight"


class Adapters:
    """The adapters of one model. Making it puts them into `model` and freezes everything else but a score layer, which
    starts at zero and learns whole (`whole`: the names of its weights).

    A model on the meta device gets adapters on meta; whoever gives them memory fills it from `initial`.
    """

    def __init__(self, model: PreTrainedModel, lora: Lora, *, seed: int, path: str) -> None:
        from peft import LoraConfig, inject_adapter_in_model
        from peft.tuners.lora import LoraLayer

        chosen = chosen_layers(model, lora.targets)
        modules = dict(model.named_modules())
        self.transposed = frozenset(name for name in chosen if isinstance(modules[name], Conv1D))
        self.seed, self.scale = seed, lora.alpha / lora.rank
        config = LoraConfig(
            r=lora.rank,
            lora_alpha=lora.alpha,  # peft takes and stores any number
            target_modules=chosen,
            fan_in_fan_out=bool(self.transposed),
            base_model_name_or_path=path,
            task_type="SEQ_CLS" if has_score_layer(model) else "CAUSAL_LM",
        )
        self.whole = frozenset(score_names(model))
        try:
            inject_adapter_in_model(config, model, low_cpu_mem_usage=True)
        except ValueError as error:
            raise ModelError(f"lora.targets: {error}", hint="name other layers, such as attention's") from None
        for name in self.whole:
            model.get_parameter(name).requires_grad_(True)
        self.layers = {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}
        assert sorted(self.layers) == chosen
        self.config = _plain(config)
        for name, layer in self.layers.items():
            device = cast(Tensor, layer.get_base_layer().weight).device
            if device.type != "meta":
                self._fill(name, layer, device)

    def _fill(self, layer_name: str, layer: Any, device: torch.device) -> None:
        pairs = ((down_of(layer_name), layer.lora_A["default"]), (up_of(layer_name), layer.lora_B["default"]))
        for name, linear in pairs:
            linear.weight = nn.Parameter(self.initial(name, tuple(linear.weight.shape)).to(device))

    def initial(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Starting value of an adapter's weight, fp32 on CPU: B zero; A uniform in ± 1 / sqrt(in), as peft draws it,
        from the run's seed and the weight's name alone, so that engines and ranks agree."""
        if not is_down(name):
            return torch.zeros(shape)
        generator = torch.Generator().manual_seed(xxhash.xxh3_64_intdigest(f"{self.seed}:{name}".encode()))
        bound = 1.0 / math.sqrt(shape[1])
        return torch.empty(shape).uniform_(-bound, bound, generator=generator)

    @torch.no_grad()
    def fill(self, shards: Iterable[Shard]) -> None:
        """Starting values into an engine's memory of adapters."""
        for shard in shards:
            values = self.initial(shard.name, shard.shape).view(-1)
            shard.flat.copy_(values[shard.start : shard.start + shard.flat.numel()])

    @contextmanager
    def off(self) -> Iterator[None]:
        """The model without its adapters. (peft's own switch also turns off gradients, which wrapped parameters do
        not take well.)"""
        for layer in self.layers.values():
            layer._disable_adapters = True
        try:
            yield
        finally:
            for layer in self.layers.values():
                layer._disable_adapters = False

    def learns(self, name: str) -> bool:
        return is_adapter(name) or name in self.whole

    def change(self, name: str, form: WeightForm) -> bool:
        """Whether what leaves the trainer is made of this weight in fp32, and is not the weight itself."""
        return is_adapter(name) or (form == "merged" and self._is_adapted(name))

    # ── merged: what leaves the trainer ───────────────────────────────────────────────────────────

    def merged_kinds(self, kinds: Mapping[str, TensorKind]) -> dict[str, TensorKind]:
        """Names, shapes and dtypes of `merged`, in its order, from those of the model's own weights."""
        found = {}
        for name, kind in kinds.items():
            if is_adapter(name):
                if not is_down(name):
                    found[f"{layer_of(name)}.weight"] = (kinds[f"{layer_of(name)}.base_layer.weight"][0], torch.float32)
            elif not self._is_adapted(name):
                found[base_name(name)] = kind
        return found

    @torch.no_grad()
    def merged(self, weights: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The weights of the model without adapters, under its names: W + scale · B A, made in fp32, one at a time.

        `weights`: those of the model with adapters in its own order, in which a layer's A and B follow its W. A tensor
        may be gone as soon as the next one is asked for.
        """
        base_VE = down_RE = torch.empty(0)  # of the layer that is under way
        for name, tensor in weights:
            if not is_adapter(name):
                if self._is_adapted(name):
                    base_VE = tensor.detach().to(torch.float32, copy=True)
                else:
                    yield base_name(name), tensor
            elif is_down(name):
                down_RE = tensor.detach().float().clone()
            else:
                weight = base_VE.T if layer_of(name) in self.transposed else base_VE
                add_adapter(weight, down_RE, tensor.detach().float(), self.scale)
                yield f"{layer_of(name)}.weight", base_VE

    def _is_adapted(self, name: str) -> bool:
        """Whether this is the frozen matrix of a layer with an adapter."""
        return name.endswith(_FROZEN) and name.removesuffix(_FROZEN) in self.layers

    # ── apart: for samplers that apply adapters themselves ────────────────────────────────────────

    def apart_kinds(self, kinds: Mapping[str, TensorKind]) -> dict[str, TensorKind]:
        """Names, shapes and dtypes of `apart`, in its order, from those of its weights."""
        return {
            _apart_name(name): (shape, torch.float32 if is_adapter(name) else dtype)
            for name, (shape, dtype) in kinds.items()
        }

    @torch.no_grad()
    def apart(self, weights: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The model's own weights by its names, and A and (alpha / rank) · B in fp32, made before any cast: whoever
        gets them adds B (A x) and needs to know neither alpha nor rank."""
        for name, tensor in weights:
            if is_adapter(name):
                tensor = tensor.detach().float() if is_down(name) else tensor.detach().float() * self.scale
            yield _apart_name(name), tensor

    # ── disk ──────────────────────────────────────────────────────────────────────────────────────

    def write(self, folder: Path) -> Path:
        """`adapter_config.json`, in peft's own format."""
        path = folder / CONFIG_FILE
        path.write_text(json.dumps(self.config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        return path

    def check(self, folder: Path) -> None:
        """Raises CheckpointError when the checkpoint's adapters are not of this kind."""
        saved = read_config(folder)
        for key in ("r", "lora_alpha", "target_modules"):
            if saved[key] != self.config[key]:
                raise CheckpointError(
                    f"{folder} has adapters with {key} {saved[key]}, this run {self.config[key]}",
                    hint=f"put {folder.name}.lora back as it was",
                )


def add_adapter(weight_VE: Tensor, down_RE: Tensor, up_VR: Tensor, scale: float) -> None:
    """W += scale · B A, in place. All in fp32."""
    weight_VE.addmm_(up_VR, down_RE, alpha=scale)


def _apart_name(name: str) -> str:
    return wire_name(name) if is_adapter(name) else base_name(name)


def read_config(folder: Path) -> dict[str, Any]:
    """`adapter_config.json` of a checkpoint. Raises CheckpointError."""
    path = folder / CONFIG_FILE
    try:
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        {config[key] for key in ("r", "lora_alpha")}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: {error!r}", hint="was this role trained with lora?") from None
    return config


def _plain(config: Any) -> dict[str, Any]:
    """peft's configuration as JSON, the same for the same adapters."""
    plain = {key: value for key, value in config.to_dict().items() if not callable(value)}
    return {
        key: sorted(value) if isinstance(value, set) else getattr(value, "value", value) for key, value in plain.items()
    } | {"inference_mode": True}
