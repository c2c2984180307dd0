"""Runs whose rollouts are episodes of several turns: what they measure, that they repeat, and what is lost on them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from running import metrics, settings, train, trained
from talking_runs import TORCH, counted, refused, spoken, write

from specs.schema.environment import STOP_REASONS

pytestmark = pytest.mark.slow

AHEAD = settings("rollout.max_staleness=1")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four steps of the fake engines; the run's directory, its spec beside it."""
    folder = tmp_path_factory.mktemp("talking")
    train(write(folder), folder / "run")
    return folder / "run"


def test_what_is_measured(whole: Path) -> None:
    lines = trained(whole)
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    for line in lines:
        assert line["episode/turns_mean"] == 3
        assert {name: line[f"episode/stop_{name}"] for name in STOP_REASONS} == {
            name: float(name == "completed") for name in STOP_REASONS
        }
        assert (line["episode/lost"], line["episode/tool_calls_mean"], line["reward/failed_environment_lost"]) == (
            0,
        ) * 3
        assert 0 < line["time/environment_s"] < 16 * 3
        assert 3 <= line["rollout/length_mean"] <= line["rollout/length_max"] <= 24
        assert line["reward/mean"] == line["reward/term_0"]
        assert 0 <= line["rollout/logprob_gap_max"] < 1e-5
    evaluated = [line for line in metrics(whole) if "eval/heldout/reward_mean" in line]
    assert [(line["step"], line["eval/heldout/turns_mean"]) for line in evaluated] == [(0, 3), (2, 3), (4, 3)]
    for (step, sample), pieces in spoken(whole).items():
        assert pieces[0] == spoken(whole)[step, sample ^ 1][0], "both of a prompt begin alike: they have one seed"
    samples = [json.loads(line) for line in (whole / "samples.jsonl").read_text().splitlines()]
    assert {(sample["stop"], len(sample["pieces"])) for sample in samples} == {("completed", 6)}


def test_a_resume_in_the_middle_changes_nothing(tmp_path: Path) -> None:
    spec, whole, halves = write(tmp_path), tmp_path / "whole", tmp_path / "halves"
    train(spec, whole, *AHEAD)
    assert {line["rollout/staleness_max"] for line in trained(whole)} == {0, 1}
    shutil.copytree(whole, halves)
    shutil.rmtree(halves / "checkpoints" / "step_000004")
    train(spec, halves, *AHEAD, "--resume")
    assert counted(halves) == counted(whole)
    assert spoken(halves) == spoken(whole)


@pytest.mark.parametrize(("role", "rank"), [("rollout", 1), ("reward", 0)])
def test_a_rank_that_is_killed_changes_nothing(role: str, rank: int, whole: Path, tmp_path: Path) -> None:
    """One of two samplers, or the only one that runs episodes, by SIGKILL, while an episode is in its second turn; few
    episodes are open at once."""
    run = tmp_path / "run"
    log = run / "logs" / "attempt_1" / role / f"rank{rank}.log"
    spec = write(tmp_path, log=str(log), **{"kill a rank": True})
    out = train(spec, run, *settings("rollout.processes=2", f"{role}.max_restarts=1"))
    assert f"{role} rank {rank} failed: its process was ended by SIGKILL" in out.replace("\n", " ")
    assert [line[f"{role}/restarts"] for line in trained(run)][-1] == 1
    assert counted(run) == counted(whole)
    assert spoken(run) == spoken(whole)


ITS_LAST_MESSAGE = '[{kind="environment"}, {kind="function", path="talk.py:last_message"}]'


def test_only_what_is_lost_is_left_out(tmp_path: Path) -> None:
    """A process is killed in the middle of an episode, another one in its reset. All others score 3 · 1."""
    rows = [{"prompt": "ask", "number": number} for number in (1, 2, 1, 0)]  # the last is held out
    spec = write(tmp_path, rows, reward=1.0, **{"lost at the start": True, "lost in between": True})
    options = settings("eval.prompts=1", "data.max_rows=4", "data.prompts_per_step=3", "run.steps=2")
    out = train(spec, tmp_path / "run", *options, *settings("eval.every=9", f"reward.terms={ITS_LAST_MESSAGE}"))
    first, second = trained(tmp_path / "run")
    failures = [json.loads(line) for line in (tmp_path / "run/reward_failures.jsonl").read_text().splitlines()]
    assert [(one["cause"], one["text"]) for one in failures] == [
        ("environment_lost", "the process was killed by SIGKILL")
    ] * 2
    assert {one["row"].rpartition("/")[2] for one in failures} <= {f"rows.jsonl:{number}" for number in (1, 2, 3)}
    said = "2 of 12 completions could not be graded (2 environment lost): the process was killed by SIGKILL (/"
    assert said in " ".join(out.split())
    assert first["reward/failed_exceptions"] == 0, "what was lost is not graded"
    assert (first["episode/lost"], first["reward/failed_environment_lost"]) == (2, 2)
    assert (first["reward/mean"], first["reward/std"], first["reward/silent_groups"]) == (3.0, 0.0, 1.0)
    assert first["episode/turns_mean"] == (10 * 3 + 2) / 12, "no group is left out"
    assert first["episode/stop_environment_lost"] == 2 / 12
    assert not first.get("rollout/dropped_stale")
    assert (second["episode/lost"], second["episode/turns_mean"]) == (0, 3)


def test_what_is_too_large_is_written_down(tmp_path: Path) -> None:
    """Three turns of 4e17 are more than a score may be; where no term is what environments give, nothing is lost."""
    options = settings("run.steps=1", "eval.every=9", "reward.max_failed_share=1")
    for terms, lost in ((ITS_LAST_MESSAGE, 16), ('[{kind="function", path="talk.py:last_message"}]', 0)):
        run = tmp_path / f"run{lost}"
        train(write(tmp_path, reward=4e17), run, *options, *settings(f"reward.terms={terms}"))
        assert trained(run)[0]["reward/failed_bad_values"] == lost
        file = run / "reward_failures.jsonl"
        failures = [json.loads(line) for line in file.read_text().splitlines()] if lost else []
        learned = [one for one in failures if one["what"] == "train"]
        assert [(one["cause"], one["text"].partition(":")[0]) for one in learned] == [
            ("bad_values", "reward.terms[0]")
        ] * lost
        assert file.exists() == bool(lost)


def test_truncated_episodes_need_not_be_learned_from(tmp_path: Path) -> None:
    one_turn = settings("environment.max_turns=1", "run.steps=1", "eval.every=9")
    out = train(write(tmp_path), tmp_path / "run", *one_turn, *settings("environment.learn_truncated=false"))
    (line,) = trained(tmp_path / "run")
    assert (line["episode/stop_max_turns"], line["episode/turns_mean"]) == (1, 1)
    assert "have no loss tokens" in out.replace("\n", " ")
    assert "actor/loss" not in line


SEVERAL = 'environment=[{name="talk", path="talk.py:Talk", max_turns=4}, {name="other", path="talk.py:Other"}]'


def test_rows_name_their_environment(tmp_path: Path) -> None:
    rows = [{"prompt": "ask", "number": 3, "where": where} for where in ("talk", "other") * 4]
    options = settings(SEVERAL, "data.environment_column=where", "run.steps=1", "eval.every=9", "data.shuffle=false")
    train(write(tmp_path, rows, reward=1.0), tmp_path / "run", *options)
    (line,) = trained(tmp_path / "run")
    assert line["episode/turns_mean"] == (3 + 1) / 2
    assert line["reward/mean"] == (3 + 0.25) / 2
    rows[1]["where"] = "elsewhere"
    code, out = refused(write(tmp_path, rows), tmp_path / "refused", *options)
    assert code == 2, out
    assert "column 'where' is 'elsewhere', and must be talk or other" in out
    assert "rows.jsonl:2" in out


def test_a_rollout_of_several_samples_counts_once(tmp_path: Path) -> None:
    """Rows of one, two and three samples, whose rewards are 0, 1 and 2; each of them is learned from."""
    agent = 'environment={agent="talk.py:forgets", max_turns=4, max_episode_tokens=128, processes=6}'
    options = settings(agent, "data.shuffle=false", "run.steps=1", "checkpoint.every=1", "rollout.max_staleness=1")
    train(write(tmp_path), tmp_path / "run", *options)
    (line,) = trained(tmp_path / "run")
    assert line["episode/turns_mean"] == (1 + 2 + 3 + 1) / 4
    assert line["reward/mean"] == line["reward/term_0"] == (0 + 1 + 2 + 0) / 4
    assert line["episode/stop_completed"] == 1
    assert line["eval/heldout/reward_mean"] == (2 + 0 + 1 + 2) / 4
    assert line["reward/agent_asked_for"] == (2 + 3) / 2, "the mean of what agents returned, where they did"
    assert line["eval/heldout/agent_asked_for"] == (3 + 2 + 3) / 3
    assert line["rollout/tokens"] == pytest.approx(16 * line["rollout/length_mean"])


@pytest.mark.parametrize(("terms", "lost"), [("", 0.5), ('{kind="function", path="talk.py:last_message"}', 0.0)])
def test_an_agent_that_gives_no_reward_is_lost_where_one_counts(tmp_path: Path, terms: str, lost: float) -> None:
    agent = 'environment={agent="talk.py:silent", max_turns=4, max_episode_tokens=128}'
    options = settings(agent, "data.shuffle=false", "run.steps=1", *([f"reward.terms=[{terms}]"] if terms else []))
    out = train(write(tmp_path), tmp_path / "run", *options)
    assert trained(tmp_path / "run")[0].get("episode/stop_environment_lost", 0.0) == lost
    assert ("the agent gave no reward: have it return a number" in out) == bool(lost)


# ── the torch engines ─────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def waves(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("waves")
    train(write(folder), folder / "run", *TORCH, *settings("run.steps=2"))
    return folder / "run"


def test_sampler_and_trainer_agree_on_every_turn(waves: Path) -> None:
    """What was drawn turn by turn, behind kept prefixes, is what one pass over the whole says."""
    for line in trained(waves):
        assert 0 < line["rollout/logprob_gap_max"] < 1e-4
        assert line["actor/grad_norm"] > 0


def test_runs_repeat_to_the_bit(waves: Path, tmp_path: Path) -> None:
    """Although the environment naps at random."""
    train(write(tmp_path, nap_s=0.2), tmp_path / "run", *TORCH, *settings("run.steps=2"))
    assert counted(tmp_path / "run") == counted(waves)
    assert spoken(tmp_path / "run") == spoken(waves)


def test_prompts_of_an_evaluation_count_in_its_own_share_of_what_was_reused(waves: Path, tmp_path: Path) -> None:
    more = settings("run.steps=1", "eval.samples_per_prompt=3", "eval.temperature=1")
    train(write(tmp_path), tmp_path / "run", *TORCH, *more)
    first, of_fewer = (next(iter(trained(run)))["episode/prefix_reused"] for run in (tmp_path / "run", waves))
    assert first == of_fewer, "the evaluation before the step is none of its business"
    evaluated = [line for line in metrics(tmp_path / "run") if "eval/heldout/reward_mean" in line]
    assert all(0 < line["eval/heldout/prefix_reused"] < 1 for line in evaluated)


def test_turns_that_are_drawn_as_they_come_are_the_same(waves: Path, tmp_path: Path) -> None:
    train(write(tmp_path), tmp_path / "run", *TORCH, *settings("run.steps=2", "rollout.repeatable=false"))
    found, expected = spoken(tmp_path / "run"), spoken(waves)
    assert found.keys() == expected.keys()
    for name, pieces in found.items():
        assert [piece["text"] for piece in pieces] == [piece["text"] for piece in expected[name]]
        pairs = [
            zip(a.get("tokens", ()), b.get("tokens", ()), strict=True)
            for a, b in zip(pieces, expected[name], strict=True)
        ]
        assert all(abs(mine - theirs) <= 1.01e-4 for pair in pairs for (_, mine), (_, theirs) in pair)
    for mine, theirs in zip(counted(tmp_path / "run"), counted(waves), strict=True):
        for name in mine.keys() - {"episode/prefix_reused", "eval/heldout/prefix_reused"}:
            assert mine[name] == pytest.approx(theirs[name], abs=1e-3), name
