"""The house keeps its shape: rooms stay small, names unique, imports without circles, tests beside what they test.

Which room may import which is in `pyproject.toml` (import-linter); here is what no linter asks.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Set
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
WINGS = ("rlctl", "workers", "backends", "specs")
# Each engine has its folder, with its class in `engine.py`; pytest has a folder's fixtures in its `conftest.py`.
SHARED_NAMES = {"__init__.py", "engine.py", "conftest.py"}
# Test files that are named after no module or folder beside them, and why.
ODD_TESTS = {
    "tests/test_house.py": "the whole source tree",
    "tests/scripts/test_pick_torch.py": "scripts/_pick_torch.py, which is no command and so begins with an underscore",
}
# What `specs` never calls: importing `shutil` or `os` is no crime, asking the machine is.
MACHINE_CALLS = {"shutil.which", "shutil.disk_usage", "os.system", "os.popen", "os.cpu_count", "os.fork"}


# Python files that are no part of the house: what users begin with, and packages that tests put in another's place.
FOREIGN = ("specs/presets", "tests/support/gym_packages")


def python_files(*folders: str) -> list[Path]:
    found = sorted(path.relative_to(ROOT) for folder in folders for path in (ROOT / folder).rglob("*.py"))
    return [path for path in found if not any(path.is_relative_to(foreign) for foreign in FOREIGN)]


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse((ROOT / path).read_text(encoding="utf-8"))


SOURCE = python_files(*WINGS)
EVERYTHING = [*SOURCE, *python_files("scripts", "tests")]


# ── budgets ───────────────────────────────────────────────────────────────────────────────────────

# Most lines of each room, blank ones and comments included; behind it where the room is to end. Lower the first when
# you can; raise it only with a reason in the commit.
BUDGETS: dict[str, tuple[int, int, tuple[str, ...]]] = {
    "checking": (
        6_298,
        6_000,
        ("rlctl/check", "rlctl/preflight", "rlctl/models", "specs/load", "specs/rules", "workers/offline"),
    ),
    "schema": (5_079, 4_300, ("specs/schema",)),
    "memory": (1_123, 1_000, ("rlctl/memory", "specs/memory_parts.py", "specs/schema/engines/held_model.py")),
    "processes": (4_590, 3_500, ("rlctl/processes", "workers/*.py")),
    "show": (2_511, 2_000, ("rlctl/show",)),
    "run": (3_320, 2_200, ("rlctl/run",)),
    "grading": (1_690, 1_400, ("workers/grading",)),
    "environments, episodes, chat": (
        4_151,
        3_300,
        ("workers/environments", "workers/episodes", "workers/chat", "rlctl/loop/episodes.py"),
    ),
    "gateway": (1_300, 1_300, ("workers/gateway",)),
    "engines, packing, weights": (16_456, 15_000, ("backends",)),
    "four packages": (60_578, 50_000, WINGS),
    "scripts": (3_000, 3_000, ("scripts",)),
    "tests with their cases": (50_159, 38_000, ("tests",)),
    "docs": (3_742, 3_500, ("docs",)),
}
COUNTED = {".py", ".css", ".js", ".md"}  # of tests also .toml


def lines_of(places: Iterable[str]) -> int:
    paths = {path for place in places for found in ROOT.glob(place) for path in (found, *found.rglob("*"))}
    counted = [path for path in paths if path.suffix in COUNTED or (path.suffix == ".toml" and "corpus" in path.parts)]
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in counted)


@pytest.mark.parametrize("room", BUDGETS)
def test_rooms_keep_their_budgets(room: str) -> None:
    most, goal, places = BUDGETS[room]
    assert goal <= most
    assert lines_of(places) <= most


# ── rooms and names ───────────────────────────────────────────────────────────────────────────────


def twice(files: Iterable[Path]) -> list[str]:
    count = Counter(path.name for path in files if path.name not in SHARED_NAMES)
    return sorted(name for name, number in count.items() if number > 1)


def test_no_file_name_stands_twice() -> None:
    assert not twice(SOURCE), "two things with one name: say what each is"
    assert not twice([path for path in python_files("tests", "scripts") if path.name != "__init__.py"])


def test_a_name_that_stands_twice_is_found() -> None:
    files = [Path("rlctl/loop/losses.py"), Path("backends/train/losses.py"), Path("a/engine.py"), Path("b/engine.py")]
    assert twice(files) == ["losses.py"]


def test_every_folder_says_what_it_is() -> None:
    folders = {path.parent for path in SOURCE}
    without = [str(folder) for folder in sorted(folders) if folder / "__init__.py" not in SOURCE]
    assert not without, "no __init__.py"


def test_files_that_the_architecture_names_are_there() -> None:
    """By path, or by base name where the folder is clear from what stands before it."""
    known = {str(path) for path in EVERYTHING} | {path.name for path in EVERYTHING}
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([\w/]+\.py)`", page))
    assert named, "it names no file"
    assert not named - known


# ── what a module says of itself ──────────────────────────────────────────────────────────────────


def first_paragraph(path: Path) -> str:
    return " ".join((ast.get_docstring(tree(path)) or "").split("\n\n")[0].split())


@pytest.mark.parametrize("wing", [*WINGS, "scripts", "tests"])
def test_every_module_begins_with_a_sentence(wing: str) -> None:
    silent = [str(path) for path in python_files(wing) if not is_sentence(first_paragraph(path))]
    assert not silent, "a module's docstring begins with a sentence that says what the module is"


def is_sentence(text: str) -> bool:
    """It ends as one, and begins with no bare word in lower case (names of programs and code may)."""
    begins = text[:1].isupper() or text.startswith(("`", "vLLM", "pydantic"))
    return begins and text.endswith((".", ":", "?")) and " " in text


@pytest.mark.parametrize("text", ["", "helpers.", "Things for the loop", "what the loop needs."])
def test_what_is_no_sentence(text: str) -> None:
    assert not is_sentence(text)


def said_of_code(path: Path) -> str:
    """Docstrings and comments of a file."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = [ast.get_docstring(node) or "" for node in ast.walk(tree(path)) if isinstance(node, documented)]
    return "\n".join([*docstrings, *re.findall(r"#.*", (ROOT / path).read_text(encoding="utf-8"))])


def test_docstrings_are_sentences_with_a_verb() -> None:
    """The plainest rule of the house's English; the rest is for the ear."""
    fragments = [
        f"{path}:{getattr(node, 'lineno', 1)}"
        for path in SOURCE
        for node in ast.walk(tree(path))
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        and re.match(r"(Of|By|As|Those|That|What)\b", ast.get_docstring(node) or "")
    ]
    assert not fragments


def test_no_public_class_name_stands_twice() -> None:
    names = Counter(
        node.name
        for path in SOURCE
        for node in tree(path).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert not [name for name, number in names.items() if number > 1]


def test_test_files_that_comments_name_are_there() -> None:
    known = {path.name for path in python_files("tests")}
    named = {(str(path), name) for path in EVERYTHING for name in re.findall(r"\btest_\w+\.py", said_of_code(path))}
    assert {name for _, name in named} & known, "none is named"
    assert not {(path, name) for path, name in named if name not in known}


# ── tests stand where what they test stands ───────────────────────────────────────────────────────


def named_after(test: Path, known: Set[Path]) -> bool:
    """`tests/<folder>/test_<module>[_aspect].py` for `<folder>/<module>.py`; the folder's own name for a whole room."""
    folder = test.parent.relative_to("tests")
    name = test.stem.removeprefix("test_")
    modules = {path.stem for path in known if path.parent == folder} | {folder.name}
    return any(name == module or name.startswith(f"{module}_") for module in modules - {"", "__init__"})


def test_tests_mirror_the_source_tree() -> None:
    tests = [path for path in python_files("tests") if path.name.startswith("test_")]
    known = {*SOURCE, *python_files("scripts")}
    stray = {str(path) for path in tests if not named_after(path, known)}
    assert stray == set(ODD_TESTS), "name a test after the module that it tests, in the same folder below tests/"


def test_a_stray_test_is_found() -> None:
    known = {Path("rlctl/loop/sync.py"), Path("rlctl/loop/__init__.py")}
    assert named_after(Path("tests/rlctl/loop/test_sync_taking_turns.py"), known)
    assert named_after(Path("tests/rlctl/loop/test_loop.py"), known)
    assert not named_after(Path("tests/rlctl/loop/test_weights.py"), known)
    assert not named_after(Path("tests/rlctl/run/test_sync.py"), known)


# ── imports ───────────────────────────────────────────────────────────────────────────────────────


def imported(path: Path) -> set[str]:
    """Return the dotted names of everything that a file imports, anywhere in it, also for type checkers alone."""
    found: set[str] = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def dotted(path: Path) -> str:
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


def import_graph() -> dict[str, set[str]]:
    """Module → modules of ours that it imports. `from package import module` is an import of the module."""
    modules = {dotted(path): path for path in SOURCE}
    graph: dict[str, set[str]] = {}
    for name, path in modules.items():
        found = imported(path) & modules.keys()
        # Naming a module imports its packages too, but none of them may need what lies in it.
        graph[name] = {module for module in found if not any(other.startswith(f"{module}.") for other in found)}
    return graph


def circle(graph: Mapping[str, Set[str]]) -> list[str]:
    """Modules that import one another in a circle, the first found, or none."""
    done: set[str] = set()

    def walk(module: str, path: list[str]) -> list[str]:
        if module in path:
            return [*path[path.index(module) :], module]
        if module in done:
            return []
        for other in sorted(graph[module]):
            if found := walk(other, [*path, module]):
                return found
        done.add(module)
        return []

    return next((found for module in sorted(graph) if (found := walk(module, []))), [])


def test_no_import_circles() -> None:
    """Imports in functions and for type checkers count: a circle means halves of one thing."""
    assert not circle(import_graph())


def test_a_circle_is_found() -> None:
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert circle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def test_nothing_is_pickled() -> None:
    for path in EVERYTHING:
        assert not {"pickle", "cloudpickle", "dill", "marshal", "shelve"} & imported(path), path


# ── specs reads no machine ────────────────────────────────────────────────────────────────────────


def calls(module: ast.Module) -> set[str]:
    """Dotted names that a module calls or hands on, and those it imports from elsewhere under their full names."""
    found: set[str] = set()
    for node in ast.walk(module):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            found.add(f"{node.value.id}.{node.attr}")
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def test_specs_asks_no_machine() -> None:
    for path in python_files("specs"):
        assert not MACHINE_CALLS & calls(tree(path)), path


@pytest.mark.parametrize("code", ["import shutil\nshutil.which('nvidia-smi')", "from shutil import which"])
def test_a_question_to_the_machine_is_found(code: str) -> None:
    assert MACHINE_CALLS & calls(ast.parse(code))
