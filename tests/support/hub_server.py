"""A server that answers huggingface_hub as the hub does, with a few models of its own; others answer oddly."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

import pytest

from rlctl.models.paths import BUILTIN_FOLDER

SECRET = "hf_of_this_test"
SHA = "0" * 40
LONG_S = 300.0  # longer than any test waits
TINY = {file.name: file.read_bytes() for file in (BUILTIN_FOLDER / "tiny-digits").iterdir()}
CONFIG: dict[str, Any] = json.loads(TINY["config.json"])
GOOD = {**TINY, "model.safetensors": b"weights"}
SHARDS = {
    "model.safetensors.index.json": b'{"weight_map": {"lm_head.weight": "model-00001-of-00001.safetensors"}}',
    "model-00001-of-00001.safetensors": b"weights",
}


MODELS: dict[str, dict[str, bytes]] = {
    "org/good": GOOD,
    "org/sharded": {**TINY, **SHARDS},
    "org/gated": GOOD,
    "org/cut": {**GOOD, "config.json": TINY["config.json"][:-40]},
    "org/empty": {"README.md": b""},
}


@dataclass
class Hub:
    """A server, what it was asked, and with which token."""

    url: str
    seen: list[tuple[str, str]] = field(default_factory=list)

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
        path, token = urlsplit(self.path).path.strip("/"), self.headers.get("Authorization", "")
        self.hub.seen.append((path, token))
        listed, (model, _, file) = path.startswith("api/models/"), path.partition(f"/resolve/{SHA}/")
        model = model.removeprefix("api/models/")
        if model == "org/slow":
            time.sleep(LONG_S)
        elif model == "org/busy":
            self._send(503)
        elif model not in MODELS:
            self._send(404 if token else 401, error="RepoNotFound")
        elif listed:
            siblings = [{"rfilename": name, "size": len(content)} for name, content in MODELS[model].items()]
            self._send(200, json.dumps({"id": model, "sha": SHA, "siblings": siblings}).encode())
        elif model == "org/gated" and token != f"Bearer {SECRET}":
            self._send(403 if token else 401, error="GatedRepo")
        elif file not in MODELS[model]:
            self._send(404, error="EntryNotFound")
        else:
            self._send(200, MODELS[model][file])

    def _send(self, code: int, content: bytes = b"", *, error: str = "") -> None:
        self.send_response(code)
        for name, value in (("ETag", '"1"'), ("X-Repo-Commit", SHA), ("Content-Length", str(len(content)))):
            self.send_header(name, value)
        if error:
            self.send_header("X-Error-Code", error)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


@contextmanager
def serve(handler: type[Handler] = Handler) -> Iterator[Hub]:
    found = Hub("")
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, found))
    server.daemon_threads, server.handle_error = True, lambda *args: None  # type: ignore[method-assign]
    found.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield found
    server.shutdown()
    server.server_close()


def use(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have this process and its children ask this server. The library reads its variables when it is imported."""
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", url)
    template = f"{url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    for name, value in {"HF_ENDPOINT": url, "HF_HUB_OFFLINE": "0", "no_proxy": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
