"""Names, wire dtypes and bytes of a model's tensors. Needs torch and nothing else, so that
a role in an interpreter of its own can use it whatever transformers it has."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def named_weights(model: nn.Module) -> dict[str, Tensor]:
    """Weights as they are saved: parameters and persistent buffers; a tied one once, under its first name."""
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            found[name] = tensor
    return found


def tensor_bytes(tensor: Tensor) -> NDArray[np.uint8]:
    """Bytes of a tensor on the host; a view where the tensor is a contiguous CPU tensor."""
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()


def typed(bytes_U: Tensor, dtype: torch.dtype) -> Tensor:
    """Wire bytes seen as elements, flat; a view where they are aligned."""
    if bytes_U.data_ptr() % dtype.itemsize or bytes_U.storage_offset() % dtype.itemsize:
        bytes_U = bytes_U.clone()
    return bytes_U.view(dtype)


def wire_dtype(dtype: torch.dtype) -> str:
    """Name of a dtype on the wire: "fp32", "bf16", or the numpy name of others."""
    return DTYPE_NAMES.get(dtype, str(dtype).removeprefix("torch."))


def torch_dtype(name: str) -> torch.dtype:
    """The dtype of a name on the wire."""
    dtype = DTYPES.get(name) or getattr(torch, name)
    assert isinstance(dtype, torch.dtype), name
    return dtype
