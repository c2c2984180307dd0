"""Models that only the hub has, against a real HTTP server that answers as the hub does."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import hub_server
import pytest
from hub_server import CONFIG, LONG_S, SECRET, Hub
from running import preset
from small_spec import raw_spec

from rlctl.cli import main
from rlctl.models import hub
from rlctl.models.paths import config_of
from rlctl.preflight.expected import models_expected
from rlctl.preflight.file_problems import file_problems
from rlctl.preflight.role_choices import role_attention
from specs.errors import Problem
from specs.load.load import spec_from

PARAMETERS = 299_904


@pytest.fixture
def the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """One per test, for a process asks once. Nothing is in the cache."""
    hub.look_up.cache_clear()
    hub._unreachable.clear()
    with hub_server.serve() as found:
        hub_server.use(found.url, monkeypatch)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "home" / "hub"))
        monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "home" / "token"))
        monkeypatch.delenv("HF_TOKEN", raising=False)
        monkeypatch.setattr(hub, "TIMEOUT_S", 60.0)  # this machine may be busy
        yield found
    hub.look_up.cache_clear()
    hub._unreachable.clear()


def check(folder: Path, model: str, *more: str) -> tuple[list[Problem], list[Problem]]:
    changes = (f"model.path={model}", "model.from_scratch=false", *more)
    return file_problems(spec_from(raw_spec(), changes), folder)


def test_a_model_on_the_hub_is_read_once(the_hub: Hub, tmp_path: Path) -> None:
    assert check(tmp_path, "org/good") == ([], [])
    assert the_hub.tokens() == {""}
    asked = len(the_hub.seen)
    spec = spec_from(raw_spec(), ("model.path=org/good", "model.from_scratch=false"))
    decision = role_attention(spec, "actor", tmp_path)
    assert decision is not None
    assert decision.implementation == "sdpa"
    assert models_expected(spec, tmp_path)["actor"]["hidden_size"] == CONFIG["hidden_size"]
    assert config_of("org/good", tmp_path) == CONFIG
    assert len(the_hub.seen) == asked, "asked once in a process"
    assert not any(path.endswith("model.safetensors") for path, _ in the_hub.seen), "its name is enough"
    assert list(tmp_path.iterdir()) == [], "nothing is written to the cache"


@pytest.mark.parametrize("model", ["org/good", "org/sharded"])
@pytest.mark.parametrize("names", [("config.json",), ("config.json", "tokenizer.json", "model.safetensors.index.json")])
def test_a_part_of_it_in_the_cache_is_not_all_that_a_run_will_have(
    the_hub: Hub, tmp_path: Path, model: str, names: Sequence[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `hf download --include "*.json"` leaves it, and whoever has loaded its tokenizer."""
    folder = tmp_path / "home" / "hub" / f"models--{model.replace('/', '--')}"
    snapshot = folder / "snapshots" / hub_server.SHA
    snapshot.mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(hub_server.SHA)
    for name in names:
        (snapshot / name).write_bytes(hub_server.MODELS[model].get(name, b""))
    assert check(tmp_path, model) == ([], [])
    hub.look_up.cache_clear()
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    errors, (warning,) = check(tmp_path, model)
    assert errors == []
    assert "will be downloaded" in warning.message
    assert config_of(model, tmp_path) == CONFIG
    asked = len(the_hub.seen)
    if len(names) > 1:
        assert check(tmp_path, model, "model.from_scratch=true") == ([], [])
    assert len(the_hub.seen) == asked


@pytest.mark.parametrize(
    ("model", "words", "hint"),
    [
        ("org/none", "no such model on the hub that you may read", "in HF_TOKEN"),
        ("org/gated", "the model is gated", "/org/gated, and set HF_TOKEN"),
        ("org/empty", "has no config.json", "a transformers model"),
        ("org/cut", "config.json is cut short or not JSON", "again"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_it(the_hub: Hub, tmp_path: Path, model: str, words: str, hint: str) -> None:
    (error,), warnings = check(tmp_path, model)
    assert warnings == []
    assert words in str(error)
    assert hint in error.hint


@pytest.mark.parametrize(("model", "words"), [("org/slow", "timed out"), ("org/busy", "it answered 503")])
def test_a_hub_that_does_not_answer_is_a_warning(
    the_hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, words: str
) -> None:
    monkeypatch.setattr(hub, "TIMEOUT_S", 0.5 if model == "org/slow" else 60.0)
    started = time.monotonic()
    errors, (warning,) = check(tmp_path, model)
    assert time.monotonic() - started < LONG_S / 2
    assert errors == []
    assert "will be downloaded when the run starts" in warning.message
    assert words in warning.message
    assert len(check(tmp_path, "org/good")[1]) == 1
    assert not any("org/good" in path for path, _ in the_hub.seen), "one that was silent is not waited for again"


def test_a_token_opens_a_gated_model(the_hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", SECRET)
    assert check(tmp_path, "org/gated") == ([], [])
    assert the_hub.tokens() == {f"Bearer {SECRET}"}


@pytest.mark.usefixtures("warm_children")
def test_it_is_planned_and_probed(the_hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = preset("quickstart", tmp_path)
    sets = ("--set", "model.path=org/good", "--set", "model.from_scratch=false")
    capsys.readouterr()
    assert main(["plan", str(spec), "--json", *sets]) == 0
    planned = json.loads(capsys.readouterr().out)
    weights = next(part for part in planned["roles"]["actor"]["parts"] if part["name"] == "weights")
    assert weights["bytes"] == pytest.approx(4 * PARAMETERS, rel=0.01)

    assert main(["check-config", str(spec), "--json", "--probe", *sets]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["problems"], found["warnings"]) == ([], [])
    for role in ("actor", "rollout"):
        about = found["roles"][role]
        assert about["got"]["path"] == about["asked"]["path"] == about["model"] == "org/good"
        assert (about["parameters"], about["hidden_size"]) == (PARAMETERS, CONFIG["hidden_size"])
    assert found["roles"]["reward"]["tokenizer_tokens"] == 15
    assert not (tmp_path / "home").exists(), "the cache is as it was"
