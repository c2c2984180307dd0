"""Modules that compute with other kernels give what transformers' own code gives, and say what they hold."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES
from kernels_worker import KERNEL_FAMILIES, gaps
from torch import Tensor
from train_helpers import GPT2, model_config, train_config, write_model

from backends.hf.hf_model import build_model
from backends.protocol import Rank
from backends.registry import train_engine
from backends.train.kernels import held_kernels
from backends.train.kernels.held_kernels import hold_kernels, install, replaceable
from backends.train.kernels.module_formulas import TORCH, Gate, NormForm, TorchKernels
from specs.errors import ModelError
from specs.packages import installed_here
from specs.schema.engines.ddp_table import DdpTable
from specs.schema.engines.fsdp2_table import Fsdp2Table
from specs.schema.engines.transformers_tables import OwnModules
from specs.schema.engines.zero_table import ZeroTable

CPU = torch.device("cpu")


@pytest.mark.parametrize("family", KERNEL_FAMILIES)
def test_the_fallback_gives_what_the_models_own_code_gives(family: str, tmp_path: Path) -> None:
    """The same seam as Liger's kernels, in plain torch: hidden states and gradients of all parameters."""
    found = gaps(family, tmp_path, TORCH)
    assert found["replaced"] > 4
    assert found["hidden"] <= 1e-6
    assert {name: gap for name, gap in found["gradients"].items() if not gap <= 1e-6} == {}


@pytest.mark.skipif(find_spec("liger_kernel") is None, reason="the package liger-kernel is not installed here")
@pytest.mark.parametrize("family", KERNEL_FAMILIES)
def test_ligers_kernels_give_what_the_models_own_code_gives(family: str, tmp_path: Path) -> None:
    """The kernels themselves, run by Triton's interpreter, in a process of their own."""
    support = Path(__file__).parents[3] / "support"
    command = [sys.executable, support / "kernels_worker.py", family, tmp_path]
    done = subprocess.run(
        command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["replaced"] > 4
    assert found["hidden"] <= 1e-6
    assert {name: gap for name, gap in found["gradients"].items() if not gap <= 2e-6} == {}


def test_in_bf16_the_fallback_is_the_models_own_code_to_the_bit(tmp_path: Path) -> None:
    for family in KERNEL_FAMILIES:
        folder = write_model(tmp_path / family, FAMILIES[family].config)
        stock, ours = (build_model(model_config(folder, dtype="bf16"), load_weights=True) for _ in range(2))
        install("torch", [*replaceable(ours)], TORCH)
        tokens = {"input_ids": torch.arange(9)[None] % 23, "use_cache": False}
        with torch.no_grad():
            assert torch.equal(ours(**tokens).logits, stock(**tokens).logits)


def test_no_other_model_of_the_process_is_changed(tmp_path: Path) -> None:
    config = model_config(write_model(tmp_path, FAMILIES["qwen3"].config))
    before = {type(module): type(module).forward for module in build_model(config, load_weights=True).modules()}
    ours = build_model(config, load_weights=True)
    install("torch", [*replaceable(ours)], TORCH)
    assert all(one.forward is forward for one, forward in before.items())
    assert [*replaceable(build_model(config, load_weights=True))] != []
    assert [*replaceable(ours)] == [], "what computes with kernels already is left alone"


# ── what is chosen, and what is refused ───────────────────────────────────────────────────────────


@pytest.mark.usefixtures("without_group")
@pytest.mark.parametrize("table", [DdpTable, Fsdp2Table, ZeroTable])
def test_every_engine_asks_for_the_kernels_of_its_table(table: type[OwnModules], tmp_path: Path) -> None:
    config = train_config(write_model(tmp_path, FAMILIES["qwen2"].config))
    engine: Any = table(kernels="liger")  # type: ignore[call-arg]
    with pytest.raises(ModelError, match="kernels liger: needs a GPU, and the role runs on the CPU"):
        train_engine(engine.kind).on_meta(config.model_copy(update={"engine": engine}), Rank())
    auto: Any = table(kernels="auto")  # type: ignore[call-arg]
    found = train_engine(auto.kind).on_meta(config.model_copy(update={"engine": auto}), Rank())
    assert found is not None
    assert (found.model.kernels, found.model.replaced_modules) == ("torch", {})


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_kernels, "installed_here", lambda names: dict.fromkeys(names, "1.0"))


@pytest.mark.parametrize("asked", ["auto", "liger"])
def test_where_they_can_be_had_they_are_held(installed: None, asked: Any, tmp_path: Path) -> None:
    """Chosen and put in place without the package: a look at what would be built calls no kernel."""
    held = hold_kernels(_model(tmp_path, "gemma2"), asked, "cuda")
    assert (held.name, held.replaced) == ("liger", {"RMSNorm": 9, "gated MLP": 2, "rotation": 2})
    assert hold_kernels(_model(tmp_path, "gemma2"), "torch", "cuda").name == "torch"


def test_a_model_without_such_modules(installed: None, tmp_path: Path) -> None:
    assert hold_kernels(_model(tmp_path, GPT2), "auto", "cuda").name == "torch"
    with pytest.raises(ModelError, match="GPT2LMHeadModel has no module that kernels of liger-kernel compute"):
        hold_kernels(_model(tmp_path, GPT2), "liger", "cuda")


@pytest.mark.skipif(bool(installed_here(["liger-kernel"])), reason="the package liger-kernel is installed here")
def test_without_the_package(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"needs liger-kernel.* not installed in this interpreter") as refused:
        hold_kernels(_model(tmp_path, "qwen2"), "liger", "cuda")
    assert "pip install liger-kernel" in (refused.value.hint or "")
    assert hold_kernels(_model(tmp_path, "qwen2"), "auto", "cuda").name == "torch"


def _model(folder: Path, config: Any) -> Any:
    written = write_model(folder, FAMILIES[config].config if isinstance(config, str) else config)
    return build_model(model_config(written), load_weights=True)


# ── proof ─────────────────────────────────────────────────────────────────────────────────────────


class OtherValues(TorchKernels):
    def gated(self, gate: Tensor, up: Tensor, activation: Gate) -> Tensor:
        return super().gated(gate, up, "silu")


class OtherGradients(TorchKernels):
    def rms_norm(self, x: Tensor, weight_E: Tensor, eps: float, form: NormForm) -> Tensor:
        right = super().rms_norm(x, weight_E, eps, form)
        return right + (x - x.detach())  # the same values


class OtherAngles(TorchKernels):
    def rotate(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return super().rotate(q, k, cos, -sin)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("kernels", "words"),
    [
        (TorchKernels(), ""),
        (OtherValues(), "gelu in"),
        (OtherGradients(), r"NormForm\(offset=1.0, rounds_first=False\) in"),
        (OtherAngles(), "rotary positions in"),
    ],
)
def test_kernels_that_give_other_numbers_are_refused(kernels: Any, words: str, dtype: Any, tmp_path: Path) -> None:
    held = install("liger", [*replaceable(_model(tmp_path, "gemma2"))], kernels)
    if not words:
        held.prove(CPU, dtype)
        return
    with pytest.raises(ModelError, match=f"the kernels liger give other numbers than torch for {words}"):
        held.prove(CPU, dtype)


def test_another_layout_of_rotations_is_left_to_the_models_own_code(tmp_path: Path) -> None:
    model = _model(tmp_path, "qwen2")
    (layer, *_) = [one for one in replaceable(model) if one.kind == "rotation"]
    calls: list[str] = []

    class Counting(TorchKernels):
        def rotate(self, *given: Tensor) -> tuple[Tensor, Tensor]:
            calls.append("kernel")
            return super().rotate(*given)

    rotate = layer.forward(Counting()).__globals__["apply_rotary_pos_emb"]
    q, cos, sin = torch.randn(1, 5, 4, 8), torch.randn(1, 5, 8), torch.randn(1, 5, 8)
    turned = rotate(q, q, cos, sin, unsqueeze_dim=2)
    assert calls == []
    again = rotate(q.transpose(1, 2), q.transpose(1, 2), cos, sin)
    assert calls == ["kernel"]
    torch.testing.assert_close(turned[0], again[0].transpose(1, 2))


def test_a_module_whose_own_forward_was_replaced_is_left_alone(tmp_path: Path) -> None:
    model = _model(tmp_path, "qwen2")
    norm = model.model.norm
    norm.forward = lambda x: x
    assert norm not in [one.module for one in replaceable(model)]
