"""A run with a reward model of another tokenizer, mixed with a term of its own; the roles take turns on the device.

Where there is an interpreter with Megatron-core, it holds the reward model, in two stages.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from optional import MEGATRON_PYTHON
from running import finish, preset, settings, trained
from tiny_reward_model import own_score, write_reward_model

IN_STAGES = ', processes=2, launcher="torchrun", engine={kind="megatron", pipeline_parallel=2}'
SMALL = """run.steps=2
checkpoint.every=1
data.prompts_per_step=4
algorithm.group_size=4
algorithm.mini_batches_per_step=1
reward.terms=[{kind="model", weight=0.5}, {kind="exact_match", partial=true, weight=2.0}]"""


def test_a_reward_model_beside_another_term(tmp_path: Path) -> None:
    model = write_reward_model(tmp_path / "scores")
    spec, run = preset("quickstart", tmp_path), tmp_path / "run"
    rows = [{"prompt": f"{digits}>", "answer": "".join(sorted(digits))} for digits in ("3142", "4321", "2143", "1423")]
    (tmp_path / "own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    engine = f'{IN_STAGES}, python="{MEGATRON_PYTHON}"' if MEGATRON_PYTHON.exists() else ""
    section = f'reward_model={{model="{model}", max_sequence_tokens=96, micro_batch_tokens=256{engine}}}'
    two = 'eval={every=2, prompts=4, sets=[{name="heldout"}, {name="own", data="own.jsonl"}]}'
    lines = (*SMALL.splitlines(), two, section, 'run.colocate="always"')
    sets = settings(*lines)
    finish("train", spec, "--run-dir", run, *sets)
    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    assert len(samples) >= 4
    for sample in samples:
        score, exact = sample["terms"]
        assert score == pytest.approx(own_score(model, sample["prompt"], sample["completion"]), abs=1e-5)
        assert sample["scored"]
        assert sample["reward"] == pytest.approx(0.5 * score + 2 * exact, abs=1e-5)
    lines = trained(run)
    for line in lines:
        assert line["reward/mean"] == pytest.approx(0.5 * line["reward/term_0"] + 2 * line["reward/term_1"], abs=1e-5)
        assert line["reward/model_tokens"] > 0
        assert line["reward/failed_model_overlong"] == 0
        assert line["mem/reward_model_onloaded_GiB"] > 0
        assert "mem/reward_model_offloaded_GiB" in line
        assert line["sync/verified"] is True
    assert {"eval/heldout/reward_mean", "eval/own/reward_mean"} <= lines[-1].keys(), "the second set has weights too"
    built = json.loads((run / "as_built.json").read_text())["reward_model"][0]["model"]
    assert (built["head"], built["model_class"]) == ("score", "Qwen2ForSequenceClassification")
    assert built["trainable_parameters"] == 0
    assert built["mesh"] == ({"data": 1, "pipeline": 2, "tensor": 1} if engine else {})
    memory = json.loads((run / "memory.json").read_text())
    assert "reward_model" in json.dumps(memory)
