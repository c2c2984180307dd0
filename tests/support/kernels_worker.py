"""How far a tiny model that computes with other kernels is from transformers' own code.

Started as a script with TRITON_INTERPRET=1: of Liger's kernels, on the CPU.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2])]

import torch
from families import FAMILIES, VOCAB
from torch import Tensor
from train_helpers import model_config, write_model

from backends.hf.hf_model import build_model
from backends.hf.recompute import recompute_activations
from backends.train.kernels.held_kernels import install, replaceable
from backends.train.kernels.liger_kernels import LigerKernels
from backends.train.kernels.module_formulas import Kernels

KERNEL_FAMILIES = ("qwen2", "qwen3", "llama", "gemma2", "gemma3_text")


def gaps(family: str, folder: Path, kernels: Kernels, *, recompute: bool = False) -> dict[str, Any]:
    """Largest differences of hidden states and of each parameter's gradient, as shares of the largest number."""
    config = model_config(write_model(folder, FAMILIES[family].config))
    stock, ours = (build_model(config, load_weights=True) for _ in range(2))
    with torch.no_grad():
        for name, parameter in stock.named_parameters():  # norms start at 1
            if parameter.ndim == 1:
                parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name))) * 0.2)
    ours.load_state_dict(stock.state_dict())
    held = install("tried", [*replaceable(ours)], kernels)
    held.prove(torch.device("cpu"), torch.float32)
    if recompute:
        recompute_activations(ours, True)
    (theirs_TE, theirs), (ours_TE, mine) = _run(stock), _run(ours)
    largest = max(float(each.abs().max()) for each in theirs.values())
    return {
        "replaced": sum(held.replaced.values()),
        "hidden": _gap(ours_TE, theirs_TE, float(theirs_TE.abs().max())),
        "gradients": {name: _gap(mine[name], each, largest) for name, each in theirs.items()},
    }


def _run(model: Any) -> tuple[Tensor, dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, VOCAB, (1, 21), generator=draw)
    hidden = model.base_model(input_ids=tokens, use_cache=False)[0][0]
    (hidden * torch.randn(hidden.shape, generator=draw)).sum().backward()
    return hidden.detach(), {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


def _gap(ours: Tensor, theirs: Tensor, scale: float) -> float:
    return float((ours - theirs).abs().max()) / scale


def teach_the_interpreter() -> None:
    """What Triton's interpreter lacks of what a GPU has: numbers with a point as arguments, and two functions of
    NVIDIA's library."""
    import numpy as np
    import triton.language as tl
    from liger_kernel.ops import geglu, rms_norm
    from triton.runtime import interpreter
    from triton_functions import rsqrt, tanh

    convert: Any = interpreter._implicit_cvt

    def with_floats(argument: Any) -> Any:
        if not isinstance(argument, float):
            return convert(argument)
        handle = interpreter.TensorHandle(np.array([argument], dtype=np.float32), tl.float32)
        return tl.tensor(handle, tl.float32)

    interpreter._implicit_cvt = with_floats
    rms_norm.rsqrt, geglu.tanh = rsqrt, tanh


def main(family: str, folder: Path) -> None:
    teach_the_interpreter()
    print(json.dumps(gaps(family, folder, LigerKernels(), recompute=family == "qwen3")))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
