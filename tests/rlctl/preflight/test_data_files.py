"""The first rows of a run's data, as `check-config` and `train` see them. Cases: `tests/specs/corpus/data.toml`."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from small_spec import raw_spec
from tiny_reward_model import write_reward_model

from rlctl.models.paths import BUILTIN_FOLDER
from rlctl.preflight.data_files import check_data, first_row
from specs.errors import Problem
from specs.load.load import spec_from
from specs.schema.recipes import RowsSpec


def found(folder: Path, *overrides: str) -> tuple[list[Problem], list[Problem]]:
    return check_data(spec_from(raw_spec(), ["data.train=rows.jsonl", *overrides]), folder)


def rows(folder: Path, *prompts: object, name: str = "rows.jsonl") -> None:
    (folder / name).write_text("".join(json.dumps({"prompt": one, "answer": "1"}) + "\n" for one in prompts))


def chat_model(folder: Path, template: str) -> None:
    shutil.copytree(BUILTIN_FOLDER / "tiny-bytes", folder / "model")
    (folder / "model" / "chat_template.jinja").write_text(template)


def test_a_prompt_that_fits_may_come_late(tmp_path: Path) -> None:
    long, limit = "1" * 20, "data.max_prompt_tokens=8"
    rows(tmp_path, *[long] * 200, "1>")
    (errors, (warning,)) = found(tmp_path, limit)
    assert errors == []
    assert "200 of the first 201 prompts of rows.jsonl are longer" in warning.message
    rows(tmp_path, *[long] * 300, "1>")
    (errors, (warning,)) = found(tmp_path, limit)
    assert errors == [], "what nobody has read may fit"
    assert "all of the first 256 prompts" in warning.message
    rows(tmp_path, long, "1>", "2>", "3>")
    assert found(tmp_path, limit) == ([], []), "as asked: data.overlong drops them"


@pytest.mark.parametrize("content", [3, ["x"], {"a": 1}, {"type": "text", "text": "12"}])
def test_what_a_tool_has_returned_may_be_anything(tmp_path: Path, content: object) -> None:
    chat_model(tmp_path, "{% for m in messages %}{{ m.content | tojson }}{% endfor %}")
    rows(tmp_path, [{"role": "user", "content": "12"}, {"role": "tool", "content": content}])
    assert found(tmp_path, "model.path=./model", "data.max_prompt_tokens=60") == ([], [])


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (
            "{% for m in messages %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
            "longer",
        ),
        ("{% set ns = namespace(s='xx') %}{% for i in range(40) %}{% set ns.s = ns.s + ns.s %}{% endfor %}", "memory"),
    ],
)
def test_a_template_that_never_ends_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, template: str, words: str
) -> None:
    monkeypatch.setattr("workers.chat.chat_renderer.RENDER_S", 2.0 if words == "longer" else 60.0)
    chat_model(tmp_path, template + ("{% endfor %}" if "for m" in template else ""))
    rows(tmp_path, "12>")
    ((error,), _) = found(tmp_path, "model.path=./model", "data.max_prompt_tokens=60")
    assert error.key == "model.path"
    assert words in error.message


def test_nothing_heavy_is_imported_for_it(tmp_path: Path) -> None:
    chat_model(tmp_path, "{% for m in messages %}{{ m.content }}{% endfor %}>")
    rows(tmp_path, "12")
    raw = raw_spec(data={"train": "rows.jsonl", "max_prompt_tokens": 60}, model={"path": "./model"})
    code = (
        "import json, sys\n"
        "from pathlib import Path\n"
        "from rlctl.preflight.data_files import check_data\n"
        "from specs.load.load import spec_from\n"
        "assert check_data(spec_from(json.loads(sys.argv[1]), []), Path(sys.argv[2])) == ([], [])\n"
        "assert 'tokenizers' in sys.modules\n"
        "print({'torch', 'transformers', 'numpy', 'datasets'} & set(sys.modules))"
    )
    command = [sys.executable, "-c", code, json.dumps(raw), str(tmp_path)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == "set()"


# ── rows that are learned from ────────────────────────────────────────────────────────────────────


ROWS: dict[str, object] = {"train": "rows.jsonl", "rows_per_step": 2, "max_tokens": 16}
WIDE: dict[str, object] = {
    "objective": {"kind": "simpo"},
    "actor": {"micro_batch_tokens": 16, "optimizer": {"lr": 1e-3}},
}
LABELS = {"objective": {"kind": "kto"}}


def learned(folder: Path, lines: list[dict[str, object]], **sections: dict[str, object]) -> RowsSpec:
    (folder / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    recipe = "preference" if "objective" in sections else "sft"
    raw = {
        "schema": 1,
        "run": {"recipe": recipe, "name": "rows", "steps": 1},
        "model": {"path": "builtin:tiny-bytes", "from_scratch": True},
        "data": ROWS,
        "objective": {"kind": "nll"},
        "actor": {"optimizer": {"lr": 1e-3}},
    }
    spec = spec_from({**raw, **sections}, [])
    assert isinstance(spec, RowsSpec)
    return spec


def test_rows_show_what_learns(tmp_path: Path) -> None:
    spec = learned(tmp_path, [{"prompt": "1+1=", "completion": "2"}, {"prompt": "1" * 20, "completion": "2"}])
    assert check_data(spec, tmp_path) == ([], [])
    found = first_row(spec, tmp_path)
    assert found.example == [[("1+1=", "seen"), ("2", "learned"), ("<eos>", "learned special")]]
    summary = "6 tokens, 2 learned (completion, with the end of each), longest 6; 1 too long"
    assert found.summary == f"first rows (1): {summary}"


def test_rows_of_an_evaluation_are_all_read(tmp_path: Path) -> None:
    """`data.max_rows` is about those that are learned from."""
    (tmp_path / "eval.jsonl").write_text('{"bad": 1}\n' + '{"text": "12"}\n' * 2)
    data, evaluation = {**ROWS, "max_rows": 1, "bad_rows": "drop"}, {"every": 1, "rows": 2, "data": "eval.jsonl"}
    assert check_data(learned(tmp_path, [{"text": "12"}], data=data, eval=evaluation), tmp_path) == ([], [])


@pytest.mark.parametrize(
    ("row", "sections", "refused", "words"),
    [
        ({"text": "sort 12"}, {}, True, "66.7% of the characters of the first 2 rows: s o r t"),
        ({"prompt": "12", "completion": "12345é"}, {"data": {**ROWS, "max_tokens": 4}}, False, "12.5%"),
        ({"prompt": "1", "chosen": "2é", "rejected": "3"}, {"objective": {"kind": "simpo"}}, False, "20.0%"),
    ],
)
def test_characters_that_the_tokenizer_drops_are_named(
    tmp_path: Path, row: dict[str, object], sections: dict[str, dict[str, object]], refused: bool, words: str
) -> None:
    """Also those behind what a row is truncated to."""
    data = {**sections.get("data", ROWS), "overlong": "truncate"}
    digits = {"path": "builtin:tiny-digits", "from_scratch": True}
    spec = learned(tmp_path, [row, row], **{**sections, "data": data, "model": digits})
    errors, warnings = check_data(spec, tmp_path)
    (problem,) = errors if refused else warnings
    assert (problem.key, bool(errors)) == ("data.train", refused)
    assert words in problem.message


@pytest.mark.parametrize("asks", [{"chat": "always"}, {"system": "Add."}])
def test_rows_are_not_blamed_for_a_template_that_is_not_there(tmp_path: Path, asks: dict[str, str]) -> None:
    """Another check says it of the key."""
    spec = learned(tmp_path, [{"prompt": "1+1=", "completion": "2"}], data={**ROWS, **asks})
    assert check_data(spec, tmp_path) == ([], [])


def test_an_end_that_is_padding_too_is_not_scored(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    write_reward_model(tmp_path / "model", template="")  # its token 0 is both
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "chosen": "2", "rejected": "3"}')
    run, learner = {"recipe": "reward_model", "name": "rows", "steps": 1}, {"optimizer": {"lr": 1e-3}}
    raw = {"schema": 1, "run": run, "model": {"path": "./model"}, "data": ROWS, "reward_model": learner}
    spec = spec_from(raw, [])
    assert isinstance(spec, RowsSpec)
    assert first_row(spec, tmp_path).example == [[("1+1=", "seen"), (digit, "learned")] for digit in "23"]


@pytest.mark.parametrize(
    ("lines", "sections", "key", "words"),
    [
        ([{"prompt": "1+1="}], {}, "data.train", r"rows\.jsonl:1: no column 'messages', 'completion' or 'text'"),
        ([{"prompt": "1" * 20, "completion": "2"}], {}, "data.train", "no row is left .1 are longer"),
        ([{"prompt": "1", "completion": "2", "label": True}] * 2, LABELS, "data.train", "every row is labelled true"),
        (
            [{"prompt": "1", "completion": "2"}],
            {"data": {**ROWS, "text_column": "x"}},
            "data.train",
            "no row has the col",
        ),
        (
            [{"prompt": "1", "chosen": "2" * 14, "rejected": "3" * 14}],
            WIDE,
            "data.train",
            "the largest row has 30 tokens",
        ),
        ([{"text": "12"}] * 2, {"eval": {"every": 1, "rows": 2}}, "eval.rows", "leaves none of the 2 rows of data"),
        ([{"text": "12"}, {"text": "1" * 99}], {"eval": {"every": 1, "rows": 1}}, "eval.rows", "1 of them can be used"),
    ],
)
def test_rows_that_end_a_start_are_refused(
    tmp_path: Path, lines: list[dict[str, object]], sections: dict[str, dict[str, object]], key: str, words: str
) -> None:
    ((error,), warnings) = check_data(learned(tmp_path, lines, **sections), tmp_path)
    assert (error.key, warnings) == (key, [])
    assert re.search(words, error.message)
