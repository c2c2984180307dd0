"""The Hugging Face hub: what of it is on this machine, and the small files of a model that is not, read into memory.

The hub is asked over plain HTTP (`ENDPOINT/ID/resolve/main/FILE`), all files at once, within seconds whatever the
network does. Nothing is written to disk; `rlctl train` downloads through transformers.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from urllib.parse import quote

from rlctl.models.hub_http import TOO_LARGE, HubAnswer, HubRequest

TOTAL_S = 4.0  # for all files of a model together
BRING_S = 60.0
_MIB = 2**20
# File → bytes that are read at most; of a larger one, and at 0, it is only known that it is there.
LIMITS = {
    "config.json": 4 * _MIB,
    "generation_config.json": _MIB,
    "model.safetensors": 0,
    "model.safetensors.index.json": 32 * _MIB,
    "tokenizer_config.json": 16 * _MIB,
    "tokenizer.json": 4 * _MIB,
    "vocab.json": 4 * _MIB,
    "added_tokens.json": _MIB,
    "tokenizer.model": 0,
    "spiece.model": 0,
    "vocab.txt": 0,
    "tekken.json": 0,
    "chat_template.jinja": _MIB,
    "chat_template.json": _MIB,
}
_OF_A_TOKENIZER = ("merges.txt", "special_tokens_map.json")  # without which one cannot be built
TOKENS = ("tokenizer.json", "vocab.json")  # files that say which id is which token


# ── on this machine ───────────────────────────────────────────────────────────────────────────────


def hub_snapshot(hub_id: str, kind: str = "models") -> Path | None:
    """The folder in Hugging Face's cache that holds the main revision of a repository, when it is there."""
    home = Path(os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface"))
    cache = Path(os.environ.get("HF_HUB_CACHE", home / "hub")) / f"{kind}--{hub_id.replace('/', '--')}"
    try:
        revision = (cache / "refs" / "main").read_text(encoding="utf-8").strip()
    except OSError:
        return None
    snapshot = cache / "snapshots" / revision
    return snapshot if snapshot.is_dir() else None


def offline() -> bool:
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


# ── on the hub ────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class HubFile:
    """What is known of a file on the hub. `there` None: no answer in time."""

    name: str
    there: bool | None = None
    content: bytes | None = None  # None: not read

    def is_file(self) -> bool:
        return bool(self.there)

    def read_bytes(self) -> bytes:
        """Raises OSError where the file is not there, or was not read."""
        if self.content is None:
            raise OSError(f"{self.name} was not read from the hub")
        return self.content

    def read_text(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        """Raises OSError as `read_bytes`, ValueError where it is no such text."""
        return self.read_bytes().decode(encoding, errors)


@dataclass(frozen=True, eq=False)
class HubFolder:
    """A model's files by name, to be read as those of a folder."""

    hub_id: str
    files: Mapping[str, HubFile]

    def __truediv__(self, name: str) -> HubFile:
        return self.files.get(name, HubFile(name))

    def __str__(self) -> str:
        return f"{self.hub_id} on the hub"


Folder = Path | HubFolder  # where the files of a model are read


@dataclass(frozen=True)
class NotGiven:
    """Why a model's files cannot be read. `refused`: the hub answered, and will refuse a run too."""

    why: str
    hint: str
    refused: bool


def unread(folder: Folder, names: Iterable[str]) -> bool:
    """Whether one of the files exists, or may exist, and was not read. Never true of a folder on this machine."""
    if isinstance(folder, Path):
        return False
    return any((file := folder / name).there is None or (file.there and file.content is None) for name in names)


def look_up(hub_id: str) -> HubFolder | NotGiven:
    """The model's files, or why they cannot be read. Asks once per process, for at most `TOTAL_S` seconds."""
    return _hub(endpoint(), _token()).look_up(hub_id)


def with_tokens(folder: HubFolder) -> HubFolder:
    """The folder with its tokenizer read too, which is too large for `look_up`; unchanged if that takes too long."""
    if not unread(folder, TOKENS[:1]):
        return folder
    found = _hub(endpoint(), _token()).files(folder.hub_id, dict.fromkeys(TOKENS, 64 * _MIB), TOTAL_S)
    read = {name: HubFile(name, _there(got), got.content) for name, got in found.items()}
    return HubFolder(folder.hub_id, {**folder.files, **read})


def bring(hub_id: str, folder: Path) -> bool:
    """Download into an empty folder what a model without weights and its tokenizer are built from. False if the hub
    does not deliver it within `BRING_S` seconds."""
    limits = dict.fromkeys([*LIMITS, *_OF_A_TOKENIZER], 64 * _MIB) | {"model.safetensors.index.json": 0}
    limits.pop("model.safetensors")
    found = _hub(endpoint(), _token()).files(hub_id, limits, BRING_S)
    for name, got in found.items():
        if got.content is not None:
            (folder / name).write_bytes(got.content)
    return (folder / "config.json").is_file()


def endpoint() -> str:
    return (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")


def _token() -> str:
    """The token, found as huggingface_hub finds it."""
    if os.environ.get("HF_HUB_DISABLE_IMPLICIT_TOKEN", "").upper() in ("1", "ON", "YES", "TRUE"):
        return ""
    if given := os.environ.get("HF_TOKEN", "").strip():
        return given
    home = Path(os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface"))
    try:
        return Path(os.environ.get("HF_TOKEN_PATH", home / "token")).read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return ""


@cache
def _hub(endpoint: str, token: str) -> _Hub:
    return _Hub(endpoint, token)


class _Hub:
    """An endpoint. Once it has not answered in time it is not asked again."""

    def __init__(self, endpoint: str, token: str) -> None:
        self.endpoint, self.token = endpoint, token
        self._known: dict[str, HubFolder | NotGiven] = {}
        self._silent: NotGiven | None = None

    def look_up(self, hub_id: str) -> HubFolder | NotGiven:
        if hub_id not in self._known:
            self._known[hub_id] = self._silent or self._look_up(hub_id)
        return self._known[hub_id]

    def _look_up(self, hub_id: str) -> HubFolder | NotGiven:
        found = self.files(hub_id, LIMITS, TOTAL_S)
        config = found.get("config.json", HubAnswer("config.json", 0, said=f"no answer within {TOTAL_S:g} s"))
        if config.code == 200:
            return HubFolder(hub_id, {name: HubFile(name, _there(got), got.content) for name, got in found.items()})
        refusal = self._refusal(hub_id, config)
        if refusal is not None:
            return refusal
        why = config.said if not config.code else f"it answered {config.code}"
        hint = "check the name, and that this machine reaches the hub"
        self._silent = NotGiven(f"{self.endpoint} could not be reached: {why}", hint, refused=False)
        return self._silent

    def files(self, hub_id: str, limits: Mapping[str, int], seconds: float) -> dict[str, HubAnswer]:
        """File → the answer; those without one in time are left out, and all the others once config.json is refused."""
        deadline = time.monotonic() + seconds
        answers: queue.SimpleQueue[HubAnswer] = queue.SimpleQueue()
        HubRequest.prepare()
        for name, limit in limits.items():
            ask = HubRequest(f"{self.endpoint}/{quote(hub_id)}/resolve/main/{name}", name, limit, self.token, deadline)
            threading.Thread(target=ask.put_answer, args=(answers,), daemon=True).start()
        found: dict[str, HubAnswer] = {}
        while len(found) < len(limits):
            try:
                got = answers.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                break
            found[got.name] = got
            if got.name == "config.json" and got.code != 200:
                break
        return found

    def _refusal(self, hub_id: str, got: HubAnswer) -> NotGiven | None:
        """An error that the user must fix; None for errors that may be temporary."""
        page = f"{self.endpoint}/{hub_id}"
        gated = got.said == "GatedRepo" or got.code == 403
        if gated:
            hint = f"accept its conditions at {page}" + ("" if self.token else ", and set HF_TOKEN")
            return NotGiven("the model is gated, and you have no access to it", hint, refused=True)
        if got.said == "EntryNotFound":
            hint = "name a repository of a transformers model"
            return NotGiven("the repository exists on the hub but has no config.json", hint, refused=True)
        if got.code == 404:
            hint = "check the name; a private model needs HF_TOKEN" if not self.token else "check the name"
            return NotGiven("no such folder, and no such model on the hub", hint, refused=True)
        if got.code == 401:  # what the hub answers for all that it does not want to tell
            hint = "check the name; if it is private or gated, set HF_TOKEN"
            if self.token:
                hint = "check the name, and that the token in HF_TOKEN is valid and may read it"
            return NotGiven("no such folder, and no such model on the hub that you may read", hint, refused=True)
        if got.code == TOO_LARGE:
            most = LIMITS["config.json"] // _MIB
            return NotGiven(f"its config.json on the hub is larger than {most} MiB", "check the name", refused=True)
        return None


def _there(got: HubAnswer) -> bool | None:
    return True if got.code in (200, TOO_LARGE) else False if got.code == 404 else None
