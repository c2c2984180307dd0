"""Models that only the hub has, against a real HTTP server that answers as the hub does."""

from __future__ import annotations

import ssl
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_server import CONFIG, LONG_S, SECRET, Hub, serve
from small_spec import raw_spec

from rlctl.models import hub, hub_http, vocabulary
from rlctl.models.expected import models_expected
from rlctl.models.paths import config_of
from rlctl.preflight.file_problems import file_problems
from rlctl.preflight.role_attention import role_attention
from rlctl.presets import presets
from specs.errors import Problem
from specs.load.load import load_spec, spec_from


@pytest.fixture
def the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """One per test, for what a process was told it does not ask again. Nothing is in the cache."""
    server, found = serve()
    monkeypatch.setenv("HF_ENDPOINT", found.url + "/")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    for name in ("HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_TOKEN", "HF_TOKEN_PATH", "HF_HUB_DISABLE_IMPLICIT_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(hub, "TOTAL_S", 60.0)  # this machine may be busy
    monkeypatch.setattr(hub_http, "CONNECT_S", 60.0)
    yield found
    server.shutdown()
    server.server_close()


def check(folder: Path, model: str, *more: str) -> tuple[list[Problem], list[Problem]]:
    changes = (f"model.path={model}", "model.from_scratch=false", *more)
    return file_problems(spec_from(raw_spec(), changes), folder)


def test_a_model_that_is_there_is_looked_at_and_nothing_is_said(the_hub: Hub, tmp_path: Path) -> None:
    assert check(tmp_path, "org/good") == ([], [])
    assert check(tmp_path, "org/sharded") == ([], [])
    assert check(tmp_path, "org/large-tokenizer") == ([], [])
    assert the_hub.tokens() == {""}
    asked = len(the_hub.seen)
    spec = spec_from(raw_spec(), ("model.path=org/good", "model.from_scratch=false"))
    decision = role_attention(spec, "actor", tmp_path)
    assert decision is not None
    assert decision.implementation == "sdpa"
    assert models_expected(spec, tmp_path, role_attention)["actor"]["hidden_size"] == CONFIG["hidden_size"]
    assert config_of("org/good", tmp_path) == CONFIG
    assert len(the_hub.seen) == asked, "asked once in a process"
    assert list(tmp_path.iterdir()) == [], "nothing is written"


@pytest.mark.parametrize(
    ("model", "words", "hint"),
    [
        ("org/none", "no such model on the hub that you may read", "private or gated, set HF_TOKEN"),
        ("org/gated", "the model is gated", "/org/gated, and set HF_TOKEN"),
        ("org/empty", "has no config.json", "a transformers model"),
        ("org/cut", "config.json cannot be read", "tell its owner"),
        ("org/heads", "is not a multiple of num_attention_heads 6", "config.json"),
        ("org/short", "more than the 15 positions", "lower data.max_prompt_tokens"),
        ("org/pickle", "never read", "as safetensors"),
        ("org/deep", "the weights have 7 layers", "different models"),
        ("org/bare", "no tokenizer with the model on the hub", "name a repository that has one"),
        ("org/huge", "larger than 4 MiB", "check the name"),
        ("org/endless", "larger than 4 MiB", "check the name"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_it(the_hub: Hub, tmp_path: Path, model: str, words: str, hint: str) -> None:
    errors, warnings = check(tmp_path, model)
    assert warnings == []
    assert len(errors) == 1, [str(error) for error in errors]
    assert words in str(errors[0])
    assert hint in errors[0].hint


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("org/slow", "no answer"),
        ("org/drip", "no answer"),
        ("org/torn", "the connection was cut"),
        ("org/busy", "it answered 503"),
        ("org/loop", "it answered 302"),
    ],
)
def test_a_hub_that_does_not_answer_is_a_warning(
    the_hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, words: str
) -> None:
    if words == "no answer":
        monkeypatch.setattr(hub, "TOTAL_S", 0.6)
        monkeypatch.setattr(hub_http, "CONNECT_S", 0.3)
    started = time.monotonic()
    errors, (warning,) = check(tmp_path, model)
    assert time.monotonic() - started < LONG_S / 2
    assert errors == []
    assert "will be downloaded when the run starts" in warning.message
    assert words in warning.message
    assert len(check(tmp_path, "org/good")[1]) == 1
    assert not any("org/good" in path for path, _ in the_hub.seen), "one that was silent is not waited for again"


def test_what_did_not_come_in_time_is_not_missed(the_hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "TOTAL_S", 6.0)
    assert check(tmp_path, "org/slow-tokenizer", "data.system=Be brief.") == ([], [])


def test_the_token_is_for_the_endpoint_alone(the_hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", SECRET)
    server, other = serve()
    the_hub.other = other.url
    assert check(tmp_path, "org/elsewhere") == ([], [])
    assert the_hub.tokens() == {f"Bearer {SECRET}"}
    assert other.tokens() == {""}, "the other host never sees it"
    assert {path.rpartition("/")[2] for path, _ in other.seen} >= {"config.json", "tokenizer.json"}
    assert not any(path.endswith("model.safetensors") for path, _ in other.seen), "that it is there is enough"
    server.shutdown()
    server.server_close()
    assert check(tmp_path, "org/renamed") == ([], []), "on the same host it is sent again"
    (error,), _ = check(tmp_path, "org/none")
    assert error.message == "no such folder, and no such model on the hub"
    monkeypatch.delenv("HF_TOKEN")
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "token").write_text(f"{SECRET}\n")
    assert check(tmp_path, "org/gated") == ([], []), "as `hf auth login` leaves it"
    monkeypatch.setenv("HF_HUB_DISABLE_IMPLICIT_TOKEN", "1")
    assert len(check(tmp_path, "org/gated")[0]) == 1


@pytest.mark.parametrize(
    "preset", sorted(name for name, file in presets().items() if 'path = "Qwen/' in file.read_text())
)
def test_presets_give_no_alarm_when_the_hub_is_reached(the_hub: Hub, tmp_path: Path, preset: str) -> None:
    spec = load_spec(presets()[preset])
    (tmp_path / "hosts").write_text("".join(f"host{number} slots=8\n" for number in range(spec.actor.nodes)))
    errors, warnings = file_problems(spec, tmp_path, elsewhere=True)
    assert not [str(found) for found in [*errors, *warnings] if found.key.startswith(("model.", "data.chat"))]
    assert errors == []
    assert any(spec.model.path in path for path, _ in the_hub.seen)


def test_certificates_are_read_once_for_all_files(
    the_hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[ssl.SSLContext] = []
    make = ssl.create_default_context

    def counted() -> ssl.SSLContext:
        made.append(make())
        return made[-1]

    hub_http._tls.cache_clear()
    monkeypatch.setattr(ssl, "create_default_context", counted)
    check(tmp_path, "org/good")
    assert len(the_hub.seen) > 5
    assert len(made) == 1


def test_offline_nothing_is_asked(the_hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (error,), _ = check(tmp_path, "org/good")
    assert "HF_HUB_OFFLINE" in error.message
    assert config_of("org/good", tmp_path) == {}
    assert the_hub.seen == []


def test_a_reference_on_the_hub_must_read_the_same_tokens(
    the_hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kl = ("algorithm.kl_coef=0.1",)
    assert check(tmp_path, "org/good", *kl, "ref.model=org/large-tokenizer") == ([], [])
    (error,), warnings = check(tmp_path, "org/good", *kl, "ref.model=org/other-tokens")
    assert "differs from the actor's in 1 token" in error.message
    assert warnings == []
    monkeypatch.setattr(hub, "TOTAL_S", 0.3)
    actor, unknown = hub.look_up("org/good"), hub.HubFolder("org/slow", {})
    assert isinstance(actor, hub.HubFolder)
    assert "was not compared" in vocabulary.vocabulary_problems(actor, unknown, "ref.model", "x")[1][0].message
