"""Liger's kernels are chosen, put in place and proven; a model that they would compute wrongly is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES
from torch import Tensor
from train_helpers import GPT2, model_config, train_config, write_model

from backends.hf.hf_model import build_model
from backends.protocol import Rank
from backends.registry import train_engine
from backends.train import liger
from backends.train.liger import HeldKernels, hold_kernels
from specs.errors import ModelError
from specs.schema.engines.ddp_table import DdpTable
from specs.schema.engines.fsdp2_table import Fsdp2Table
from specs.schema.engines.transformers_tables import OwnModules
from specs.schema.engines.zero_table import ZeroTable

KNOWN = ("qwen2", "qwen3", "llama", "mistral", "gemma2", "gemma3_text")


def built(folder: Path, config: dict[str, Any]) -> Any:
    return build_model(model_config(write_model(folder, config)), load_weights=True)


@pytest.mark.skipif(find_spec("liger_kernel") is None, reason="the package liger-kernel is not installed here")
@pytest.mark.parametrize("family", KNOWN)
def test_ligers_kernels_compute_what_the_model_does(family: str) -> None:
    """The kernels themselves, run by Triton's interpreter, in a process of their own."""
    worker = Path(__file__).parents[2] / "support" / "kernels_worker.py"
    done = subprocess.run(
        [sys.executable, worker, family],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) > 4, "modules replaced"


# ── what is chosen, and what is refused ───────────────────────────────────────────────────────────


@pytest.mark.usefixtures("without_group")
@pytest.mark.parametrize("table", [DdpTable, Fsdp2Table, ZeroTable])
def test_every_engine_holds_the_kernels_of_its_table(table: type[OwnModules], tmp_path: Path) -> None:
    config = train_config(write_model(tmp_path, FAMILIES["qwen2"].config))
    engine: Any = table(kernels="liger")  # type: ignore[call-arg]
    with pytest.raises(ModelError, match="kernels liger: needs a GPU, and the role runs on the CPU"):
        train_engine(engine.kind).on_meta(config.model_copy(update={"engine": engine}), Rank())
    auto: Any = table(kernels="auto")  # type: ignore[call-arg]
    found = train_engine(auto.kind).on_meta(config.model_copy(update={"engine": auto}), Rank())
    assert found is not None
    assert (found.model.kernels, found.model.replaced_modules) == ("torch", {})


@pytest.mark.parametrize("asked", ["auto", "liger"])
def test_a_model_that_liger_does_not_know(asked: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liger, "installed_here", lambda names: dict.fromkeys(names, "1.0"))
    monkeypatch.setattr(liger, "_patch", lambda model: False)
    model = built(tmp_path, GPT2)
    if asked == "auto":
        assert hold_kernels(model, asked, "cuda") == HeldKernels("torch")
    else:
        with pytest.raises(ModelError, match="liger-kernel has no patch for GPT2LMHeadModel"):
            hold_kernels(model, asked, "cuda")


# ── proof ─────────────────────────────────────────────────────────────────────────────────────────


def patched(change: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Any], bool]:
    """Replace the norms of a model by (output, input) → output, as Liger binds its forwards."""

    def patch(model: Any) -> bool:
        for module in model.modules():
            if type(module).__name__.endswith("RMSNorm"):
                stock = module.forward
                module.forward = lambda x, stock=stock: change(stock(x), x)
        return True

    return patch


@pytest.mark.parametrize("family", ["qwen2", "gemma3_text"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("change", "right"),
    [
        (lambda out, x: out, True),
        (lambda out, x: out * 1.5, False),
        (lambda out, x: out + (x - x.detach()), False),  # the same values, other gradients
    ],
)
def test_kernels_that_compute_other_numbers_are_refused(
    family: str, dtype: torch.dtype, change: Any, right: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = built(tmp_path, FAMILIES[family].config)
    monkeypatch.setattr(liger, "_patch", patched(change))
    random_state = torch.get_rng_state()
    if right:
        HeldKernels("liger").prove(model, torch.device("cpu"), dtype)
    else:
        with pytest.raises(ModelError, match="Liger's kernels compute other numbers than"):
            HeldKernels("liger").prove(model, torch.device("cpu"), dtype)
    assert torch.equal(torch.get_rng_state(), random_state), "the proof draws nothing from the run's generator"
