"""Prove Liger's kernels on the CPU: `TRITON_INTERPRET=1 python kernels_worker.py FAMILY`; prints how many modules they
replace in a tiny model of the family."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2])]

import torch
from families import FAMILIES
from train_helpers import model_config, write_model

from backends.hf.hf_model import build_model
from backends.train.liger import hold_kernels


def teach_the_interpreter() -> None:
    """Add what Triton's interpreter lacks of a GPU: floats as arguments, and two functions of NVIDIA's library."""
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


def main(family: str) -> None:
    teach_the_interpreter()
    with tempfile.TemporaryDirectory() as folder:
        model = build_model(model_config(write_model(Path(folder), FAMILIES[family].config)), load_weights=True)
    held = hold_kernels(model, "liger", "cuda")
    held.prove(model, torch.device("cpu"), torch.float32)
    print(sum(held.replaced.values()))


if __name__ == "__main__":
    main(sys.argv[1])
