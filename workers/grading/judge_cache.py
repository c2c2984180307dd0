"""Keep replies of judges on disk: a line of JSON for each request, found by the hash of all that the request says.

Several processes may write to one file: a line is appended under a lock, behind a line break where the last writer was
killed in the midst of its own. What is no whole record is skipped. Only where each line lies is kept in memory.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import threading
from dataclasses import dataclass
from pathlib import Path

from specs.errors import RewardError


@dataclass(frozen=True)
class Reply:
    """Hold what a judge wrote, and how many tokens that took."""

    text: str
    prompt_tokens: int
    completion_tokens: int


def request_key(url: str, content: bytes) -> str:
    """Return the hash of a request: its address and every byte that is sent, without the API key."""
    return hashlib.sha256(url.encode() + b"\0" + content).hexdigest()


class JudgeCache:
    """One file of replies, for many threads. `path` None: nothing is kept."""

    def __init__(self, path: Path | None) -> None:
        """Raises RewardError where the file cannot be opened."""
        self.path, self._lock = path, threading.Lock()
        self._places: dict[bytes, tuple[int, int]] = {}  # of a key: where its line begins, and its length
        self._file = -1
        if path is None:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        except OSError as error:
            hint = "name another file in the term's cache_file, or set cache = false"
            raise RewardError(f"{path}: the judge's replies cannot be kept: {error.strerror}", hint=hint) from None
        self._index(path)

    def _index(self, path: Path) -> None:
        at = 0
        with path.open("rb") as file:
            for line in file:
                if key := _key(line):
                    self._places[key] = at, len(line)
                at += len(line)

    def get(self, key: str) -> Reply | None:
        place = self._places.get(bytes.fromhex(key))
        if place is None:
            return None
        try:
            record = json.loads(os.pread(self._file, place[1], place[0]))
            return Reply(str(record["reply"]), int(record["tokens"][0]), int(record["tokens"][1]))
        except (OSError, ValueError, KeyError, TypeError, IndexError, RecursionError):
            return None  # the file was changed beneath: the judge is asked again

    def put(self, key: str, reply: Reply) -> None:
        """Append it. On a full disk the reply is not kept, and the run goes on."""
        if self.path is None:
            return
        tokens = [reply.prompt_tokens, reply.completion_tokens]
        line = json.dumps({"key": key, "reply": reply.text, "tokens": tokens}).encode() + b"\n"
        with self._lock:
            if self._file < 0:
                return
            fcntl.flock(self._file, fcntl.LOCK_EX)
            try:
                end = os.fstat(self._file).st_size
                whole = line if end == 0 or os.pread(self._file, 1, end - 1) == b"\n" else b"\n" + line
                if os.write(self._file, whole) == len(whole):
                    self._places[bytes.fromhex(key)] = end + len(whole) - len(line), len(line)
            except OSError as error:
                print(f"{self.path}: {error.strerror}; a reply of the judge is not kept", flush=True)
            finally:
                fcntl.flock(self._file, fcntl.LOCK_UN)

    def close(self) -> None:
        with self._lock:
            if self._file >= 0:
                os.close(self._file)
                self._file, self._places = -1, {}


def _key(line: bytes) -> bytes:
    """Return the key of a whole record; empty for anything else."""
    if not line.endswith(b"\n"):
        return b""
    try:
        record = json.loads(line)
        return bytes.fromhex(record["key"]) if isinstance(record.get("reply"), str) else b""
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return b""
