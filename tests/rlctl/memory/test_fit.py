"""What does not fit is said with what it needs and its largest part."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlctl.memory import fit
from rlctl.memory.fit import does_not_fit, fit_problems
from rlctl.memory.memory_plan import plan_memory
from rlctl.presets import presets
from specs.load.load import load_spec
from specs.schema.recipes import RlSpec


def spec_of(folder: Path, preset: str, *changes: str) -> RlSpec:
    path = folder / "spec.toml"
    path.write_text(presets()[preset].read_text())
    return load_spec(path, changes)


@pytest.mark.parametrize(
    ("preset", "changes", "gpu_GiB", "key", "largest"),
    [
        ("fsdp2-8gpu", (), 4, "actor.engine.kind", "gradients under way of actor"),
        ("fsdp2-8gpu", ("actor.micro_batch_tokens=131072",), 24, "actor.micro_batch_tokens", "activations of actor"),
        (
            "grpo-1gpu",
            ("run.colocate=never", "rollout.engine.max_sequences=8192", "data.prompts_per_step=1024"),
            16,
            "rollout.engine.kind",
            "KV cache of rollout",
        ),
    ],
)
def test_the_largest_part_is_named(
    preset: str, changes: tuple[str, ...], gpu_GiB: float, key: str, largest: str, tmp_path: Path
) -> None:
    spec = spec_of(tmp_path, preset, *changes)
    plan = plan_memory(spec, tmp_path, gpu_GiB=gpu_GiB, host_GiB=0)
    problem = does_not_fit(spec, next(place for place in plan.places if place.fits is False))
    assert problem.key == key
    assert f"of {gpu_GiB:.1f} GiB" in problem.message
    assert f"the largest part is {largest}, " in problem.message


def test_a_host_that_processes_fill_by_themselves_wants_fewer_of_them(tmp_path: Path) -> None:
    """No cache makes room where Python and its libraries are the largest part."""
    spec = spec_of(tmp_path, "quickstart", "rollout.processes=8")
    (place,) = plan_memory(spec, tmp_path, gpu_GiB=0, host_GiB=2).places
    problem = does_not_fit(spec, place)
    assert problem.key == "rollout.processes"
    assert "the largest part is process and libraries of rollout, 0.6 GiB" in problem.message
    assert problem.hint.startswith("start fewer processes, or take a host with more memory")


def test_shapes_alone_are_an_error_and_estimates_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = spec_of(tmp_path, "quickstart", "rollout.engine.max_sequences=64")
    found = {}
    for GiB in (0.001, 0.5, 100):
        monkeypatch.setattr(fit, "host_memory_GiB", lambda GiB=GiB: GiB)
        found[GiB] = [len(problems) for problems in fit_problems(spec, tmp_path, here=True)]
    assert found == {0.001: [1, 0], 0.5: [0, 1], 100: [0, 0]}
    monkeypatch.setattr(fit, "host_memory_GiB", lambda: 0.001)
    assert fit_problems(spec, tmp_path, here=False) == ([], [])
