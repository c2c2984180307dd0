"""Starts DeepSpeed in a rank, and partitions models without ever holding them whole."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from typing import Any

import torch
from pydantic import ValidationError
from torch import distributed as dist
from torch import nn
from transformers import PreTrainedModel

from backends.protocol import Rank
from backends.train.role_group import device_index, join_group
from specs.errors import ModelError
from specs.schema.engines.library_keys import leaves
from specs.schema.engines.zero_table import ZeroTable
from specs.wire.role_config import TrainConfig


def start_deepspeed(rank: Rank, device: str) -> None:
    """Join the ranks' group and hand it to DeepSpeed. Nothing is compiled."""
    # zero.Init and the engine take it for the number of a visible device, of which a rank may see only its own.
    visible = torch.cuda.device_count() if device.startswith("cuda") else 1
    os.environ["LOCAL_RANK"] = str(device_index(rank, visible))
    deepspeed = import_deepspeed(device)
    from deepspeed.ops import __compatible_ops__ as compiled_ops

    # Its collectives go by names that torch has renamed since, and says so at every call.
    warnings.filterwarnings("ignore", message=r".*torch\.distributed\..* is deprecated", category=FutureWarning)
    # A faster all-reduce in shared memory, which would be compiled at the first start, by all ranks at once, behind a
    # lock that a killed build never releases.
    compiled_ops["deepspeed_shm_comm"] = False
    _import_muon_without_compiling()
    join_group(rank, device, even_alone=True)
    deepspeed.init_distributed(dist_backend=dist.get_backend(), auto_mpi_discovery=False, verbose=False)


def _import_muon_without_compiling() -> None:
    """DeepSpeed imports this optimizer at every start, whose decorators would import inductor in each rank. Nobody uses
    it here: the optimizer is torch's AdamW."""
    compiled, torch.compile = torch.compile, lambda *_, **__: lambda function: function  # type: ignore[assignment]
    try:
        with suppress(ImportError):
            import_module("deepspeed.runtime.zero.muon.original_muon")
    finally:
        torch.compile = compiled


def import_deepspeed(device: str) -> Any:
    """Return the module, imported for this kind of device. Raises ModelError where it is not installed."""
    os.environ.setdefault("DS_ACCELERATOR", device.partition(":")[0])  # read when deepspeed is imported
    try:
        import deepspeed
    except ImportError as error:
        raise ModelError(
            f"the engine zero needs DeepSpeed: {error}", hint="rlctl setup-engine deepspeed installs it"
        ) from None
    return deepspeed


def deepspeed_config(config: TrainConfig) -> dict[str, Any]:
    """Return the whole configuration that DeepSpeed is given."""
    assert isinstance(config.engine, ZeroTable)
    return {**config.engine.library_config(config.model.dtype, config.optimizer, config.model.device)["deepspeed"]}


class _Read(dict[str, Any]):
    """A configuration that knows which of its keys were read: DeepSpeed passes over those that it does not know."""

    def __init__(self, content: Mapping[str, Any]) -> None:
        super().__init__(content)
        self.read: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.read.add(key)
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        return super().__getitem__(key)


def check_keys(deepspeed: Any, config: TrainConfig) -> None:
    """Raise ModelError for a key of `[<role>.engine.deepspeed]` that DeepSpeed does not know or whose value it does not
    take."""
    assert isinstance(config.engine, ZeroTable)
    own, table, hint = config.engine.deepspeed, f"{config.role}.engine.deepspeed", "change or remove the key"
    content = _Read(deepspeed_config(config))
    try:
        deepspeed.DeepSpeedConfig(content)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        path = next((path for path, _ in leaves(own) if path.endswith(place)), place)
        raise ModelError(f"{table}.{path}: DeepSpeed refuses it: {first['msg']}", hint=hint) from None
    except (ValueError, TypeError, AssertionError, deepspeed.runtime.config.DeepSpeedConfigError) as error:
        raise ModelError(f"{table} ({', '.join(own)}): DeepSpeed refuses it: {error}", hint=hint) from None
    if unread := own.keys() - content.read:
        raise ModelError(f"{table}.{min(unread)}: DeepSpeed has no such key", hint=hint)


def stop_deepspeed() -> None:
    """Leave the ranks' group. DeepSpeed keeps a copy of it, which the next engine in this process must not find."""
    from deepspeed import comm

    if dist.is_initialized():
        comm.destroy_process_group()


def shard_model(deepspeed: Any, model: PreTrainedModel, ds_config: dict[str, Any], device: torch.device) -> None:
    """Give every parameter of a model on meta its part of (unset) memory, one after another.

    (`zero.Init` around the constructor would also draw every weight, and make rotary frequencies in bf16.)
    """
    sharded: dict[int, nn.Parameter] = {}
    first: Any = None
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is None:
                continue
            if id(parameter) not in sharded:
                made = nn.Parameter(
                    torch.empty(parameter.shape, dtype=parameter.dtype, device=device), parameter.requires_grad
                )
                if first is None:
                    first = made
                    holder = nn.ParameterList([made])
                    deepspeed.zero.Init(module=holder, config_dict_or_path=ds_config, dtype=made.dtype)
                else:
                    first.convert_to_zero_parameters(param_list=[made])
                sharded[id(parameter)] = made
            module._parameters[name] = sharded[id(parameter)]
