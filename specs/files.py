"""Rules about what a spec names on this machine: model, data, reward functions, interpreters, GPUs.

Nothing is created, changed, imported or downloaded.
"""

from __future__ import annotations

import ast
import json
import os
import shutil
import string
import sys
from collections.abc import Iterable
from pathlib import Path

from specs.errors import Problem
from specs.explain import show
from specs.keys import closest
from specs.model_files import ModelCheck, hub_snapshot, looks_like_hub_id, offline
from specs.schema import ExactMatch, Function, MathVerify, RoleName, RoleSection, Spec

BUILTIN_DATA = {"sort-digits": ("prompt", "answer")}
DATA_SUFFIXES = (".jsonl", ".parquet")
ROWS_LOOKED_AT = 50


def file_problems(spec: Spec, spec_dir: Path) -> tuple[list[Problem], list[Problem]]:
    """Errors and warnings about everything that the spec names. Relative paths start at `spec_dir`."""
    errors, warnings = _models(spec, spec_dir)
    for found in (_data(spec, spec_dir), _device_problems(spec)):
        errors += found[0]
        warnings += found[1]
    errors += _functions(spec, spec_dir)
    errors += _interpreters(spec, spec_dir)
    return errors, warnings


# ── models ────────────────────────────────────────────────────────────────────────────────────────


def _models(spec: Spec, spec_dir: Path) -> tuple[list[Problem], list[Problem]]:
    model = spec.model
    fake = spec.actor.engine.kind == "fake"
    main = ModelCheck(
        "model.path",
        model.path,
        spec_dir,
        from_scratch=model.from_scratch or fake,
        remote_code=model.trust_remote_code,
        tokenizer=True,
    )
    checks = [main]
    if spec.ref is not None and spec.ref.model:
        checks.append(
            ModelCheck(
                "ref.model",
                spec.ref.model,
                spec_dir,
                from_scratch=False,
                remote_code=model.trust_remote_code,
                tokenizer=False,
            )
        )
    if not fake:
        for check in checks:
            check.check_length(spec.max_sequence_tokens)
    errors = [problem for check in checks for problem in check.problems]
    warnings = [problem for check in checks for problem in check.warnings]
    if spec.data.chat == "always" and not main.has_chat_template():
        errors.append(
            Problem(
                "data.chat",
                f"the tokenizer of {model.path} has no chat template",
                'write "auto" or "never"',
                '"always"',
            )
        )
    if len(checks) == 2:
        sizes = [check.config.get("vocab_size") for check in checks]
        if None not in sizes and sizes[1] < sizes[0]:
            message = (
                f"its vocabulary ({sizes[1]}) is smaller than the actor's ({sizes[0]}): it cannot score the same tokens"
            )
            errors.append(
                Problem(
                    "ref.model",
                    message,
                    "use a model with the same tokenizer",
                    show(spec.ref_section and spec.ref.model),
                )
            )
    return errors, warnings


# ── data ──────────────────────────────────────────────────────────────────────────────────────────


def is_hub_data(source: str) -> bool:
    """Whether a data source is a hub id rather than a file or a built-in task."""
    return bool(source) and not source.startswith("builtin:") and not _is_data_path(source)


def _is_data_path(source: str) -> bool:
    return bool(Path(source).suffix in (*DATA_SUFFIXES, ".json", ".csv", ".txt")) or source.startswith((".", "/", "~"))


def _data(spec: Spec, spec_dir: Path) -> tuple[list[Problem], list[Problem]]:
    errors, warnings = [], []
    sources = [("data.train", spec.data.train)]
    if spec.eval is not None and spec.eval.data:
        sources.append(("eval.data", spec.eval.data))
    for key, source in sources:
        found = _source(key, source, spec, spec_dir)
        errors += found[0]
        warnings += found[1]
    return errors, warnings


def _source(key: str, source: str, spec: Spec, spec_dir: Path) -> tuple[list[Problem], list[Problem]]:
    value = show(source)
    if source.startswith("builtin:"):
        return _builtin(key, source, spec), []
    file = spec_dir / Path(source).expanduser()
    if is_hub_data(source):
        if file.exists():
            hint = "rename it, or convert it to JSON Lines"
            return [Problem(key, f"data files end in {' or '.join(DATA_SUFFIXES)}", hint, value)], []
        hub_id = source.partition(":")[0]
        if not looks_like_hub_id(hub_id, spec_dir):
            return [Problem(key, f"no such file ({os.path.abspath(file)})", "", value)], []
        if hub_snapshot(hub_id, "datasets") is not None:
            return [], []
        if offline():
            return [
                Problem(key, "not in the Hugging Face cache while HF_HUB_OFFLINE is set", "check the name", value)
            ], []
        return [], [Problem(key, "will be downloaded from the hub when the run starts", "", value)]
    if file.suffix not in DATA_SUFFIXES:
        hint = "write one JSON object per line into a file that ends in .jsonl"
        return [Problem(key, f"data files end in {' or '.join(DATA_SUFFIXES)}", hint, value)], []
    if not file.is_file():
        hint = "a relative path starts at the spec file's folder"
        return [Problem(key, f"no such file ({os.path.abspath(file)})", hint, value)], []
    try:
        message = _jsonl(file, spec) if file.suffix == ".jsonl" else _parquet(file, spec)
    except OSError as error:
        message = f"cannot be read: {error.strerror or error}"
    if not message:
        return [], []
    problem = Problem(key, message, _row_hint(message), value)
    bad_row = ":" in message.split(" ")[0]
    return ([], [problem]) if bad_row and spec.data.bad_rows == "drop" else ([problem], [])


def _row_hint(message: str) -> str:
    if "has no column" in message:
        return "name the columns with data.prompt_column, data.answer_column or data.template"
    return 'repair the row, or set data.bad_rows = "drop"' if ":" in message.split(" ")[0] else ""


def _builtin(key: str, source: str, spec: Spec) -> list[Problem]:
    name = source.removeprefix("builtin:")
    if name not in BUILTIN_DATA:
        near = closest(name, list(BUILTIN_DATA))
        hint = f'did you mean "builtin:{near}"?' if near else ""
        return [Problem(key, f"no such built-in task; known: {', '.join(BUILTIN_DATA)}", hint, show(source))]
    message = _lacks(BUILTIN_DATA[name], needed_columns(spec))
    return [Problem(key, f"{name} {message}", _row_hint(message), show(source))] if message else []


def template_columns(template: str) -> list[str]:
    """Columns named in `{…}`. Raises ValueError where braces do not pair."""
    return [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]


def needed_columns(spec: Spec) -> list[str]:
    """Columns that the prompt and the built-in rewards read."""
    data = spec.data
    columns = template_columns(data.template) if data.template else [data.prompt_column]
    if any(isinstance(term, ExactMatch | MathVerify) for term in spec.reward.terms):
        columns.append(data.answer_column)
    return list(dict.fromkeys(columns))


def _lacks(has: Iterable[str], needs: list[str]) -> str:
    missing = [name for name in needs if name not in set(has)]
    return f"has no column {missing[0]!r}; it has {', '.join(map(repr, has)) or 'none'}" if missing else ""


def _jsonl(file: Path, spec: Spec) -> str:
    """What is wrong with the first rows, or "". A message about a row starts with `name:line`."""
    needs, rows = needed_columns(spec), 0
    with file.open("rb") as stream:
        for number, line in enumerate(stream, 1):
            if rows == ROWS_LOOKED_AT:
                break
            if not line.strip():
                continue
            rows += 1
            where = f"{file.name}:{number}"
            try:
                row = json.loads(line)
            except ValueError as error:
                return f"{where} is not JSON: {error}"
            if not isinstance(row, dict):
                return f"{where} is not a JSON object"
            if message := _lacks(row, needs):
                return f"{where} {message}"
    return "" if rows else "the file is empty"


def _parquet(file: Path, spec: Spec) -> str:
    with file.open("rb") as stream:
        size = stream.seek(0, os.SEEK_END)
        stream.seek(0)
        head = stream.read(4)
        stream.seek(max(0, size - 4))
        if size < 12 or head != b"PAR1" or stream.read(4) != b"PAR1":
            return "not a Parquet file, or cut short"
    import pyarrow.parquet as parquet  # costs a quarter second: only where there is such a file

    found = parquet.ParquetFile(file)
    if found.metadata.num_rows == 0:
        return "the file is empty"
    return _lacks(found.schema_arrow.names, needed_columns(spec))


# ── reward functions, interpreters, devices ───────────────────────────────────────────────────────


def _functions(spec: Spec, spec_dir: Path) -> list[Problem]:
    problems = []
    for index, term in enumerate(spec.reward.terms):
        if isinstance(term, Function):
            found = _function(term.path, spec_dir)
            if found:
                problems.append(Problem(f"reward.terms.{index}.path", found[0], found[1], show(term.path)))
    return problems


def _function(path: str, spec_dir: Path) -> tuple[str, str] | None:
    """What is wrong with `file.py:name`, and a hint. The file is parsed, never run."""
    name = path.rpartition(":")[2]
    file = spec_dir / Path(path.rpartition(":")[0]).expanduser()
    if not file.is_file():
        return f"no such file ({os.path.abspath(file)})", "a relative path starts at the spec file's folder"
    try:
        tree = ast.parse(file.read_bytes(), str(file))
    except SyntaxError as error:
        return f"{file.name}:{error.lineno}: {error.msg}", "repair the file"
    except (OSError, ValueError) as error:
        return f"cannot be read: {error}", ""
    names = _top_level_names(tree)
    if name not in names:
        near = closest(name, [known for known in names if known])
        return f"{file.name} defines no {name}", f"did you mean `{near}`?" if near else ""
    node = names[name]
    if isinstance(node, ast.AsyncFunctionDef):
        return f"{name} is async", "write a plain function"
    if isinstance(node, ast.FunctionDef) and not _takes_three(node.args):
        return f"{name} must take three arguments", f"write def {name}(prompt, completion, row)"
    return None


def _top_level_names(tree: ast.Module) -> dict[str, ast.AST]:
    """Names that the module binds, also inside `if` and `try`."""
    names: dict[str, ast.AST] = {}
    scopes: list[ast.AST] = list(tree.body)
    while scopes:
        node = scopes.pop(0)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names[node.name] = node
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name: node for alias in node.names}
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names[node.id] = node
        scopes += list(ast.iter_child_nodes(node))
    return names


def _takes_three(arguments: ast.arguments) -> bool:
    most = len(arguments.posonlyargs) + len(arguments.args)
    least = most - len(arguments.defaults)
    required_by_name = any(default is None for default in arguments.kw_defaults)
    return least <= 3 and (most >= 3 or arguments.vararg is not None) and not required_by_name


def _interpreters(spec: Spec, spec_dir: Path) -> list[Problem]:
    problems = []
    sections: list[tuple[RoleName, RoleSection | None]] = [("actor", spec.actor), ("ref", spec.ref)]
    for role, section in [*sections, ("rollout", spec.rollout), ("reward", spec.reward)]:
        if section is None or not section.python:
            continue
        file = spec_dir / Path(section.python).expanduser()
        if not file.is_file():
            message = f"no such interpreter ({os.path.abspath(file)})"
            hint = f"leave it out to use {sys.executable}"
            problems.append(Problem(f"{role}.python", message, hint, show(section.python)))
        elif not os.access(file, os.X_OK):
            problems.append(Problem(f"{role}.python", "is not executable", "", show(section.python)))
    return problems


def has_nvidia_driver() -> bool:
    return Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None


def _device_problems(spec: Spec) -> tuple[list[Problem], list[Problem]]:
    """GPUs are a warning: a spec may be checked on another machine than the one that runs it."""
    return [], device_problems(spec)


def device_problems(spec: Spec) -> list[Problem]:
    """Roles that ask for GPUs on a machine without an NVIDIA driver. `train` takes them as errors."""
    sections: list[tuple[str, RoleSection | None]] = [
        ("actor", spec.actor),
        ("ref", spec.ref),
        ("rollout", spec.rollout),
    ]
    asked = [(role, section) for role, section in sections if section is not None and section.devices]
    if not asked or has_nvidia_driver():
        return []
    message = "this machine has no NVIDIA driver"
    return [
        Problem(f"{role}.devices", message, "leave it out to run on the CPU", show(section.devices))
        for role, section in asked
    ]
