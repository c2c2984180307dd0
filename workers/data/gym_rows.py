"""Make rows with the package reasoning-gym, in a process of its own: its import takes seconds and 100 MB.

`python -m workers.data.gym_rows SOURCE` writes a JSON line for each row, or `{"error": ..., "hint": ...}`.
"""

from __future__ import annotations

import difflib
import json
import os
import subprocess
import sys
from collections.abc import Generator, Iterator, Mapping
from dataclasses import fields
from tempfile import TemporaryFile
from typing import Any

from specs.builtin_tasks import GYM_PREFIX, GymSource, gym_entry_as_json
from specs.errors import DataError
from specs.packages import package_path

_making: dict[str, Any] = {"python": sys.executable, "env": {}}


def make_with(python: str, env: Mapping[str, str]) -> None:
    """Have rows made by this interpreter, with these variables besides those of this process."""
    _making.update(python=python, env=dict(env))


def gym_rows(source: str) -> Generator[dict[str, Any], None, None]:
    """Yield rows: `prompt`, `answer` and what scores them, `reasoning_gym`. Raises DataError."""
    env = {**os.environ, **_making["env"]}
    env["PYTHONPATH"] = package_path(env.get("PYTHONPATH", ""))
    command = [_making["python"], "-P", "-m", "workers.data.gym_rows", source]
    with TemporaryFile() as log:
        try:
            process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=log)
        except OSError as error:
            raise DataError(f"{command[0]} does not start: {error.strerror}", hint="check reward.python") from None
        with process:
            assert process.stdout is not None
            try:
                for line in process.stdout:
                    row = json.loads(line)
                    if "error" in row:
                        raise DataError(row["error"], hint=row["hint"])
                    yield row
            except BaseException:  # nobody reads the rest
                process.kill()
                raise
        if process.returncode:
            log.seek(0)
            last = "".join(log.read().decode(errors="replace").strip().splitlines()[-1:])
            message = f"the process that makes rows of {source} ended with status {process.returncode}: {last}"
            raise DataError(message, hint="make fewer with ?size=…, or choose another data set")


# ── in the process ────────────────────────────────────────────────────────────────────────────────────


def main() -> None:
    rows = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # for what others print
    for row in _rows(GymSource.parse(sys.argv[1])):
        print(json.dumps(row), file=rows, flush=True)


def _rows(source: GymSource) -> Iterator[dict[str, Any]]:
    try:
        from reasoning_gym.factory import DATASETS, create_dataset
    except ImportError as error:
        text = f"{error}" if error.name != "reasoning_gym" else f"reasoning-gym is not installed for {sys.executable}"
        yield {"error": text, "hint": f"{sys.executable} -m pip install reasoning-gym"}
        return
    if wrong := _wrong(source, DATASETS):
        yield wrong
        return
    try:
        made = create_dataset(source.name, size=source.size, seed=source.seed, **source.options)
    except Exception as error:  # its data sets check their options by assert
        text = f"{source.name} refuses its options: {error or type(error).__name__}"
        yield {"error": text, "hint": f"change them; they are {', '.join(_options(DATASETS[source.name][1]))}"}
        return
    of = {"name": source.name, "options": source.options}
    for number in range(source.size):
        entry = made[number]
        gym = {**of, "entry": gym_entry_as_json(entry)}
        yield {"prompt": entry["question"], "answer": entry["answer"], "reasoning_gym": gym}


def _wrong(source: GymSource, known: Mapping[str, tuple[Any, Any]]) -> dict[str, str] | None:
    """Return the error of a data set, or an option of it, that there is not."""
    if source.name not in known:
        (near,) = difflib.get_close_matches(source.name, known, n=1, cutoff=0)
        hint = f'did you mean "{GYM_PREFIX}{near}"?'
        return {"error": f"reasoning-gym has no data set {source.name!r}", "hint": hint}
    options = _options(known[source.name][1])
    if unknown := [name for name in source.options if name not in options]:
        hint = f"its options are {', '.join(options)}"
        return {"error": f"{source.name} has no option {unknown[0]!r}", "hint": hint}
    return None


def _options(config: type) -> list[str]:
    return [each.name for each in fields(config)]


if __name__ == "__main__":
    main()
