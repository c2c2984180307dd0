"""Functions of the user that a spec names, as far as they can be found without running them: the file is only parsed.

`rlctl check-config` calls them too, in a process of their own (`rlctl.check.own_functions.py`, `own_functions.py`).
"""

from __future__ import annotations

from pathlib import Path

from rlctl.models.paths import not_found
from specs.errors import Problem
from specs.packages import OUR_PACKAGES
from specs.schema.recipes import sampling_of
from specs.schema.rewards import Function
from specs.schema.spec import Spec
from workers.grading.reward_sources import reward_sources


def scorer_code(spec: Spec) -> dict[str, str]:
    """Return by key the code that the reward role runs, as `file.py:name`: reward functions, environments, tools and
    agents."""
    terms, sampling = enumerate(spec.reward_terms), sampling_of(spec)
    found = {f"reward.terms.{index}.path": term.path for index, term in terms if isinstance(term, Function)}
    for key, section in sampling.environments_by_key.items() if sampling is not None else ():
        tools = {f"{key}.tools.{index}": tool for index, tool in enumerate(section.tools)}
        named = {f"{key}.path": section.path, **tools, f"{key}.agent": section.loop}
        named |= {f"{key}.agent.reward": section.command.reward} if section.command else {}
        found |= {name: source for name, source in named.items() if source in section.files}
    return found


def function_problems(spec: Spec, spec_dir: Path) -> list[Problem]:
    """Return what is wrong with the files of code that the reward role runs, and of the user's own advantage and
    loss."""
    problems = []
    for key, path in {**scorer_code(spec), **spec.own_functions}.items():
        place = path.rpartition(":")[0]
        file = spec_dir / Path(place).expanduser()
        if not file.exists():
            problems.append(not_found(key, "file", file, place))
        elif found := _unusable_file(file):
            problems.append(Problem(key, *found))
    return problems


def _unusable_file(file: Path) -> tuple[str, str] | None:
    if not file.is_file():
        return f"{file} is a folder" if file.is_dir() else f"{file} is not a file", "name a Python file"
    for source in reward_sources(file)[1:]:  # modules beside it, which it imports
        name = source.relative_to(file.parent).parts[0].removesuffix(".py")
        if name in OUR_PACKAGES:
            return f"imports {name}, and gets rlctl's own package of that name, not {source}", f"rename {source.name}"
    return None
