"""Files that a run reads belong to it: one that was edited between two attempts is named, and refused or accepted."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from small_spec import raw_spec

from rlctl.run.input_files import inputs_of
from rlctl.run.run_dir import RunDir
from specs.errors import RunDirError
from specs.load.load import spec_from
from specs.schema.recipes import RlSpec

REWARD = """
import math, json
import helpers.lists as lists

def score(prompt, completion, row):
    from words import good
    return 1.0
"""
FILES = {
    "rows.jsonl": '{"prompt": "a", "answer": "1"}\n',
    "held.jsonl": '{"prompt": "b", "answer": "2"}\n',
    "code/rewards.py": REWARD,
    "code/words.py": "import deeper\ngood = []\n",
    "code/deeper.py": "import words  # a circle\n",
    "code/helpers/__init__.py": "",
    "code/helpers/lists.py": "",
    "code/math.py": "the standard library's comes first",
    "code/apart.py": "",
    "model/tokenizer.json": "{}",
    "model/model.safetensors": "",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "spec.toml").write_text("# copied to the run directory, and not read here\n")
    return tmp_path


def spec_of(**sections: dict[str, object]) -> RlSpec:
    terms = [{"kind": "exact_match"}, {"kind": "function", "path": "code/rewards.py:score"}]
    given = {
        "data": {"train": "rows.jsonl"},
        "eval": {"every": 1, "data": "held.jsonl"},
        "reward": {"terms": terms},
        "model": {"path": "model"},
    }
    return spec_from(raw_spec(**given | sections))


def attempt(folder: Path, spec: RlSpec | None = None, *, resume: bool = True, accept: bool = False) -> RunDir:
    run = RunDir(folder / "run")
    run.open(spec or spec_of(), folder / "spec.toml", resume=resume, accept_changed_files=accept)
    run.metrics.write_text('{"step": 1}\n')
    built = {"actor": [{"model": {"weights_checksum": "1"}, "versions": {}}]}
    run.as_built.write_text(json.dumps(built))
    run.release()
    return run


def edit(folder: Path, name: str, text: str | None = None) -> None:
    """Keep size and times: only reading it tells."""
    file = folder / name
    before = file.stat()
    file.write_text(text if text is not None else file.read_text().swapcase() or "# now with words\n")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_what_belongs_to_a_run(folder: Path) -> None:
    found = inputs_of(spec_of(), folder)
    assert {key: sorted(marks) for key, marks in found.items()} == {
        "data.train": ["rows.jsonl"],
        "eval.data": ["held.jsonl"],
        "reward.terms.1.path": [
            *("code/deeper.py", "code/helpers/__init__.py", "code/helpers/lists.py", "code/rewards.py"),
            "code/words.py",
        ],
        "model.path": ["tokenizer.json"],
    }
    command = ["python", "{spec_dir}/code/apart.py", "{spec_dir}", "{prompt}"]
    for cwd, inside in (("code/helpers", ["code/helpers/__init__.py", "code/helpers/lists.py"]), (".", [])):
        agent = {"command": command, "cwd": cwd}
        program = spec_from(raw_spec(environment={"agent": agent, "max_episode_tokens": 64}))
        marked = {key: sorted(marks) for key, marks in inputs_of(program, folder).items()}
        assert marked == {"environment.agent": ["code/apart.py", *inside]}, "the spec's folder has its runs in it"
    assert inputs_of(spec_from(raw_spec()), folder) == {}, "what comes with rlctl is rlctl's"
    rows: dict[str, Any] = {"train": "rows.jsonl", "rows_per_step": 1, "max_tokens": 9}
    for recipe in ("sft", "reward_model"):
        raw = {"schema": 1, "run": {"name": "r", "steps": 1, "recipe": recipe}, "model": {"path": "model"}}
        raw |= {"data": rows, "eval": {"every": 1, "data": "held.jsonl"}}
        raw |= {"objective": {"kind": "nll" if recipe == "sft" else "bradley_terry"}}
        assert sorted(inputs_of(spec_from(raw), folder)) == ["data.train", "eval.data", "model.path"]


def test_edited_files_are_refused_and_nothing_changed(folder: Path) -> None:
    attempt(folder, resume=False)
    attempt(folder)
    before = {str(path) for path in (folder / "run").rglob("*")}
    edit(folder, "rows.jsonl")
    edit(folder, "code/deeper.py")
    edit(folder, "model/tokenizer.json", "[]")
    with pytest.raises(RunDirError) as caught:
        attempt(folder)
    for key, name in (
        ("data.train", "rows.jsonl"),
        ("reward.terms.1.path", "code/deeper.py"),
        ("model.path", "tokenizer.json"),
    ):
        assert f"  - {key}: {name} has other content" in caught.value.message
    assert "--accept-changed-files" in caught.value.hint
    assert {str(path) for path in (folder / "run").rglob("*")} == before


def test_what_is_accepted_is_recorded_and_then_what_counts(folder: Path) -> None:
    attempt(folder, resume=False)
    edit(folder, "rows.jsonl", FILES["rows.jsonl"] * 2)
    accepted = attempt(folder, accept=True).accepted
    assert accepted == ["data.train: rows.jsonl has other content (31 → 62 bytes)"]
    record = json.loads((folder / "run" / "inputs.attempt_2.json").read_text())
    assert (record["attempt"], record["accepted"]) == (2, accepted)
    assert record["files"]["data.train"]["rows.jsonl"]["bytes"] == 62
    assert attempt(folder).accepted == [], "the third attempt reads what the second one read"
    edit(folder, "rows.jsonl", FILES["rows.jsonl"])
    with pytest.raises(RunDirError, match=r"rows\.jsonl has other content"):
        attempt(folder)


def test_files_that_come_and_go(folder: Path) -> None:
    attempt(folder, resume=False)
    (folder / "code" / "words.py").unlink()
    (folder / "model" / "chat_template.jinja").write_text("{{ messages }}")
    with pytest.raises(RunDirError) as caught:
        attempt(folder)
    assert "reward.terms.1.path: code/words.py is gone, or no longer read" in caught.value.message
    assert "model.path: chat_template.jinja is new" in caught.value.message


def test_a_hub_data_set_is_known_by_its_revision(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = folder / "hub" / "datasets--owner--name"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(folder / "hub"))
    spec = spec_of(data={"train": "owner/name"})
    run = attempt(folder, spec, resume=False)
    assert "data.train" not in run.inputs
    for revision in ("aaaa", "bbbb"):
        (cache / "snapshots" / revision).mkdir(parents=True)
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("aaaa")
    run.add_downloaded()  # it was downloaded when the roles were built
    attempt(folder, spec)
    (cache / "refs" / "main").write_text("bbbb")
    with pytest.raises(RunDirError, match=r"data\.train: owner/name is of another revision \(aaaa → bbbb\)"):
        attempt(folder, spec)
