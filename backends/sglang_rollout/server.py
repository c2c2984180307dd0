"""The SGLang server of one replica: started on loopback with a key of its own, watched, ended with the role.

It writes to this role's log. Its memory is on the role's GPU; this process holds none of it.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from backends.sglang_rollout.client import Client
from specs.errors import ModelError, SamplerDied
from specs.schema.engines.sglang_table import SglangTable
from specs.wire.role_config import RolloutConfig

START_LIMIT_S = 3600.0  # `run.start_timeout_s` ends a slow start long before; this one holds where there is no driver
END_LIMIT_S = 20.0
_POLL_S = 0.2
ENDING_S = 5.0  # from a connection that breaks to the end of the process behind it
_HEALTH_S = 30.0  # the server answers /health by generating a token
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
# SGLang truncates completions at `context-length` less the prompt and two, and refuses prompts closer to it than six.
_CONTEXT_MARGIN = 8


class Server:
    """A running server. `client` speaks to it."""

    def __init__(self, process: subprocess.Popen[bytes], client: Client, folder: Path) -> None:
        self.process, self.client = process, client
        self._folder = folder  # only this user can enter it

    @classmethod
    def start(cls, config: RolloutConfig) -> Server:
        """Returns when the server is healthy. Raises ModelError when it ends instead."""
        key = secrets.token_urlsafe(24)
        folder = Path(tempfile.mkdtemp(prefix="rlctl-sglang-"))
        # Command lines can be read by every user of the host; a file of mode 0600 cannot.
        key_file = folder / "key.yaml"
        key_file.touch(mode=0o600)
        key_file.write_text(json.dumps({"api-key": key}))  # JSON is YAML
        launch = (sys.executable, "-m", "backends.sglang_rollout.server_process", str(os.getpid()), "--")
        with reserved_port() as port:
            command = [*launch, "--config", str(key_file), *arguments(config, port)]
            # A session of its own, so that `stop` reaches SGLang's own children too.
            process = subprocess.Popen(
                command, env=environment(folder), stdin=subprocess.DEVNULL, start_new_session=True
            )
            server = cls(process, Client(port, key), folder)
            try:
                server._wait_until_healthy()
            except BaseException:
                server.stop()
                raise
        key_file.unlink()
        return server

    def _wait_until_healthy(self) -> None:
        deadline = time.monotonic() + START_LIMIT_S
        while not self.client.healthy(_HEALTH_S):
            if (code := self.process.poll()) is not None:
                raise ModelError(
                    f"the SGLang server ended with exit code {code} before it was ready",
                    hint="see its messages above in this role's log; is sglang installed in [rollout] python?",
                )
            if time.monotonic() > deadline:
                raise ModelError(f"the SGLang server was not ready after {START_LIMIT_S:.0f} s")
            time.sleep(_POLL_S)

    def check_alive(self, grace_s: float = 0.0) -> None:
        """Raises SamplerDied when the server is gone, or ends within `grace_s`."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(grace_s)
        if (code := self.process.poll()) is not None:
            raise SamplerDied(
                f"the SGLang server ended with exit code {code}", hint="see its last messages in this role's log"
            )

    def stop(self) -> None:
        """End the server and its children. A second call does nothing."""
        for sign in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, sign)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(END_LIMIT_S)
        shutil.rmtree(self._folder, ignore_errors=True)


def arguments(config: RolloutConfig, port: int) -> list[str]:
    """Command line of `python -m sglang.launch_server`, without the key."""
    table, model = config.engine, config.model
    assert isinstance(table, SglangTable)
    named = {
        "model-path": model.path,
        "host": "127.0.0.1",
        "port": port,
        "dtype": DTYPES[model.dtype],
        "load-format": "dummy",  # weights come by sync
        "context-length": model.max_sequence_tokens + _CONTEXT_MARGIN,
        "tp-size": table.tensor_parallel,
        "mem-fraction-static": table.memory_fraction,
        "max-running-requests": table.max_sequences,
        "random-seed": model.seed,
        "log-level": "info",
    }
    flags = {
        "skip-tokenizer-init": True,  # tokens in, tokens out
        "skip-server-warmup": True,
        "enable-memory-saver": True,  # else /release_memory_occupation frees nothing
        "enable-weights-cpu-backup": table.weights_backup,
        "enable-deterministic-inference": table.deterministic,
        "disable-radix-cache": not table.prefix_caching,
        "trust-remote-code": model.trust_remote_code,
    }
    pairs = [part for name, value in named.items() for part in (f"--{name}", str(value))]
    return pairs + [f"--{name}" for name, on in flags.items() if on]


def environment(folder: Path) -> dict[str, str]:
    """The role's, with the variables that decide what log-probs mean, how long a sequence may be, and where SGLang's
    processes meet: by default at a store of torch's, which listens on every interface."""
    return {
        **os.environ,
        "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE": f"file://{folder}/store",
        "SGLANG_RETURN_ORIGINAL_LOGPROB": "0",  # log-probs of the distribution sampled from, after the temperature
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",  # for the margin; lengths are checked here
    }


@contextmanager
def reserved_port() -> Iterator[int]:
    """A port of loopback that nobody else is given meanwhile: the kernel deals out none that is bound. A server that
    sets SO_REUSEADDR, as Python's and SGLang's do, may listen there."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield int(held.getsockname()[1])
