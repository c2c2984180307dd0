"""What check-config says of sampling ahead of learning."""

from __future__ import annotations

from pathlib import Path

import pytest
from running import preset

from specs.errors import SpecError
from specs.load.load import load_spec
from specs.rules.all_rules import cross_field_warnings


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        (('run.colocate="always"',), "take turns"),
        (("actor.devices=[0]", "rollout.devices=[0]"), "shares GPU 0 with actor"),
        (("actor.devices=[0]", "rollout.devices=[0]", 'run.colocate="never"'), "shares GPU 0 with actor"),
    ],
)
def test_roles_that_share_a_device_cannot_run_ahead(tmp_path: Path, sets: tuple[str, ...], words: str) -> None:
    spec = preset("quickstart", tmp_path)
    load_spec(spec, list(sets))
    with pytest.raises(SpecError, match=rf"rollout\.max_staleness = 1: .*{words}"):
        load_spec(spec, [*sets, "rollout.max_staleness=1"])


def test_clip_keys_have_an_effect_on_stale_samples(tmp_path: Path) -> None:
    once = ("algorithm.mini_batches_per_step=1",)
    spec = preset("quickstart", tmp_path)
    keys = [problem.key for problem in cross_field_warnings(load_spec(spec, [*once]))]
    assert keys == ["algorithm.clip_low", "algorithm.clip_high"]
    assert not cross_field_warnings(load_spec(spec, [*once, "rollout.max_staleness=1"]))
