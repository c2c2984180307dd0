"""`rlctl serve`: put a run's checkpoint, or a model, behind the gateway of agents, for any client."""

from __future__ import annotations

import ipaddress
import json
import os
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from rlctl.models.paths import config_of, resolve_model
from rlctl.models.run_export import RunExport
from rlctl.preflight.interpreters import look_at
from rlctl.run.checkpoints import run_and_step
from rlctl.run.export import export, find
from rlctl.run.interrupt import as_ctrl_c
from rlctl.show.screen import Screen
from specs.errors import UsageError
from specs.model_facts import positions_of
from specs.packages import path_for
from specs.schema.engines.vllm_table import SAMPLES_AT, TEMPERATURES
from specs.schema.roles import ACTOR

CONTEXT = 8192  # tokens, of a model that takes as many
SEQUENCES = 8  # sampled at a time


def serve(
    what: str,
    out: Path,
    *,
    step: int | None = None,
    host: str = "127.0.0.1",
    port: int = 0,
    key: str = "",
    context: int = 0,
    temperature: float = 1.0,
    engine: str = "torch",
    python: str = sys.executable,
    gpu: bool = False,
) -> int:
    """Serve until Ctrl-C; return the exit code. `context`: tokens of a conversation, 0: as many as `CONTEXT` and the
    model take; `python`: the interpreter that samples. Raises UsageError, and what an export raises."""
    if not key and not _loopback(host):
        message = f"--host {host}: other machines could sample without a key"
        raise UsageError(message, hint="add --key KEY, or listen on 127.0.0.1")
    if engine == "vllm" and temperature and not TEMPERATURES[0] <= temperature <= TEMPERATURES[1]:
        message = f"--temperature {temperature:g}: {SAMPLES_AT}"
        raise UsageError(message, hint="use one of these, 0, or --engine torch")
    found = look_at(python)
    if lacking := [package for package in (engine, "accelerate") if not found.version(package)]:
        message = f"--engine {engine}: {python}: {found.failure or f'{lacking[0]} is not installed'}"
        raise UsageError(message, hint="`rlctl setup-engine vllm` makes .venv-vllm: --python .venv-vllm/bin/python")
    model = _model_of(what, step)
    config = config_of(model, Path())
    if not config:
        raise UsageError(
            f"{what}: no run, and no model here", hint="name a run's directory, a model's folder or hub id"
        )
    room = positions_of(config) or CONTEXT
    context = context or min(CONTEXT, room)
    if context > room:
        raise UsageError(f"--context {context}: the model takes {room} tokens", hint=f"use at most {room}")
    if out.is_dir():
        raise UsageError(f"--out {out}: that is a folder", hint="name a file")
    out.parent.mkdir(parents=True, exist_ok=True)
    asked = {
        "rollout": {
            "model": {
                "path": str(resolve_model(model, Path())),
                "from_scratch": False,
                "seed": 0,
                "dtype": "bf16" if gpu else "fp32",
                "attn_implementation": "auto",
                "trust_remote_code": False,
                "device": "cuda" if gpu else "cpu",
                "max_sequence_tokens": context,
            },
            "engine": {"kind": engine, "max_sequences": SEQUENCES},
            "max_prompt_tokens": context - 1,
            "max_response_tokens": context,
            "stop": [],
        },
        "temperature": temperature,
        "out": str(out.absolute()),
        "host": host,
        "port": port,
        "key": key,
    }
    return _run(python, json.dumps(asked))


def _loopback(host: str) -> bool:
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def _model_of(what: str, step: int | None) -> str:
    """Return the folder or hub id of a model; of a run that of its export, which is made where it is missing."""
    run, at = run_and_step(what)
    if not (run / "resolved.json").is_file():
        if step is not None:
            raise UsageError(f"--step: {what} is not a run directory", hint="leave it out")
        return what
    checkpoint = find(run, at if step is None else step)
    exported = RunExport(run, ACTOR, checkpoint.step)
    if not exported.folder.is_dir():
        export(run, exported.folder, checkpoint.step, ACTOR, screen=Screen(stderr=True, highlight=True))
    return str(exported.folder)


def _run(python: str, config: str) -> int:
    """Have the process that holds the model serve it, until a signal ends both."""
    command = [python, "-P", "-m", "workers.episodes.served_model"]
    with tempfile.TemporaryDirectory(prefix="rlctl-serve-") as folder:
        path = path_for(python, os.environ.get("PYTHONPATH", ""), Path(folder))
        env = {"VLLM_LOGGING_LEVEL": "ERROR", **os.environ, "PYTHONPATH": path}  # else vLLM writes a page first
        process = subprocess.Popen(command, stdin=subprocess.PIPE, text=True, start_new_session=True, env=env)
        assert process.stdin is not None
        try:
            with as_ctrl_c():
                with suppress(BrokenPipeError):  # it has said why it ended
                    process.stdin.write(config)
                    process.stdin.close()
                return process.wait()
        except KeyboardInterrupt:
            process.terminate()
            return process.wait()
        finally:
            if process.poll() is None:
                process.kill()
