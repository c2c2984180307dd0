"""Recipes that learn from rows, with a real engine in one process: steps, resume to the bit, references."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from local_run import local_run

from rlctl.recipes.reference import Reference, unlike_rows
from specs.errors import DataError, Interrupted, NotFiniteError
from specs.wire.batch import Batch

pytestmark = pytest.mark.slow

PAIRS = 'train = "builtin:sort-digits-pairs"'
WORDS = {
    "sft": 'train = "builtin:sort-digits"\ncompletion_column = "answer"',
    "preference": PAIRS,
    "reward_model": PAIRS,
}
OBJECTIVES = {
    "nll": ("sft", 'kind = "nll"'),
    "dpo": ("preference", 'kind = "dpo"'),
    "dpo-precomputed": ("preference", 'kind = "dpo"\nprecompute_ref = true'),
    "rpo": ("preference", 'mixture = [{ kind = "dpo" }, { kind = "nll", weight = 0.5 }]'),
    "orpo": ("preference", 'kind = "orpo"'),
    "kto": ("preference", 'kind = "kto"'),
    "bradley_terry": ("reward_model", 'kind = "bradley_terry"\ncenter_coef = 0.01'),
}
LEARNER = "micro_batch_tokens = 256\noptimizer = { lr = 2e-3 }\n"


def spec_of(folder: Path, name: str, more: str = "") -> Path:
    recipe, objective = OBJECTIVES[name]
    data = WORDS[recipe]
    if name == "kto":
        rows = [{"prompt": f"{n}>", "completion": f"{n % 10}", "label": n % 3 == 0} for n in range(100, 160)]
        (folder / "labels.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        data = 'train = "labels.jsonl"'
    section = "reward_model" if recipe == "reward_model" else "actor"
    (folder / "spec.toml").write_text(
        f'schema = 1\n[run]\nrecipe = "{recipe}"\nname = "rows"\nsteps = 4\n'
        '[model]\npath = "builtin:tiny-digits"\nfrom_scratch = true\n'
        f"[data]\n{data}\nrows_per_step = 6\nmax_tokens = 16\nmax_rows = 60\n[objective]\n{objective}\n"
        f"[{section}]\n{LEARNER}[eval]\nevery = 2\nrows = 8\n[checkpoint]\nevery = 2\n{more}"
    )
    return folder / "spec.toml"


def numbers(metrics: dict[str, Any]) -> dict[str, Any]:
    """Return the metrics that do not follow the clock."""
    return {name: value for name, value in metrics.items() if not name.startswith(("time/", "mem/", "perf/tokens_"))}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_run_learns_and_resumes_to_the_bit(name: str, tmp_path: Path) -> None:
    spec = spec_of(tmp_path, name)
    with local_run(spec, tmp_path / "whole") as run:
        run.driver.begin(0)
        before = run.driver.evaluate(0).metrics["eval/heldout/loss"]
        whole = [numbers(record.metrics) for record in run.steps(4)]
        after = numbers(run.driver.evaluate(4).metrics)
    assert after["eval/heldout/loss"] < before
    assert whole[0]["data/tokens"] > whole[0]["data/learned_tokens"] > 0
    with local_run(spec, tmp_path / "parted") as run:
        parted = [numbers(record.metrics) for record in run.steps(2, save=[2])]
        assert not run.said.warnings, "proven"
    with local_run(spec, tmp_path / "parted", resume=True) as run:
        assert run.done == 2
        assert parted + [numbers(record.metrics) for record in run.steps(4)] == whole
        assert numbers(run.driver.evaluate(4).metrics) == after


def test_the_rows_of_a_step_that_was_broken_off_are_drawn_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken_off(batch: Batch, step: int) -> None:
        raise Interrupted("interrupted (SIGINT)")

    with local_run(spec_of(tmp_path, "nll"), tmp_path / "run") as run:
        assert len([*run.steps(2)]) == 2
        monkeypatch.setattr(run.driver, "learn", broken_off)
        with pytest.raises(Interrupted):
            run.driver.step(3)
        assert run.driver.save(tmp_path) == {"position": 2 * 6}, "what the last finished step learned from"


def test_every_kind_of_reference_gives_the_same_losses(tmp_path: Path) -> None:
    found = {}
    for name in ("dpo", "dpo-precomputed"):
        with local_run(spec_of(tmp_path, name), tmp_path / name) as run:
            run.driver.begin(0)
            start = run.driver.evaluate(0).metrics["eval/heldout/loss"]
            assert ("ref" in run.spec.roles) == (name == "dpo"), "precomputed, no second model is held"
            found[name] = [start, *(record.metrics["actor/loss"] for record in run.steps(4))]
    assert found["dpo"][0] == pytest.approx(math.log(2), abs=1e-7)
    assert found["dpo"] == pytest.approx(found["dpo-precomputed"], abs=1e-7)


@pytest.mark.parametrize("name", ["nll", "dpo", "bradley_terry"])
def test_a_loss_that_is_no_number_ends_the_run(name: str, tmp_path: Path) -> None:
    spec = spec_of(tmp_path, name)
    spec.write_text(spec.read_text().replace("lr = 2e-3", "lr = 1e38"))
    with local_run(spec, tmp_path / "run") as run:
        with pytest.raises(NotFiniteError) as caught:
            run.steps(4)
        run.saver.save(run.driver, run.done)
        assert "is saved without its proof" in run.said.warnings[-1], "no export is made of weights that give NaN"
        assert run.said.warnings[-1].endswith("'s: its weights give NaN or infinity")
    assert re.search(r"^step [23]: .*loss is (nan|inf).* in the update\. The run stopped before", str(caught.value))
    role = "reward_model" if name == "bradley_terry" else "actor"
    assert f"lower {role}.optimizer.lr" in caught.value.hint


def other_rows(folder: Path) -> str:
    rows = [{"prompt": f"{n}>", "chosen": f"{n % 10}", "rejected": "0"} for n in range(101, 130) if n % 10]
    (folder / "other.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return '"other.jsonl"'


@pytest.mark.parametrize("change", ["run.seed=7", "data.train="])
def test_log_probs_of_another_reference_or_row_are_never_taken(change: str, tmp_path: Path) -> None:
    """An attempt that ended before its first step leaves its file to one with another model or other rows."""
    spec, rows = spec_of(tmp_path, "dpo-precomputed"), other_rows(tmp_path)
    change += rows * change.endswith("=")
    with local_run(spec, tmp_path / "again") as run:
        run.driver.begin(0)
    found = []
    for name in ("again", "clean"):
        with local_run(spec, tmp_path / name, change) as run:
            found.append([numbers(record.metrics) for record in run.steps(2)])
    assert found[0] == found[1]
    assert found[0][0]["actor/loss"] == pytest.approx(math.log(2), abs=1e-7)


def test_a_resume_computes_what_its_file_lacks_of_the_model_before_it_learned(tmp_path: Path) -> None:
    """Other rows of an evaluation; all where the file is gone, or torn as by a crash of the machine."""
    spec = spec_of(tmp_path, "dpo-precomputed")
    own, other = 'eval.data="builtin:sort-digits-pairs"', f"eval.data={other_rows(tmp_path)}"
    with local_run(spec, tmp_path / "whole", other) as run:
        whole = [numbers(record.metrics) for record in run.steps(4)]
        after = numbers(run.driver.evaluate(4).metrics)
    with local_run(spec, tmp_path / "parted", own) as run:
        run.steps(2, save=[2])
    for bytes_left in (None, 0, 100):
        kept = tmp_path / f"with {bytes_left}" / "ref_logprobs.safetensors"
        shutil.copytree(tmp_path / "parted", kept.parent)
        content = kept.read_bytes()[:bytes_left]
        kept.unlink()
        if content:
            kept.write_bytes(content)
        with local_run(spec, kept.parent, other, resume=True) as run:
            assert [numbers(record.metrics) for record in run.steps(4)] == whole[2:]
            assert numbers(run.driver.evaluate(4).metrics) == after


def test_what_was_computed_of_a_reference_stays_where_the_rest_is_interrupted(tmp_path: Path, monkeypatch: Any) -> None:
    spec, computed, sizes = spec_of(tmp_path, "dpo-precomputed"), Reference.logprobs, list[int]()

    def interrupted(self: Reference, driver: Any, rows: Batch, step: int) -> Any:
        sizes.append(len(rows))
        if len(sizes) == 2:
            raise Interrupted("Ctrl-C")
        return computed(self, driver, rows, step)

    monkeypatch.setattr(Reference, "logprobs", interrupted)
    with pytest.raises(Interrupted), local_run(spec, tmp_path / "run"):
        pass
    with local_run(spec, tmp_path / "run"):
        assert sizes == [2 * 4 * 6, 2 * 8, 2 * 8], "of 52 rows those that 4 steps draw"
    with local_run(spec, tmp_path / "run", "run.steps=20"):
        assert sizes[3:] == [2 * (52 - 4 * 6)]


def test_the_kl_is_estimated_with_the_completions_of_other_rows() -> None:
    rows = Batch(
        {
            "length_B": np.array([3, 4]),
            "tokens_T": np.array([1, 2, 7, 3, 4, 8, 9]),
            "loss_mask_T": np.array([0, 0, 1, 0, 0, 1, 1], dtype=np.uint8),
        }
    )
    unlike = unlike_rows(rows, 4)
    assert [each.tolist() for each in unlike.sequences("tokens_T")] == [[1, 2, 8, 9], [3, 4, 7]]
    assert [each.tolist() for each in unlike.sequences("loss_mask_T")] == [[0, 0, 1, 1], [0, 0, 1]]
    short = unlike_rows(rows, 3)
    assert [each.tolist() for each in short.sequences("tokens_T")] == [[1, 2, 8], [3, 4, 7]]
    assert [each.tolist() for each in short.sequences("loss_mask_T")] == [[0, 0, 1], [0, 0, 1]]


def test_a_pair_that_fits_no_micro_batch_is_refused_at_the_start(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, "dpo")
    overrides = ("actor.micro_batch_tokens=12", "data.max_tokens=12")
    with pytest.raises(DataError, match=r"actor\.micro_batch_tokens = 12: the largest row has 1[3-9] tokens"):
        local_run(spec, tmp_path / "run", *overrides).__enter__()
