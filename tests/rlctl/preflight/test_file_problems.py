"""What a spec names on disk: models, data, reward functions, interpreters. Checked before anything starts."""

from __future__ import annotations

import json
import shutil
import struct
import sys
from pathlib import Path
from typing import Any

import pytest
from corpus import qwen2_shapes, write_weights
from small_spec import raw_spec

from rlctl.models.paths import BUILTIN_FOLDER, resolve_model
from rlctl.preflight.file_problems import file_problems
from specs.errors import Problem
from specs.load.load import spec_from

ROWS = [{"question": "1+1?", "answer": "2"}, {"question": "2+2?", "answer": "4"}]


def check(folder: Path, *overrides: str) -> tuple[list[Problem], list[Problem]]:
    return file_problems(spec_from(raw_spec(), overrides), folder)


def only_error(folder: Path, *overrides: str) -> str:
    errors, _ = check(folder, *overrides)
    assert len(errors) == 1, [str(error) for error in errors]
    return str(errors[0])


def safetensors(file: Path, data: bytes = bytes(8)) -> None:
    header = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    file.write_bytes(struct.pack("<Q", len(header)) + header + data)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model folder that is fine; weights included."""
    folder = tmp_path / "model"
    shutil.copytree(BUILTIN_FOLDER / "tiny-digits", folder)
    config = json.loads((folder / "config.json").read_text())
    write_weights(folder / "model.safetensors", qwen2_shapes(config))
    return folder


def edit_json(file: Path, **changes: Any) -> None:
    content = json.loads(file.read_text())
    content.update(changes)
    file.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def resize_vocabulary(model: Path, size: int) -> None:
    """Config and weights; the tokenizer stays."""
    edit_json(model / "config.json", vocab_size=size)
    write_weights(model / "model.safetensors", qwen2_shapes(json.loads((model / "config.json").read_text())))


USE_MODEL = ("model.path=./model", "model.from_scratch=false")


def test_the_good_spec_has_no_problems(tmp_path: Path, model: Path) -> None:
    assert check(tmp_path) == ([], [])
    assert check(tmp_path, *USE_MODEL) == ([], [])


def test_model_paths_start_at_the_spec(tmp_path: Path, model: Path) -> None:
    assert resolve_model("model", tmp_path) == model
    assert resolve_model("./none", tmp_path) == tmp_path / "none"
    assert resolve_model("models/none", tmp_path) == tmp_path / "models/none"
    assert resolve_model("Qwen/Qwen2.5-0.5B", tmp_path) == "Qwen/Qwen2.5-0.5B"
    assert resolve_model("builtin:tiny-bytes", tmp_path) == BUILTIN_FOLDER / "tiny-bytes"


def test_missing_models(tmp_path: Path) -> None:
    assert "no such model folder" in only_error(tmp_path, "model.path=models/nothing")
    assert 'did you mean "builtin:tiny-digits"?' in only_error(tmp_path, "model.path=builtin:tiny-digit")
    text = only_error(tmp_path, "model.from_scratch=false")
    assert text.startswith("model.from_scratch = false: a built-in model has no weights")


def test_hub_ids_without_a_network(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "hub"
    monkeypatch.setenv("HF_HUB_CACHE", str(cache))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    errors, warnings = check(tmp_path, "model.path=some/model", "model.from_scratch=false")
    assert not errors
    assert "will be downloaded when the run starts. http://127.0.0.1:9 could not be reached: Connection" in str(
        warnings[0]
    )
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "HF_HUB_OFFLINE" in only_error(tmp_path, "model.path=some/model")
    snapshot = cache / "models--some--model" / "snapshots" / "abc"
    shutil.copytree(model, snapshot)
    (cache / "models--some--model" / "refs").mkdir()
    (cache / "models--some--model" / "refs" / "main").write_text("abc")
    assert check(tmp_path, "model.path=some/model", "model.from_scratch=false") == ([], [])


def _remove(name: str) -> Any:
    return lambda folder: (folder / name).unlink()


def _pickle_only(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def _index_without_shard(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {"w": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _cut(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-3])


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (_remove("config.json"), "no config.json"),
        (lambda folder: (folder / "config.json").write_text("{"), "config.json cannot be read"),
        (lambda folder: edit_json(folder / "config.json", model_type=None), "no model_type"),
        (lambda folder: edit_json(folder / "config.json", num_attention_heads=6), "not a multiple"),
        (lambda folder: edit_json(folder / "config.json", num_key_value_heads=3), "num_key_value_heads 3"),
        (lambda folder: resize_vocabulary(folder, 10), "token 14"),
        (lambda folder: edit_json(folder / "config.json", max_position_embeddings=15), "15 positions"),
        (
            lambda folder: edit_json(folder / "config.json", model_type="strange", auto_map={"AutoModel": "m.M"}),
            "model.trust_remote_code = true",
        ),
        (_remove("tokenizer.json"), "no tokenizer"),
        (_remove("model.safetensors"), "set model.from_scratch = true"),
        (_pickle_only, "pickle"),
        (_index_without_shard, "model-00001-of-00002.safetensors"),
        (_cut, "is cut short"),
    ],
)
def test_broken_model_folders(tmp_path: Path, model: Path, damage: Any, words: str) -> None:
    damage(model)
    assert words in only_error(tmp_path, *USE_MODEL)


def test_a_reference_needs_weights_and_as_many_tokens(tmp_path: Path, model: Path) -> None:
    resize_vocabulary(model, 14)
    assert "cannot score the same tokens" in only_error(tmp_path, "algorithm.kl_coef=0.1", "ref.model=./model")
    (model / "model.safetensors").unlink()
    errors, _ = check(tmp_path, "algorithm.kl_coef=0.1", "ref.model=./model")
    assert any(error.key == "ref.model" and "no model.safetensors" in error.message for error in errors)


def test_a_chat_template_that_is_asked_for_must_be_there(tmp_path: Path, model: Path) -> None:
    assert "no chat template" in only_error(tmp_path, *USE_MODEL, "data.chat=always")
    edit_json(model / "tokenizer_config.json", chat_template="{{ messages }}")
    assert check(tmp_path, *USE_MODEL, "data.chat=always")[0] == []


# ── data ──────────────────────────────────────────────────────────────────────────────────────────


def write_rows(file: Path, rows: list[Any]) -> None:
    file.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))


DATA = ("data.train=rows.jsonl", "data.prompt_column=question")


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (None, "no such file"),
        ([], "the file is empty"),
        ([*ROWS, "{"], "rows.jsonl:3 is not JSON"),
        ([*ROWS, "", "[1]"], "rows.jsonl:4 is not a JSON object"),
        ([{"question": "x"}], "rows.jsonl:1 has no column 'answer'; it has 'question'"),
        ([{"prompt": "x", "answer": "y"}], "no column 'question'"),
    ],
)
def test_broken_data_files(tmp_path: Path, rows: list[Any] | None, words: str) -> None:
    if rows is not None:
        write_rows(tmp_path / "rows.jsonl", rows)
    assert words in only_error(tmp_path, *DATA)


def test_bad_rows_that_may_be_dropped_are_a_warning(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", [*ROWS, "{"])
    errors, warnings = check(tmp_path, *DATA, "data.bad_rows=drop")
    assert not errors
    assert "rows.jsonl:3" in str(warnings[0])


def test_columns_that_nothing_reads_may_be_missing(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", [{"a": "x", "b": "y"}])
    terms = "reward.terms=[{kind = 'regex', pattern = '7'}]"
    use = ("data.train=rows.jsonl", "data.prompts_per_step=1")
    assert check(tmp_path, *use, "data.template={a} {b}", terms) == ([], [])
    assert "no column 'c'" in only_error(tmp_path, "data.train=rows.jsonl", "data.template={a} {c}", terms)


def test_parquet_columns_and_cut_files(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    file = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), file)
    use = ("data.train=rows.parquet", "data.prompts_per_step=2")
    assert check(tmp_path, *use, "data.prompt_column=question") == ([], [])
    assert "no column 'prompt'" in only_error(tmp_path, *use)
    file.write_bytes(file.read_bytes()[:-2])
    assert "truncated" in only_error(tmp_path, *use)


def test_other_kinds_of_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    assert ".jsonl or .parquet" in only_error(tmp_path, "data.train=rows.csv")
    assert 'did you mean "builtin:sort-digits"?' in only_error(tmp_path, "data.train=builtin:sort-digit")
    assert "no column 'x'" in only_error(tmp_path, "data.prompt_column=x")
    errors, warnings = check(tmp_path, "data.train=some/data:main")
    assert not errors
    assert "downloaded" in str(warnings[0])
    assert "no such file" in only_error(tmp_path, "data.train=data/rows")


# ── reward functions, interpreters, devices ───────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (None, "no such file"),
        ("def score(:\n", "rewards.py:1: "),
        ("def scor(prompt, completion, row): ...\n", "did you mean `scor`?"),
        ("def score(text): ...\n", "text is not prompt, completion or row"),
        ("def score(prompt, completion, row, other): ...\n", "other is not prompt, completion or row"),
        ("def score(prompt, completion, row, *, other): ...\n", "other is not prompt, completion or row"),
        ("async def score(prompt, completion, row): ...\n", "is async"),
        ("def outer():\n    def score(prompt, completion, row): ...\n", "defines no score"),
    ],
)
def test_broken_reward_functions(tmp_path: Path, code: str | None, words: str) -> None:
    if code is not None:
        (tmp_path / "rewards.py").write_text(code)
    assert words in only_error(tmp_path, "reward.terms=[{kind = 'function', path = 'rewards.py:score'}]")


@pytest.mark.parametrize(
    "code",
    [
        "def score(prompt, completion, row): return 1.0\n",
        "def score(prompt, completion, row, strict=True): return 1.0\n",
        "def score(*parts): return 1.0\n",
        "score = lambda prompt, completion, row: 1.0\n",
        "from elsewhere import grade as score\n",
        "try:\n    import x\nexcept ImportError:\n    def score(prompt, completion, row): return 1.0\n",
        "raise SystemExit('checking must not run this')\ndef score(p, c, r): return 1.0\n",
    ],
)
def test_reward_functions_are_found_without_running_the_file(tmp_path: Path, code: str) -> None:
    (tmp_path / "rewards.py").write_text(code)
    assert check(tmp_path, "reward.terms=[{kind = 'function', path = 'rewards.py:score'}]") == ([], [])


def test_interpreters_must_be_there_and_executable(tmp_path: Path) -> None:
    assert "no such interpreter" in only_error(tmp_path, "rollout.python=.venv-none/bin/python")
    (tmp_path / "python").write_text("")
    assert "not executable" in only_error(tmp_path, "rollout.python=python")
    (tmp_path / "python").chmod(0o755)
    assert "does not start" in only_error(tmp_path, "rollout.python=python")
    (tmp_path / "python").unlink()
    assert check(tmp_path, f"rollout.python={sys.executable}") == ([], [])


@pytest.mark.parametrize("driver", [True, False])
def test_gpus_without_a_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, driver: bool) -> None:
    monkeypatch.setattr("rlctl.preflight.file_problems.has_nvidia_driver", lambda: driver)
    spec = spec_from(raw_spec(), ["actor.devices=[0]"])
    errors, warnings = file_problems(spec, tmp_path)
    assert errors == []
    assert [(one.key, one.message, one.value) for one in warnings] == (
        [] if driver else [("actor.devices", "this machine has no NVIDIA driver", "[0]")]
    )
    assert all("run on the CPU" in one.hint and "--target cluster" in one.hint for one in warnings)
    assert file_problems(spec, tmp_path, starting=True) == (warnings, [])
