"""PPO end to end: actor and critic in one checkpoint, a critic that learns first, its export and a start from that."""

from __future__ import annotations

import json
import shutil

import pytest
from local_run import local_run
from running import finish, metrics, preset, settings, train, trained

PPO = settings("algorithm.kind=ppo", "algorithm.mini_batches_per_step=2")
FOUR = (
    *PPO,
    *settings("run.steps=4", "checkpoint.every=1", "checkpoint.keep=9", "algorithm.critic_warmup_steps=2"),
    *settings("algorithm.value_clip=0.2", "algorithm.kl_coef=0.1"),
    *settings('critic={engine={kind="fake"}, optimizer={lr=0.1}}'),
)


def learned(run):
    """Return what must repeat bit for bit."""
    prefixes = ("critic/", "actor/", "reward/mean", "rollout/logprob_gap")
    return [{key: value for key, value in line.items() if key.startswith(prefixes)} for line in trained(run)]


def saved(run, step):
    """Checksums of what the roles saved."""
    files = json.loads((run / "checkpoints" / f"step_{step:06d}" / "manifest.json").read_text())["files"]
    return {name: mark["xxh3"] for name, mark in files.items() if not name.startswith("driver/")}


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    """Four steps of the fake engines, with a reference; in the first two the critic learns alone."""
    folder = tmp_path_factory.mktemp("ppo")
    spec = preset("fake", folder)
    train(spec, folder / "run", *FOUR)
    return spec, folder / "run"


def test_four_steps_are_two_and_two(four, tmp_path):
    """Both models with their optimizers, from one checkpoint; the roles that go on take turns on one device."""
    spec, run = four
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    for step in (3, 4):
        shutil.rmtree(copy / "checkpoints" / f"step_{step:06d}")
    assert "step_000002" in train(spec, copy, *FOUR, "--resume", "--set", 'run.colocate="always"')
    assert learned(copy) == learned(run)
    assert {"mem/critic_offloaded_GiB", "mem/critic_onloaded_GiB", "mem/actor_onloaded_GiB"} <= metrics(copy)[-1].keys()
    assert len(learned(copy)) == 4
    assert "reward/silent_groups" not in metrics(run)[-1], "equal scores teach a critic's actor too"
    assert saved(copy, 4) == saved(run, 4)
    assert {name.split("/")[0] for name in saved(run, 4)} == {"actor", "critic"}


def test_the_critic_learns_alone_first(four):
    """The actor stays as it is to the bit, and nothing is sent where nothing is new."""
    _, run = four
    lines = trained(run)
    assert ["actor/loss" in line for line in lines] == [False, False, True, True]
    assert ["sync/verified" in line for line in lines] == [False, False, True, True]
    assert all("critic/loss" in line and line["critic/grad_norm"] > 0 for line in lines)
    weights = [[saved(run, step)[f"{role}/model.safetensors"] for step in (1, 2, 3, 4)] for role in ("actor", "critic")]
    assert weights[0][0] == weights[0][1]
    assert len(set(weights[0])) == 3
    assert len(set(weights[1])) == 4


def test_running_ahead_counts_no_age_while_the_actor_stands_still(tmp_path):
    ahead = (*FOUR[1::2], "rollout.max_staleness=1", "run.steps=6")
    with local_run(preset("fake", tmp_path), tmp_path / "run", *ahead) as run:
        lines = [record.metrics for record in run.steps(6)]
    assert [line["rollout/staleness_max"] for line in lines] == [0, 0, 0, 1, 1, 1]
    assert all(line["rollout/dropped_stale"] == 0 for line in lines)


def test_it_learns_without_groups(tmp_path):
    """To write a 7, from one completion per prompt; the critic explains more and more of what comes."""
    task = ('reward.terms=[{kind="regex", pattern="7"}]', "actor.optimizer.lr=0.3", "run.steps=25")
    alone = ("data.prompts_per_step=32", "algorithm.group_size=1")
    with local_run(preset("fake", tmp_path), tmp_path / "run", *PPO[1::2], *task, *alone) as run:
        lines = [record.metrics for record in run.steps(25)]
    rewards = [line["reward/mean"] for line in lines]
    assert rewards[0] < 0.5
    assert sum(rewards[-5:]) / 5 > 0.95
    losses = [line["critic/loss"] for line in lines]
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.slow
def test_a_critic_is_exported_and_another_starts_from_it(tmp_path):
    """It is a folder that transformers loads; the next run's critic begins with its weights,
    and a reward model's folder is the same to it."""
    from transformers import AutoModelForSequenceClassification

    spec, run, out = preset("quickstart", tmp_path), tmp_path / "run", tmp_path / "critic"
    small = (*PPO, *settings("run.steps=2", "data.prompts_per_step=4", "algorithm.group_size=2"),
             *settings("eval.prompts=8", "checkpoint.every=2"))  # fmt: skip
    train(spec, run, *small, "--set", 'run.colocate="always"')
    (tmp_path / "elsewhere").mkdir()
    out.symlink_to(tmp_path / "elsewhere")  # as with a mount, the folder itself can neither be removed nor replaced
    done = finish("export-checkpoint", run, out, "--role", "critic", "--dtype", "fp32")
    assert not [*out.glob(".*")]
    assert "values the same" in " ".join(done.stdout.split())
    model = AutoModelForSequenceClassification.from_pretrained(out)
    assert model.config.num_labels == 1
    assert model.score.weight.abs().max() > 0
    train(spec, tmp_path / "next", *small, *settings("run.steps=1", f'critic.model="{out}"'))
    before = json.loads((run / "as_built.json").read_text())["critic"][0]["model"]
    after = json.loads((tmp_path / "next" / "as_built.json").read_text())["critic"][0]["model"]
    assert (before["new_head"], after["new_head"]) == (True, False)
    assert before["weights_checksum"] != after["weights_checksum"]
