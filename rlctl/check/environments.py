"""Environments, tried before a run starts: imported, reset on a row and given one scripted turn by the code that runs
them, in the reward role's interpreter, and that turn taken through the chat template token by token."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlctl.check.own_functions import readable_rows, run_offline
from rlctl.models.paths import model_folder
from rlctl.preflight.interpreters import own_path
from rlctl.processes.role_configs import build_bodies
from specs.errors import Problem
from specs.rules.all_rules import with_values
from specs.schema.environment import EnvironmentSection
from specs.schema.recipes import RlSpec
from specs.schema.roles import REWARD
from specs.schema.spec import Spec
from specs.schema.table import no_effect
from workers.data.prompts import RowReader, as_json
from workers.data.row_source import BadRow

START_TIMEOUT_S = 120.0  # as in a run
_MORE_S = 60.0  # for what is imported, and the tokenizer
_CALLS = 4  # of an environment: reset, a turn, and its end
_AGENT_S = 90.0  # for a program that is an agent
_ROWS = 256  # among which each environment finds one of its own


@dataclass(frozen=True)
class TriedEnvironment:
    """Hold what an environment is, and what it did with a row and a scripted turn. `turn_ids`, `suffix_ids`: the turn's
    tokens, and those that are appended to it."""

    key: str
    name: str  # what it is made from
    mode: str = ""
    tools: list[dict[str, str]] = field(default_factory=list)  # name, arguments, and the first line about it
    row: str = ""
    prompt_tokens: int | None = None
    tools_tokens: int | None = None  # of the prompt
    turn: str = ""
    reply: str | None = None
    reply_error: bool = False
    reply_lost: bool = False  # the call loses the episode, so that the model reads no reply
    turn_ids: list[int] = field(default_factory=list)
    suffix_ids: list[int] = field(default_factory=list)
    output: str = ""  # the end of what it printed, where something is wrong


def try_environments(
    spec: Spec, spec_dir: Path, known: Collection[str] = ()
) -> tuple[list[Problem], list[Problem], list[TriedEnvironment]]:
    """Try each environment that can be tried; return errors, warnings, and what was found of each. Keys in `known` have
    been found wrong already."""
    errors: list[Problem] = []
    warnings: list[Problem] = []
    found: list[TriedEnvironment] = []
    if not isinstance(spec, RlSpec) or not spec.environments or "reward.python" in known:
        return errors, warnings, found
    sections = spec.environments_by_key
    rows = {} if "data.environment_column" in known else _rows(spec, spec_dir, sections)
    wanted = {
        key for key, one in sections.items() if _named_once(one) and not any(k.startswith(f"{key}.") for k in known)
    }
    if wanted:
        folder = None if "model.path" in known else model_folder(spec.model.path, spec_dir)
        request = {
            "config": build_bodies(spec, spec_dir, spec_dir / "no-run")[REWARD] | {"model_path": str(folder or "")},
            "trials": [{"key": key, "row": rows.get(key)} if key in wanted else None for key in sections],
            "max_prompt_tokens": spec.data.max_prompt_tokens,
            "start_timeout_s": START_TIMEOUT_S,
        }
        for reply in _ask(spec, spec_dir, request, wanted):
            for problem in reply.pop("problems"):
                message = problem["message"].replace(str(folder), spec.model.path) if folder else problem["message"]
                new = Problem(problem["key"], message, problem["hint"])
                kind = errors if problem["refuses"] else warnings
                kind += [new] if new not in kind else []
            section = sections[reply["key"]]
            found.append(TriedEnvironment(name=", ".join(section.sources), **reply))
            of_tools = section.model_fields_set & {"max_tool_calls", "on_parse_error"}
            for name in sorted(of_tools) if reply.get("mode") == "text" else ():
                errors.append(no_effect(f"{reply['key']}.{name}", "it replies to text, and no tool is called"))
    return with_values(spec, errors), with_values(spec, warnings), found


def _named_once(section: EnvironmentSection) -> bool:
    """Return whether a section says what it is; a rule refuses others."""
    return sum(map(bool, (section.path, section.tools, section.agent))) == 1


# ── rows ──────────────────────────────────────────────────────────────────────────────────────────


def _rows(spec: RlSpec, spec_dir: Path, sections: Mapping[str, EnvironmentSection]) -> dict[str, dict[str, Any]]:
    """Return a row for each environment that the first rows name, as its episodes are given it."""
    reader = RowReader(spec.data, False, chat=True)
    column, keys = spec.data.environment_column, {one.name: key for key, one in sections.items()}
    rows: dict[str, dict[str, Any]] = {}
    for row in readable_rows(spec, spec_dir, _ROWS):
        name = str(row.values.get(column, "")) if len(keys) > 1 else next(iter(keys))
        with suppress(BadRow):
            if name in keys and keys[name] not in rows:  # others are bad rows
                content = {"messages": reader.prompt(row), "values": row.values}
                rows[keys[name]] = {"where": row.where, **as_json(content)}
        if len(rows) == len(keys):
            break
    return rows


# ── the process ───────────────────────────────────────────────────────────────────────────────────


def _ask(spec: RlSpec, spec_dir: Path, request: dict[str, Any], wanted: Collection[str]) -> list[dict[str, Any]]:
    """Return what the process that tries them found of each. It ends with all that it started."""
    python = own_path(spec.grading, spec_dir) or sys.executable
    env = {**spec.grading.env, "PYTHONDONTWRITEBYTECODE": "1", "CUDA_VISIBLE_DEVICES": ""}
    limits_s = (
        START_TIMEOUT_S + _CALLS * one.call_timeout_s + _AGENT_S * bool(one.command) for one in spec.environments
    )
    timeout_s = _MORE_S + sum(limits_s)
    with tempfile.TemporaryDirectory(prefix="rlctl-check-", ignore_cleanup_errors=True) as folder:
        text = json.dumps({**request, "log": os.path.join(folder, "output.log")})
        command = [python, "-P", "-m", "workers.offline.try_environment"]
        output, how = run_offline(command, env, timeout_s, text.encode())
    replies = {one["key"]: one for one in map(json.loads, output.splitlines())}
    silent = next((key for key in wanted if key not in replies), None)
    if silent is not None:
        problem = {"key": f"[{silent}]", "message": how, "hint": "import its file with python to see why"}
        replies[silent] = {"key": silent, "problems": [{**problem, "refuses": True}]}
    return [*replies.values()]
