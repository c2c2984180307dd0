"""The text of a spec as it was run: with `--set` in it, and with its comments."""

from __future__ import annotations

from pathlib import Path

import pytest
import tomli
from hypothesis import given, settings
from hypothesis import strategies as st

from rlctl.presets import presets
from specs.load.as_run import as_run
from specs.load.overrides import apply_overrides, fill_engine_kinds
from specs.load.toml_text import dumped, written

ROOT = Path(__file__).resolve().parents[3]
SPEC = """# a run
schema = 1

[run]
name = "a"      # its name
steps = 10

[reward]
terms = [
    { kind = "exact_match", weight = 1.0 },   # right
    { kind = "regex", pattern = "#x" },
]

[actor]
optimizer = { lr = 1e-3, schedule = "cosine" }   # decays
# the engine
engine.kind = "ddp"

[rollout.engine]
max_sequences = 8

[[tracking]]
kind = "wandb"
[[tracking]]
kind = "tensorboard"   # too
"""


def wanted(text: str, overrides: list[str]) -> dict:
    raw = tomli.loads(text)
    apply_overrides(raw, overrides)
    return raw


def read(text: str) -> dict:
    raw = tomli.loads(text)
    fill_engine_kinds(raw)
    return raw


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("run.steps=50", "steps = 50\n"),
        ("run.name=b # c", 'name = "b # c"  # its name\n'),
        ("run.seed=3", "steps = 10\nseed = 3\n"),
        ("actor.optimizer.lr=1e-6", 'optimizer = { lr = 1e-06, schedule = "cosine" }  # decays\n'),
        ("actor.optimizer.betas=[0.9, 0.95]", "betas = [0.9, 0.95] }  # decays\n"),
        ("actor.engine.kind=fsdp2", '# the engine\nengine.kind = "fsdp2"\n'),
        ("reward.terms.1.weight=2.0", "weight = 2.0 }]"),
        ("tracking.1.kind=mlflow", 'kind = "mlflow"  # too\n'),
        ("tracking.0.project=p", 'kind = "wandb"\nproject = "p"\n'),
        ("eval.every=5", "\n[eval]\nevery = 5\n"),
        ("algorithm.correction.low=0.5", "\n[algorithm]\ncorrection = { low = 0.5 }\n"),
        ("rollout.temperature=0.7", "\n[rollout]\ntemperature = 0.7\n"),
        ('data.template="{q}\\n"', 'template = "{q}\\n"\n'),
    ],
)
def test_one_key_is_changed_where_it_stands(override: str, line: str) -> None:
    text = as_run(SPEC, [override])
    assert line in text
    assert text.startswith("# a run\nschema = 1\n")
    assert read(text) == wanted(SPEC, [override])


def test_without_overrides_not_a_byte_is_changed() -> None:
    assert as_run(SPEC, []) == SPEC
    assert as_run(SPEC, ["run.steps=10"]) == SPEC


def test_keys_of_a_kind_that_was_replaced_become_comments() -> None:
    text = (ROOT / "specs" / "presets" / "quickstart.toml").read_text()
    changed = as_run(text, ["algorithm.kind=gspo"])
    assert "# clip_high = 0.28" in changed
    assert read(changed) == wanted(text, ["algorithm.kind=gspo"])


@pytest.mark.parametrize("name", sorted(presets()))
def test_every_preset_keeps_its_comments(name: str) -> None:
    text = (ROOT / "specs" / "presets" / f"{name}.toml").read_text()
    overrides = ["run.steps=7", "run.name=other", "algorithm.group_size=3", "actor.optimizer.lr=2e-6", "eval.every=3"]
    changed = as_run(text, overrides)
    assert read(changed) == wanted(text, overrides)
    comments = [line for line in text.splitlines() if line.startswith("#")]
    assert all(line in changed.splitlines() for line in comments)


def test_a_layout_that_cannot_be_edited_is_written_anew() -> None:
    text = "schema = 1\nrun.name = 'a'\n[data]\n[data.more]\nx = 1\n"
    changed = as_run(text, ["run.dir=there", "data.train=rows.jsonl"])
    assert read(changed) == wanted(text, ["run.dir=there", "data.train=rows.jsonl"])


LEAVES = st.one_of(st.booleans(), st.integers(-(2**40), 2**40), st.floats(allow_nan=False), st.text(max_size=12))
VALUES = st.recursive(
    LEAVES, lambda of: st.lists(of, max_size=3) | st.dictionaries(st.text(max_size=5), of, max_size=3), max_leaves=8
)


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.text(max_size=6), VALUES, max_size=4))
def test_what_is_written_reads_back(tables: dict) -> None:
    assert tomli.loads(dumped(tables)) == tables
    assert tomli.loads(f"x = {written(tables)}") == {"x": tables}
