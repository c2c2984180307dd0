"""Which transport a run takes, what is shown of it, and which transports are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlctl.check.findings import examine
from rlctl.loop.weight_transport import Transport, plan_transport, prepare
from rlctl.presets import write_preset
from rlctl.processes.placement import make_plan
from specs.load.load import load_spec

GPUS_APART = ["actor.devices=[0]", "rollout.devices=[1]"]
ONE_GPU = ["actor.devices=[0]", "rollout.devices=[0]"]


@pytest.fixture
def spec_path(tmp_path: Path) -> Path:
    write_preset("quickstart", tmp_path / "spec.toml", force=False)
    return tmp_path / "spec.toml"


def transport(spec_path: Path, *overrides: str) -> Transport:
    spec = load_spec(spec_path, overrides)
    return plan_transport(spec, spec_path.parent, spec_path.parent / "run", make_plan(spec, spec_path.parent))


def problems(spec_path: Path, *overrides: str) -> dict[str, str]:
    return {problem.key: str(problem) for problem in examine(spec_path, overrides).problems}


@pytest.mark.parametrize("where", [[], ONE_GPU, GPUS_APART])
def test_auto_takes_what_is_proven(spec_path: Path, where: list[str]) -> None:
    assert transport(spec_path, *where).kind == "shm"


def test_a_group_is_on_the_gpus_only_where_each_rank_has_one(spec_path: Path) -> None:
    asked = "sync.transport=group"
    assert transport(spec_path, asked, *GPUS_APART).options == {"device": "cuda", "address": "127.0.0.1"}
    for where in ([], ONE_GPU, ["actor.devices=[0]"], ["rollout.devices=[1]"]):
        assert transport(spec_path, asked, *where).options["device"] == "cpu"


def test_the_checksum_is_that_of_where_the_windows_lie(spec_path: Path) -> None:
    """Both ends and `as_built.json` ask the same function."""
    asked = {"cuda_ipc": ONE_GPU, "group": GPUS_APART, "shm": ONE_GPU, "folder": GPUS_APART}
    found = {kind: transport(spec_path, f"sync.transport={kind}", *where) for kind, where in asked.items()}
    on_device = {kind for kind, made in found.items() if made.describe()["checksum"] == "word_sum"}
    assert on_device == {"cuda_ipc", "group"}
    assert transport(spec_path, "sync.transport=group").describe()["checksum"] == "xxh3"


def test_a_killed_attempts_files_go_from_the_runs_own_folder_only(tmp_path: Path) -> None:
    for folder in (tmp_path / "run" / "sync", tmp_path / "shared"):
        folder.mkdir(parents=True)
        (folder / "rlctl-sync-0123-1-0.safetensors").touch()
        prepare(Transport("folder", "", {"folder": str(folder)}), tmp_path / "run")
    assert list((tmp_path / "run" / "sync").iterdir()) == []
    assert len(list((tmp_path / "shared").iterdir())) == 1


@pytest.mark.parametrize(
    ("overrides", "key", "words"),
    [
        (["sync.transport=cuda_ipc", "actor.devices=[0]"], "sync.transport", "the rollout runs on the CPU"),
        (["sync.transport=cuda_ipc", *GPUS_APART], "sync.transport", "rank 0 is on 0, the rollouts on [1]"),
        (["sync.transport=shm", "rollout.nodes=2", "rollout.processes=2"], "sync.transport", "shared memory stays"),
    ],
)
def test_transports_that_lead_nowhere_are_refused(spec_path: Path, overrides: list[str], key: str, words: str) -> None:
    assert words in problems(spec_path, *overrides)[key]
