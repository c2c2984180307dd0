"""Models that only the hub has, against a real HTTP server that answers as the hub does."""

from __future__ import annotations

import copy
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from test_load_spec import GOOD

from specs import hub, hub_http, reference
from specs.attention_rules import attention_of
from specs.errors import Problem
from specs.files import file_problems
from specs.load import spec_from
from specs.model_asked import models_asked
from specs.model_files import BUILTIN_FOLDER, config_of

SECRET = "hf_of_this_test"
LONG_S = 6.0  # longer than any test waits
TINY = {file.name: file.read_bytes() for file in (BUILTIN_FOLDER / "tiny-digits").iterdir()}
CONFIG: dict[str, Any] = json.loads(TINY["config.json"])


def index_of(layers: int) -> bytes:
    names = [f"model.layers.{number}.mlp.up_proj.weight" for number in range(layers)]
    return json.dumps({"weight_map": dict.fromkeys(names, "model-00001-of-00001.safetensors")}).encode()


def changed(**changes: Any) -> dict[str, bytes]:
    return {**TINY, "model.safetensors": b"", "config.json": json.dumps({**CONFIG, **changes}).encode()}


MODELS: dict[str, dict[str, bytes]] = {
    "org/good": {**TINY, "model.safetensors": b"weights"},
    "org/gated": {**TINY, "model.safetensors": b"weights"},
    "org/cut": {**TINY, "model.safetensors": b"", "config.json": TINY["config.json"][:-40]},
    "org/heads": changed(num_attention_heads=6),
    "org/short": changed(max_position_embeddings=15),
    "org/pickle": {**TINY, "pytorch_model.bin": b""},
    "org/deep": {**TINY, "model.safetensors.index.json": index_of(7)},
    "org/sharded": {**TINY, "model.safetensors.index.json": index_of(CONFIG["num_hidden_layers"])},
    "org/bare": {name: content for name, content in changed().items() if "token" not in name},
    "org/empty": {"README.md": b""},
    "org/large-tokenizer": {**TINY, "model.safetensors": b"", "tokenizer.json": TINY["tokenizer.json"] + b" " * 2**23},
    "org/other-tokens": {
        **TINY,
        "model.safetensors": b"",
        "tokenizer.json": TINY["tokenizer.json"].replace(b'"7"', b'"x"') + b" " * 2**23,
    },
}


@dataclass
class Hub:
    """A server, what it was asked, and with which token."""

    url: str
    seen: list[tuple[str, str]] = field(default_factory=list)
    other: str = ""  # the address of another host

    def tokens(self) -> set[str]:
        return {token for _, token in self.seen}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def __init__(self, hub: Hub, *args: Any) -> None:
        self.hub = hub
        super().__init__(*args)

    def log_message(self, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        token = self.headers.get("Authorization", "")
        self.hub.seen.append((self.path, token))
        model, _, file = self.path.strip("/").partition("/resolve/main/")
        odd = getattr(self, "_" + model.removeprefix("org/").replace("-", "_"), None)
        if odd is not None:
            odd(file)
        elif model == "org/gated" and token != f"Bearer {SECRET}":
            self._send(401, error="GatedRepo")
        elif model not in MODELS:
            self._send(404 if token else 401, error="RepoNotFound")
        elif file not in MODELS[model]:
            self._send(404, error="EntryNotFound")
        else:
            self._send(200, MODELS[model][file])

    def _send(self, code: int, content: bytes = b"", *, length: int | None = None, **headers: str) -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(content) if length is None else length))
        for name, value in headers.items():
            self.send_header({"error": "X-Error-Code", "to": "Location"}[name], value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)
        self.close_connection = length is not None

    def _slow(self, file: str) -> None:
        time.sleep(LONG_S)

    def _drip(self, file: str) -> None:
        """Never silent for long, and never done."""
        self.send_response(200)
        self.end_headers()
        for _ in range(int(LONG_S / 0.05)):
            self.wfile.write(b" ")
            time.sleep(0.05)
        self.close_connection = True

    def _slow_tokenizer(self, file: str) -> None:
        if file != "config.json":
            time.sleep(LONG_S)
        self._send(200, TINY.get(file, b"{}"))

    def _torn(self, file: str) -> None:
        self._send(200, TINY["config.json"][:100], length=5000)

    def _huge(self, file: str) -> None:
        self._send(200, b"{", length=10**11)

    def _endless(self, file: str) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b" " * (hub.LIMITS["config.json"] + 1))
        self.close_connection = True

    def _busy(self, file: str) -> None:
        self._send(503)

    def _loop(self, file: str) -> None:
        self._send(302, to=self.path)

    def _renamed(self, file: str) -> None:
        self._send(307, to=f"/org/gated/resolve/main/{file}")

    def _elsewhere(self, file: str) -> None:
        self._send(302, to=f"{self.hub.other}/org/good/resolve/main/{file}")


def serve() -> tuple[ThreadingHTTPServer, Hub]:
    found = Hub("")
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, found))
    server.daemon_threads, server.handle_error = True, lambda *args: None  # type: ignore[method-assign]
    found.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    return server, found


@pytest.fixture
def the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """One per test, for what a process was told it does not ask again. Nothing is in the cache."""
    server, found = serve()
    monkeypatch.setenv("HF_ENDPOINT", found.url + "/")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    for name in ("HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_TOKEN", "HF_TOKEN_PATH", "HF_HUB_DISABLE_IMPLICIT_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    yield found
    server.shutdown()
    server.server_close()


def check(folder: Path, model: str, *more: str) -> tuple[list[Problem], list[Problem]]:
    changes = (f"model.path={model}", "model.from_scratch=false", *more)
    return file_problems(spec_from(copy.deepcopy(GOOD), changes), folder)


def test_a_model_that_is_there_is_looked_at_and_nothing_is_said(the_hub: Hub, tmp_path: Path) -> None:
    assert check(tmp_path, "org/good") == ([], [])
    assert check(tmp_path, "org/sharded") == ([], [])
    assert check(tmp_path, "org/large-tokenizer") == ([], [])
    assert the_hub.tokens() == {""}
    asked = len(the_hub.seen)
    spec = spec_from(copy.deepcopy(GOOD), ("model.path=org/good", "model.from_scratch=false"))
    decision = attention_of(spec, "actor", tmp_path)
    assert decision is not None
    assert decision.implementation == "sdpa"
    assert models_asked(spec, tmp_path)["actor"]["hidden_size"] == CONFIG["hidden_size"]
    assert config_of("org/good", tmp_path) == CONFIG
    assert len(the_hub.seen) == asked, "asked once in a process"
    assert list(tmp_path.iterdir()) == [], "nothing is written"


@pytest.mark.parametrize(
    ("model", "words", "hint"),
    [
        ("org/none", "no such folder, and no model on the hub that you may read", "private or gated, set HF_TOKEN"),
        ("org/gated", "does not give this model to everyone", "/org/gated, and set HF_TOKEN"),
        ("org/empty", "there is no config.json in it", "a transformers model"),
        ("org/cut", "config.json cannot be read", "tell its owner"),
        ("org/heads", "is not a multiple of num_attention_heads 6", "config.json"),
        ("org/short", "which has 15 positions", "lower data.max_prompt_tokens"),
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
    monkeypatch.setattr(hub, "TOTAL_S", 0.4)
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
    assert "was not compared" in reference.vocabulary_problems(actor, unknown, "ref.model", "x")[1][0].message
