"""Starts DeepSpeed in a rank, and partitions models without ever holding them whole."""

from __future__ import annotations

import os
import warnings
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from transformers import PreTrainedModel

from backends.protocol import Rank
from backends.train.role_group import device_index, join_group
from specs.errors import ModelError


def start_deepspeed(rank: Rank, device: str) -> Any:
    """Join the ranks' group and hand it to DeepSpeed; returns the module. Nothing is compiled."""
    kind = device.partition(":")[0]
    os.environ.setdefault("DS_ACCELERATOR", kind)  # read when deepspeed is imported
    # zero.Init and the engine take it for the number of a visible device, of which a rank may see only its own.
    visible = torch.cuda.device_count() if kind == "cuda" else 1
    os.environ["LOCAL_RANK"] = str(device_index(rank, visible))
    try:
        import deepspeed
        from deepspeed.ops import __compatible_ops__ as compiled_ops
    except ImportError as error:
        raise ModelError(
            f"the engine zero needs DeepSpeed: {error}", hint="rlctl setup-engine deepspeed installs it"
        ) from None
    # Its collectives go by names that torch has renamed since, and says so at every call.
    warnings.filterwarnings("ignore", message=r".*torch\.distributed\..* is deprecated", category=FutureWarning)
    # A faster all-reduce in shared memory, which would be compiled at the first start, by all ranks at once, behind a
    # lock that a killed build never releases.
    compiled_ops["deepspeed_shm_comm"] = False
    join_group(rank, device, even_alone=True)
    deepspeed.init_distributed(dist_backend=dist.get_backend(), auto_mpi_discovery=False, verbose=False)
    return deepspeed


def stop_deepspeed() -> None:
    """Leave the ranks' group. DeepSpeed keeps a copy of it, which the next engine in this process must not find."""
    from deepspeed import comm

    if dist.is_initialized():
        comm.destroy_process_group()


def cut_model(deepspeed: Any, model: PreTrainedModel, ds_config: dict[str, Any], device: torch.device) -> None:
    """Give every parameter of a model on meta its part of (unset) memory, one after another.

    (`zero.Init` around the constructor would also draw every weight, and make rotary frequencies in bf16.)
    """
    cut: dict[int, nn.Parameter] = {}
    first: Any = None
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is None:
                continue
            if id(parameter) not in cut:
                made = nn.Parameter(
                    torch.empty(parameter.shape, dtype=parameter.dtype, device=device), parameter.requires_grad
                )
                if first is None:
                    first = made
                    holder = nn.ParameterList([made])
                    deepspeed.zero.Init(module=holder, config_dict_or_path=ds_config, dtype=made.dtype)
                else:
                    first.convert_to_zero_parameters(param_list=[made])
                cut[id(parameter)] = made
            module._parameters[name] = cut[id(parameter)]
