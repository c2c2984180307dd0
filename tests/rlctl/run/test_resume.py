"""Which changes of a spec a resume takes, and which checkpoints it takes for its own."""

from __future__ import annotations

import json
import shutil
from contextlib import nullcontext

import pytest
from running import preset

from rlctl.models.paths import BUILTIN_FOLDER
from rlctl.run.lineage import check_held_out
from rlctl.run.resume import about_model, check_fits, differences, held_out
from specs.errors import CheckpointError, UsageError
from specs.load.load import load_spec
from specs.schema.engines.ddp_table import DdpTable
from specs.schema.engines.engine_table import TrainTable
from workers.saved_files import mark

TRAINED = "model.from_scratch=false"  # adapters want it


@pytest.mark.parametrize(
    ("change", "line", "taken"),
    [
        ("actor.processes=4", "actor.processes: 1 → 4", True),
        ("actor.engine.kind=fsdp2", 'actor.engine.kind: "ddp" → "fsdp2"', True),
        ('model.attn_implementation="sdpa"', 'model.attn_implementation: "auto" → "sdpa"', True),
        ("run.steps=7", "run.steps: 100 → 7, where the cosine schedule of the learning rate now ends", True),
        ("run.seed=1", "run.seed: 0 → 1", False),
        ("actor.optimizer.lr=1", "actor.optimizer.lr: 0.001 → 1.0", False),
        ("actor.devices=[0]", 'actor.dtype: "fp32" → "bf16"', False),  # `auto` is what it means there
        (
            "actor.lora.rank=4",
            'actor.lora: unset → {"rank": 4, "alpha": 32.0, "targets": ["all-linear"]}',
            False,
        ),
    ],
)
def test_what_may_change(tmp_path, change, line, taken):
    spec = preset("quickstart", tmp_path)
    before, after = load_spec(spec, [TRAINED]).resolved(), load_spec(spec, [TRAINED, change]).resolved()
    refused, allowed = differences(before, after)
    assert (refused, line in allowed) == (([], True) if taken else ([line], False))


def test_another_engine_is_one_line(tmp_path):
    """Not one more for each key that only one of the two has; for what both have, it is."""
    spec = preset("megatron-cpu", tmp_path)
    before = load_spec(spec, ["actor.engine.logits_chunk_tokens=32"]).resolved()
    ddp = ["actor.engine.kind=ddp", "actor.engine.logits_chunk_tokens=64"]
    refused, allowed = differences(before, load_spec(spec, ddp).resolved())
    assert refused == []
    assert sorted(allowed) == ['actor.engine.kind: "megatron" → "ddp"', "actor.engine.logits_chunk_tokens: 32 → 64"]


@pytest.mark.parametrize(
    ("run", "change", "hint"),
    [
        ({}, "run.seed=0", "name other rows"),
        ({"eval": {"prompts": 4}}, "run.seed=0", "set eval.prompts to 4 or less, or name"),
        ({"data": {"train": "other.jsonl"}}, "run.seed=0", ""),
        ({"data": {"train": "other.jsonl"}}, "data.train=same.jsonl", "name other rows"),
        (
            {"data": {"sets": [{"path": "builtin:products"}, {"path": "builtin:sort-digits"}]}},
            "run.seed=0",
            "name other",
        ),
        ({"eval": {"prompts": 9}}, "run.seed=0", ""),
        ({"eval": {"prompts": 9}}, "data.max_rows=100", "leave the key"),
        ({"eval": {"prompts": 9}, "data": {"max_rows": 99}}, "data.max_rows=98", ""),
    ],
)
def test_an_evaluation_on_rows_that_were_trained_on_says_what_to_set(tmp_path, run, change, hint):
    """Of the same source, by its name or its content; with `data.max_rows` the last rows are others."""
    spec = load_spec(preset("quickstart", tmp_path), ["eval={every=1, prompts=8}", change])
    (tmp_path / "resolved.json").write_text(json.dumps(run))
    (tmp_path / "same.jsonl").write_text("{}")
    marks = {"data.train": {"other.jsonl": mark(tmp_path / "same.jsonl")}}
    (tmp_path / "inputs.json").write_text(json.dumps({"files": marks}))
    with pytest.raises(UsageError) if hint else nullcontext() as refused:
        check_held_out(tmp_path, spec, tmp_path)
    assert not refused or refused.value.hint.startswith(hint)


@pytest.mark.parametrize(
    ("before", "after", "rows"),
    [
        ("{every=1, prompts=8}", "{every=1, prompts=400}", (8, 400)),
        ("{every=1, prompts=8}", '{every=1, prompts=8, data="other.jsonl"}', (8, 0)),
        ('{every=1, sets=[{name="a", prompts=4}, {name="b", data="b.jsonl"}]}', "{every=9, prompts=4}", (4, 4)),
        ('{every=1, prompts=8, data="b.jsonl"}', '{every=2, prompts=9, data="c.jsonl"}', (0, 0)),
    ],
)
def test_rows_that_are_held_out_of_training_stay_so(tmp_path, before, after, rows):
    spec = preset("quickstart", tmp_path)
    resolved = [load_spec(spec, [f"eval={sets}"]).resolved() for sets in (before, after)]
    assert tuple(map(held_out, resolved)) == rows
    refused = [f"rows of data.train held out for evaluation: {rows[0]} → {rows[1]}"]
    assert differences(*resolved)[0] == (refused if rows[0] != rows[1] else [])


@pytest.mark.parametrize(
    ("was", "changes", "refused"),
    [
        ([], ["ref.processes=2"], []),
        (["ref.dtype=fp32"], ["ref.dtype=bf16"], ['ref.dtype: "fp32" → "bf16"']),
        ([], ['ref.model="builtin:tiny-bytes"'], ['ref.model: unset → "builtin:tiny-bytes"']),
    ],
)
def test_the_reference_may_move_but_not_become_another(tmp_path, was, changes, refused):
    spec = preset("quickstart", tmp_path)
    before = load_spec(spec, ["algorithm.kl_coef=0.1", *was]).resolved()
    after = load_spec(spec, ["algorithm.kl_coef=0.1", *changes]).resolved()
    assert differences(before, after)[0] == refused


# ── is it this model? ─────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def here(tmp_path):
    """A spec with a model folder of its own."""
    shutil.copytree(BUILTIN_FOLDER / "tiny-digits", tmp_path / "model")
    return preset("quickstart", tmp_path), ["model.path=model"]


def test_a_checkpoint_fits_its_own_run_whatever_holds_it(here, tmp_path):
    spec_path, overrides = here
    manifest = {"step": 3, **about_model(load_spec(spec_path, overrides), tmp_path)}
    kinds = ["ddp", "fsdp2", "zero", "zero3", "megatron"]
    assert manifest["resumes_as"] == kinds
    for kind in kinds:
        check_fits(manifest, load_spec(spec_path, [*overrides, f"actor.engine.kind={kind}"]), tmp_path)
    assert manifest["model_config"]["vocab_size"] == 15


def test_another_config_is_named(here, tmp_path):
    spec_path, overrides = here
    spec = load_spec(spec_path, overrides)
    manifest = {"step": 3, **about_model(spec, tmp_path)}
    file = tmp_path / "model" / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, "vocab_size": 32, "transformers_version": "9"}))
    with pytest.raises(
        CheckpointError, match=r"step 3 belongs to another model:\n  - config.json.vocab_size: 15 → 32\n"
    ):
        check_fits(manifest, spec, tmp_path)


def test_adapters_are_no_whole_model(here, tmp_path):
    spec_path, overrides = here[0], [*here[1], "model.from_scratch=false"]
    manifest = {"step": 3, **about_model(load_spec(spec_path, [*overrides, "actor.lora.rank=4"]), tmp_path)}
    with pytest.raises(CheckpointError, match=r"actor.lora: {.*} → unset"):
        check_fits(manifest, load_spec(spec_path, overrides), tmp_path)
    with pytest.raises(CheckpointError, match=r"actor.lora.rank: 4 → 8\n") as error:
        check_fits(manifest, load_spec(spec_path, [*overrides, "actor.lora.rank=8"]), tmp_path)
    assert error.value.hint is not None
    assert "model.path = RUN_DIR" in error.value.hint, "the folder at model.path did not change"


def test_engines_without_a_common_format(here, tmp_path):
    spec_path, overrides = here
    spec = load_spec(spec_path, overrides)
    manifest = {"step": 3, **about_model(spec, tmp_path), "engine": "fake"}
    fake = ("actor.engine.kind=fake", "rollout.engine.kind=fake")
    assert about_model(load_spec(spec_path, [*overrides, *fake]), tmp_path)["resumes_as"] == ["fake"]
    with pytest.raises(CheckpointError, match="written by the train engine fake: ddp cannot read it"):
        check_fits(manifest, spec, tmp_path)


def test_an_engine_that_does_not_say_so_may_not_change_its_shape(tmp_path):
    spec_path = preset("quickstart", tmp_path)

    class Silent(TrainTable):
        kind: str = "silent"

    before = load_spec(spec_path).resolved()
    after = load_spec(spec_path, ["actor.engine.logits_chunk_tokens=7", "run.steps=9"]).resolved()
    assert differences(before, after, Silent())[0] == [
        "actor.engine.logits_chunk_tokens: unset → 7 (not known whether the engine silent can resume so)"
    ]
    assert differences(before, after, DdpTable())[0] == []
