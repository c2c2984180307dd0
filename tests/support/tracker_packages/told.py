"""Where the stand-ins write down what they are told."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any


def tell(call: str, **what: Any) -> None:
    print(f"* {call}")  # as Trackio and MLflow do
    if os.environ.get("TRACKERS_FAIL_AT") == call:
        raise ConnectionError(os.environ.get("TRACKERS_FAIL_WITH") or f"no route to the server of {call}")
    if os.environ.get("TRACKERS_STOPPED_AT") == call:  # a person presses Ctrl-C while no answer comes
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)
    with Path(os.environ["TRACKERS_TOLD"]).open("a") as file:
        file.write(json.dumps({"call": call, **what}, default=vars) + "\n")


def told(path: Path, call: str) -> list[dict[str, Any]]:
    """What was said in all calls of this name."""
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [{key: value for key, value in line.items() if key != "call"} for line in lines if line["call"] == call]
