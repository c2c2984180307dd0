"""A user's own advantage and loss: run by check-config, refused with key and hint, and learned with by every engine."""

from __future__ import annotations

from pathlib import Path

import pytest
from corpus import write_case
from local_run import local_run
from process_ends import ended
from running import preset

from backends.train.own_loss import try_loss
from rlctl.check.findings import examine
from rlctl.check.own_functions import call_functions, run_offline
from rlctl.run import serve_command
from rlctl.run.input_files import inputs_of
from specs.errors import RlctlError
from specs.load.load import load_spec

GOOD = """
import numpy as np

def centred(score_R, group_R, tokens_R):
    mean_G = np.bincount(group_R, score_R) / np.bincount(group_R)
    std_G = np.sqrt(np.bincount(group_R, (score_R - mean_G[group_R]) ** 2) / np.maximum(np.bincount(group_R) - 1, 1))
    return (score_R - mean_G[group_R]) / (std_G[group_R] + 1e-6)

def surrogate(logprob, anchor_logprob, advantage):
    ratio = (logprob - anchor_logprob).exp()
    return -(advantage * ratio).minimum(advantage * ratio.clamp(0.8, 1.2))
"""
BAD = """
import os, sys
import numpy as np

def short(score_R, group_R, tokens_R):
    return score_R[:-1]

def nan(score_R, group_R, tokens_R):
    return (score_R - 1) / np.where(score_R == 1, 0.0, 1.0)

def hangs(score_R, group_R, tokens_R):
    import subprocess, time
    for apart in (False, True):
        print(subprocess.Popen(["sleep", "600"], start_new_session=apart).pid, file=open("pids", "a"))
    time.sleep(600)

def leaves(score_R, group_R, tokens_R):
    os._exit(3)

def detached(logprob, anchor_logprob, advantage):
    return -advantage * logprob.detach()

def infinite(logprob, anchor_logprob, advantage):
    print("not an answer")
    return -advantage * (1 / (logprob - anchor_logprob))

def normalised(logprob, anchor_logprob, advantage):
    return -advantage * (logprob - anchor_logprob).exp() / len(logprob)
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "good.py").write_text(GOOD)
    (tmp_path / "bad.py").write_text(BAD)
    return preset("fake", tmp_path)


@pytest.mark.parametrize(
    ("key", "path", "words"),
    [
        ("advantage", "bad.py:short", "returned shape (5,) for 6 rollouts"),
        ("advantage", "bad.py:nan", "for rollout 0 (score 1)"),
        ("advantage", "bad.py:leaves", "trying it ended the process (status 3)"),
        ("advantage", "bad.py:detached", "calling it raised AttributeError in line 21: "),
        ("advantage", "bad.py:shrot", "bad.py defines no function shrot"),
        ("loss", "bad.py:infinite", "its loss is not finite"),
    ],
)
def test_what_cannot_be_used_is_refused_with_its_key(file: Path, key: str, path: str, words: str) -> None:
    (found,) = examine(file, [f"algorithm.{key}_function={path}"]).problems
    assert found.key == f"algorithm.{key}_function"
    assert words in found.message
    assert found.hint


def test_one_that_hangs_ends_with_all_that_it_started(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlctl.check.own_functions.TIMEOUT_S", 5.0)
    monkeypatch.chdir(tmp_path)
    (found,) = examine(file, ["algorithm.advantage_function=bad.py:hangs"]).problems
    assert "does not end within 5 s" in found.message
    pids = (tmp_path / "pids").read_text().split()
    assert [ended(int(pid)) for pid in pids] == [True, True]


@pytest.mark.parametrize(
    ("name", "words"), [("detached", "no gradient"), ("normalised", "alone and .* beside five others")]
)
def test_what_is_no_loss(file: Path, name: str, words: str) -> None:
    with pytest.raises(RlctlError, match=words):
        try_loss(f"{file.with_name('bad.py')}:{name}")


def test_a_run_with_them_is_that_of_the_kind_that_they_repeat(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file has GRPO's two functions, so both runs must be the same; the files are inputs of the run."""
    monkeypatch.setenv("HOME", str(tmp_path))
    own = ("algorithm.advantage_function=good.py:centred", "algorithm.loss_function=~/good.py:surrogate")
    found, seen = examine(file, own), []
    assert found.problems == [problem for problem in found.warnings if problem.key.endswith("_function")] == []
    for name, options in (("own", own), ("grpo", ())):
        with local_run(file, tmp_path / name, *options, "algorithm.mini_batches_per_step=2") as run:
            keys = ("actor/loss", "actor/grad_norm", "actor/ratio", "reward/mean")
            seen.append([[record.metrics[key] for key in keys] for record in run.steps(3)])
    for mine, theirs in zip(*seen, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5, abs=1e-7)
    inputs = [key for key in inputs_of(load_spec(file, own), tmp_path) if key.startswith("algorithm")]
    assert inputs == ["algorithm.advantage_function", "algorithm.loss_function"]


def test_at_run_time_a_bad_number_stops_the_run(file: Path, tmp_path: Path) -> None:
    options = ("algorithm.advantage_function=bad.py:nan", 'reward.terms=[{kind="regex", pattern="."}]')
    with local_run(file, tmp_path / "run", *options) as run, pytest.raises(RlctlError, match="for rollout"):
        run.steps(1)


def test_another_interpreter_does_not_see_this_ones_site_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "lib" / "site-packages"
    root.mkdir(parents=True)
    monkeypatch.setattr("specs.packages._ROOT", root)
    python, told = tmp_path / "python", tmp_path / "told"
    python.write_text(f"#!/bin/sh\necho $PYTHONPATH >>{told}\n")
    python.chmod(0o755)
    run_offline([str(python)], {"PYTHONPATH": "/users/own"}, 30.0)
    own = {"reward.python": str(python), "reward.env": {"PYTHONPATH": "/users/own"}}
    reward = {"reward.terms.0": {"kind": "function", "path": "rewards.py:score"}, **own}
    spec = write_case({"set": reward, "files": {"rewards.py": "def score(completion): return 0.0\n"}}, tmp_path)
    call_functions(load_spec(spec), tmp_path)
    monkeypatch.setenv("PYTHONPATH", "/users/own")
    serve_command._run(str(python), "{}")
    lines = told.read_text().splitlines()
    assert len(lines) == 3
    for seen in (line.split(":") for line in lines):
        assert (Path(seen[0]).name, seen[1:]) == ("packages", ["/users/own"])
