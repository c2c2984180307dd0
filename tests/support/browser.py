"""A page in a real browser: Chromium without a window, spoken to through the pipe of its DevTools protocol."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome", "chrome-headless-shell", "headless_shell")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-dev-shm-usage", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--remote-debugging-pipe"),
)
DEADLINE_S = 60.0


def found() -> str | None:
    """The browser that RLCTL_TEST_BROWSER names, or one on PATH."""
    return os.environ.get("RLCTL_TEST_BROWSER") or next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One tab. `complaints`: what pages wrote to the console, errors of scripts and policies among it."""

    def __init__(self, program: str) -> None:
        self.complaints: list[str] = []
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        to_read, self._to = os.pipe()
        self._from, to_write = os.pipe()
        command = [program, *FLAGS, f"--user-data-dir={self._profile.name}", "about:blank"]
        # The browser reads its descriptor 3 and writes to 4.
        shell = f'exec 3<&{to_read} 4>&{to_write}; exec "$@"'
        self._process = subprocess.Popen(
            ["bash", "-c", shell, "browser", *command],
            pass_fds=(to_read, to_write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(to_read)
        os.close(to_write)
        self._buffer, self._number, self._session = b"", 0, ""
        self._events: list[dict[str, Any]] = []
        pages = [one for one in self.ask("Target.getTargets")["targetInfos"] if one["type"] == "page"]
        target = pages[0]["targetId"] if pages else self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.ask(f"{domain}.enable")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            os.killpg(self._process.pid, 9)
        self._process.wait()
        os.close(self._to)
        os.close(self._from)
        self._profile.cleanup()

    def ask(self, method: str, **params: Any) -> dict[str, Any]:
        """The result of one command."""
        self._number += 1
        own = {"sessionId": self._session} if self._session else {}
        os.write(self._to, json.dumps({"id": self._number, "method": method, "params": params, **own}).encode() + b"\0")
        for message in self._messages():
            if message.get("id") == self._number:
                assert "error" not in message, f"{method}: {message['error']}"
                result: dict[str, Any] = message["result"]
                return result
        raise AssertionError("unreachable")

    def open(self, page: Path) -> float:
        """Seconds from the start of the navigation until the page is loaded, its scripts have run and it is painted."""
        self._events.clear()
        self.ask("Page.navigate", url=page.resolve().as_uri())
        if not any(event["method"] == "Page.loadEventFired" for event in self._events):
            next(event for event in self._messages() if event.get("method") == "Page.loadEventFired")
        painted = "new Promise(done => requestAnimationFrame(() => setTimeout(() => done(performance.now()))))"
        return float(self.run(painted)) / 1e3

    def run(self, script: str) -> Any:
        """What an expression is, in the page."""
        told = self.ask("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in told, told["exceptionDetails"]
        return told["result"].get("value")

    def look(self, width: int, height: int, *, dark: bool = False) -> None:
        """The size of the window, and the colours that its owner prefers."""
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.ask("Emulation.setEmulatedMedia", features=[scheme])

    def move(self, kind: str, x: float, y: float, **more: Any) -> None:
        """A mouse event: mouseMoved, mousePressed, mouseReleased."""
        self.ask("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def picture(self, path: Path, *, whole: bool = False) -> None:
        told = self.ask("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(told["data"]))

    def _messages(self) -> Iterator[dict[str, Any]]:
        """What the browser says; kept where it is an event."""
        deadline = time.monotonic() + DEADLINE_S
        while True:
            while b"\0" in self._buffer:
                line, self._buffer = self._buffer.split(b"\0", 1)
                message = json.loads(line)
                if "method" in message:
                    self._keep(message)
                yield message
            left_s = max(0.0, deadline - time.monotonic())
            assert select.select([self._from], [], [], left_s)[0], "the browser is silent"
            piece = os.read(self._from, 1 << 20)
            assert piece, f"the browser has ended ({self._process.poll()})"
            self._buffer += piece

    def _keep(self, event: dict[str, Any]) -> None:
        self._events.append(event)
        params = event["params"]
        if event["method"] == "Runtime.consoleAPICalled":
            self.complaints.append(" ".join(str(one.get("value")) for one in params["args"]))
        elif event["method"] == "Runtime.exceptionThrown":
            self.complaints.append(str(params["exceptionDetails"]))
        elif event["method"] == "Log.entryAdded":
            self.complaints.append(str(params["entry"]["text"]))
