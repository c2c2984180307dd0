"""Trackers are told hyperparameters, finite metrics, samples; by which name a resume finds the run again."""

from __future__ import annotations

import errno
import math
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from small_spec import raw_spec
from tracker_packages.told import told

from rlctl.run.interrupt import Interrupt
from rlctl.show import tracking
from rlctl.show.tracking import TRACKERS, TensorBoardTracker, open_trackers
from specs.errors import Interrupted, RlctlError, SpecError
from specs.load.keys import kinds_of, tables_of
from specs.load.load import spec_from
from specs.schema.recipes import RlSpec

STAND_INS = Path(__file__).resolve().parents[2] / "support" / "tracker_packages"
WANDB = {"kind": "wandb", "project": "mine", "entity": "team"}
TRACKIO = {"kind": "trackio", "project": "mine", "space_id": "me/board"}
MLFLOW = {"kind": "mlflow", "experiment": "mine", "tracking_uri": "http://server"}
SAMPLES = [
    {"id": 7, "prompt": "1+1|", "completion": "<b>2</b>\n# x", "answer": "2", "reward": 0.5, "terms": [1.0, 0.0]},
    {"id": 9, "prompt": "2+2", "completion": "", "answer": None, "reward": 0.0, "terms": [0.0, 0.0]},
]


def spec_with(*tracking: dict[str, Any], name: str = "tracked") -> RlSpec:
    return spec_from({**raw_spec(run={"name": name}), "tracking": [dict(table) for table in tracking]})


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], list[dict[str, Any]]]]:
    """The stand-ins are installed; returns what one of their functions was told."""
    monkeypatch.syspath_prepend(str(STAND_INS))
    for name in ("wandb", "trackio", "mlflow"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    path = tmp_path / "told.jsonl"
    monkeypatch.setenv("TRACKERS_TOLD", str(path))
    yield lambda call: told(path, call)
    for name in ("wandb", "trackio", "mlflow"):
        sys.modules.pop(name, None)


def run(
    spec: RlSpec, folder: Path, steps: range, *, resume: bool = False, warned: list[str] | None = None
) -> list[str]:
    """Log these steps, with samples; returns what was said to the user."""
    said: list[str] = []
    warn = (warned if warned is not None else said).append
    with open_trackers(spec, folder, resume=resume, say=said.append, warn=warn) as trackers:
        for step in steps:
            metrics = {"step": step, "reward/mean": step / 10, "eval/x/pass@4": 1, "actor/loss": math.nan}
            trackers.log(metrics, SAMPLES)
    return said


def test_every_kind_of_the_schema_has_a_tracker() -> None:
    tables = tables_of(RlSpec.model_fields["tracking"].annotation)
    assert {kind for table in tables for kind in kinds_of(table)} == set(TRACKERS)


def test_several_get_the_same_steps(tmp_path: Path, calls: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracking, "WAIT_S", 60.0)  # a busy machine is slow to import them
    said = run(spec_with(WANDB, TRACKIO, MLFLOW), tmp_path, range(1, 4))
    values = [{"reward/mean": step / 10, "eval/x/pass@4": 1.0} for step in (1, 2, 3)]
    logged = [{key: value for key, value in call["data"].items() if key != "samples"} for call in calls("wandb.log")]
    assert logged == [{"step": step, **one} for step, one in enumerate(values, start=1)]
    logged = [
        {key: value for key, value in call["metrics"].items() if key != "samples"} for call in calls("trackio.log")
    ]
    assert logged == values
    assert [call["step"] for call in calls("trackio.log")] == [1, 2, 3]
    renamed = [{"reward/mean": one["reward/mean"], "eval/x/pass_4": 1.0} for one in values]  # what MLflow takes
    assert [call["metrics"] for call in calls("mlflow.log_metrics")] == renamed
    assert said == ["wandb: https://wandb.ai/run/run1", "mlflow: run run1 of experiment mine at http://server"]
    assert calls("wandb.finish") == [{"exit_code": 0}]
    assert calls("trackio.finish") == [{}]
    assert calls("mlflow.end_run") == [{"status": "FINISHED"}]


def test_what_trackers_print_leaves_stdout_to_the_result(tmp_path: Path, calls: Any, capsys: Any) -> None:
    run(spec_with(WANDB, TRACKIO, MLFLOW), tmp_path, range(1, 3))
    shown = capsys.readouterr()
    assert shown.out == ""
    assert {"* trackio.init", "* mlflow.log_metrics", "* trackio.finish"} <= {*shown.err.splitlines()}


def test_mlflow_is_told_the_experiment_and_every_hyperparameter(tmp_path: Path, calls: Any) -> None:
    raw = {**raw_spec(), "tracking": [MLFLOW]}
    raw["data"] = {**raw["data"], "template": "x" * 600 + "{prompt}"}
    spec = spec_from(raw)
    run(spec, tmp_path, range(1, 2))
    assert calls("mlflow.set_tracking_uri") == [{"uri": "http://server"}]
    assert calls("mlflow.set_experiment") == [{"name": "mine"}]
    known = {key: value for call in calls("mlflow.log_params") for key, value in call["params"].items()}
    assert known["actor.optimizer.lr"] == str(spec.actor.optimizer.lr)
    assert known["reward.terms.0.kind"] == spec.reward.terms[0].kind
    assert known["data.template"] == "x" * 499 + "…"
    (resolved,) = calls("mlflow.log_dict")
    assert resolved == {"artifact_file": "resolved.json", "dictionary": spec.resolved()}


def test_two_runs_begin_on_a_fresh_sqlite_file(tmp_path: Path, calls: Any) -> None:
    (table,) = spec_with({**MLFLOW, "tracking_uri": f"sqlite:///{tmp_path}/runs.db"}).tracking
    with ThreadPoolExecutor() as pool:
        begun = [pool.submit(TRACKERS["mlflow"], table, spec_with(), tmp_path, {}) for _ in range(2)]
    assert len({one.result().remembers["run_id"] for one in begun}) == 2


def test_samples_are_a_table(tmp_path: Path, calls: Any) -> None:
    columns = ["step", "prompt", "completion", "answer", "reward", "term_0", "term_1"]
    row = [10, "1+1|", "<b>2</b>\n# x", "2", 0.5, 1.0, 0.0]
    run(spec_with(WANDB, TRACKIO, {**MLFLOW, "samples_every": 4}), tmp_path, range(1, 13))
    tables = [call["data"]["samples"] for call in calls("wandb.log") if "samples" in call["data"]]
    assert [table["data"][0][0] for table in tables] == [1, 10]
    assert (tables[1]["columns"], tables[1]["data"][0]) == (columns, row)
    tables = [call["metrics"]["samples"] for call in calls("trackio.log") if "samples" in call["metrics"]]
    assert (tables[1]["columns"], tables[1]["data"][0]) == (columns, row)
    grown = [call["data"] for call in calls("mlflow.log_table")]
    assert [data["step"] for data in grown] == [[1, 1], [4, 4], [8, 8], [12, 12]]
    assert grown[0]["completion"] == ["<b>2</b>\n# x", ""]


# ── resume ────────────────────────────────────────────────────────────────────────────────────────


def test_a_resume_goes_on_with_the_same_runs(tmp_path: Path, calls: Any) -> None:
    spec = spec_with(WANDB, TRACKIO, MLFLOW, name="again")
    run(spec, tmp_path, range(1, 4))
    run(spec, tmp_path, range(3, 6), resume=True)
    first, second = calls("wandb.init")
    assert (first["id"], first["resume"]) == (None, None)
    assert (second["id"], second["resume"]) == ("run1", "allow")
    first, second = calls("trackio.init")
    assert (first["name"], first["resume"], second["name"], second["resume"]) == ("again", "never", "again", "allow")
    first, second = calls("mlflow.start_run")
    assert (first["run_id"], second["run_id"]) == (None, "run1")
    params = [call for call in calls("mlflow.log_params") if "run.name" in call["params"]]
    assert len(params) == 1, "parameters of MLflow never change"


def test_a_copy_of_a_run_directory_begins_runs_of_its_own_and_one_that_was_moved_does_not(
    tmp_path: Path, calls: Any
) -> None:
    spec, first, copy, moved = spec_with(WANDB, MLFLOW), *(tmp_path / name for name in ("first", "copy", "moved"))
    first.mkdir()
    run(spec, first, range(1, 3))
    shutil.copytree(first, copy)
    said = run(spec, copy, range(3, 4), resume=True)
    assert [call["id"] for call in calls("wandb.init")] == [None, None]
    assert [call["run_id"] for call in calls("mlflow.start_run")] == [None, None]
    assert [f"begins a new run: {first}, of which this is a copy" in line for line in said].count(True) == 2
    run(spec, copy, range(4, 5), resume=True)
    first.rename(moved)
    run(spec, moved, range(3, 4), resume=True)
    assert [call["id"] for call in calls("wandb.init")[2:]] == ["run2", "run1"]


def test_a_resume_goes_on_with_its_own_run_where_a_newer_one_has_its_name(tmp_path: Path, calls: Any) -> None:
    spec = spec_with(TRACKIO, name="again")
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        run(spec, tmp_path / folder, range(1, 2))
    run(spec, tmp_path / "one", range(2, 3), resume=True)
    first, second, resumed = [call["run"] for call in calls("trackio.log")]
    assert resumed == first != second


# ── what goes wrong ───────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("kind", "more"), [("tensorboard", {}), ("wandb", WANDB), ("trackio", TRACKIO), ("mlflow", MLFLOW)]
)
def test_a_package_that_breaks_is_a_spec_error_with_the_way_out(
    kind: str, more: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = spec_with({**more, "kind": kind})
    package = spec.tracking[0].package
    monkeypatch.setitem(sys.modules, package, None)  # what Python itself uses to say: not importable
    with pytest.raises(SpecError) as caught:
        run(spec, tmp_path, range(1, 2))
    assert caught.value.exit_code == 2
    text = str(caught.value)
    assert f'tracking.0.kind = "{kind}": the package {package} cannot be imported' in text
    assert f"pip install {package}" in text


def test_a_tracker_that_does_not_start_ends_the_run_before_it_begins(
    tmp_path: Path, calls: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRACKERS_FAIL_AT", "mlflow.set_experiment")
    with pytest.raises(RlctlError) as caught:
        run(spec_with(WANDB, MLFLOW), tmp_path, range(1, 2))
    assert caught.value.message == "mlflow did not start: no route to the server of mlflow.set_experiment"
    assert "MLFLOW_TRACKING_URI" in caught.value.hint
    assert "tracking.1" in caught.value.hint
    assert calls("wandb.finish") == [{"exit_code": 1}]


def test_a_run_that_a_resume_finds_no_more_has_a_way_out(
    tmp_path: Path, calls: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(spec_with(MLFLOW), tmp_path, range(1, 2))
    monkeypatch.setenv("TRACKERS_FAIL_AT", "mlflow.start_run")
    long = "the way out stands at the end " * 20
    monkeypatch.setenv("TRACKERS_FAIL_WITH", long)
    with pytest.raises(RlctlError) as caught:
        run(spec_with(MLFLOW), tmp_path, range(2, 3), resume=True)
    assert f"without {tmp_path / 'trackers.json'} it begins a new run there" in caught.value.hint
    assert caught.value.message == f"mlflow did not start: {long.strip()}"


def test_a_tracker_that_fails_later_is_left_out_and_the_others_go_on(
    tmp_path: Path, calls: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    warned: list[str] = []
    with open_trackers(spec_with(MLFLOW, WANDB), tmp_path, resume=False, say=print, warn=warned.append) as trackers:
        trackers.log({"step": 1, "reward/mean": 1.0})
        monkeypatch.setenv("TRACKERS_FAIL_AT", "mlflow.log_metrics")
        trackers.log({"step": 2, "reward/mean": 1.0})
        monkeypatch.delenv("TRACKERS_FAIL_AT")
        trackers.log({"step": 3, "reward/mean": 1.0})
    assert warned == ["mlflow takes no more metrics from step 2 on: no route to the server of mlflow.log_metrics"]
    assert [call["step"] for call in calls("mlflow.log_metrics")] == [1]
    assert [call["data"]["step"] for call in calls("wandb.log")] == [1, 2, 3]
    assert calls("wandb.finish") == [{"exit_code": 0}]


def test_a_tracker_that_was_left_out_learns_when_python_ends_how_the_run_ended(
    tmp_path: Path, calls: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_end: list[Callable[[], None]] = []
    monkeypatch.setattr("atexit.register", lambda *call: at_end.append(partial(*call)))
    trackers = open_trackers(spec_with(MLFLOW), tmp_path, resume=False, say=print, warn=print)
    monkeypatch.setenv("TRACKERS_FAIL_AT", "mlflow.log_metrics")
    trackers.log({"step": 1, "reward/mean": 1.0})
    trackers.close("failed")
    assert not calls("mlflow.end_run"), "a server that is away would be waited for before the error is said"
    (end,) = at_end
    end()
    assert calls("mlflow.end_run") == [{"status": "FAILED"}]
    monkeypatch.setenv("TRACKERS_FAIL_AT", "mlflow.end_run")
    end()  # it says nothing more


def test_a_password_in_an_address_is_not_shown(tmp_path: Path, calls: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKERS_FAIL_AT", "mlflow.log_metrics")
    monkeypatch.setenv("TRACKERS_FAIL_WITH", "API request to http://me:secret@server:5000/api failed: me@here")
    monkeypatch.setattr("mlflow.get_tracking_uri", lambda: "http://me:secret@server:5000")
    said = run(spec_with(MLFLOW), tmp_path, range(1, 2))
    assert said == [
        "mlflow: run run1 of experiment mine at http://server:5000",
        "mlflow takes no more metrics from step 1 on: API request to http://server:5000/api failed: me@here",
    ]


@pytest.mark.parametrize("call", ["mlflow.set_experiment", "mlflow.log_metrics", "mlflow.end_run"])
def test_a_wait_for_a_server_ends_with_a_signal(
    call: str, tmp_path: Path, calls: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, warned, began = spec_with(WANDB, MLFLOW), list[str](), time.monotonic()
    monkeypatch.setenv("TRACKERS_STOPPED_AT", call)
    ended = pytest.raises(Interrupted) if call != "mlflow.end_run" else nullcontext()
    with ended, Interrupt(print) as interrupt:
        opened = open_trackers(spec, tmp_path, resume=False, say=print, warn=warned.append, at_once=interrupt.at_once)
        with opened as trackers:
            trackers.log({"step": 1, "reward/mean": 1.0})
            interrupt.check()
    assert time.monotonic() - began < 30
    assert calls("wandb.finish") == [{"exit_code": 0 if call == "mlflow.end_run" else 1}]
    assert calls("mlflow.end_run") == ([{"status": "KILLED"}] if call == "mlflow.log_metrics" else [])
    said = {"mlflow.log_metrics": "may lack step 1", "mlflow.end_run": "may lack the last metrics"}.get(call)
    assert warned == ([f"mlflow {said}: interrupted (SIGINT)"] if said else [])


def test_a_server_that_hangs_holds_no_step_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers, logged, warned = threading.Event(), list[int](), list[str]()

    class Hanging(TensorBoardTracker):
        def log(self, step: int, *_: Any) -> None:
            assert answers.wait(60)
            logged.append(step)

    monkeypatch.setattr(tracking, "WAIT_S", 0.2)
    monkeypatch.setattr(tracking, "WAITING", 3)
    monkeypatch.setitem(TRACKERS, "tensorboard", Hanging)
    spec, began = spec_with({"kind": "tensorboard"}), time.monotonic()

    def warn(text: str) -> None:
        warned.append(text)
        if "Ctrl-C" in text:
            answers.set()

    with open_trackers(spec, tmp_path, resume=False, say=print, warn=warn) as trackers:
        for step in range(1, 7):  # one is at the tracker, three wait, and two find no room
            trackers.log({"step": step, "reward/mean": 1.0})
        assert time.monotonic() - began < 30
        assert [line.split(":")[0] for line in warned] == ["tensorboard has not taken step 1 in 0 s"]
    assert logged == [1, 2, 3, 4]
    assert warned[1:] == [
        "the run waits for tensorboard, which has not taken 4 steps; Ctrl-C ends the wait",
        "tensorboard lacks 2 steps: too many waited for it",
    ]


def test_event_files_on_a_full_disk_hold_up_no_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    warned, many = list[str](), {f"m/{number}": 1.0 for number in range(40)}
    trackers = open_trackers(spec_with({"kind": "tensorboard"}), tmp_path, resume=False, say=print, warn=warned.append)
    monkeypatch.setattr("tensorboardX.record_writer.RecordWriter.write", full)

    def run_on() -> None:
        for step in (1, 2):
            trackers.log({"step": step, **many})
        trackers.close("failed")

    ended = threading.Thread(target=run_on, daemon=True)
    ended.start()
    ended.join(20)
    assert not ended.is_alive()
    assert warned == ["tensorboard takes no more metrics from step 1 on: [Errno 28] No space left on device"]


@pytest.mark.parametrize(("error", "status"), [(RlctlError("x"), "FAILED"), (Interrupted("x"), "KILLED")])
def test_trackers_know_how_a_run_ended(error: Exception, status: str, tmp_path: Path, calls: Any) -> None:
    with (
        pytest.raises(type(error)),
        open_trackers(spec_with(WANDB, MLFLOW), tmp_path, resume=False, say=print, warn=print),
    ):
        raise error
    assert calls("mlflow.end_run") == [{"status": status}]
    assert calls("wandb.finish") == [{"exit_code": 1}]


# ── the packages themselves ───────────────────────────────────────────────────────────────────────


def test_tensorboard_files_hold_the_values(tmp_path: Path) -> None:
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.record_writer import masked_crc32c

    run(spec_with({"kind": "tensorboard", "samples_every": 2}), tmp_path, range(1, 3))
    [path] = (tmp_path / "tensorboard").iterdir()
    data, seen, texts, parameters, compared = path.read_bytes(), [], {}, b"", b""
    while data:  # length, its checksum, the event, its checksum
        length = int.from_bytes(data[:8], "little")
        body = data[12 : 12 + length]
        assert int.from_bytes(data[12 + length : 16 + length], "little") == masked_crc32c(body)
        event = Event.FromString(body)
        for value in event.summary.value:
            if value.HasField("simple_value"):
                seen.append((event.step, value.tag, round(value.simple_value, 6)))
            elif value.HasField("tensor"):
                texts[value.tag.removesuffix("/text_summary"), event.step] = value.tensor.string_val[0].decode()
            elif "session_start" in value.tag:
                parameters = value.metadata.plugin_data.content
            elif "experiment" in value.tag:
                compared = value.metadata.plugin_data.content
        data = data[16 + length :]
    wanted = [[(step, "reward/mean", step / 10), (step, "eval/x/pass_4", 1.0)] for step in (1, 2)]
    assert [one for one in seen if one[1] in ("reward/mean", "eval/x/pass_4")] == [
        one for step in wanted for one in step
    ]
    assert b"actor.optimizer.lr" in parameters  # the tab HParams
    assert all(key in compared for key in (b"reward/mean", b"actor/loss", b"actor/reward_accuracy"))  # of any recipe
    assert '"name": "tracked"' in texts["spec", 0]
    assert "\n    <b>2</b>\n    # x\n" in texts["samples", 2]  # in a code block: what a model writes is no markup
