"""A small server that speaks the part of SGLang's HTTP interface that rlctl uses, as SGLang 0.5.23 speaks it.

Written from that version's own source (in `srt/`: `entrypoints/http_server.py`, `managers/io_struct.py`,
`layers/sampler.py`, `managers/scheduler_components/weight_updater.py`, `utils/weight_checker.py`). Behind it is a real
Hugging Face model, so log-probs are real. It is stricter than SGLang: a field or a flag that it does not know, a
missing key, an order that would crash SGLang are errors.

`tests/support/sglang_helpers.py` puts it where `python -m sglang.launch_server` finds it. The file that
SGLANG_TEST_FAULT names holds what is wrong with it at the moment, if anything:

    stale:NAME      does not load the weight NAME
    late-rank       is a rank that loads after another one has answered, and before all ranks meet in a checksum
    packed-head     computes with a copy of the head that a load does not fill
    slow:TOKEN      does not answer prompts that begin with TOKEN, for a minute or until it is mended
    version:X       says that it is version X
    die             ends in the middle of a /generate
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import threading
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

VERSION = "0.5.23"
FUSED = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj"} | {
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}
SLOW_S = 60.0
GENERATE_FIELDS = {"rid", "input_ids", "sampling_params", "return_logprob", "logprob_start_len", "token_ids_logprob"}
SAMPLING_FIELDS = {"max_new_tokens", "temperature", "stop_token_ids", "sampling_seed"}


class Refused(Exception):
    """A request that gets status 400 and these words."""


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name in ("model-path", "host", "load-format", "log-level", "config"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("port", "context-length", "tp-size", "max-running-requests", "random-seed"):
        parser.add_argument(f"--{name}", required=True, type=int)
    parser.add_argument("--mem-fraction-static", required=True, type=float)
    parser.add_argument("--dtype", required=True, choices=["float32", "bfloat16", "float16", "half", "float", "auto"])
    flags = ["skip-tokenizer-init", "skip-server-warmup", "enable-memory-saver", "enable-weights-cpu-backup"]
    for name in [*flags, "enable-deterministic-inference", "disable-radix-cache", "trust-remote-code"]:
        parser.add_argument(f"--{name}", action="store_true")
    return parser.parse_args(argv)


class Model:
    """The model, its memory, its prefix cache. One thread at a time."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        config = AutoConfig.from_pretrained(args.model_path)
        self.model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, args.dtype)).eval()
        generator = torch.Generator().manual_seed(0)
        for parameter in self.model.parameters():  # load format "dummy"
            parameter.data.uniform_(-1e-3, 1e-3, generator=generator)
        ends = config.eos_token_id
        self.ends = set(ends if isinstance(ends, list) else [] if ends is None else [ends])
        self.config = config
        self.released: set[str] = set()
        self.backup: dict[str, torch.Tensor] = {}
        self.cache: dict[tuple[int, ...], torch.Tensor] = {}
        self.random = np.random.default_rng(args.random_seed)
        self.head: torch.Tensor | None = None
        self.late: list[tuple[str, str, bool]] = []

    @property
    def fault(self) -> str:
        with suppress(FileNotFoundError):
            return Path(os.environ["SGLANG_TEST_FAULT"]).read_text()
        return ""

    # memory

    def release(self, tags: list[str]) -> None:
        if not self.args.enable_memory_saver:
            raise Refused("memory saver is not enabled")
        if set(tags) & self.released or not set(tags) <= {"weights", "kv_cache"}:
            raise Refused(f"cannot release {tags}: {self.released} are released")
        self.released |= set(tags)
        self.cache.clear()
        if "weights" in tags:
            for name, parameter in self.model.named_parameters():
                if self.args.enable_weights_cpu_backup:
                    self.backup[name] = parameter.data.clone()
                parameter.data.fill_(float("nan"))

    def resume(self, tags: list[str]) -> None:
        if not set(tags) <= self.released:
            raise Refused(f"cannot resume {tags}: {self.released} are released")
        self.released -= set(tags)
        if "weights" in tags:
            for name, tensor in self.backup.items():
                self.model.get_parameter(name).data.copy_(tensor)
            self.backup.clear()

    # weights

    def load(self, folder: str, load_format: str, flush: bool) -> None:
        if "weights" in self.released:
            raise Refused("the weights have no memory")
        if load_format != "safetensors":
            raise Refused(f"load format {load_format} may read pickled files")
        files = sorted(Path(folder).glob("*.safetensors"))
        if not files:
            raise Refused(f"Cannot find any model weights with `{folder}`")
        held = dict(self.model.named_parameters())
        stale = self.fault.partition("stale:")[2]
        self.head = self.model.get_output_embeddings().weight.data.clone() if self.fault == "packed-head" else None
        for name, tensor in (item for file in files for item in load_file(file).items()):
            if name in held and name != stale:  # SGLang's loaders too pass over names that they do not know
                if held[name].shape != tensor.shape:
                    raise Refused(f"{name} has shape {list(tensor.shape)}")
                held[name].data.copy_(tensor)
        if flush:
            self.cache.clear()

    def hashes(self) -> dict[str, str]:
        if "weights" in self.released:
            raise Refused("the weights have no memory")
        parts: dict[str, list[bytes]] = {}
        for name, parameter in self.model.named_parameters():
            fused = re.sub("|".join(FUSED), lambda match: FUSED[match[0]], name)
            parts.setdefault(fused, []).append(parameter.data.contiguous().view(torch.uint8).numpy().tobytes())
        return {name: hashlib.sha256(b"".join(each)).digest()[:8].hex() for name, each in parts.items()}

    # tokens

    @torch.inference_mode()
    def logits(self, tokens: tuple[int, ...]) -> torch.Tensor:
        """Of the next token, [V] in fp32."""
        if tokens not in self.cache:
            out = self.model.model(input_ids=torch.tensor([tokens]), use_cache=False).last_hidden_state[0, -1]
            head = self.model.get_output_embeddings().weight if self.head is None else self.head
            found = (head @ out).float()
            if self.args.disable_radix_cache:
                return found
            self.cache[tokens] = found
        return self.cache[tokens]

    def answer(self, prompt: list[int], params: dict[str, Any], asked: list[int] | None) -> dict[str, Any]:
        self._check(prompt, params)
        cached = len(prompt) - 1 if tuple(prompt) in self.cache else 0
        limit = min(params["max_new_tokens"], self.args.context_length - 1 - len(prompt) - 1)
        stops = self.ends | set(params.get("stop_token_ids") or ())
        tokens, pairs, asked_pairs = list(prompt), [], []
        reason: dict[str, Any] = {"type": "length", "length": limit}
        greedy = params["temperature"] < 1e-6
        while len(pairs) < limit:
            logprob = (self.logits(tuple(tokens)) / (1.0 if greedy else params["temperature"])).log_softmax(-1)
            noise = 0 if greedy else self._noise(params.get("sampling_seed", 42), len(tokens), len(logprob))
            token = int((logprob + noise).argmax())
            pairs.append([float(logprob[token]), token, None])
            if asked is not None:
                asked_pairs.append([[float(logprob[each]), each, None] for each in asked])
            tokens.append(token)
            if token in stops:
                reason = {"type": "stop", "matched": token}
                break
        meta = {
            "id": os.urandom(16).hex(),
            "finish_reason": reason,
            "prompt_tokens": len(prompt),
            "weight_version": "default",
            "completion_tokens": len(pairs),
            "cached_tokens": cached,
            "output_token_logprobs": pairs,
            "output_token_logprobs_length": len(pairs),
            "input_token_logprobs": [],
        }
        if asked is not None:
            meta |= {"output_token_ids_logprobs": asked_pairs, "input_token_ids_logprobs": []}
        return {"text": "", "output_ids": tokens[len(prompt) :], "meta_info": meta}

    def _noise(self, seed: int, position: int, vocab: int) -> torch.Tensor:
        """Gumbel noise: of (seed, position) in deterministic inference, else of what was drawn before."""
        if not self.args.enable_deterministic_inference:
            return torch.from_numpy(self.random.gumbel(size=vocab))
        return torch.from_numpy(np.random.Generator(np.random.Philox(key=[seed, position])).gumbel(size=vocab))

    def _check(self, prompt: list[int], params: dict[str, Any]) -> None:
        context = self.args.context_length
        if self.released:
            raise Refused(f"{sorted(self.released)} have no memory")
        if unknown := set(params) - SAMPLING_FIELDS:
            raise Refused(f"unknown sampling parameters {sorted(unknown)}")
        if "sampling_seed" in params and not self.args.enable_deterministic_inference:
            raise Refused("sampling_seed has no effect without --enable-deterministic-inference")
        if len(prompt) >= context - 1 - 5 or len(prompt) + params["max_new_tokens"] > context:
            raise Refused(f"{len(prompt)} + {params['max_new_tokens']} tokens exceed the context of {context}")
        if not prompt or not all(0 <= token < self.config.vocab_size for token in prompt):
            raise Refused("input_ids must be token ids")


class Handler(BaseHTTPRequestHandler):
    """Routes. State is the class's: there is one server per process."""

    model: Model
    key: str
    lock = threading.Lock()

    def do_GET(self) -> None:
        model = self.model
        if self.path == "/health":
            return self._send(200, None)
        if not self._allowed():
            return None
        if self.path == "/model_info":
            info = {"model_path": model.args.model_path, "architectures": [type(model.model).__name__]}
            return self._send(200, {**info, "is_generation": True, "weight_version": "default"})
        if self.path == "/server_info":
            version = model.fault.partition("version:")[2] or VERSION
            info = {"version": version, "dtype": model.args.dtype, "attention_backend": "torch_native"}
            return self._send(200, {**info, "tp_size": model.args.tp_size, "internal_states": [{}]})
        return self._send(404, {"detail": "Not Found"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self._allowed():
            return
        routes = {
            "/generate": self._generate,
            "/update_weights_from_disk": self._update,
            "/weights_checker": self._hashes,
            "/release_memory_occupation": self._release,
            "/resume_memory_occupation": self._resume,
            "/abort_request": self._abort,
        }
        if self.path not in routes:
            return self._send(404, {"detail": "Not Found"})
        try:
            if self.path == "/generate":
                return self._send(200, routes[self.path](body))
            with self.lock:
                return self._send(200, routes[self.path](body))
        except Refused as error:
            if self.path == "/update_weights_from_disk":
                return self._send(400, {"success": False, "message": str(error), "num_paused_requests": 0})
            return self._send(400, {"error": {"message": str(error)}})

    def _generate(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        _fields(body, GENERATE_FIELDS, {"input_ids", "sampling_params", "return_logprob"})
        prompts, params, asked = body["input_ids"], body["sampling_params"], body.get("token_ids_logprob")
        params = params if isinstance(params, list) else [params] * len(prompts)
        asked = asked or [None] * len(prompts)
        if not len(prompts) == len(params) == len(asked) or not body["return_logprob"]:
            raise Refused("the parts of the batch differ in length, or no log-probs were asked for")
        until = time.monotonic() + SLOW_S
        while self.model.fault == f"slow:{prompts[0][0]}" and time.monotonic() < until:
            time.sleep(0.01)
        if self.model.fault == "die":
            os._exit(17)
        found = []
        for one in zip(prompts, params, asked, strict=True):
            with self.lock:
                found.append(self.model.answer(*one))
        return found

    def _update(self, body: dict[str, Any]) -> dict[str, Any]:
        _fields(body, {"model_path", "load_format", "flush_cache"}, {"model_path"})
        load = (body["model_path"], body.get("load_format") or "auto", body.get("flush_cache", True))
        if self.model.fault == "late-rank":
            self.model.late.append(load)
        else:
            self.model.load(*load)
        return {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}

    def _hashes(self, body: dict[str, Any]) -> dict[str, Any]:
        _fields(body, {"action"}, {"action"})
        if body["action"] != "checksum":
            raise Refused(f"Unsupported action={body['action']!r}")
        while self.model.late:
            self.model.load(*self.model.late.pop())
        hashes = self.model.hashes()
        overall = hashlib.sha256("".join(f"{k}{v}" for k, v in sorted(hashes.items())).encode()).hexdigest()
        rank = {
            "checksums": hashes,
            "per_gpu_checksum": overall,
            "parallelism_info": [{"role": "target", "tp_rank": 0}],
        }
        return {"success": True, "message": "Success.", "ranks": [rank], "per_engine_checksum": overall}

    def _release(self, body: dict[str, Any]) -> None:
        _fields(body, {"tags"}, {"tags"})
        self.model.release(body["tags"])

    def _resume(self, body: dict[str, Any]) -> None:
        _fields(body, {"tags"}, {"tags"})
        self.model.resume(body["tags"])

    def _abort(self, body: dict[str, Any]) -> None:
        _fields(body, {"rid", "abort_all"}, {"abort_all"})

    def _allowed(self) -> bool:
        if self.headers.get("Authorization") == f"Bearer {self.key}":
            return True
        self._send(401, {"error": "Unauthorized"})
        return False

    def _send(self, status: int, body: Any) -> None:
        data = b"" if body is None and self.path == "/health" else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: object) -> None:
        """Quiet."""


def _fields(body: dict[str, Any], known: set[str], needed: set[str]) -> None:
    if wrong := (set(body) - known) | (needed - set(body)):
        raise Refused(f"unknown or missing fields: {sorted(wrong)}")


def main() -> None:
    args = parse_arguments()
    assert args.host == "127.0.0.1", "beyond loopback anybody could steer the server"
    assert args.load_format == "dummy"
    torch.set_num_threads(1)
    file = Path(args.config)
    assert file.suffix == ".yaml"
    assert file.stat().st_mode & 0o077 == 0, "others can read the key"
    Handler.key = json.loads(file.read_text())["api-key"]
    Handler.model = Model(args)
    assert os.environ["SGLANG_RETURN_ORIGINAL_LOGPROB"] == "0"
    ThreadingHTTPServer.request_queue_size = 512
    ThreadingHTTPServer((args.host, args.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
