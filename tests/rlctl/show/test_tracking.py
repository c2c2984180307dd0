"""Trackers get every finite metric, and a missing package is a spec error."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from small_spec import raw_spec

from rlctl.show.tracking import numbers, open_tracker
from specs.errors import SpecError
from specs.schema.spec import Spec


def spec_with(tracking: dict[str, Any] | None) -> Spec:
    return Spec.model_validate(raw_spec(run={"name": "tracked"}, **({"tracking": tracking} if tracking else {})))


def test_only_finite_numbers_are_tracked() -> None:
    metrics = {"step": 3, "a": 1, "b": 0.5, "ok": True, "c": math.nan, "d": None, "e": "text"}
    assert numbers(metrics) == {"a": 1.0, "b": 0.5, "ok": 1.0}


def test_without_the_section_nothing_is_written(tmp_path: Path) -> None:
    with open_tracker(spec_with(None), tmp_path) as tracker:
        tracker.log({"step": 1, "reward/mean": 0.5})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("kind", "package"), [("tensorboard", "tensorboardX"), ("wandb", "wandb")])
def test_a_missing_package_is_a_spec_error_with_the_way_out(
    kind: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)  # what Python itself uses to say: not importable
    with pytest.raises(SpecError) as caught:
        open_tracker(spec_with({"kind": kind}), tmp_path)
    assert caught.value.exit_code == 2
    text = str(caught.value)
    assert f"tracking.kind = {kind}: the package {package} is not installed" in text
    assert "pip install 'rlctl[tracking]'" in text


def test_tensorboard_files_hold_the_values(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX", reason="tensorboardX is not installed")
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.record_writer import masked_crc32c

    with open_tracker(spec_with({"kind": "tensorboard"}), tmp_path) as tracker:
        tracker.log({"step": 1, "reward/mean": 0.25, "actor/loss": math.nan})
        tracker.log({"step": 2, "reward/mean": 0.5})
    [path] = (tmp_path / "tensorboard").iterdir()
    data, seen = path.read_bytes(), []
    while data:  # length, its checksum, the event, its checksum
        length = int.from_bytes(data[:8], "little")
        body = data[12 : 12 + length]
        assert int.from_bytes(data[12 + length : 16 + length], "little") == masked_crc32c(body)
        event = Event.FromString(body)
        seen += [(event.step, value.tag, value.simple_value) for value in event.summary.value]
        data = data[16 + length :]
    assert seen == [(1, "reward/mean", 0.25), (2, "reward/mean", 0.5)]


def test_wandb_is_told_the_project_and_the_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """wandb wants an account, so a stand-in takes down what it is told."""
    told: list[Any] = []
    run = SimpleNamespace(log=lambda values, step: told.append((step, values)), finish=lambda: told.append("end"))
    stand_in = SimpleNamespace(
        init=lambda **options: told.append((options["project"], options["name"])) or run,
        Settings=lambda **options: options,
        Error=RuntimeError,
    )
    monkeypatch.setitem(sys.modules, "wandb", stand_in)
    with open_tracker(spec_with({"kind": "wandb", "project": "mine"}), tmp_path) as tracker:
        tracker.log({"step": 1, "reward/mean": 0.25})
    assert told == [("mine", "tracked"), (1, {"reward/mean": 0.25}), "end"]
