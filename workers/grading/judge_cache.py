"""Keep replies of judges in a SQLite file, by the hash of all that a request says. Several processes may share one."""

from __future__ import annotations

import hashlib
import sqlite3
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from specs.errors import RewardError


@dataclass(frozen=True)
class Reply:
    """Hold what a judge wrote, and how many tokens that took. `cut_off`: at its limit of tokens."""

    text: str
    prompt_tokens: int
    completion_tokens: int
    cut_off: bool = False


def request_key(url: str, content: bytes) -> str:
    """Return the hash of a request: its address and every byte that is sent, without the API key."""
    return hashlib.sha256(url.encode() + b"\0" + content).hexdigest()


class JudgeCache:
    """One file of replies."""

    def __init__(self, path: Path) -> None:
        """Raises RewardError where the file cannot be opened."""
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = sqlite3.connect(path, timeout=30.0, isolation_level=None, check_same_thread=False)
            self._file.execute("PRAGMA synchronous = OFF")  # a lost reply costs a request: no wait for the disk
            columns = "key TEXT PRIMARY KEY, reply BLOB, prompt_tokens INTEGER, completion_tokens INTEGER"
            self._file.execute(f"CREATE TABLE IF NOT EXISTS replies ({columns})")
            with suppress(sqlite3.OperationalError):  # it is there
                self._file.execute("ALTER TABLE replies ADD COLUMN cut_off INTEGER DEFAULT 0")
        except (OSError, sqlite3.Error) as error:
            hint = "name another file in the term's cache_file, or set cache = false"
            raise RewardError(f"{path}: the judge's replies cannot be kept: {error}", hint=hint) from None

    def get(self, key: str) -> Reply | None:
        """Return the reply to a request; None: it is not known, or cannot be read."""
        query = "SELECT reply, prompt_tokens, completion_tokens, cut_off FROM replies WHERE key = ?"
        try:
            found = self._file.execute(query, [key]).fetchone()
        except sqlite3.Error:
            return None
        if found is None:
            return None
        reply, read, written, cut_off = found
        return Reply(reply.decode("utf-8", "surrogatepass"), read, written, bool(cut_off))

    def put(self, key: str, reply: Reply) -> None:
        """Keep it. On a full disk it is not kept, and the run continues."""
        text = reply.text.encode("utf-8", "surrogatepass")
        values = [key, text, reply.prompt_tokens, reply.completion_tokens, reply.cut_off]
        try:
            self._file.execute("INSERT OR REPLACE INTO replies VALUES (?, ?, ?, ?, ?)", values)
        except sqlite3.Error as error:
            print(f"{self.path}: {error}; a reply of the judge is not kept", flush=True)

    def close(self) -> None:
        self._file.close()
