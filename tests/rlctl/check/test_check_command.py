"""What `check-config` finds and says, as JSON and for the person."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlctl.check.check_command import check
from rlctl.check.findings import examine
from rlctl.presets import presets


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "spec.toml"
    file.write_text(presets()["quickstart"].read_text())
    return file


def as_json(spec: Path, capsys: pytest.CaptureFixture[str], *overrides: str) -> tuple[int, dict[str, Any]]:
    code = check(spec, overrides, as_json=True)
    return code, json.loads(capsys.readouterr().out)


def as_text(spec: Path, capsys: pytest.CaptureFixture[str], *overrides: str) -> list[str]:
    """Return the printed lines, each with single spaces."""
    assert check(spec, overrides, as_json=False) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return [" ".join(line.split()) for line in out.splitlines()]


def test_a_good_spec(spec: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = ("actor.attn_implementation=eager", "rollout.processes=2", "actor.dtype=bf16")
    code, found = as_json(spec, capsys, *own)
    assert (code, found["ok"], found["problems"]) == (0, True, [])
    roles, batch = found["roles"], found["batch"]
    assert sorted(roles) == ["actor", "data", "reward", "rollout"]
    actor, rollout = roles["actor"], roles["rollout"]
    assert [actor[key] for key in ("attn_implementation", "attn_asked", "attn_why")] == ["eager", "eager", "as asked"]
    assert (rollout["attn_implementation"], rollout["attn_asked"]) == ("sdpa", "auto")
    assert rollout["attn_function"] == "backends.packed.packed_attention.sdpa_by_layout"
    assert (rollout["processes"], rollout["dtype"], roles["reward"]["attn_implementation"]) == (2, "bf16", None)
    assert actor["model"].endswith("tiny-digits")
    assert batch["samples_per_step"] == batch["prompts_per_step"] * batch["group_size"] == 1024
    assert batch["samples_per_mini_batch"] * batch["mini_batches_per_step"] == 1024
    lines = as_text(spec, capsys, *own, "rollout.max_staleness=2")
    assert any("64 prompts × 16 completions = 1024 samples" in line for line in lines)
    assert any(line.startswith("ahead the samples of the next 2 steps are drawn while") for line in lines)
    lines = as_text(spec, capsys, *own, "rollout.max_staleness=2", "rollout.in_flight=true")
    assert any(line.endswith("learns: at most 2 steps old; weights travel every step") for line in lines)
    assert "actor eager eager as asked" in lines
    assert lines[-1] == f"ok: {spec}"


def test_a_broken_spec(spec: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = as_json(spec, capsys, "actor.gpus=1")
    assert (code, found["ok"], found["roles"], found["placement"], found["batch"]) == (2, False, {}, {}, {})
    hint = "here it is `actor.devices`"
    assert found["problems"] == [{"key": "actor.gpus", "value": "1", "message": "unknown key", "hint": hint}]
    code, found = as_json(spec, capsys, "data.train=none.jsonl")
    assert (code, [problem["key"] for problem in found["problems"]]) == (2, ["data.train"])
    assert all(found[part] for part in ("roles", "batch")), "a missing file leaves the spec readable"
    assert check(spec, ("actor.micro_batch_tokens=3",), as_json=False) == 2
    out, err = capsys.readouterr()
    assert "ok" not in out
    assert err.startswith("error: actor.micro_batch_tokens = 3: less than the longest sequence")
    assert "\n\nhint: use at least 14\n" in err
    assert f"1 problem in {spec}" in err


def test_warnings_do_not_refuse(spec: Path) -> None:
    (spec.parent / "runs" / "quickstart").mkdir(parents=True)
    (spec.parent / "runs" / "quickstart" / "x").touch()
    found = examine(spec, ("algorithm.mini_batches_per_step=1",))
    assert found.ok
    assert {warning.key for warning in found.warnings} == {"algorithm.clip_low", "algorithm.clip_high", "run.name"}


# ── engines that shard the model ──────────────────────────────────────────────────────────────────

FSDP2 = ("actor.engine.kind=fsdp2", "actor.processes=16", "actor.engine.shard=8", "actor.engine.replicate=2")
SHARED = ("actor.processes=8", "actor.sequence_parallel=4", "actor.micro_batch_tokens=16")


@pytest.mark.parametrize(
    ("sets", "rows"),
    [
        (FSDP2, ["actor replicate 2 × shard 8 0 0–7 0 CPU", "1 8–15 0 CPU"]),
        (
            ("actor.engine.kind=megatron", "actor.processes=4", "actor.engine.tensor_parallel=2"),
            ["actor data 2 × pipeline 1 × tensor 2 0 0–1 0 CPU", "1 2–3 0 CPU"],
        ),
        (
            (*SHARED, "actor.engine.kind=fsdp2"),
            ["actor replicate 1 × shard 8 0 0–7 0 CPU", "data 2 × sequence 4 0 0–3 0 CPU", "1 4–7 0 CPU"],
        ),
        (SHARED, ["actor data 2 × sequence 4 0 0–3 0 CPU", "1 4–7 0 CPU"]),
    ],
)
def test_the_groups_of_ranks(
    spec: Path, capsys: pytest.CaptureFixture[str], sets: tuple[str, ...], rows: list[str]
) -> None:
    """Copies of the model by the names that the engine gives its axes, and ranks that share samples."""
    check(spec, sets, as_json=False)  # where Megatron is missing it is a problem
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    at = lines.index(rows[0])
    assert lines[at : at + len(rows)] == rows


def test_the_place_of_every_rank(spec: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, found = as_json(spec, capsys, *SHARED)
    actor = found["placement"]["actor"]
    assert actor["sequence"] == 4
    assert actor["ranks"][6] == {
        "rank": 6, "node": 0, "local_rank": 6, "devices": [], "replica": 6, "shard": 0, "data": 1, "sequence": 2,
        "nodes": 1,
    }  # fmt: skip
    vllm = ("rollout.engine.kind=vllm", "rollout.engine.tensor_parallel=2", "rollout.devices=[0,1,2,3,4,5,6,7]")
    two = ("rollout.nodes=2", "rollout.processes=8", "cluster.kind=slurm", "rollout.python=bin/python")
    _, found = as_json(spec, capsys, *vllm, *two, "actor.devices=[0]")
    shown = [(one["node"], one["devices"]) for one in found["placement"]["rollout"]["ranks"]]
    assert shown == [(node, [first, first + 1]) for node in range(2) for first in (0, 2, 4, 6)]


def test_the_roles_of_each_host_and_where_weights_go(spec: Path, capsys: pytest.CaptureFixture[str]) -> None:
    far = ("cluster.kind=slurm", "rollout.nodes=2", "rollout.first_node=1", "rollout.processes=4")
    lines = as_text(spec, capsys, *far)
    at = lines.index("host role ranks devices")
    rows = ["this host data 0 CPU", "reward 0 CPU", "actor 0 CPU", "node 1 rollout 0–1 CPU", "node 2 rollout 2–3 CPU"]
    assert lines[at + 1 : at + 6] == rows
    assert "from this host to 2 replicas on node 1, 2 replicas on node 2" in lines
    _, found = as_json(spec, capsys, *far)
    assert found["sync"]["to"] == [{"host": "node 1", "replicas": 2}, {"host": "node 2", "replicas": 2}]
    assert found["hosts"][2] == {"number": 2, "host": "node 2", "roles": {"rollout": {"ranks": [2, 3], "devices": []}}}
