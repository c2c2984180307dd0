"""Mark what a run reads besides its spec and the weights of its models: data, users' code, tokenizers.

Their content belongs to the run. Each start hashes every file whole and records it in the run directory and in every
checkpoint; a resume with other content is refused, or accepted by a flag, which is recorded too. There is no short cut
by size and time of change: both stay the same where a file is restored, copied with its times or written twice within
a file system's tick, and hashing costs little beside tokenising what was read. xxh3 finds changes, not forgers.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from pydantic import BaseModel

from rlctl.models.hub import hub_snapshot
from rlctl.models.paths import BUILTIN_FOLDER, resolve_model
from rlctl.models.tokenizer_files import TOKENIZER_FILES
from rlctl.preflight.reward_files import scorer_code
from rlctl.run.checkpoints import SavedMark
from specs.errors import UsageError
from specs.schema.environment import AgentCommand
from specs.schema.recipes import RowsSpec, sampling_of
from specs.schema.sections import is_hub_data
from specs.schema.spec import Spec
from workers.grading.reward_sources import reward_sources
from workers.saved_files import FileMark, mark

# Key of the spec → file (relative to the spec where it lies below it) → what is in it; of a hub data set its revision.
Inputs = Mapping[str, Mapping[str, FileMark]]


class _Revision(BaseModel):
    revision: str


Recorded = dict[str, dict[str, SavedMark | _Revision]]  # inputs as they come back from a file

# What makes prompts of rows, and ends completions, besides the vocabulary.
_TOKENIZER = (
    *("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "merges.txt"),
    *("chat_template.jinja", "chat_template.json", "generation_config.json"),
    "additional_chat_templates/tool_use.jinja",
)


def inputs_of(spec: Spec, spec_dir: Path, known: Inputs | None = None) -> Inputs:
    """Read all of them but the `known`. What is not on this host (yet) is left out. Raises UsageError for a file that
    cannot be read."""
    marks: dict[Path, FileMark] = {}  # one file may be read for several keys
    found: dict[str, Mapping[str, FileMark]] = {**(known or {})}
    for key, folder, paths in _files(spec, spec_dir):
        if key not in found and paths:
            try:
                marks |= {path: mark(path) for path in paths if path not in marks}
            except OSError as error:
                problem = f"{error.filename or paths[0]} cannot be read: {error.strerror}"
                raise UsageError(problem, hint=f"{key} needs it: make it readable") from None
            found[key] = {_name(path, folder): marks[path] for path in paths}
    for key, source in _data(spec):
        snapshot = hub_snapshot(source.partition(":")[0], "datasets") if is_hub_data(source) else None
        if snapshot is not None:
            found[key] = {source: {"revision": snapshot.name}}
    return found


def _files(spec: Spec, spec_dir: Path) -> Iterator[tuple[str, Path, list[Path]]]:
    """Yield key, folder that names are relative to, and files."""
    for key, source in _data(spec):
        file = spec_dir / Path(source).expanduser()
        if file.is_file():
            yield key, spec_dir, [file]
    for key, path in {**scorer_code(spec), **spec.own_functions}.items():
        file = spec_dir / Path(path.rpartition(":")[0]).expanduser()
        yield key, spec_dir, [source for source in reward_sources(file) if source.is_file()]
    for key, environment in sampling.environments_by_key.items() if (sampling := sampling_of(spec)) else ():
        if environment.command:
            yield f"{key}.agent", spec_dir, _files_of_program(environment.command, spec_dir)
    model = resolve_model(spec.model.path, spec_dir)
    folder = model if isinstance(model, Path) else hub_snapshot(model)
    if folder is not None and BUILTIN_FOLDER not in folder.parents:  # those come with rlctl
        names = [folder / name for name in (*TOKENIZER_FILES, *_TOKENIZER)]
        own = sorted(folder.glob("*.py")) if spec.model.trust_remote_code else []
        yield "model.path", folder, [path for path in (*names, *own) if path.is_file()]


def _data(spec: Spec) -> list[tuple[str, str]]:
    named = {f"{one.key}.data": one.data for one in spec.evaluations}
    if isinstance(spec, RowsSpec) and spec.eval is not None:
        named["eval.data"] = spec.eval.data
    return [*spec.data.named.items(), *((key, source) for key, source in named.items() if source)]


def _files_of_program(agent: AgentCommand, spec_dir: Path) -> list[Path]:
    """Return what an agent is called with and starts from, but no folder that holds the spec, and so its runs."""
    named = [Path(word.replace("{spec_dir}", str(spec_dir))) for word in agent.command if "{spec_dir}" in word]
    named += [spec_dir / agent.cwd] if agent.cwd != "fresh" else []
    apart = [path for path in named if not spec_dir.resolve().is_relative_to(path.resolve())]
    return [file for path in apart for file in (path, *sorted(path.rglob("*"))) if file.is_file()]


def _name(path: Path, folder: Path) -> str:
    path, folder = Path(os.path.abspath(path)), Path(os.path.abspath(folder))
    return str(path.relative_to(folder) if folder in path.parents else path)


# ── two attempts ──────────────────────────────────────────────────────────────────────────────────


def changes(before: Inputs, after: Inputs) -> list[str]:
    """List what is not as it was, as lines `key: file …`. Another source under a key is the spec's change, not a
    file's."""
    found = []
    for key in [key for key in before if key in after]:
        old, new = before[key], after[key]
        if not old.keys() & new.keys():
            continue
        for name in sorted(old.keys() | new.keys()):
            if old.get(name) != new.get(name):
                found.append(f"{key}: {name} {_change(old.get(name), new.get(name))}")
    return found


def _change(old: FileMark | None, new: FileMark | None) -> str:
    if old is None or new is None:
        return "is new" if old is None else "is gone, or no longer read"
    if "revision" in old or "revision" in new:
        revisions = (str(marked.get("revision", "a file"))[:12] for marked in (old, new))
        return f"is of another revision ({' → '.join(revisions)})"
    if old["bytes"] == new["bytes"]:
        return f"has other content ({old['bytes']:,} bytes as before)"
    return f"has other content ({old['bytes']:,} → {new['bytes']:,} bytes)"
