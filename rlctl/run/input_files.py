"""What a run reads besides its spec and the weights of its models: data, reward modules, tokenizers.

Their content belongs to the run. Each start hashes every file whole and records it in the run directory and in every
checkpoint; a resume with other content is refused, or accepted by a flag, which is recorded too. There is no short cut
by size and time of change: both stay the same where a file is restored, copied with its times or written twice within
a file system's tick, and hashing costs little beside tokenising what was read. xxh3 finds changes, not forgers.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from rlctl.models.hub import hub_snapshot
from rlctl.models.paths import BUILTIN_FOLDER, resolve_model
from rlctl.models.tokenizer_files import TOKENIZER_FILES
from specs.errors import UsageError
from specs.schema.rewards import Function
from specs.schema.sections import is_hub_data
from specs.schema.spec import Spec
from workers.grading.reward_sources import reward_sources
from workers.saved_files import FileMark, mark

# Key of the spec → file (relative to the spec where it lies below it) → what is in it; of a hub data set its revision.
Inputs = Mapping[str, Mapping[str, FileMark]]
Seen = Callable[[int], None]  # is told of bytes that were read

# What makes prompts of rows, and ends completions, besides the vocabulary.
_TOKENIZER = (
    *("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "merges.txt"),
    *("chat_template.jinja", "chat_template.json", "generation_config.json"),
)
TOLD_AFTER_S = 1.0


def inputs_of(spec: Spec, spec_dir: Path, seen: Seen | None = None, known: Inputs | None = None) -> Inputs:
    """Read all of them but the `known`. What is not on this host (yet) is left out. Raises UsageError for a file that
    cannot be read."""
    marks: dict[Path, FileMark] = {}  # one file may be read for several keys
    found: dict[str, Mapping[str, FileMark]] = {**(known or {})}
    for key, folder, paths in _files(spec, spec_dir):
        if key not in found and paths:
            marks |= {path: _mark(key, path, seen) for path in paths if path not in marks}
            found[key] = {_name(path, folder): marks[path] for path in paths}
    for key, source in _data(spec):
        snapshot = hub_snapshot(source.partition(":")[0], "datasets") if is_hub_data(source) else None
        if snapshot is not None:
            found[key] = {source: {"revision": snapshot.name}}
    return found


def _mark(key: str, path: Path, seen: Seen | None) -> FileMark:
    try:
        return mark(path, seen)
    except OSError as error:
        hint = f"{key} needs it: make it readable"
        raise UsageError(f"{path} cannot be read: {error.strerror}", hint=hint) from None


def size_of(spec: Spec, spec_dir: Path) -> int:
    """Bytes to read."""
    return sum(path.stat().st_size for path in {path for _, _, paths in _files(spec, spec_dir) for path in paths})


def _files(spec: Spec, spec_dir: Path) -> Iterator[tuple[str, Path, list[Path]]]:
    """(key, folder that names are relative to, files)."""
    for key, source in _data(spec):
        file = spec_dir / Path(source).expanduser()
        if file.is_file():
            yield key, spec_dir, [file]
    for index, term in enumerate(spec.reward.terms):
        if isinstance(term, Function):
            file = spec_dir / Path(term.path.rpartition(":")[0]).expanduser()
            yield f"reward.terms.{index}.path", spec_dir, [path for path in reward_sources(file) if path.is_file()]
    for key, path in spec.algorithm.own_functions.items():
        file = spec_dir / Path(path.rpartition(":")[0]).expanduser()
        yield f"algorithm.{key}", spec_dir, [source for source in reward_sources(file) if source.is_file()]
    model = resolve_model(spec.model.path, spec_dir)
    folder = model if isinstance(model, Path) else hub_snapshot(model)
    if folder is not None and BUILTIN_FOLDER not in folder.parents:  # those come with rlctl
        names = [folder / name for name in (*TOKENIZER_FILES, *_TOKENIZER)]
        code = sorted(folder.glob("*.py")) if spec.model.trust_remote_code else []
        yield "model.path", folder, [path for path in (*names, *code) if path.is_file()]


def _data(spec: Spec) -> list[tuple[str, str]]:
    sources = [("data.train", spec.data.train)]
    return [*sources, *((f"{one.key}.data", one.data) for one in spec.evaluations if one.data)]


def _name(path: Path, folder: Path) -> str:
    path, folder = Path(os.path.abspath(path)), Path(os.path.abspath(folder))
    return str(path.relative_to(folder) if folder in path.parents else path)


# ── two attempts ──────────────────────────────────────────────────────────────────────────────────


def changes(before: Inputs, after: Inputs) -> list[str]:
    """What is not as it was, as lines `key: file …`. Another source under a key is the spec's change, not a file's."""
    found = []
    for key in [key for key in before if key in after]:
        old, new = before[key], after[key]
        if not old.keys() & new.keys():
            continue
        for name in sorted(old.keys() | new.keys()):
            if old.get(name) != new.get(name):
                found.append(f"{key}: {name} {_words(old.get(name), new.get(name))}")
    return found


def _words(old: FileMark | None, new: FileMark | None) -> str:
    if old is None:
        return "is new"
    if new is None:
        return "is gone, or no longer read"
    if "revision" in old or "revision" in new:
        revisions = (str(one.get("revision", "a file"))[:12] for one in (old, new))
        return f"is of another revision ({' → '.join(revisions)})"
    if old["bytes"] == new["bytes"]:
        return f"has other content ({old['bytes']:,} bytes as before)"
    return f"has other content ({old['bytes']:,} → {new['bytes']:,} bytes)"


def parsed(content: Mapping[str, Any]) -> Inputs:
    """What a record in the run directory says. Raises ValueError where it is of another shape."""
    files = content.get("files")
    keys = files.values() if isinstance(files, dict) else [None]
    marks = [one for key in keys for one in (key.values() if isinstance(key, dict) else [None])]
    if not all(isinstance(one, dict) and _is_mark(one) for one in marks):
        raise ValueError("is of another shape: it has no files with their marks")
    return cast(Inputs, files)


def _is_mark(one: Mapping[str, object]) -> bool:
    kinds = {name: type(value) for name, value in one.items()}
    return kinds in ({"bytes": int, "xxh3": str}, {"revision": str})


# ── for the person ────────────────────────────────────────────────────────────────────────────────


@contextmanager
def told_progress(total_bytes: int) -> Iterator[Seen]:
    """How far the reading is, on standard error, when it takes more than a second."""
    from rich.text import Text

    from rlctl.show.screen import Screen

    screen, started, done = Screen(stderr=True), time.monotonic(), 0
    status = screen.status("")
    told = False

    def seen(nbytes: int) -> None:
        nonlocal done, told
        done += nbytes
        if not told and time.monotonic() - started > TOLD_AFTER_S:
            told = True
            status.start()
            if not screen.is_terminal:
                screen.print(f"{_what(total_bytes)} …")
        if told:
            status.update(Text(f"{_what(total_bytes)}: {done / max(total_bytes, 1):.0%}"))

    try:
        yield seen
    finally:
        status.stop()


def _what(total_bytes: int) -> str:
    return f"hashing {total_bytes / 1e9:.1f} GB of data and reward files"
