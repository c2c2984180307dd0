"""No step is trained with a model that is not the one asked for: processes that build another are caught, each kind.

Real processes, launched once: two ranks of the actor under fsdp2, one of the reference under ddp, one torch sampler.
What goes wrong in them is in `tests/support/sabotage.py`, below everything that reads back.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import warm
from probe_groups import handled_by
from running import REPO, preset
from sabotage import SUPPORT

import rlctl.run.train
from rlctl.cli import main
from rlctl.models import as_built_check
from rlctl.preflight.expected import models_expected
from rlctl.processes.groups import Groups
from rlctl.processes.placement import Plan, make_plan
from rlctl.processes.role_configs import build_bodies
from specs.errors import AsBuiltError, RlctlError, RoleFailure
from specs.load.load import load_spec
from specs.schema.recipes import RlSpec
from specs.wire.as_built import AsBuilt
from specs.wire.messages import Verb

pytestmark = pytest.mark.slow

MODULES = {role: f"sabotage:{role}" for role in ("actor", "ref", "rollout")}
FUNCTION = "attention function: expected backends.packed.packed_attention.sdpa_by_layout, built "


class Started:
    """The roles of a run, built once as asked."""

    def __init__(self, spec: RlSpec, folder: Path, groups: Groups) -> None:
        self.spec, self.folder, self.groups = spec, folder, groups
        self.bodies = build_bodies(spec, folder, folder / "run")
        self.reports = {role: self.build(role) for role in MODULES}

    def build(self, role: str) -> list[AsBuilt]:
        answers = self.groups[role].call(Verb.BUILD, self.bodies[role], timeout_s=120)
        return [AsBuilt.model_validate(answer.body) for answer in answers]

    def check(self, reports: dict[str, list[AsBuilt]]) -> None:
        as_built_check.check(self.spec, reports, models_expected(self.spec, self.folder))

    def refusal(self, role: str, sabotage: str) -> str:
        """What is said when `role` alone builds something else."""
        self.groups[role].call(Verb.PING, {"sabotage": sabotage})
        try:
            with pytest.raises((AsBuiltError, RoleFailure)) as caught:
                self.check({**self.reports, role: self.build(role)})
        finally:
            self.groups[role].call(Verb.PING, {"sabotage": ""})
        assert isinstance(caught.value, RlctlError)
        assert caught.value.exit_code in (1, 2)
        return caught.value.message


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    folder = tmp_path_factory.mktemp("sabotage")
    shutil.copytree(REPO / "specs" / "builtin" / "tiny-digits", folder / "other")
    spec = load_spec(
        preset("quickstart", folder),
        [
            *("algorithm.kl_coef=0.1", "actor.engine.kind=fsdp2", "actor.processes=2", "ref.engine.kind=ddp"),
            *(f"{role}.env.PYTHONPATH={SUPPORT}" for role in MODULES),
            *(f"{role}.env.OTHER_MODEL={folder / 'other'}" for role in MODULES),
            *(f"{role}.threads=1" for role in MODULES),
        ],
    )
    plan = sabotaged(make_plan(spec, folder), MODULES)
    with Groups(replace(plan, roles=tuple(plan.role(role) for role in MODULES)), folder / "logs") as groups:
        with warm.children():
            groups.start()
        yield Started(spec, folder, groups)


def sabotaged(plan: Plan, modules: dict[str, str]) -> Plan:
    roles = [handled_by(role, modules[role.role]) if role.role in modules else role for role in plan.roles]
    return replace(plan, roles=tuple(roles))


def test_as_asked_nothing_is_said(started: Started) -> None:
    started.check(started.reports)
    meshes = [report.model.mesh for report in started.reports["actor"] if report.model]
    assert meshes == [{"replicate": 1, "shard": 2}] * 2


@pytest.mark.parametrize(
    ("role", "sabotage", "said"),
    [
        ("ref", "attention", "attn_implementation: expected sdpa, built eager"),
        ("rollout", "attention", "attn_implementation: expected sdpa, built eager"),
        ("rollout", "attention of a layer", "attn_implementation: expected sdpa, built eager,sdpa"),
        ("actor", "attention function", f"{FUNCTION}sabotage.stranger"),
        ("ref", "attention function", f"{FUNCTION}sabotage.stranger"),
        ("rollout", "attention function", f"{FUNCTION}sabotage.stranger"),
        ("actor", "another model", "model path: expected {builtin}, built {other}"),
        ("ref", "another model", "model path: expected {builtin}, built {other}"),
        ("rollout", "another model", "model path: expected {builtin}, built {other}"),
        ("actor", "dtype", "dtype: expected fp32, built bf16"),
        ("ref", "dtype", "dtype: expected fp32, built bf16"),
        ("rollout", "dtype", "dtype: expected fp32, built bf16"),
        ("actor", "vocabulary", "vocab_size: expected 15, built 16"),
        ("ref", "vocabulary", "vocab_size: expected 15, built 16"),
        ("rollout", "vocabulary", "vocab_size: expected 15, built 16"),
        ("actor", "layers", "layers: expected 2, built 3"),
        ("ref", "layers", "layers: expected 2, built 3"),
        ("rollout", "width of the MLP", "parameters: expected 299904, built "),
        ("actor", "width of the MLP", "parameters: expected 299904, built "),
        ("ref", "width of the MLP", "parameters: expected 299904, built "),
        ("actor", "frozen", "trainable_parameters: expected 299904, built 297984"),
        ("actor", "mesh", "ranks along the mesh axis shard: expected 2, built 1"),
    ],
)
def test_another_is_caught_and_named(started: Started, role: str, sabotage: str, said: str) -> None:
    said = said.format(builtin=REPO / "specs" / "builtin" / "tiny-digits", other=started.folder / "other")
    told = started.refusal(role, sabotage)
    for rank in range(started.spec.role(role).processes):  # type: ignore[arg-type]
        assert f"{role} rank {rank}: {said}" in told
    accused = {line.split(" rank ")[0] for line in told.splitlines() if line.startswith("  - ") and " rank " in line}
    assert accused == {f"  - {role}"}, "the other roles are right"


def test_put_right_it_is_as_asked_again(started: Started) -> None:
    """So that none of the refusals above was left over from the one before."""
    started.check({role: started.build(role) for role in MODULES})


def test_a_run_ends_before_its_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def groups(plan: Plan, *args: object, **kwargs: object) -> Groups:
        return Groups(sabotaged(plan, {"actor": "sabotage:actor"}), *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(rlctl.run.train, "Groups", groups)
    settings = (f"actor.env.PYTHONPATH={SUPPORT}", "actor.env.SABOTAGE=fake vocabulary")
    options = [part for setting in settings for part in ("--set", setting)]
    code = main(["train", str(preset("fake", tmp_path)), "--run-dir", str(tmp_path / "run"), *options])
    told = capsys.readouterr().err
    assert code == AsBuiltError.exit_code
    assert "actor rank 0: vocab_size: expected 15, built 16" in told
    assert "hint: nothing was trained" in told
    assert not (tmp_path / "run" / "as_built.json").exists()
    assert not (tmp_path / "run" / "checkpoints").is_dir() or not any((tmp_path / "run" / "checkpoints").iterdir())
    assert "step" not in (tmp_path / "run" / "metrics.jsonl").read_text()
