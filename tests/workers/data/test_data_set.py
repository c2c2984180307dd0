"""Data: every kind of source, bad and overlong rows, chat templates, and a cursor that a resume can trust."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import specs
from backends import activity
from backends.hf.tokenizer import TextCodec, load_codec
from specs.errors import DataError
from specs.schema.eval_sets import EvalSection
from specs.schema.sections import DataSection
from specs.templates import render_template, template_columns
from specs.wire.heartbeat import Activity
from specs.wire.role_config import DataConfig
from workers.data.data_set import EVAL_IDS, RunData, open_data
from workers.data.prompts import PromptTable
from workers.data.row_source import read_rows

pytestmark = pytest.mark.usefixtures("warm_children")

BUILTIN = Path(specs.__file__).parent / "builtin"


@pytest.fixture(scope="module")
def codec() -> TextCodec:
    return load_codec(str(BUILTIN / "tiny-bytes"))


@pytest.fixture(scope="module")
def chat_codec() -> TextCodec:
    codec = load_codec(str(BUILTIN / "tiny-bytes"))
    codec.tokenizer.chat_template = (
        "{% for t in tools or [] %}[tool]{{ t['function']['name'] }}{% endfor %}"
        "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}[go]{% endif %}"
    )
    return codec


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of files by split, which `datasets` takes for `some/rows` of the hub in the folder where a role runs."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "some" / "rows"
    folder.mkdir(parents=True)
    return folder


def section(**keys: Any) -> DataSection:
    given = {"train": "rows.jsonl", "prompts_per_step": 2, "max_prompt_tokens": 32, "max_response_tokens": 8}
    return DataSection.model_validate({**given, **keys})


def write_jsonl(folder: Path, rows: list[Any]) -> None:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    (folder / "rows.jsonl").write_text("\n".join(lines) + "\n", "utf-8")


def table_of(folder: Path, codec: TextCodec, **keys: Any) -> PromptTable:
    return run_data(folder, codec, needs_answer=False, **keys).train.table


def run_data(
    folder: Path,
    codec: TextCodec,
    *,
    needs_answer: bool = True,
    eval_keys: dict[str, Any] | None = None,
    **keys: Any,
) -> RunData:
    held = EvalSection.model_validate({"every": 1, **eval_keys}) if eval_keys else None
    config = {
        "model_path": codec.model_path,
        "trust_remote_code": False,
        "data": section(**keys).model_dump(),
        "evals": [one.model_dump() for one in held.evaluations] if held else [],
        "needs_answer": needs_answer,
        "row_columns": None,
        "tools_column": section(**keys).tools_column,
        "seed": 7,
        "spec_dir": str(folder),
    }
    return open_data(DataConfig.model_validate(config), codec)


# ── rows ──────────────────────────────────────────────────────────────────────────────────────────


def test_jsonl_keeps_columns_and_skips_blank_lines(tmp_path: Path, codec: TextCodec) -> None:
    text = '\ufeff{"prompt": "one", "answer": "1", "extra": [1, {"a": null}]}\n\n{"prompt": "zwei", "answer": 2}\n'
    (tmp_path / "rows.jsonl").write_text(text, "utf-8")
    table = table_of(tmp_path, codec)
    assert table.rows[0]["extra"] == [1, {"a": None}]
    assert [codec.decode([table.prompt_ids(i)])[0] for i in range(2)] == ["one", "zwei"] == table.prompts
    assert [where.rsplit(":", 1)[1] for where in table.wheres] == ["1", "3"]


def test_a_verb_says_how_many_rows_it_has_read_of_all(tmp_path: Path, hub: Path, codec: TextCodec) -> None:
    import pyarrow as arrow
    from pyarrow import parquet

    folder, rows = tmp_path / "of the spec", [{"prompt": "p"}] * 4
    folder.mkdir()
    write_jsonl(folder, rows)
    write_jsonl(hub, rows)
    parquet.write_table(arrow.Table.from_pylist(rows), folder / "rows.parquet")
    for source in ("rows.jsonl", "rows.parquet", "some/rows"):
        activity.begin("open_data", 1, counted=False)
        activity.describe("open_data", "row", counted=False)
        for most in (None, 3, 9):
            table_of(folder, codec, train=source, split="train", max_rows=most)
        now = Activity.model_validate(activity.snapshot())
        activity.end()
        assert (now.so_far, now.of_all) == (11, 11), source


BAD_ROWS: list[tuple[Any, str]] = [
    ('{"prompt": "torn', "not JSON"),
    ({"question": "x"}, "no column 'prompt'; the row has 'question'"),
    ({"prompt": None}, "column 'prompt' is null"),
    ({"prompt": ""}, "the prompt is empty"),
    ({"prompt": [{"role": "user", "content": "x"}]}, "no chat template"),
    ('{"prompt": "half \\ud800"}', "column 'prompt' holds half of a surrogate pair"),
    ('{"prompt": "p", "extra": [{"a": ["x", "\\uDBFF"]}]}', "column 'extra' holds half of a surrogate pair"),
    ("[" * 100_000, "not JSON"),
    (f'{{"prompt": "p", "more": {"[" * 200}{"]" * 200}}}', "nested more than 200 levels deep"),
]


@pytest.mark.parametrize(("bad", "words"), BAD_ROWS)
def test_a_bad_row_is_named_or_dropped(tmp_path: Path, codec: TextCodec, bad: Any, words: str) -> None:
    write_jsonl(tmp_path, [{"prompt": "a"}, bad, {"prompt": "b"}, bad])
    with pytest.raises(DataError) as error:
        table_of(tmp_path, codec)
    assert f"{tmp_path / 'rows.jsonl'}:2: " in error.value.message
    assert words in error.value.message
    assert "data.bad_rows" in error.value.hint
    lacks = words.startswith(("no column", "column 'prompt' is null"))
    assert ("prompt_column" in error.value.hint) is lacks, "the row may be right, and its column named otherwise"
    table = table_of(tmp_path, codec, bad_rows="drop")
    assert table.prompts == ["a", "b"]
    assert table.dropped_bad == 2
    assert "rows.jsonl:2: " in table.first_bad


def test_overlong_prompts(tmp_path: Path, codec: TextCodec) -> None:
    write_jsonl(tmp_path, [{"prompt": "a"}, {"prompt": "b" * 33}, {"prompt": "c" * 32}, {"prompt": "d" * 40}])
    table = table_of(tmp_path, codec)
    assert table.prompts == ["a", "c" * 32]
    assert (table.dropped_overlong, table.longest_prompt_tokens) == (2, 40)
    with pytest.raises(DataError, match=r"2 prompts .*rows\.jsonl:2 has 33, the longest has 40"):
        table_of(tmp_path, codec, overlong="refuse")


def test_parquet(tmp_path: Path, codec: TextCodec) -> None:
    import pyarrow as arrow
    from pyarrow import parquet

    columns = {"prompt": [f"p{i}" for i in range(3000)], "day": [datetime.date(2026, 1, 1)] * 3000}
    parquet.write_table(arrow.table(columns), tmp_path / "rows.parquet", row_group_size=700)
    table = table_of(tmp_path, codec, train="rows.parquet")
    assert table.prompts == columns["prompt"]
    assert table.rows[2999]["day"] == datetime.date(2026, 1, 1)
    assert len(table_of(tmp_path, codec, train="rows.parquet", max_rows=5)) == 5
    parquet.write_table(arrow.table({"prompt": [b"p"]}), tmp_path / "bytes.parquet")
    with pytest.raises(DataError, match="column 'prompt' is bytes, which no template can write"):
        table_of(tmp_path, codec, train="bytes.parquet", template="{prompt}?")
    columns["prompt"][1500] = None
    parquet.write_table(arrow.table(columns), tmp_path / "rows.parquet")
    with pytest.raises(DataError, match=r"rows\.parquet row 1501: column 'prompt' is null"):
        table_of(tmp_path, codec, train="rows.parquet")
    (tmp_path / "rows.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(DataError, match="not a readable Parquet file"):
        table_of(tmp_path, codec, train="rows.parquet")


@pytest.mark.parametrize(
    ("column", "words"),
    [
        (lambda arrow: arrow.array([4 * 10**17], arrow.timestamp("us")), "holds what Python cannot: date value"),
        (lambda arrow: arrow.StructArray.from_arrays([arrow.array([1])] * 2, ["a", "a"]), "duplicate field names"),
        (lambda arrow: arrow.array([[("a", 1)] * 2], arrow.map_(arrow.string(), arrow.int64())), "duplicate key"),
    ],
)
def test_parquet_values_that_python_does_not_have(column: Any, words: str, tmp_path: Path, codec: TextCodec) -> None:
    import pyarrow as arrow
    from pyarrow import parquet

    table = arrow.table({"prompt": ["31|"], "answer": ["13"], "odd": column(arrow)})
    parquet.write_table(table, tmp_path / "rows.parquet")
    with pytest.raises(DataError, match=words) as caught:
        table_of(tmp_path, codec, train="rows.parquet")
    assert "leave that column out" in caught.value.hint


def test_a_map_of_a_table_is_an_object_of_the_row(tmp_path: Path) -> None:
    import pyarrow as arrow
    from pyarrow import parquet

    of_text = arrow.map_(arrow.string(), arrow.string())
    column = arrow.array([[{"unit": "m"}], None], arrow.list_(of_text))
    by_day = arrow.array([[(datetime.date(2026, 1, 2), 3)]] * 2, arrow.map_(arrow.date32(), arrow.int64()))
    parquet.write_table(arrow.table({"days": by_day, "tests": column}), tmp_path / "rows.parquet")
    rows = read_rows("rows.parquet", split="", base=tmp_path, max_rows=None)
    wanted = [{"days": {"2026-01-02": 3}, "tests": tests} for tests in ([{"unit": "m"}], None)]
    assert [row.values for row in rows] == wanted, "what travels as JSON has text as keys"


def test_messages_and_tools_of_a_table_are_as_they_were_written(tmp_path: Path, hub: Path) -> None:
    """The table gives each call the arguments of all other calls, as null, and `y: null` would be learned."""
    import pyarrow as arrow
    from pyarrow import parquet

    rows = []
    for name, arguments in (("f", {"x": 1}), ("g", {"y": [None, 2]}), ("h", {})):
        call = {"type": "function", "function": {"name": name, "arguments": arguments}}
        tool = {"name": name, "parameters": {"properties": {key: {"type": "number"} for key in arguments}}}
        messages = [{"role": "user", "content": "q"}, {"role": "assistant", "tool_calls": [call]}]
        rows.append({"messages": messages, "tools": [tool], "kept": [{"in": 1, "out": None}]})
    parquet.write_table(arrow.Table.from_pylist(rows), hub / "train.parquet")
    for source in ("some/rows", "some/rows/train.parquet"):
        base = tmp_path if source.endswith("parquet") else tmp_path / "of the spec"
        assert [row.values for row in read_rows(source, split="train", base=base, max_rows=None)] == rows


def test_parquet_with_two_columns_of_one_name(tmp_path: Path, codec: TextCodec) -> None:
    import pyarrow as arrow
    from pyarrow import parquet

    columns = [arrow.array([text]) for text in ("31|", "13", "42|")]
    table = arrow.Table.from_arrays(columns, ["prompt", "answer", "prompt"])
    parquet.write_table(table, tmp_path / "rows.parquet")
    with pytest.raises(DataError, match="has two columns 'prompt'"):
        table_of(tmp_path, codec, train="rows.parquet")


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("missing.jsonl", "does not exist"),
        ("missing.parquet", "does not exist"),
        ("data.csv", "unknown format"),
        ("builtin:nonsense", "no built-in task 'nonsense'"),
    ],
)
def test_a_source_that_cannot_be_read(tmp_path: Path, codec: TextCodec, source: str, words: str) -> None:
    with pytest.raises(DataError, match=words) as error:
        table_of(tmp_path, codec, train=source)
    assert error.value.hint


@pytest.mark.parametrize(
    ("begin", "what", "program"),
    [
        (b"\x28\xb5\x2f\xfd\x04", "compressed", "unzstd"),
        (b"\x1f\x8b\x08", "compressed", "gunzip"),
        ("\ufeff{".encode("utf-16-le"), "UTF-16", "iconv"),
        (b"version https://git-lfs.github.com", "a pointer of Git LFS", "git lfs pull"),
    ],
)
def test_a_file_that_is_not_what_its_name_says(begin: bytes, what: str, program: str, tmp_path: Path) -> None:
    for name in ("rows.jsonl", "rows.parquet"):
        (tmp_path / name).write_bytes(begin)
        with pytest.raises(DataError, match=f"{name} is {what}") as error:
            read_rows(name, split="", base=tmp_path, max_rows=None)
        assert program in error.value.hint


def test_a_split_is_picked(tmp_path: Path, codec: TextCodec, hub: Path) -> None:
    for split, prompt in (("train", "a"), ("test", "b")):
        (hub / f"{split}.jsonl").write_text(f'{{"prompt": "{prompt}", "answer": "1"}}\n' * 2)
    folder = tmp_path / "of the spec"
    assert table_of(folder, codec, train="some/rows").prompts == ["a", "a"]
    assert table_of(folder, codec, train="some/rows", split="test").prompts == ["b", "b"]
    data = run_data(folder, codec, train="some/rows", eval_keys={"prompts": 2, "data": "some/rows", "split": "test"})
    assert data.prompts("eval", "heldout").table.prompts == ["b", "b"]


def test_a_row_of_the_hub_that_python_cannot_hold(tmp_path: Path, codec: TextCodec, hub: Path) -> None:
    import pyarrow as arrow
    from pyarrow import parquet

    table = arrow.table({"prompt": ["a"], "answer": ["1"], "day": arrow.array([4 * 10**17], arrow.timestamp("us"))})
    parquet.write_table(table, hub / "train.parquet")
    with pytest.raises(DataError, match="a row behind row 0 cannot be read: date value"):
        table_of(tmp_path / "of the spec", codec, train="some/rows")


# ── prompts ───────────────────────────────────────────────────────────────────────────────────────


def test_templates() -> None:
    template = "Q: {question}\nEnd with \\boxed{} or {{x}}. {level} {question}"
    assert template_columns(template) == ("question", "level")
    assert render_template(template, {"question": "{level}?", "level": 3}) == (
        "Q: {level}?\nEnd with \\boxed{} or {x}. 3 {level}?"
    )
    with pytest.raises(KeyError):
        render_template("{missing}", {})


def test_chat(tmp_path: Path, chat_codec: TextCodec) -> None:
    said = (("user", "hi"), ("assistant", "yo"), ("user", "so"))
    messages = [{"role": role, "content": content} for role, content in said]
    write_jsonl(
        tmp_path, [{"prompt": "text"}, {"prompt": messages}, {"prompt": [{"role": "system", "content": "own"}]}]
    )
    assert table_of(tmp_path, chat_codec, system="be brief", max_prompt_tokens=64).prompts == [
        "[system]be brief[user]text[go]",
        "[system]be brief[user]hi[assistant]yo[user]so[go]",
        "[system]own[go]",
    ]
    write_jsonl(tmp_path, [{"prompt": "text"}])
    assert table_of(tmp_path, chat_codec, chat="never").prompts == ["text"]
    assert table_of(tmp_path, chat_codec, template="Say {prompt}").prompts == ["[user]Say text[go]"]


def test_tools_of_a_row_are_shown(tmp_path: Path, chat_codec: TextCodec) -> None:
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
    rows = [{"prompt": "a", "tools": [tool]}, {"prompt": "b", "tools": json.dumps([tool])}, {"prompt": "c"}]
    write_jsonl(tmp_path, rows)
    assert table_of(tmp_path, chat_codec).prompts == ["[tool]add[user]a[go]", "[tool]add[user]b[go]", "[user]c[go]"]
    with pytest.raises(DataError, match="no row has the column 'other'"):
        table_of(tmp_path, chat_codec, tools_column="other")
    write_jsonl(tmp_path, [row | {"other": None} for row in rows])
    assert table_of(tmp_path, chat_codec, tools_column="other").prompts == ["[user]a[go]", "[user]b[go]", "[user]c[go]"]
    write_jsonl(tmp_path, [{"prompt": "a", "tools": "add"}])
    with pytest.raises(DataError, match="column 'tools' is no JSON"):
        table_of(tmp_path, chat_codec)
    assert table_of(tmp_path, chat_codec, chat="never").prompts == ["a"], "no template is there to show them"


def test_chat_that_the_tokenizer_cannot_do(tmp_path: Path, codec: TextCodec) -> None:
    write_jsonl(tmp_path, [{"prompt": "text"}])
    with pytest.raises(DataError, match="has no chat template"):
        table_of(tmp_path, codec, chat="always")
    with pytest.raises(DataError, match=r"data\.system has no effect"):
        table_of(tmp_path, codec, system="be brief")
    write_jsonl(tmp_path, [{"prompt": [{"role": "user", "content": "x"}]}])
    with pytest.raises(DataError, match="is list, not text, and the tokenizer has no chat") as error:
        table_of(tmp_path, codec)
    assert error.value.hint.startswith("use an instruct model"), "the row is not to blame"


# ── drawing ───────────────────────────────────────────────────────────────────────────────────────


def numbered(folder: Path, count: int) -> None:
    write_jsonl(folder, [{"prompt": f"p{'x' * (i % 3)}{i}", "answer": str(i)} for i in range(count)])


def test_columns_of_a_draw(tmp_path: Path, codec: TextCodec) -> None:
    numbered(tmp_path, 5)
    prompts = run_data(tmp_path, codec, shuffle=False).train
    columns, state = prompts.draw(4, 2, 3)
    assert state == {"position": 6, "epoch": 1}
    assert columns["row_B"].tolist() == [4, 4, 4, 0, 0, 0]
    assert columns["group_B"].tolist() == [4, 4, 4, 5, 5, 5]
    assert columns["id_B"].tolist() == columns["rollout_B"].tolist() == [12, 13, 14, 15, 16, 17]
    assert columns["length_B"].tolist() == [3, 3, 3, 2, 2, 2]
    assert columns["prefix_B"].tolist() == [4, 4, 4, 5, 5, 5], "samples of a draw may share their prompt's computation"
    assert columns["position_B"].tolist() == [0] * 6
    tokens = np.split(columns["tokens_T"], np.cumsum(columns["length_B"])[:-1])
    assert codec.decode([ids.tolist() for ids in tokens]) == ["px4"] * 3 + ["p0"] * 3


def test_every_row_once_an_epoch_and_in_a_new_order(tmp_path: Path, codec: TextCodec) -> None:
    numbered(tmp_path, 11)
    prompts = run_data(tmp_path, codec).train
    rows = prompts.draw(0, 33, 1)[0]["row_B"].reshape(3, 11)
    assert all(sorted(epoch.tolist()) == list(range(11)) for epoch in rows)
    assert len({tuple(epoch.tolist()) for epoch in rows}) == 3


def test_the_cursor_resumes_exactly(tmp_path: Path, codec: TextCodec) -> None:
    """Drawn at once, in steps, or by a new process from any position: the same prompts, ids and tokens."""
    numbered(tmp_path, 7)
    whole, _ = run_data(tmp_path, codec).train.draw(0, 40, 2)
    prompts, position, pieces = run_data(tmp_path, codec).train, 0, []
    for step in range(8):
        if step in (3, 5):
            prompts = run_data(tmp_path, codec).train
        columns, state = prompts.draw(position, 5, 2)
        position = state["position"]
        pieces.append(columns)
    assert position == 40
    for name, column in whole.items():
        np.testing.assert_array_equal(np.concatenate([piece[name] for piece in pieces]), column)


def test_held_out_rows_are_never_drawn(tmp_path: Path, codec: TextCodec) -> None:
    numbered(tmp_path, 20)
    data = run_data(tmp_path, codec, eval_keys={"prompts": 6})
    drawn = set(data.train.draw(0, 14 * 3, 1)[0]["row_B"].tolist())
    held, state = data.prompts("eval", "heldout").draw(0, 100, 1)
    assert drawn == set(range(14))
    assert held["row_B"].tolist() == list(range(14, 20))
    assert state["position"] == 6
    assert held["id_B"].min() == EVAL_IDS
    assert data.report("answer")["eval_rows"] == {"heldout": 6}
    with pytest.raises(DataError, match=r"eval\.prompts = 20: rows\.jsonl has only 20 usable rows"):
        run_data(tmp_path, codec, eval_keys={"prompts": 20})


def test_several_sets_are_read_apart(tmp_path: Path, codec: TextCodec) -> None:
    """Held-out rows and those of a file, the file read once; no two sets draw the same random numbers."""
    numbered(tmp_path, 10)
    (tmp_path / "held.jsonl").write_text('{"prompt": "h", "answer": "1"}\n' * 3, "utf-8")
    sets = [{"name": "kept", "prompts": 4}, {"name": "a", "data": "held.jsonl"}, {"name": "b", "data": "held.jsonl"}]
    data = run_data(tmp_path, codec, eval_keys={"prompts": 2, "sets": sets})
    assert data.report("answer")["eval_rows"] == {"kept": 4, "a": 2, "b": 2}
    assert len(data.train.indices) == 6
    drawn = {name: data.prompts("eval", name).draw(0, 100, 3)[0] for name in ("kept", "a", "b")}
    assert drawn["kept"]["row_B"].tolist() == [6, 6, 6, 7, 7, 7, 8, 8, 8, 9, 9, 9]
    assert drawn["kept"]["id_B"].tolist() == list(range(EVAL_IDS, EVAL_IDS + 12))
    assert len({int(one) for columns in drawn.values() for one in columns["id_B"]}) == 12 + 6 + 6
    assert data.prompts("eval", "a").table is data.prompts("eval", "b").table
