"""On-policy distillation, in a run: the student comes near its teacher, by what the teacher says alone."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from local_run import bigram_folder, local_run
from running import preset

VOCABULARY, LIKED, BY = 15, 2, 4.0


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_a_student_comes_near_its_teacher(tmp_path: Path, temperature: float) -> None:
    """The reverse KL starts where that of a uniform distribution to the teacher's at the sampler's temperature does (at
    another it would be 1.57 instead of 0.35 nats, or the reverse), and falls, although every score is 0."""
    teacher = bigram_folder(tmp_path / "teacher", likes="37", by=BY)
    with local_run(
        preset("fake", tmp_path),
        tmp_path / "run",
        *("algorithm.kind=distill", "algorithm.group_size=1", "data.prompts_per_step=48"),
        *(f'ref.model="{teacher}"', "ref.engine.kind=fake"),
        *('reward.terms=[{kind="regex", pattern="no such text"}]', f"rollout.temperature={temperature}"),
        *("actor.optimizer.lr=0.5", "run.steps=16"),
    ) as run:
        lines = [record.metrics for record in run.steps(16)]
    logit = BY / temperature
    normaliser = math.log(VOCABULARY - LIKED + LIKED * math.exp(logit))
    kl = np.array([line["actor/kl"] for line in lines])
    assert kl[0] == pytest.approx(normaliser - LIKED / VOCABULARY * logit - math.log(VOCABULARY), rel=0.25)
    assert abs(kl[-3:].mean()) < 0.25 * kl[0]
    assert all(line["reward/mean"] == 0 for line in lines)
    assert all("reward/kl_penalty" not in line for line in lines)
