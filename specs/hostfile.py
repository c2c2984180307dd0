"""The hosts of a run: a file with a line `host slots=N` for each, as DeepSpeed and MPI write it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from specs.errors import Problem, SpecError

_LINE = re.compile(r"([A-Za-z0-9][A-Za-z0-9._:-]*)\s+slots=([1-9][0-9]*)", re.ASCII)


@dataclass(frozen=True)
class Host:
    """A host by its name or address, and how many processes of a role it takes."""

    name: str
    slots: int


def read_hostfile(path: Path) -> list[Host]:
    """Hosts in the order of the file; `#` starts a comment. Raises SpecError, which names line and text."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        hint = "a relative path starts at the spec file's folder"
        raise SpecError([Problem("cluster.hostfile", f"cannot be read: {reason}", hint, f'"{path}"')]) from None
    hosts: dict[str, Host] = {}
    problems = []
    for number, line in enumerate(text.splitlines(), start=1):
        wanted = line.partition("#")[0].strip()
        if not wanted:
            continue
        found = _LINE.fullmatch(wanted)
        if found is None:
            problems.append(_problem(path, number, f"`{wanted}` is not a host", "write `host slots=N`, N at least 1"))
        elif found[1] in hosts:
            problems.append(_problem(path, number, f"{found[1]} stands twice", "give each host one line"))
        else:
            hosts[found[1]] = Host(found[1], int(found[2]))
    if problems:
        raise SpecError(problems)
    return list(hosts.values())


def _problem(path: Path, number: int, message: str, hint: str) -> Problem:
    return Problem("cluster.hostfile", f"line {number}: {message}", hint, f'"{path}"')
