"""What of the Hugging Face hub is on this machine already, and whether the rest may be asked for."""

from __future__ import annotations

import os
from pathlib import Path


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
