"""Shells on a node of a Ray cluster: an actor that starts them and passes their text, which is all that Ray carries.

Standard library only: it runs in the interpreter of the cluster, which need not have what rlctl needs.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from contextlib import suppress

_CHUNK = 65536


class RayNode:
    """A node's part of a run. Ray ends it with the driver, and each shell's input with it."""

    def __init__(self) -> None:
        self._shells: dict[str, asyncio.Task[asyncio.subprocess.Process]] = {}

    async def gpus(self) -> str:
        """Return the GPUs that Ray has given to it, as CUDA_VISIBLE_DEVICES names them."""
        return os.environ.get("CUDA_VISIBLE_DEVICES", "")

    async def open(self, key: str, devices: str) -> None:
        """Start a shell, which sees `devices`: numbers, counted among this node's part, with commas between."""
        given = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        seen = ",".join(given[int(number)] for number in devices.split(",") if number)
        start = asyncio.create_subprocess_exec(
            "sh",
            env={**os.environ, "CUDA_VISIBLE_DEVICES": seen},
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
        self._shells[key] = asyncio.ensure_future(start)

    async def write(self, key: str, text: str) -> None:
        shell = await self._shells[key]
        assert shell.stdin is not None
        with suppress(OSError):
            shell.stdin.write(text.encode())

    async def hang_up(self, key: str) -> None:
        shell = await self._shells[key]
        assert shell.stdin is not None
        shell.stdin.close()

    async def kill(self, key: str) -> None:
        shell = await self._shells[key]
        with suppress(ProcessLookupError):
            os.killpg(shell.pid, signal.SIGKILL)

    async def read(self, key: str) -> str:
        """Wait for output, or for its end; return JSON with `text`, and `code` after the end of both."""
        shell = await self._shells[key]
        assert shell.stdout is not None
        chunk = await shell.stdout.read(_CHUNK)
        code = None if chunk else await shell.wait()
        return json.dumps({"text": chunk.decode(errors="replace"), "code": code})
