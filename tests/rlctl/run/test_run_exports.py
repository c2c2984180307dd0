"""`model.path = "runs/warm"`: a run begins with the last proven weights of another, and says so."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from running import finish, preset, settings, warm_rlctl
from safetensors.numpy import load_file
from small_spec import raw_spec

from rlctl.cli import main
from rlctl.models.paths import BUILTIN_FOLDER
from rlctl.run.run_exports import checked, export_missing, with_run_exports
from specs.errors import UsageError
from specs.schema.recipes import RlSpec

TINY = str(BUILTIN_FOLDER / "tiny-digits")
SMALL = settings(
    "data.prompts_per_step=8", "algorithm.group_size=4", "algorithm.mini_batches_per_step=1", "eval.every=9"
)
WARM = settings("model.path=runs/warm", "model.from_scratch=false")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A spec, and beside it `runs/warm` of two steps, both saved."""
    folder = tmp_path_factory.mktemp("chain")
    spec = preset("quickstart", folder)
    finish("train", spec, *SMALL, *settings("run.name=warm", "run.steps=2", "checkpoint.every=1"), cwd=folder)
    return folder


@pytest.mark.slow
def test_a_run_begins_with_the_last_weights_of_another(place: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(place)
    warm, spec = place / "runs" / "warm", "quickstart.toml"

    assert main(["check-config", spec, *WARM]) == 0
    assert "runs/warm, step 2 " in capsys.readouterr().out
    assert main(["plan", spec, *WARM]) == 0
    assert not (warm / "exports").exists(), "looking at it made it"
    assert main(["check-config", spec, "--set", "model.path=runs/warm"]) == 2
    assert "model.from_scratch" in capsys.readouterr().err

    more = (*SMALL, *WARM, *settings("run.name=next", "checkpoint.every=1", "algorithm.kl_coef=0.01"))
    done = finish("train", spec, *more, *settings("run.steps=1"), cwd=place)
    assert "Qwen2 warm, step 2 (rl)" in " ".join(done.stdout.split())
    run, chain = place / "runs" / "next", ["warm, step 2 (rl)", "builtin:tiny-digits"]
    built = json.loads((run / "as_built.json").read_text())
    assert built["lineage"] == {"actor": chain, "ref": chain, "rollout": chain}
    assert "actor: warm, step 2 (rl) ← builtin:tiny-digits" in (run / "report.html").read_text()
    exported = load_file(warm / "exports" / "actor_step_000002" / "model.safetensors")
    assert built["actor"][0]["model"]["weights_checksum"] == checksum(exported)

    out = place / "out"
    finish("export-checkpoint", run, out, cwd=place)
    assert json.loads((out / "rlctl_export.json").read_text())["made_from"] == chain
    assert "`warm, step 2 (rl) ← builtin:tiny-digits`" in (out / "README.md").read_text()

    later = warm / "checkpoints" / "step_000003"
    shutil.copytree(warm / "checkpoints" / "step_000002", later)
    manifest = json.loads((later / "manifest.json").read_text())
    (later / "manifest.json").write_text(json.dumps({**manifest, "step": 3}))
    assert main(["check-config", spec, *WARM]) == 0
    assert "runs/warm, step 3 " in capsys.readouterr().out
    shutil.rmtree(warm / "exports")
    quiet = [finish("eval", "runs/next", "--quiet", cwd=place)]
    shutil.rmtree(warm / "exports")
    quiet += [finish("train", spec, *more, *settings("run.steps=2"), "--resume", "--quiet", cwd=place)]
    assert "exported" not in "".join(done.stdout + done.stderr for done in quiet)
    finish("train", spec, *more, *settings("run.name=fork", "run.steps=2"), "--from", "runs/next@1", cwd=place)
    assert [folder.name for folder in (warm / "exports").glob("actor_*")] == ["actor_step_000002"]

    warm.rename(place / "elsewhere")
    failed = warm_rlctl("train", "runs/next", *settings("run.steps=3"), "--resume", cwd=place)
    assert failed.returncode == 2
    told = " ".join((failed.stdout + failed.stderr).split())
    assert "model.path" in told
    assert "no such export, nor its run (" in told
    assert "put that run back" in told


def checksum(weights: dict[str, Any]) -> str:
    from backends.weights.checksum import checksum_bytes, checksum_weights

    return checksum_weights((name, checksum_bytes(array.reshape(-1).view("uint8"))) for name, array in weights.items())


# ── which checkpoint, and of whom ─────────────────────────────────────────────────────────────────


def a_run(folder: Path, steps: dict[int, Any], *roles: str) -> Path:
    """Write what is read of a run: `steps` says whether each has its proof."""
    for step, proven in steps.items():
        manifest = {"proven": proven, "engine": "ddp", "roles": {role: {"model_path": TINY} for role in roles}}
        (folder / "checkpoints" / f"step_{step:06d}").mkdir(parents=True)
        (folder / "checkpoints" / f"step_{step:06d}" / "manifest.json").write_text(json.dumps(manifest))
    folder.mkdir(exist_ok=True)
    (folder / "resolved.json").write_text("{}")
    return folder


def spec_of(**sections: Any) -> RlSpec:
    return RlSpec.model_validate(raw_spec(model={"path": TINY, "from_scratch": False}, **sections))


@pytest.mark.parametrize(
    ("learned", "section", "taken"),
    [
        (("actor", "critic"), "ref", "actor"),
        (("actor", "critic"), "critic", "critic"),
        (("reward_model",), "critic", "reward_model"),
        (("actor",), "critic", "actor"),
        (("reward_model",), "reward_model", "reward_model"),
        (("actor", "critic"), "reward_model", "critic"),
    ],
)
def test_whose_weights_a_role_takes(tmp_path: Path, learned: tuple[str, ...], section: str, taken: str) -> None:
    a_run(tmp_path / "runs" / "a", {4: True, 8: True, 12: False}, *learned)
    for named, step in (("runs/a", 8), ("runs/a@4", 4)):
        spec, problems = with_run_exports(spec_of(**{section: {"model": named}}), tmp_path)
        assert not problems
        assert getattr(spec, section).model == f"runs/a/exports/{taken}_step_{step:06d}"
        assert spec.model.path == TINY


@pytest.mark.parametrize(
    ("steps", "roles", "named", "message", "hint"),
    [
        ({}, (), "a", "has no checkpoint", "checkpoint.every"),
        ({4: True}, ("actor",), "a@5", "has no checkpoint of step 5", "it has: 4"),
        ({4: False}, ("actor",), "a", "without the proof", "resume that run"),
        ({4: True}, ("reward_model",), "a", "trained the reward model, not the actor", "a run that trained the actor"),
    ],
)
def test_a_run_that_cannot_be_a_model_is_refused(
    tmp_path: Path, steps: dict, roles: tuple, named: str, message: str, hint: str
) -> None:
    a_run(tmp_path / "a", steps, *roles)
    _, (problem,) = with_run_exports(spec_of(ref={"model": named}), tmp_path)
    assert (problem.key, problem.value) == ("ref.model", f'"{named}"')
    assert message in problem.message
    assert hint in problem.hint


def test_a_run_that_may_not_be_written_has_a_way_out(tmp_path: Path) -> None:
    (a_run(tmp_path / "a", {4: True}, "actor") / "exports").touch()
    way_out = f"rlctl export-checkpoint {tmp_path}/a OUT --step 4 --role actor"
    named = RlSpec.model_validate(raw_spec(model={"path": "a", "from_scratch": False}))
    _, errors, _ = checked(named, tmp_path)
    (found,) = [one for one in errors if one.key == "model.path" and way_out in one.hint]
    assert found.message == f"{tmp_path}/a/exports is not a folder"
    spec, _ = with_run_exports(named, tmp_path)
    with pytest.raises(UsageError, match="exports cannot be written to") as caught:
        export_missing(spec, tmp_path)
    assert way_out in caught.value.hint


def test_a_resume_or_fork_keeps_what_was_taken_unless_another_step_is_named(tmp_path: Path) -> None:
    a_run(tmp_path / "a", {4: True, 8: True}, "actor")
    first = tmp_path / "b"
    first.mkdir()
    (first / "resolved.json").write_text(json.dumps({"ref": {"model": "a/exports/actor_step_000004"}}))
    for named, taken in (("a", 4), ("a/", 4), ("a@4", 4), ("a@8", 8)):
        spec, _ = with_run_exports(spec_of(ref={"model": named}), tmp_path, first)
        assert Path(getattr(spec, "ref").model) == Path(f"a/exports/actor_step_{taken:06d}")  # noqa: B009
    (tmp_path / "elsewhere").mkdir()
    (first / "journal.jsonl").write_text(json.dumps({"event": "start", "spec_dir": str(tmp_path)}) + "\n")
    for named in ("../a", str(tmp_path / "a")):  # as a fork's spec names it
        spec, _ = with_run_exports(spec_of(ref={"model": named}), tmp_path / "elsewhere", first)
        assert getattr(spec, "ref").model == f"{named}/exports/actor_step_000004"  # noqa: B009
