"""A server that answers as the hub does, with a few models of its own; others answer oddly."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from rlctl.models import hub
from rlctl.models.paths import BUILTIN_FOLDER

SECRET = "hf_of_this_test"
LONG_S = 300.0  # longer than any test waits
TINY = {file.name: file.read_bytes() for file in (BUILTIN_FOLDER / "tiny-digits").iterdir()}
CONFIG: dict[str, Any] = json.loads(TINY["config.json"])


REWARD_MODEL = {
    "architectures": ["Qwen3ForSequenceClassification"],
    "model_type": "qwen3",
    "id2label": {"0": "LABEL_0"},
}


def index_of(layers: int) -> bytes:
    names = [f"model.layers.{number}.mlp.up_proj.weight" for number in range(layers)]
    return json.dumps({"weight_map": dict.fromkeys(names, "model-00001-of-00001.safetensors")}).encode()


def changed(**changes: Any) -> dict[str, bytes]:
    return {**TINY, "model.safetensors": b"", "config.json": json.dumps({**CONFIG, **changes}).encode()}


def qwen(hidden: int, layers: int, heads: int, kv_heads: int, **more: Any) -> dict[str, bytes]:
    """What the hub has of a Qwen2.5, in small: a tokenizer too large to be read, a template, an index."""
    config: dict[str, Any] = {
        **{"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "vocab_size": 152064, "eos_token_id": 151645},
        **{"hidden_size": hidden, "intermediate_size": 4 * hidden, "num_hidden_layers": layers},
        **{"num_attention_heads": heads, "num_key_value_heads": kv_heads, "max_position_embeddings": 32768},
        **more,
    }
    return {
        "config.json": json.dumps(config).encode(),
        "tokenizer.json": b" " * (hub.LIMITS["tokenizer.json"] + 1),
        "tokenizer_config.json": json.dumps({"chat_template": "{{ messages[0].content }}"}).encode(),
        "model.safetensors.index.json": index_of(layers),
    }


MODELS: dict[str, dict[str, bytes]] = {
    "org/good": {**TINY, "model.safetensors": b"weights"},
    "Qwen/Qwen2.5-7B-Instruct": qwen(3584, 28, 28, 4),
    "Qwen/Qwen2.5-0.5B-Instruct": qwen(896, 24, 14, 2),
    "Qwen/Qwen3-4B-Thinking-2507": qwen(
        *(2560, 36, 32, 8),
        **{"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 128},
        max_position_embeddings=262144,
    ),
    "Qwen/Qwen2.5-72B-Instruct": qwen(8192, 80, 64, 8),
    "Qwen/Qwen3-30B-A3B": qwen(
        *(2048, 48, 32, 4),
        **{"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "head_dim": 128},
        **{"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True},
        max_position_embeddings=40960,
    ),
    "Skywork/Skywork-Reward-V2-Qwen3-8B": qwen(4096, 36, 32, 8, **REWARD_MODEL),
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


def serve(handler: type[Handler] = Handler) -> tuple[ThreadingHTTPServer, Hub]:
    found = Hub("")
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, found))
    server.daemon_threads, server.handle_error = True, lambda *args: None  # type: ignore[method-assign]
    found.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    return server, found
