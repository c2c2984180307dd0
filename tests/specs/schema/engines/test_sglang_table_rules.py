"""What check-config says about a rollout by SGLang."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlctl.presets import presets
from specs.errors import SpecError
from specs.load.load import load_spec


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("rollout.devices=[]", r'rollout\.engine\.kind = "sglang": needs a GPU'),
        ("rollout.top_p=0.9", r"rollout\.top_p = 0\.9: the log-probs that SGLang returns leave it out"),
        ("rollout.attn_implementation=sdpa", r"rollout\.attn_implementation .*sglang chooses its attention itself"),
        ("rollout.env.SGLANG_RETURN_ORIGINAL_LOGPROB=1", r"rollout\.env\.SGLANG_RETURN_ORIGINAL_LOGPROB"),
        ("rollout.engine.memory_fraction=1.0", r"rollout\.engine\.memory_fraction"),
        ("rollout.engine.tensor_parallel=2", r"rollout\.devices .*1 processes; each process has 2"),
    ],
)
def test_what_cannot_work_is_named(tmp_path: Path, change: str, words: str) -> None:
    spec = tmp_path / "spec.toml"
    spec.write_text(presets()["sglang-1gpu"].read_text())
    assert load_spec(spec, []).rollout.engine.kind == "sglang"
    with pytest.raises(SpecError, match=words):
        load_spec(spec, [change])
