"""The kernels of a role as this machine sees them: its interpreter's packages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from small_spec import raw_spec

from rlctl.preflight import role_choices as looked_at
from rlctl.preflight.role_choices import choice_problems, role_kernels
from specs.load.load import spec_from
from specs.schema.recipes import RlSpec
from specs.schema.roles import ACTOR, ROLLOUT


def asking(kernels: str, **model: Any) -> RlSpec:
    return spec_from(raw_spec(actor={"devices": [0], "engine": {"kind": "ddp", "kernels": kernels}}, **model), [])


@pytest.fixture
def all_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(looked_at, "packages_of", lambda *_: {"liger-kernel": "0.8.5", "triton": "3.9.0"})


def test_only_engines_that_run_the_models_own_modules_are_asked(all_packages: None, tmp_path: Path) -> None:
    spec = asking("liger")
    assert role_kernels(spec, ROLLOUT, tmp_path) is None
    found = role_kernels(spec, ACTOR, tmp_path)
    assert found is not None
    assert (found.implementation, found.why) == ("liger", "as asked")


def test_auto_dtype_on_gpus_without_bf16(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for capability, keys in (((7, 0), ["actor.dtype"]), ((8, 0), []), (None, [])):
        monkeypatch.setattr(looked_at, "gpu_capability", lambda devices, capability=capability: capability)
        assert [problem.key for problem in choice_problems(asking("torch"), tmp_path)] == keys
