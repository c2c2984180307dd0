"""What check-config says about a rollout by SGLang."""

from __future__ import annotations

import sys
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

import pytest

from rlctl.preflight.interpreters import interpreter_problems
from specs.errors import SpecError
from specs.load.load import load_spec


def load(folder: Path, *changes: str):
    path = folder / "spec.toml"
    path.write_text((files("specs") / "presets" / "sglang-1gpu.toml").read_text())
    return load_spec(path, list(changes))


def test_the_preset_is_sound(tmp_path: Path) -> None:
    assert load(tmp_path).rollout.engine.kind == "sglang"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("rollout.devices=[]", r'rollout\.engine\.kind = "sglang": needs a GPU'),
        ("rollout.top_p=0.9", r"rollout\.top_p = 0\.9: the log-probs that SGLang returns leave it out"),
        ("rollout.top_k=20", r"rollout\.top_k = 20: the log-probs that SGLang returns leave it out"),
        ("rollout.attn_implementation=sdpa", r"rollout\.attn_implementation .*sglang chooses its attention itself"),
        ("rollout.env.SGLANG_RETURN_ORIGINAL_LOGPROB=1", r"rollout\.env\.SGLANG_RETURN_ORIGINAL_LOGPROB"),
        ("rollout.engine.memory_fraction=1.0", r"rollout\.engine\.memory_fraction"),
        ("rollout.engine.gpu_memory_utilization=0.5", r"rollout\.engine\.gpu_memory_utilization"),
        ("rollout.engine.tensor_parallel=2", r"rollout\.devices .*1 processes; each process has 2"),
    ],
)
def test_what_cannot_work_is_named(tmp_path: Path, change: str, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        load(tmp_path, change)


@pytest.mark.skipif(find_spec("sglang") is not None, reason="sglang is installed here")
def test_an_interpreter_without_sglang_is_named(tmp_path: Path) -> None:
    spec = load(tmp_path, f"rollout.python={sys.executable}")
    (problem,) = interpreter_problems(spec, tmp_path, nvidia_driver=False)
    assert problem.key == "rollout.python"
    assert "sglang" in problem.message
