"""Whether the data files, built-in tasks and hub ids that a spec names exist. Rows: `rlctl/preflight/data_rows.py`."""

from __future__ import annotations

import os
import re
from pathlib import Path

from rlctl.models.chat_template import ChatTemplate, chat_template_of
from rlctl.models.hub import hub_snapshot, offline
from rlctl.models.paths import looks_like_hub_id, model_folder, not_found
from rlctl.preflight.data_relations import relation_warnings
from rlctl.preflight.data_rows import Looked, look_at_rows, missing_column
from rlctl.preflight.data_sense import held_out_problems, sense_problems
from rlctl.preflight.data_texts import text_warnings
from rlctl.preflight.rendered_rows import rendered_warnings
from rlctl.preflight.small_tokens import token_warnings
from specs.builtin_tasks import BUILTIN_TASKS
from specs.errors import NotHere, Problem
from specs.load.keys import closest
from specs.schema.sections import DATA_SUFFIXES, is_hub_data
from specs.schema.spec import Spec
from specs.text import show


def check_data(spec: Spec, spec_dir: Path) -> tuple[list[Problem], list[Problem]]:
    """Errors and warnings about the data files that a spec names."""
    errors: list[Problem] = []
    warnings: list[Problem] = []
    looked: dict[str, Looked] = {}
    sources = [("data.train", spec.data.train)]
    sources += [(f"{one.key}.data", one.data) for one in spec.evaluations if one.data]
    for key, source in sources:
        found = _source(key, source, spec, spec_dir, looked)
        errors += found[0]
        warnings += found[1]
    if errors:
        return errors, warnings
    sense = sense_problems(spec, spec_dir, looked)
    template = _template(spec, spec_dir).text
    warnings += [*sense[1], *text_warnings(spec, looked, template)]
    if not sense[0]:
        warnings += relation_warnings(spec, looked, template)
    folder = model_folder(spec.model.path, spec_dir)
    if isinstance(folder, Path) and not sense[0]:
        told = {problem.key for problem in warnings}
        more = [*rendered_warnings(spec, folder, template, looked), *token_warnings(spec, folder, template, looked)]
        for problem in more:  # of a key that has been said something of, the rest may follow from it
            warnings += [problem] if problem.key not in told else []
            told.add(problem.key)
    return held_out_problems(spec, spec_dir) or sense[0], warnings


def _source(
    key: str, source: str, spec: Spec, spec_dir: Path, looked: dict[str, Looked]
) -> tuple[list[Problem], list[Problem]]:
    """Errors and warnings; the rows of a file that could be read go to `looked`."""
    value = show(source)
    if source.startswith("builtin:"):
        return _builtin(key, source, spec), []
    file = spec_dir / Path(source).expanduser()
    if "://" in source:
        return [_address(key, source)], []
    if file.is_symlink() and not file.exists():
        hint = "repair the link, or name the file itself"
        return [Problem(key, f"a symbolic link to {os.readlink(file)}, which does not exist", hint, value)], []
    if file.is_dir():
        return [Problem(key, "a folder, not a file", "name one file; rows of several can be joined", value)], []
    if is_hub_data(source):
        return _hub(key, source, file, spec_dir)
    if file.suffix not in DATA_SUFFIXES:
        hint = "write one JSON object per line into a file that ends in .jsonl"
        return [Problem(key, f"data files end in {' or '.join(DATA_SUFFIXES)}", hint, value)], []
    if not file.is_file():
        return [not_found(key, f"no such file ({os.path.abspath(file)})", source, hint=_where_it_may_be(file))], []
    most = spec.data.max_rows if key == "data.train" else None
    found = looked[key] = look_at_rows(file, spec, chat=_may_chat(_template(spec, spec_dir)), most=most)
    fault = found.fault
    if fault is None:
        return [], []
    problem = Problem(key, fault.message, fault.hint, value)
    return ([], [problem]) if fault.of_a_row and spec.data.bad_rows == "drop" else ([problem], [])


def _template(spec: Spec, spec_dir: Path) -> ChatTemplate:
    folder = model_folder(spec.model.path, spec_dir)
    return ChatTemplate(unknown=True) if folder is None else chat_template_of(folder)


def _may_chat(template: ChatTemplate) -> bool:
    """Whether the model has a chat template, or may have one."""
    return template.unknown or bool(template.text or template.names)


def _hub(key: str, source: str, file: Path, spec_dir: Path) -> tuple[list[Problem], list[Problem]]:
    """A source that is a hub id, or a file of an unknown kind."""
    value = show(source)
    if file.name.endswith((".gz", ".zst", ".bz2", ".xz", ".zip")) and file.exists():
        return [Problem(key, "compressed", "decompress it (gunzip, unzstd, …) and use the result", value)], []
    if file.exists():
        hint = "rename it, or convert it to JSON Lines"
        return [Problem(key, f"data files end in {' or '.join(DATA_SUFFIXES)}", hint, value)], []
    hub_id = source.partition(":")[0]
    if not looks_like_hub_id(hub_id, spec_dir):
        return [not_found(key, f"no such file ({os.path.abspath(file)})", source)], []
    if hub_snapshot(hub_id, "datasets") is not None:
        return [], []
    if offline():
        message = "not in the Hugging Face cache while HF_HUB_OFFLINE is set"
        return [NotHere(key, message, "check the name", value)], []
    hint = "check the name, and that this machine reaches the hub"
    if hub_id in BUILTIN_TASKS:
        hint = f'did you mean "builtin:{hub_id}"?'
    return [], [NotHere(key, "will be downloaded from the hub when the run starts", hint, value)]


def _address(key: str, source: str) -> Problem:
    """A URL where a file or a hub id is expected."""
    found = re.fullmatch(r"(?:https?://huggingface\.co/datasets/|hf://(?:datasets/)?)([\w.-]+/[\w.-]+).*", source)
    hint = f'write "{found[1]}"' if found else "download it, and name the file"
    return Problem(key, "a URL, not a file or a hub id", hint, show(source))


def _where_it_may_be(file: Path) -> str:
    if "*" in file.name:
        return "name one file; rows of several can be joined"
    there = (
        [other.name for other in file.parent.glob("*") if other.suffix in DATA_SUFFIXES] if file.parent.is_dir() else []
    )
    near = closest(file.name, there)
    return f"did you mean {near}?" if near else ""


def _builtin(key: str, source: str, spec: Spec) -> list[Problem]:
    name = source.removeprefix("builtin:")
    if name not in BUILTIN_TASKS:
        near = closest(name, list(BUILTIN_TASKS))
        hint = f'did you mean "builtin:{near}"?' if near else f'write "builtin:{next(iter(BUILTIN_TASKS))}"'
        return [Problem(key, f"no such built-in task; known: {', '.join(BUILTIN_TASKS)}", hint, show(source))]
    fault = missing_column(next(BUILTIN_TASKS[name]()), spec)
    return [Problem(key, f"{name} {fault.message}", fault.hint, show(source))] if fault else []
