"""The first rows of a run's data, as `check-config` and `train` see them. Cases: `tests/specs/corpus/data.toml`."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from small_spec import raw_spec

from rlctl.models.paths import BUILTIN_FOLDER
from rlctl.preflight.data_files import check_data
from specs.errors import Problem
from specs.load.load import spec_from


def found(folder: Path, *overrides: str) -> tuple[list[Problem], list[Problem]]:
    return check_data(spec_from(raw_spec(), ["data.train=rows.jsonl", *overrides]), folder)


def rows(folder: Path, *prompts: object, name: str = "rows.jsonl") -> None:
    (folder / name).write_text("".join(json.dumps({"prompt": one, "answer": "1"}) + "\n" for one in prompts))


def chat_model(folder: Path, template: str) -> None:
    shutil.copytree(BUILTIN_FOLDER / "tiny-bytes", folder / "model")
    (folder / "model" / "chat_template.jinja").write_text(template)


def test_evaluation_data_is_looked_at_too(tmp_path: Path) -> None:
    rows(tmp_path, "12>")
    rows(tmp_path, "sort it", name="held.jsonl")
    ((error,), warnings) = found(tmp_path, "eval.every=1", "eval.data=held.jsonl", "eval.prompts=1")
    assert (error.key, error.value, warnings) == ("eval.data", '"held.jsonl"', [])
    assert "the prompt has no tokens: the tokenizer drops all of its characters" in error.message


def test_a_prompt_that_fits_may_come_late(tmp_path: Path) -> None:
    long, limit = "1" * 20, "data.max_prompt_tokens=8"
    rows(tmp_path, *[long] * 400, "1>")
    (errors, (warning,)) = found(tmp_path, limit)
    assert errors == []
    assert "400 of the first 401 prompts of rows.jsonl are longer" in warning.message
    rows(tmp_path, *[long] * 3000, "1>")
    (errors, (warning,)) = found(tmp_path, limit)
    assert errors == [], "what nobody has read may fit"
    assert "all of the first 2048 prompts" in warning.message
    rows(tmp_path, long, "1>", "2>", "3>")
    assert found(tmp_path, limit) == ([], []), "as asked: data.overlong drops them"


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
    monkeypatch.setattr("workers.chat_renderer.RENDER_S", 2.0 if words == "longer" else 60.0)
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
