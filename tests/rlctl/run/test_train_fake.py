"""The whole frame with numpy engines: real processes, real channel, real checkpoints, and everything that can die."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time

import psutil
import pytest
from running import (
    REPO,
    finish,
    metrics,
    preset,
    rlctl,
    settings,
    start,
    steps_done,
    trained,
    trajectory,
    wait_for,
    warm_rlctl,
    workers_of,
)
from tracker_packages.told import told
from warm import PATCHES

from rlctl.models.paths import BUILTIN_FOLDER
from rlctl.show.journal import read_journal
from rlctl.show.metrics_file import read_samples

FOREVER = settings("run.steps=100000", "checkpoint.every=2")


@pytest.fixture
def spec(tmp_path):
    return preset("fake", tmp_path)


def plot(folder, role, code):
    """Return the settings under which a role runs this code when it starts."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(PATCHES + code)
    return settings(f'{role}.env.PYTHONPATH="{folder}"')


def nothing_left(run_dir, timeout_s=60):
    wait_for(lambda: not workers_of(run_dir), timeout_s, "the end of every worker")


# ── a run ─────────────────────────────────────────────────────────────────────────────────────────


def evaluated_alone(run, folder):
    """`rlctl eval` of a checkpoint says what the run said after that step, to the bit."""
    done = finish("eval", run, "--step", "2", "--out", folder / "alone", "--json")
    more = rlctl("eval", run, "--set", "eval.prompts=5", "--out", folder / "more")
    assert (more.returncode, "but the run trained on all but 4" in more.stderr) == (2, True), "rows it has learned"
    assert f"weights of {run / 'checkpoints' / 'step_000002'}" in done.stderr.replace("\n", "")
    found = json.loads(done.stdout)
    assert (found["step"], found["out"]) == (2, str(folder / "alone"))
    own = next(line for line in metrics(run) if line["step"] == 2)
    sets = {key: value for key, value in own.items() if key.startswith("eval/")}
    assert sets == {
        f"eval/{name}/{key}": value for name, values in found["sets"].items() for key, value in values.items()
    }
    assert metrics(folder / "alone") == [{"step": 2, **sets}]
    assert len((folder / "alone" / "eval.jsonl").read_text().splitlines()) == 4 + 12
    assert read_journal(folder / "alone")[-1]["outcome"] == "done"
    assert "Evaluation " in (folder / "alone" / "report.html").read_text()


SETS = '{name="mine"}, {name="drawn", data="other.jsonl", prompts=3, samples_per_prompt=4, temperature=0.9}'
FOUR = settings("run.steps=4", f"eval={{every=2, prompts=4, pass_score=0.05, sets=[{SETS}]}}")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Four steps, evaluated on two sets and saved twice; the spec, and the run's directory beside it."""
    folder = tmp_path_factory.mktemp("whole")
    spec, run = preset("fake", folder), folder / "run"
    (folder / "other.jsonl").write_text('{"prompt": "4231", "answer": "1234"}\n' * 3)
    finish("train", spec, "--run-dir", run, *FOUR, *settings("checkpoint.every=2"))
    return spec, run


def test_a_run_leaves_a_directory_that_explains_itself(whole, tmp_path):
    _, run = whole
    lines = trained(run)
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert [line["step"] for line in lines if "eval/mine/reward_mean" in line] == [2, 4]
    wanted = """reward/mean reward/std actor/loss actor/grad_norm actor/entropy actor/kl actor/clip_fraction
        rollout/length_mean rollout/logprob_gap time/step_s time/rollout_s time/reward_s time/update_s time/sync_s
        perf/tokens_per_s sync/bytes sync/GB_per_s sync/verified""".split()  # noqa: SIM905
    assert all(line[key] is not None for line in lines for key in wanted)
    assert all(line["sync/verified"] is True and line["rollout/logprob_gap"] < 1e-4 for line in lines)
    for name in ("spec.toml", "resolved.json", "as_built.json", "samples.jsonl", "report.html"):
        assert (run / name).stat().st_size > 0, name
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step_000002", "step_000004"]
    saved = run / "checkpoints" / "step_000004"
    assert json.loads((saved / "manifest.json").read_text())["proven"]
    proof = json.loads((saved / "actor" / "greedy_proof.json").read_text())
    assert [len(answer["tokens"]) for answer in proof["answers"]] == [8, 8], "no longer than the run's completions"
    built = json.loads((run / "as_built.json").read_text())
    assert built["actor"][0]["model"]["parameters"] == built["rollout"][0]["model"]["parameters"] > 0
    assert (run / "logs" / "attempt_1" / "actor" / "rank0.log").is_file()
    sample = json.loads((run / "samples.jsonl").read_text().splitlines()[0])
    assert {"step", "prompt", "completion", "reward"} <= set(sample)
    kept = [json.loads(line) for line in (run / "eval.jsonl").read_text().splitlines()]
    answers = [line for line in kept if line["name"] == "mine"]
    assert [line["step"] for line in answers] == [0] * 4 + [2] * 4 + [4] * 4, "every completion of every evaluation"
    drawn = [line for line in kept if line["name"] == "drawn" and line["step"] == 4]
    assert len(drawn) == 12
    assert len({line["completion"] for line in drawn[:4]}) > 1, "they are drawn, not greedy"
    last = metrics(run)[-1]
    passed = [[line["reward"] >= 0.05 for line in drawn[start : start + 4]] for start in (0, 4, 8)]
    assert [line["passed"] for line in drawn] == [one for prompt in passed for one in prompt]
    assert last["eval/drawn/pass@1"] == pytest.approx(sum(map(sum, passed)) / 12)
    assert last["eval/drawn/pass@4"] == sum(map(any, passed)) / 3
    evaluated_alone(run, tmp_path)
    for step in (2, 4):
        rewards = [line["reward"] for line in answers if line["step"] == step]
        told = next(line for line in metrics(run) if line["step"] == step)
        assert told["eval/mine/reward_mean"] == pytest.approx(sum(rewards) / 4)
        assert told["eval/mine/term_0"] == pytest.approx(sum(rewards) / 4)
        assert told["eval/mine/finished"] == sum(line["finished"] for line in answers if line["step"] == step) / 4
        assert told["eval/mine/failed"] == 0
    nothing_left(run)


# ── on shared devices ─────────────────────────────────────────────────────────────────────────────

SHARED = settings('run.colocate="always"')

WAKES_AS_ANOTHER = """
import backends.fake.fake_rollout as m
wake = m.FakeRolloutEngine.wake
def other(self, tags):
    wake(self, tags)
    if "kv_cache" in tags and self._weights:
        self._weights["bigram.weight"] *= 1.5
m.FakeRolloutEngine.wake = other
"""

SAYS_HOW_DEEP = """
import backends.fake.fake_rollout as m
sleep = m.FakeRolloutEngine.sleep
def said(self, level):
    print("asleep at level", level, flush=True)
    sleep(self, level)
m.FakeRolloutEngine.sleep = said
"""


def test_replicas_turns_checkpoints_and_evaluations_change_nothing(whole, tmp_path):
    """To save, the trainer needs the device, and the rollout sleeps: it gets its weights again before it samples. It
    sleeps at level 2, from the first time after the build on: level 1 would keep a copy in host memory for nothing."""
    spec, apart = whole
    run = tmp_path / "turns"
    more = settings("checkpoint.every=1", "rollout.processes=3")
    finish("train", spec, "--run-dir", run, *FOUR, *SHARED, *more, *plot(tmp_path / "plot", "rollout", SAYS_HOW_DEEP))
    assert trajectory(run) == trajectory(apart)
    moves = [f"mem/actor_{what}_GiB" for what in ("before_offload", "offloaded", "before_onload", "onloaded")]
    for in_turn, beside in zip(metrics(run), metrics(apart), strict=True):
        assert {key: value for key, value in in_turn.items() if key.startswith("eval/")} == {
            key: value for key, value in beside.items() if key.startswith("eval/")
        }
        if in_turn["step"]:
            assert in_turn["sync/verified"] is True
            assert in_turn["rollout/logprob_gap"] < 1e-4
            assert all(0.01 < in_turn[key] < 4 and key not in beside for key in moves), in_turn
            assert 0.01 < beside["mem/actor_peak_GiB"] < 4
    log = (run / "logs" / "attempt_1" / "rollout" / "rank0.log").read_text().splitlines()
    slept = [line for line in log if line.startswith("asleep")]
    assert len(slept) > 4, "after the build, and before each of four updates"
    assert set(slept) == {"asleep at level 2"}


def test_a_sampler_that_wakes_as_another_stops_the_run_before_it_samples(spec, tmp_path):
    run = tmp_path / "run"
    woken = plot(tmp_path / "plot", "rollout", WAKES_AS_ANOTHER)
    done = warm_rlctl("train", spec, "--run-dir", run, *SHARED, *woken)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "every weight arrived with the right bytes, but rollout 0 does not behave" in " ".join(done.stderr.split())
    assert not (run / "samples.jsonl").exists() or not (run / "samples.jsonl").read_text(), "nothing was sampled"


# ── resuming ──────────────────────────────────────────────────────────────────────────────────────


def test_six_steps_are_three_and_three(spec, tmp_path):
    """The second half is made twice, by the first attempt and by a resume that finds the last checkpoint torn."""
    options = settings("run.steps=6", "checkpoint.every=3", "algorithm.mini_batches_per_step=2")
    steered = ("kl_coef=0.3", 'kl_in="reward"', "kl_target=1e-4", "kl_horizon=64")  # its weight is part of a checkpoint
    options += settings(*(f"algorithm.{key}" for key in steered))
    run = tmp_path / "run"
    tracked = settings('tracking=[{kind="wandb", project="p", samples_every=3}, {kind="tensorboard"}]')
    support = REPO / "tests" / "support"
    env = {"PYTHONPATH": f"{REPO}:{support}:{support / 'tracker_packages'}", "TRACKERS_TOLD": str(tmp_path / "told")}
    finish("train", spec, "--run-dir", run, *options, *tracked, **env)
    whole, shown = trajectory(run), (run / "samples.jsonl").read_text()
    coefs = [line["actor/kl_coef"] for line in trained(run)]
    torn = run / "checkpoints" / "step_000006" / "actor" / "model.safetensors"
    torn.write_bytes(torn.read_bytes()[:-3])
    for copy in ("step_000009x", "step_000003 (copy)", "backup"):
        shutil.copytree(run / "checkpoints" / "step_000003", run / "checkpoints" / copy)
    (run / "logs" / "attempt_backup").mkdir()
    with (run / "samples.jsonl").open("ab") as samples:
        samples.write(b'{"step": 6, "prompt": "\xc3')
    again = finish("train", spec, "--run-dir", run, *options, *tracked, "--resume", **env)
    logged = [call["data"] for call in told(tmp_path / "told", "wandb.log")]
    assert [line["step"] for line in logged] == [1, 2, 3, 4, 5, 6, 4, 5, 6]
    assert [line["step"] for line in logged if "samples" in line] == [1, 3, 6, 6]
    assert [call["id"] for call in told(tmp_path / "told", "wandb.init")] == [None, "run1"]
    assert len(list((run / "tensorboard").iterdir())) == 2
    assert "skipped step_000006" in again.stdout
    assert "step_000003" in again.stdout
    assert trajectory(run) == whole
    assert len(whole) == 6
    assert [line["actor/kl_coef"] for line in trained(run)] == coefs
    assert len(set(coefs)) == 6
    assert (run / "logs" / "attempt_2").is_dir()
    kept = {"step_000003", "step_000006", "torn_step_000006", "step_000009x", "step_000003 (copy)", "backup"}
    assert {path.name for path in (run / "checkpoints").iterdir()} == kept
    assert (run / "samples.jsonl").read_text() == shown
    assert "report: " in again.stdout
    (run / "report.html").unlink()
    (run / "report.html").mkdir()  # refused, as on a full disk
    ended = finish("train", run, "--resume", *settings("run.steps=2"), **env).stdout
    assert "done: 6 steps" in ended
    assert "report: " not in ended


# ── what can die ──────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def running(request, spec, tmp_path):
    """A long run in its third step or later. Its parameter: seconds of silence that end it."""
    run, silence_s = tmp_path / "run", getattr(request, "param", 60)
    strict = settings(f"run.heartbeat_timeout_s={silence_s}", "rollout.max_restarts=0")
    driver = start("train", spec, "--run-dir", run, *FOREVER, *strict)
    try:
        wait_for(lambda: steps_done(run) >= 3 or driver.poll() is not None, 120, "the third step")
        assert driver.poll() is None, driver.stdout.read()
        yield driver, run
    finally:
        driver.kill()
        driver.communicate()
        for processes in workers_of(run).values():
            for process in processes:
                process.kill()


@pytest.mark.parametrize("running", [7], indirect=True)
def test_a_hanging_rank_is_noticed(running):
    driver, run = running
    workers_of(run)["rollout"][0].send_signal(signal.SIGSTOP)
    output = driver.communicate(timeout=200)[0]
    assert driver.returncode == 1, output
    assert "rollout rank 0" in output
    assert "no sign of life" in output
    nothing_left(run)


def test_a_dead_driver_leaves_nobody_behind(running):
    driver, run = running
    grades = psutil.Process(workers_of(run)["reward"][0].pid).children(recursive=True)
    actor = workers_of(run)["actor"][0].pid
    driver.kill()
    nothing_left(run)
    wait_for(lambda: not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in grades), 150, "grades' end")
    assert not [name for name in os.listdir("/dev/shm") if name.startswith(f"rlctl-{actor}-")]


def test_a_terminal_that_hangs_up_costs_no_step_and_the_run_continues_from_there(running, spec):
    """Closing an ssh session: SIGHUP, and nobody who reads. Ctrl-C on `rlctl train … 2>&1 | tee log` ends alike."""
    driver, run = running
    other = rlctl("train", spec, "--run-dir", run, "--resume", *FOREVER)
    assert (other.returncode, "in use by another rlctl" in other.stderr) == (2, True)
    driver.stdout.close()
    driver.stdout = None
    driver.send_signal(signal.SIGHUP)
    assert driver.wait(timeout=200) == 130
    nothing_left(run)
    done = steps_done(run)
    newest = max(int(path.name.removeprefix("step_")) for path in (run / "checkpoints").glob("step_*"))
    assert newest == done
    again = finish("train", spec, "--run-dir", run, "--resume", *FOREVER[2:], "--set", f"run.steps={done + 2}")
    assert [line["step"] for line in metrics(run) if line["step"] > 0] == list(range(1, done + 3))
    assert "step 0/" not in again.stdout, "it begins where it was"


NEVER_ENDS = """
import pathlib, time

def score(prompt, completion, row):
    if row["answer"] == "held out":
        with open(pathlib.Path(__file__).with_name("evaluations"), "a") as evaluations:
            evaluations.write("x")
            evaluations.flush()
            if evaluations.tell() == 2:
                time.sleep(99)
    return len(completion) / 8
"""


def with_todays_year(model):
    """Write a model whose chat template begins with the year."""
    shutil.copytree(BUILTIN_FOLDER / "tiny-chat", model)
    config = json.loads((model / "tokenizer_config.json").read_text())
    config["chat_template"] = "{{ strftime_now('%Y') }}" + config["chat_template"]
    (model / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.mark.usefixtures("warm_children")
def test_an_evaluation_that_was_interrupted_is_made_up_for(spec, tmp_path):
    """Its step is saved: a resume begins behind it, and proves what was killed while it was proven. A template that
    writes today's day writes that of the run's first, also on another day: else prompts would differ."""
    with_todays_year(tmp_path / "model")
    for answer in ("learned", "held out"):
        (tmp_path / f"{answer}.jsonl").write_text(json.dumps({"prompt": "4231", "answer": answer}) + "\n")
    (tmp_path / "slow.py").write_text(NEVER_ENDS)
    keys = ["run.steps=3", "data.train=learned.jsonl", "reward.timeout_s=99"]
    keys += [
        *("model.path=model", "data.max_prompt_tokens=40"),
        'eval={every=5, data="held out.jsonl", prompts=1}',
        'reward.terms=[{kind="function", path="slow.py:score"}]',
    ]
    run = tmp_path / "run"
    driver = start("train", spec, "--run-dir", run, *settings(*keys))
    wait_for(lambda: (tmp_path / "evaluations").is_file() and (tmp_path / "evaluations").stat().st_size == 2, 150)
    driver.send_signal(signal.SIGINT)
    driver.communicate(timeout=200)
    assert (driver.returncode, steps_done(run)) == (130, 3)
    before, saved = metrics(run), run / "checkpoints" / "step_000003"
    manifest = json.loads((saved / "manifest.json").read_text())
    del manifest["files"]["actor/greedy_proof.json"]
    (saved / "manifest.json").write_text(json.dumps({**manifest, "proven": False}))
    first, *others = (run / "journal.jsonl").read_text().splitlines()
    began = json.dumps({**json.loads(first), "time": 981_200_000.0})  # in February 2001
    (run / "journal.jsonl").write_text("\n".join([began, *others, ""]))
    finish("train", run, "--resume")
    assert json.loads((saved / "manifest.json").read_text())["proven"]
    after, evaluated = metrics(run), read_samples(run / "eval.jsonl")
    assert [line["step"] for line in evaluated] == [0, 3]
    assert after == [*before[:-1], before[-1] | after[-1]]
    assert after[-1]["eval/heldout/reward_mean"] == evaluated[1]["reward"]
    assert [line["prompt"][:4] for line in evaluated] == [time.strftime("%Y"), "2001"]


SAVES_SLOWLY = """
import time
import backends.fake.fake_train as m
save = m.FakeTrainEngine.save
def slow(self, folder):
    (folder / "begun").touch()
    time.sleep(1.5)
    (folder / "begun").unlink()
    return save(self, folder)
m.FakeTrainEngine.save = slow
"""


@pytest.mark.usefixtures("warm_children")
def test_a_save_that_has_begun_is_finished(spec, tmp_path):
    """Broken off, it would leave nothing, and ranks that write where nobody looks any more."""
    run = tmp_path / "run"
    driver = start("train", spec, "--run-dir", run, *FOREVER, *plot(tmp_path / "plot", "actor", SAVES_SLOWLY))
    wait_for(lambda: any(run.glob("checkpoints/.tmp_step_000002/actor/begun")), 150, "the save")
    driver.send_signal(signal.SIGTERM)
    told = driver.communicate(timeout=200)[0]
    assert (driver.returncode, "not saved" in told) == (130, False), told
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step_000002"]


# ── sabotage: faults that a run must catch by itself ──────────────────────────────────────────────

# A rollout that keeps its first weights, though it answers as if it had loaded the new ones.
STALE = """
import backends.fake.fake_rollout as m
load, digests = m.FakeRolloutEngine.import_weight, {}
def stale(self, spec, data):
    if spec.name not in digests:
        digests[spec.name] = load(self, spec, data)
    return digests[spec.name]
m.FakeRolloutEngine.import_weight = stale
"""
RAISES = """
import backends.fake.fake_train as m
def boom(self, *a): raise RuntimeError('the tensor is on fire')
m.FakeTrainEngine.forward_backward = boom
"""


@pytest.mark.parametrize(
    ("role", "code", "words"),
    [
        ("rollout", STALE, ["differs after the sync"]),
        ("actor", RAISES, ["actor rank 0, verb update, step 1", "RuntimeError: the tensor is on fire"]),
    ],
    ids=["stale weights", "an exception"],
)
def test_a_faulty_engine_ends_the_run_and_is_quoted(spec, tmp_path, role, code, words):
    run, faulty = tmp_path / "run", plot(tmp_path / "plot", role, code)
    done = warm_rlctl("train", spec, "--run-dir", run, "--set", "run.steps=3", *faulty)
    assert done.returncode == 1, done.stdout + done.stderr
    assert all(told in done.stderr.replace("\n", " ") for told in words), done.stderr
    nothing_left(run)
