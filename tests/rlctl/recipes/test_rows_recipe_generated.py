"""Recipes of rows evaluated on what the model writes, with real engines in one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from local_run import LocalRun, local_run
from running import finish, metrics, warm_rlctl
from test_rows_recipe import numbers, spec_of

pytestmark = pytest.mark.slow

CLOCKED = ("sync/GB_per_s", "sync/checksum_s", "sync/probe_s")

GENERATE = """[eval.generate]
max_response_tokens = 6
pass_term = 0
{more}
[reward]
terms = [{{ kind = "exact_match" }}, {{ kind = "regex", pattern = "[0-9]+", weight = 0.5 }}]
"""


def generating(folder: Path, name: str, more: str = "prompts = 8", answer: str = "answer") -> Path:
    return spec_of(folder, name, GENERATE.format(more=f'{more}\nanswer_column = "{answer}"'))


def evaluated(run: LocalRun) -> dict[str, Any]:
    """Return the metrics of an evaluation now that do not follow the clock."""
    found = numbers(run.driver.evaluate(run.done).metrics)
    return {name: value for name, value in found.items() if name not in CLOCKED}


@pytest.mark.parametrize(("name", "answer"), [("nll", "answer"), ("dpo", "chosen")])
def test_a_run_that_is_sampled_learns_the_same_wherever_its_roles_are(name: str, answer: str, tmp_path: Path) -> None:
    plain = spec_of(tmp_path, name)
    with local_run(plain, tmp_path / "plain") as run:
        wanted = [numbers(record.metrics) for record in run.steps(4)]
    spec, found = generating(tmp_path, name, "samples_per_prompt = 3\ntemperature = 0.7\nprompts = 8", answer), []
    for turns in ("never", "always"):
        with local_run(spec, tmp_path / turns, f"run.colocate={turns}", "rollout.processes=2") as run:
            run.driver.begin(0)
            first = run.driver.evaluate(0)
            steps = [numbers(record.metrics) for record in run.steps(4)]
            assert steps == wanted, "learning does not see that it is sampled"
            record = run.driver.evaluate(4)
        found.append((numbers(first.metrics), numbers(record.metrics)))
        assert [one["completion"] for one in first.samples] != [one["completion"] for one in record.samples]
        assert len(record.samples) == 8 * 3
        assert {sample["name"] for sample in record.samples} == {"heldout"}
    keys = [key for key in found[0][1] if key.startswith("eval/")]
    assert [[each[key] for key in keys] for each in found[0]] == [[each[key] for key in keys] for each in found[1]]
    last = found[0][1]
    assert last["sync/verified"] is True
    assert last["sync/probe_gap"] < 1e-4
    assert {"eval/heldout/loss", "eval/heldout/reward_mean", "eval/heldout/pass@1", "eval/heldout/term_1"} <= {*last}


def test_what_is_sampled_is_what_reinforcement_learning_would_sample_and_score(tmp_path: Path) -> None:
    """The same model, the same rows: the recipe `rl` says the same of them, through a path of its own."""
    spec = generating(tmp_path, "nll", "prompts = 8")
    with local_run(spec, tmp_path / "rows") as run:
        rows = run.driver.evaluate(0)
    (tmp_path / "rl.toml").write_text(
        'schema = 1\n[run]\nname = "rl"\nsteps = 1\n[model]\npath = "builtin:tiny-digits"\nfrom_scratch = true\n'
        '[data]\ntrain = "builtin:sort-digits"\nmax_rows = 60\nprompts_per_step = 2\nmax_prompt_tokens = 16\n'
        'max_response_tokens = 6\n[algorithm]\nkind = "grpo"\ngroup_size = 2\n[actor]\nmicro_batch_tokens = 256\n'
        "optimizer = { lr = 1e-3 }\n[eval]\nevery = 1\nprompts = 8\npass_term = 0\n"
        '[reward]\nterms = [{ kind = "exact_match" }, { kind = "regex", pattern = "[0-9]+", weight = 0.5 }]\n'
    )
    with local_run(tmp_path / "rl.toml", tmp_path / "rl") as run:
        run.driver.begin(0)
        wanted = run.driver.evaluate(0)
    assert wanted.metrics.items() <= rows.metrics.items()
    told = ("prompt", "completion", "terms", "reward")
    assert [[one[key] for key in told] for one in rows.samples] == [
        [one[key] for key in told] for one in wanted.samples
    ]


def test_an_evaluation_after_a_resume_is_the_one_that_would_have_been(tmp_path: Path) -> None:
    spec = generating(tmp_path, "nll")
    with local_run(spec, tmp_path / "whole") as run:
        whole = [(run.steps(step), evaluated(run))[1] for step in range(1, 5)]
    with local_run(spec, tmp_path / "parted") as run:
        run.steps(2, save=[2])
    with local_run(spec, tmp_path / "parted", resume=True) as run:
        assert evaluated(run) == whole[1]
        run.steps(4)
        assert evaluated(run) == whole[3]


def test_eval_says_of_a_checkpoint_what_the_run_said(tmp_path: Path) -> None:
    """Also where the reference was computed once, by a model that had not learned yet."""
    spec = generating(tmp_path, "dpo-precomputed", answer="chosen")
    finish("train", spec, "--run-dir", tmp_path / "run")
    said = finish("eval", tmp_path / "run", "--out", tmp_path / "again", "--json")
    last = {key.removeprefix("eval/heldout/"): value for key, value in metrics(tmp_path / "run")[-1].items()}
    found = json.loads(said.stdout)["sets"]["heldout"]
    assert {"loss", "reward_accuracy", "reward_mean", "pass@1"} <= found.keys()
    assert found == {name: last[name] for name in found}
    other = tmp_path / "other.toml"  # which begins with this very run: what is evaluated began elsewhere
    other.write_text(spec.read_text().replace('"builtin:tiny-digits"\nfrom_scratch = true', '"run"'))
    said = finish("eval", tmp_path / "run", other, "--out", tmp_path / "other", "--json")
    assert json.loads(said.stdout)["sets"]["heldout"] == found
    refused = warm_rlctl("eval", tmp_path / "run", spec_of(tmp_path, "bradley_terry"))
    assert refused.returncode == 2
    assert "evaluates a run's reward_model" in refused.stderr
