"""Check that the data that a spec names exists, parses and fits: its first rows become prompts as in a run."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path

from rlctl.models.hub import hub_snapshot, loaded_before, offline
from rlctl.models.paths import looks_like_hub_id, model_folder, not_found
from rlctl.models.tokenizer_files import ChatTemplate, chat_template_of, load_tokenizer
from rlctl.preflight.interpreters import own_path
from specs.builtin_tasks import BUILTIN_TASKS, GYM_PREFIX, PREFIX, GymSource
from specs.errors import DataError, NotHere, Problem
from specs.load.keys import closest
from specs.schema.recipes import RlSpec, RowsSpec
from specs.schema.roles import DATA
from specs.schema.rows import RowsSection
from specs.schema.sections import DATA_SUFFIXES, DataSection, is_hub_data
from specs.schema.spec import Spec
from specs.wire.finding import Finding
from specs.wire.role_config import DataConfig
from workers.chat.chat_renderer import ChatRenderer
from workers.data.first_prompts import all_held_out, first_findings, held_out_of_training
from workers.data.first_rows import FirstRows, first_rows, row_findings
from workers.data.gym_rows import make_with
from workers.data.row_source import read_rows
from workers.data.tokenizer_file import TokenizerFile

_ONE_FILE = "name one file; rows of several can be joined"


def check_data(spec: Spec, spec_dir: Path) -> tuple[list[Problem], list[Problem]]:
    """Return errors and warnings about the data that a spec names."""
    sources = [*spec.data.named.items()]
    sources += [(f"{one.key}.data", one.data) for one in spec.evaluations if one.data]
    errors = [problem for key, source in sources for problem in _source(key, source, spec_dir)]
    warnings = [] if errors else [problem for key, source in sources for problem in _to_download(key, source)]
    if errors:
        return errors, warnings
    section = spec.role(DATA)
    make_with(own_path(section, spec_dir) or sys.executable, section.env)
    found = _first_rows(spec, spec_dir)
    if not any(finding.refuses for finding in found):
        found += _held_out(_config(spec, spec_dir), spec.data)
    for finding in found:
        problem = Problem(finding.key, finding.message, finding.hint, finding.value)
        (errors if finding.refuses else warnings).append(problem)
    return errors, warnings


# ── sources ───────────────────────────────────────────────────────────────────────────────────────


def _source(key: str, source: str, spec_dir: Path) -> Iterator[Problem]:
    """Yield why a source cannot be opened. What is in a file, the reader of rows says."""
    file, hub = spec_dir / Path(source).expanduser(), is_hub_data(source)
    if (name := source.removeprefix(PREFIX)) != source:
        if name not in BUILTIN_TASKS:
            near = closest(name, list(BUILTIN_TASKS)) or next(iter(BUILTIN_TASKS))
            message = f"no such built-in task; known: {', '.join(BUILTIN_TASKS)}"
            yield Problem(key, message, f'did you mean "{PREFIX}{near}"?')
    elif source.startswith(GYM_PREFIX):  # its package knows more
        return
    elif "://" in source:
        pattern = r"(?:https?://huggingface\.co/datasets/|hf://(?:datasets/)?)([\w.-]+/[\w.-]+).*"
        found = re.fullmatch(pattern, source)
        hint = f'write "{found[1]}"' if found else "download it, and name the file"
        yield Problem(key, "a URL, not a file or a hub id", hint)
    elif file.is_dir():
        yield Problem(key, "a folder, not a file", _ONE_FILE)
    elif file.suffix not in DATA_SUFFIXES and (file.exists() or not hub):
        hint = "write one JSON object per line into a file that ends in .jsonl, and decompress what is compressed"
        yield Problem(key, f"data files end in {' or '.join(DATA_SUFFIXES)}", hint)
    elif hub:
        yield from _hub(key, source, file, spec_dir)
    elif not file.is_file():
        yield not_found(key, "file", file, source, _similar_file(file))


def _hub(key: str, source: str, file: Path, spec_dir: Path) -> Iterator[Problem]:
    hub_id = source.partition(":")[0]
    if not looks_like_hub_id(hub_id, spec_dir):
        yield not_found(key, "file", file, source)
    elif offline() and not loaded_before(hub_id):
        load = f"import datasets; datasets.load_dataset('{hub_id}')"
        hint = f'check the name; with a network, run `python -c "{load}"` once'
        yield NotHere(key, "never loaded by `datasets` on this machine, and HF_HUB_OFFLINE is set", hint)


def _to_download(key: str, source: str) -> Iterator[Problem]:
    """Name a hub id of which nothing is known before the run starts."""
    hub_id = source.partition(":")[0]
    if is_hub_data(source) and hub_snapshot(hub_id, "datasets") is None:
        builtin = f'did you mean "{PREFIX}{hub_id}"?' if hub_id in BUILTIN_TASKS else ""
        hint = builtin or "check the name, and that this machine reaches the hub"
        yield NotHere(key, "will be downloaded from the hub when the run starts", hint)


def _similar_file(file: Path) -> str:
    if "*" in file.name:
        return _ONE_FILE
    there = file.parent.glob("*") if file.parent.is_dir() else ()
    near = closest(file.name, [other.name for other in there if other.suffix in DATA_SUFFIXES])
    return f"did you mean {near}?" if near else ""


# ── rows ──────────────────────────────────────────────────────────────────────────────────────────


def _first_rows(spec: Spec, spec_dir: Path) -> list[Finding]:
    """Look at the first rows as a run makes them. Without a tokenizer, or with a broken one, which is reported of the
    model, prompts are only parsed, and rows that are learned from are not looked at."""
    config = _config(spec, spec_dir)
    with _codec_and_chats(spec, spec_dir) as (codec, chats):
        if isinstance(spec, RlSpec):
            return [*first_findings(config, codec, chats if spec.data.chat != "never" else None)]
        return [] if codec is None else [*row_findings(config, codec, chats, partial(check_rows_fit, spec=spec))]


def check_rows_fit(largest: int, spec: Spec) -> None:
    """Raises DataError where a pair finds no room in a micro-batch: it is computed in one. `largest`: its tokens."""
    if largest > spec.lead_section.row_tokens:
        key = f"{spec.lead}.micro_batch_tokens"
        message = f"{key} = {spec.lead_section.micro_batch_tokens}: the largest row has {largest} tokens"
        raise DataError(message, hint=f"raise {key}, which a pair must fit as a whole, or lower data.max_tokens")


def first_row(spec: RowsSpec, spec_dir: Path) -> FirstRows:
    """Return the first row as it is learned; nothing where it is not at hand."""
    with _codec_and_chats(spec, spec_dir) as (codec, chats):
        return FirstRows() if codec is None else first_rows(_config(spec, spec_dir), codec, chats)


@contextmanager
def _codec_and_chats(spec: Spec, spec_dir: Path) -> Iterator[tuple[TokenizerFile | None, ChatRenderer | None]]:
    folder = model_folder(spec.model_path(spec.lead), spec_dir)
    template = chat_template_of(folder) if folder is not None else ChatTemplate()
    try:
        codec = load_tokenizer(folder) if folder is not None and not template.names else None
    except ValueError:
        codec = None
    if codec is None or not template.text:  # where the spec asks for a template, others report that it is not there
        yield None if spec.data.system or spec.data.chat == "always" else codec, None
        return
    tools = template.with_tools
    with ChatRenderer(template.text, codec.special_tokens, library=False, tool_template=tools) as chats:
        yield codec, chats


def _config(spec: Spec, spec_dir: Path) -> DataConfig:
    """Return the data role's config. No code of a tokenizer is run here."""
    return DataConfig.of(spec, spec.model_path(spec.lead), spec_dir).model_copy(update={"trust_remote_code": False})


def _held_out(config: DataConfig, section: DataSection | RowsSection) -> Iterator[Finding]:
    """Find sets that leave no row of the training data to train on. Reads only as many rows as it needs."""
    key, _, held = held_out_of_training(config)
    source = section.named[key]
    if not held or is_hub_data(source):
        return
    if source.startswith(GYM_PREFIX):
        rows = min(GymSource.parse(source).size, section.max_rows or sys.maxsize)
    else:
        read = read_rows(source, split="", base=Path(config.spec_dir), max_rows=section.max_rows)
        rows = sum(1 for _ in islice(read, held + 1))
    yield from all_held_out(config, key, rows, rows)
