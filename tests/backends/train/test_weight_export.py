"""Weights on their way block by block: any cut gives the same bytes, and what computes is what travels."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from train_helpers import QWEN2, build_engine, grpo, make_batch, scale_of, train_config, weights_of, write_model

from backends.ddp.engine import DdpTrainEngine
from backends.train.weight_export import TensorWeight, spec_of
from backends.weights.checksum import checksum_bytes


def cut(whole_U: NDArray[np.uint8], block_bytes: int) -> Iterator[NDArray[np.uint8]]:
    return (whole_U[start : start + block_bytes] for start in range(0, len(whole_U), block_bytes))


@pytest.mark.parametrize(("own", "sent"), [("float32", "fp32"), ("float32", "bf16"), ("bfloat16", "bf16")])
@pytest.mark.parametrize("block_bytes", [64, 4096, 1 << 20])
def test_blocks_carry_the_tensor_in_wire_dtype(own: str, sent: str, block_bytes: int) -> None:
    tensor = torch.randn(37, 41, generator=torch.Generator().manual_seed(0)).to(getattr(torch, own))
    wire = {"fp32": torch.float32, "bf16": torch.bfloat16}[sent]
    weight = TensorWeight(spec_of("w", ((37, 41), tensor.dtype), sent), tensor, wire)  # type: ignore[arg-type]
    whole_U = np.zeros(weight.spec.nbytes, dtype=np.uint8)
    digest = weight.copy_in_blocks(cut(whole_U, block_bytes))
    want_U = tensor.to(wire).flatten().view(torch.uint8).numpy()
    np.testing.assert_array_equal(whole_U, want_U)
    assert digest == checksum_bytes(want_U) == weight.checksum()


def test_the_bf16_copy_that_computes_travels_and_is_the_cast_master(tmp_path: Path) -> None:
    """No cast on the way: what leaves shares the model's memory. After a step, and after memory was let go."""
    write_model(tmp_path, QWEN2)
    engine = build_engine(train_config(tmp_path, model={"dtype": "bf16"}))
    assert isinstance(engine, DdpTrainEngine)
    batch = make_batch()
    for _ in range(2):
        engine.forward_backward(batch, grpo(), scale_of(batch))
        engine.optim_step()
        engine.offload()
        engine.onload()
        held = {parameter.data_ptr() for parameter in engine.policy.model.parameters()}
        sent = list(engine.export_weights("bf16"))
        assert [weight.spec for weight in sent] == list(engine.weight_specs("bf16"))
        assert {weight._tensor.data_ptr() for weight in sent} <= held  # type: ignore[attr-defined]
        master, bf16 = weights_of(engine), weights_of(engine, "bf16")
        assert master.keys() == bf16.keys()
        for name, value in master.items():
            want_U = torch.from_numpy(value).to(torch.bfloat16).flatten().view(torch.uint8).numpy()
            np.testing.assert_array_equal(bf16[name], want_U, err_msg=name)
