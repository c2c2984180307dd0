"""Everything that a spec names on disk is looked at before a run starts. Cases: `tests/specs/corpus`."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from corpus import qwen2_shapes, write_weights
from small_spec import raw_spec

from rlctl.models.paths import BUILTIN_FOLDER
from rlctl.preflight.file_problems import file_problems
from specs.errors import Problem
from specs.load.load import spec_from


def check(folder: Path, *overrides: str) -> tuple[list[Problem], list[Problem]]:
    return file_problems(spec_from(raw_spec(), overrides), folder)


def only_error(folder: Path, *overrides: str) -> str:
    errors, _ = check(folder, *overrides)
    assert len(errors) == 1, [str(error) for error in errors]
    return str(errors[0])


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model folder that is fine; weights included."""
    folder = tmp_path / "model"
    shutil.copytree(BUILTIN_FOLDER / "tiny-digits", folder)
    write_weights(folder / "model.safetensors", qwen2_shapes(json.loads((folder / "config.json").read_text())))
    return folder


USE_MODEL = ("model.path=./model", "model.from_scratch=false")


def test_hub_ids_without_a_network(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "hub"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    errors, warnings = check(tmp_path, "model.path=some/model", "model.from_scratch=false")
    assert not errors
    assert "will be downloaded" in str(warnings[0])
    errors, warnings = check(tmp_path, "data.train=some/data:main")
    assert (errors, warnings[0].key) == ([], "data.train")
    assert "downloaded" in str(warnings[0])
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE" in only_error(tmp_path, "model.path=some/model")
    assert "HF_HUB_OFFLINE" in only_error(tmp_path, "data.train=some/data:main")
    snapshot = cache / "models--some--model" / "snapshots" / "abc"
    shutil.copytree(model, snapshot)
    (cache / "models--some--model" / "refs").mkdir()
    (cache / "models--some--model" / "refs" / "main").write_text("abc")
    assert check(tmp_path, "model.path=some/model", "model.from_scratch=false") == ([], [])


def test_a_data_set_opens_offline_only_where_it_was_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets")
    downloaded = tmp_path / "hub" / "datasets--some--myData"  # as `hf download` leaves it, which `datasets` never reads
    (downloaded / "snapshots" / "abc").mkdir(parents=True)
    (downloaded / "refs").mkdir()
    (downloaded / "refs" / "main").write_text("abc")
    assert "never loaded by `datasets`" in only_error(tmp_path, "data.train=some/myData:main")
    (tmp_path / "datasets" / "some___my_data" / "main" / "0.0.0" / "abc").mkdir(parents=True)
    assert check(tmp_path, "data.train=some/myData:main") == ([], [])


@pytest.mark.parametrize("driver", [True, False])
def test_gpus_without_a_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, driver: bool) -> None:
    monkeypatch.setattr("rlctl.preflight.file_problems.has_nvidia_driver", lambda: driver)
    spec = spec_from(raw_spec(), ["actor.devices=[0]"])
    errors, warnings = file_problems(spec, tmp_path)
    assert errors == []
    assert [(one.key, one.message, one.value) for one in warnings] == (
        [] if driver else [("actor.devices", "this machine has no NVIDIA driver", "[0]")]
    )
    assert all("run on the CPU" in one.hint and "--target cluster" in one.hint for one in warnings)
    assert file_problems(spec, tmp_path, starting=True) == (warnings, [])


def test_folders_of_several_models_are_for_engines_that_build_transformers_models(tmp_path: Path, model: Path) -> None:
    """The others have models of their own, and names for what is in them."""
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": config}))
    assert check(tmp_path, *USE_MODEL)[0] == []
    errors, _ = check(tmp_path, *USE_MODEL, 'rollout.engine.kind="vllm"')
    assert "this folder's language model is one among others" in "".join(map(str, errors))


def test_a_place_that_no_key_names_is_said_without_one(tmp_path: Path) -> None:
    (tmp_path / "x").touch()
    for place in (tmp_path / "x", tmp_path / "x" / "run"):
        errors, _ = file_problems(spec_from(raw_spec()), tmp_path, run_dir=place)
        assert [error.text for error in errors] == [f"{tmp_path / 'x'} is not a folder"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_run_directory_of_ones_own_may_lie_where_nothing_else_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "all" / "run").mkdir(parents=True)
    (tmp_path / "all").chmod(0o555)
    assert file_problems(spec_from(raw_spec()), tmp_path, run_dir=tmp_path / "all" / "run")[0] == []
    errors, _ = file_problems(spec_from(raw_spec()), tmp_path, run_dir=tmp_path / "all" / "other")
    assert [error.text for error in errors] == [f"{tmp_path / 'all'} cannot be written to"]
