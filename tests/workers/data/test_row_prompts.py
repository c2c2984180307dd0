"""Prompts that a recipe of rows is evaluated on: the very tokens that stand before an answer where it is learned."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_conversations import DROPS_THINKING, HEADERS, TALK, chats_of
from test_examples import ANSWERED, ASKED, CODEC, MODEL, reader_of

from specs.errors import DataError
from specs.schema.eval_sets import GenerateSection
from specs.schema.objectives import Unit
from specs.schema.rows import RowsEval, RowsSection
from specs.wire.role_config import DataConfig, RowsConfig
from workers.data.data_set import EVAL_IDS, RunRows, open_rows
from workers.data.first_rows import row_findings
from workers.data.row_source import BadRow, DataRow

TOOLS = [{"type": "function", "function": {"name": "add"}}]
OTHER = [{"role": "assistant", "content": "I"}]


@pytest.mark.parametrize(
    ("unit", "values", "keys"),
    [
        ("token", {"prompt": "1+1=", "completion": "2"}, {}),
        ("token", {"prompt": "one?", "completion": "1"}, {"system": "be brief"}),
        ("token", {"prompt": "one?", "completion": "1"}, {"chat": "always"}),
        ("token", {"prompt": ASKED, "completion": "1"}, {}),
        ("token", {"prompt": "one?", "completion": ANSWERED}, {}),
        ("token", {"messages": TALK}, {}),
        ("token", {"messages": TALK[1:]}, {"system": "be brief"}),
        ("token", {"messages": [*TALK, {"role": "user", "content": "bye"}]}, {}),
        ("token", {"messages": TALK, "tools": TOOLS}, {"template": HEADERS}),
        ("token", {"messages": TALK}, {"template": DROPS_THINKING, "learn_from": "last_assistant"}),
        ("token", {"messages": TALK}, {"learn_from": "flagged"}),
        ("token", {"messages": TALK, "q": "x", "a": "y"}, {"prompt_column": "q", "completion_column": "a"}),
        ("pair", {"prompt": "q ", "chosen": "a", "rejected": "b"}, {}),
        ("pair", {"chosen": "Q: is it so? yes it is", "rejected": "Q: is it so? yet no"}, {}),
        ("pair", {"prompt": "one?", "chosen": [*ASKED, *ANSWERED], "rejected": [*ASKED, *OTHER]}, {}),
        ("pair", {"prompt": "one?", "chosen": "1", "rejected": ANSWERED}, {}),
        ("sequence", {"prompt": "q", "completion": "a", "label": True}, {}),
    ],
)
def test_a_prompt_is_what_stands_before_the_answer_that_is_learned(
    unit: Unit, values: dict[str, Any], keys: dict[str, Any]
) -> None:
    """It ends where the last tokens that are learned in a row begin."""
    reader, row = reader_of(unit, **keys), DataRow("x.jsonl:1", values)
    learned = reader.example(row).sequences[0]
    at = max(n for n, mask in enumerate(learned.mask) if mask and not learned.mask[n - 1])
    for alone in (False, True):  # how a prompt without an answer would be written changes nothing here
        (text, tokens), asked = reader.prompt(row, chat=alone), reader.asked(values, chat=alone)
        assert tokens == learned.tokens[:at]
        assert CODEC.decode([tokens], special_tokens=True)[0].endswith(text)
        assert isinstance(asked, str) or not any("train" in message for message in asked)


@pytest.mark.parametrize(
    ("chat", "begins"), [(False, "one?"), (True, "<|im_start|>user\none?<|im_end|>\n<|im_start|>a")]
)
def test_a_prompt_without_an_answer_goes_the_way_of_the_rows_that_are_learned(chat: bool, begins: str) -> None:
    text, _ = reader_of().prompt(DataRow("", {"prompt": "one?", "answer": "1"}), chat=chat)
    assert text.startswith(begins)


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"text": "q"}, "no column 'prompt' to complete; the row has 'text'"),
        ({"prompt": ""}, "column 'prompt' is empty"),
        ({"prompt": ASKED}, "the tokenizer has no chat template"),
        ({"messages": ANSWERED}, "begins with its only answer"),
    ],
)
def test_rows_without_a_prompt(values: dict[str, Any], why: str) -> None:
    with pytest.raises(BadRow, match=why):
        reader_of(template="").prompt(DataRow("x.jsonl:1", values), chat=False)
    with pytest.raises(BadRow, match="no column 'prompt' to complete"):
        reader_of("pair").prompt(DataRow("x.jsonl:1", {"chosen": "a b"}), chat=False)


# ── the prompts of a run ──────────────────────────────────────────────────────────────────────────


def config_of(folder: Path, rows: list[dict[str, Any]], generate: dict[str, Any], **data: Any) -> DataConfig:
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    section = RowsSection.model_validate({"train": "a.jsonl", "rows_per_step": 4, **data})
    config = RowsConfig(rows=section, eval=RowsEval(every=1, rows=4), unit="token")
    table = GenerateSection.model_validate({"max_response_tokens": 4, **generate})
    about = {"model_path": str(MODEL), "trust_remote_code": False, "spec_dir": str(folder), "seed": 3}
    graded = {"evals": table.evaluations, "answer_column": "answer", "needs_answer": True, "max_prompt_tokens": 6}
    return DataConfig(rows=config, **graded, **about)


def opened(folder: Path, rows: list[dict[str, Any]], generate: dict[str, Any], **data: Any) -> RunRows:
    return open_rows(config_of(folder, rows, generate, **{"max_tokens": 9, "bad_rows": "drop", **data}), CODEC)


ROWS = [{"prompt": f"p{n}", "completion": f"{n}", "answer": f"{n}"} for n in range(20)]


def asked(rows: RunRows, name: str = "heldout") -> list[str]:
    columns, _ = rows.prompts("eval", name).draw(0, 99, 1)
    starts = np.cumsum([0, *columns["length_B"]])
    return CODEC.decode([columns["tokens_T"][begin:end].tolist() for begin, end in pairwise(starts)])


def test_only_rows_that_are_held_out_are_completed(tmp_path: Path) -> None:
    """Also where bad ones lie among the last: rows and prompts drop different ones."""
    rows = [dict(row) for row in ROWS]
    del rows[17]["answer"]  # a good row, but no prompt that can be graded
    rows[18]["completion"] = "much too long"
    found = opened(tmp_path, rows, {})
    trained = {json.dumps(CODEC.decode([tokens.tolist()])) for tokens in trained_on(found)}
    assert asked(found) == ["p15", "p16", "p19"]
    assert not any(prompt in text for prompt in asked(found) for text in trained)
    report = found.report()
    assert (report["rows"], report["eval_rows"], report["dropped_bad"], report["dropped_overlong"]) == (
        15,
        {"heldout": 4},
        1,
        1,
    )


def trained_on(rows: RunRows) -> list[np.ndarray]:
    columns, _ = rows.draw("all", 0, 99)
    return np.split(columns["tokens_T"], np.cumsum(columns["length_B"])[:-1])


def test_sets_of_their_own_and_how_often_each_prompt_comes(tmp_path: Path) -> None:
    (tmp_path / "b.jsonl").write_text('{"prompt": "x", "answer": 1}\n{"prompt": "too long for it", "answer": 2}\n')
    sets = [{"name": "own", "data": "b.jsonl"}, {"name": "held", "prompts": 2}]
    found = opened(tmp_path, ROWS, {"sets": sets})
    assert asked(found, "own") == ["x"]
    assert asked(found, "held") == ["p16", "p17"]
    columns, _ = found.prompts("eval", "held").draw(0, 2, 3)
    assert columns["group_B"].tolist() == np.repeat(np.unique(columns["group_B"]), 3).tolist()
    assert min(columns["id_B"]) > EVAL_IDS, "apart from those of the first set"
    table = found.prompts("eval", "own").table
    told = table.rows_of(np.zeros(1, np.int64), ("answer",), messages=True)["0"]
    assert told == {
        "where": f"{tmp_path / 'b.jsonl'}:1",
        "prompt": "x",
        "values": {"answer": 1},
        "messages": [{"role": "user", "content": "x"}],
    }


def test_prompts_that_are_refused(tmp_path: Path) -> None:
    bare = [{name: value for name, value in row.items() if name != "answer"} for row in ROWS]
    with pytest.raises(DataError, match=r"no prompt is left for eval.generate .4 rows are bad, .*no column 'answer'"):
        opened(tmp_path, bare, {})
    with pytest.raises(DataError, match=r"a\.jsonl:17: no column 'answer'"):
        opened(tmp_path, bare, {}, bad_rows="refuse")


def test_a_template_that_is_broken_is_the_models(tmp_path: Path) -> None:
    """It is met with the first messages: those of prompts alone, here."""
    (tmp_path / "b.jsonl").write_text(json.dumps({"prompt": ASKED, "answer": 2}))
    config = config_of(tmp_path, ROWS, {"data": "b.jsonl"}, max_tokens=20)
    (found,) = row_findings(config, CODEC, chats_of("{% for"))
    assert (found.key, "is not Jinja" in found.message) == ("model.path", True)


@pytest.mark.parametrize(
    ("rows", "generate", "wanted"),
    [
        ([{"prompt": "q", "completion": "a", "answer": "a"}], {}, {}),
        ([{"prompt": "q", "completion": "a"}], {}, {"eval.generate.data": "no column 'answer'"}),
        (
            [{"text": "hello"}],
            {"data": "b.jsonl"},
            {"eval.generate.data": "b.jsonl:1: the prompt has 15 tokens, more than the 6 of eval.generate"},
        ),
    ],
)
def test_what_a_check_says_of_the_first_prompts(
    rows: list[dict[str, Any]], generate: dict[str, Any], wanted: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "b.jsonl").write_text('{"prompt": "too long for it", "answer": 2}\n')
    config = config_of(tmp_path, rows * 5, generate, max_tokens=20)
    findings = list(row_findings(config, CODEC, None))
    found = {one.key: one.message for one in findings}
    assert found.keys() == wanted.keys(), found
    assert all(("eval.generate.max_prompt_tokens" in one.hint) is ("more than" in one.message) for one in findings)
    assert all(text in found[key] for key, text in wanted.items()), found
