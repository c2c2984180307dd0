"""What `check-config` finds and says, as JSON and for the person."""

from __future__ import annotations

import json
from pathlib import Path

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


def as_json(spec: Path, capsys: pytest.CaptureFixture[str], *overrides: str) -> tuple[int, dict[str, object]]:
    code = check(spec, overrides, as_json=True)
    return code, json.loads(capsys.readouterr().out)


def test_json_of_a_good_spec(spec: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = as_json(spec, capsys, "actor.attn_implementation=eager", "rollout.processes=2", "actor.dtype=bf16")
    assert (code, found["ok"], found["problems"]) == (0, True, [])
    roles: dict[str, dict[str, object]] = found["roles"]  # type: ignore[assignment]
    assert sorted(roles) == ["actor", "data", "reward", "rollout"]
    assert roles["actor"]["attn_implementation"] == "eager"
    assert (roles["actor"]["attn_asked"], roles["actor"]["attn_why"]) == ("eager", "as asked")
    assert (roles["rollout"]["attn_implementation"], roles["rollout"]["attn_asked"]) == ("sdpa", "auto")
    assert roles["rollout"]["attn_function"] == "backends.packed.packed_attention.sdpa_by_layout"
    assert roles["reward"]["attn_implementation"] is None
    assert (roles["rollout"]["processes"], roles["rollout"]["dtype"]) == (2, "bf16")
    assert str(roles["actor"]["model"]).endswith("tiny-digits")
    batch: dict[str, int] = found["batch"]  # type: ignore[assignment]
    assert batch["samples_per_step"] == batch["prompts_per_step"] * batch["group_size"] == 1024
    assert batch["samples_per_mini_batch"] * batch["mini_batches_per_step"] == 1024


def test_a_reference_appears_with_kl(spec: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, found = as_json(spec, capsys, "algorithm.kl_coef=0.1")
    assert found["roles"]["ref"]["engine"] == "ddp"  # type: ignore[index]


def test_json_of_a_broken_spec(spec: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = as_json(spec, capsys, "actor.gpus=1")
    assert (code, found["ok"], found["roles"], found["placement"], found["batch"]) == (2, False, {}, {}, {})
    assert found["problems"] == [
        {"key": "actor.gpus", "value": "1", "message": "unknown key", "hint": "here it is `actor.devices`"}
    ]


def test_problems_with_files_leave_the_tables_readable(spec: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = as_json(spec, capsys, "data.train=none.jsonl")
    assert code == 2
    assert [problem["key"] for problem in found["problems"]] == ["data.train"]  # type: ignore[attr-defined]
    assert found["roles"]
    assert found["batch"]


def test_the_person_sees_roles_arithmetic_and_ok(spec: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(spec, (), as_json=False) == 0
    out, err = capsys.readouterr()
    assert "64 prompts × 16 completions = 1024 samples" in out
    assert "rollout  torch" in out
    assert f"ok: {spec}" in out
    assert "ahead" not in out
    assert err == ""
    assert check(spec, ("rollout.max_staleness=2",), as_json=False) == 0
    assert "ahead  the samples of the next 2 steps are drawn while the actor learns" in capsys.readouterr().out


def test_the_person_sees_problems_on_stderr(spec: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
    assert {warning.key for warning in found.warnings} == {
        "algorithm.clip_low",
        "algorithm.clip_high",
        "run.name",
    }


# ── engines that cut the model ────────────────────────────────────────────────────────────────────


def test_who_sits_where(spec: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mesh = ("actor.engine.kind=fsdp2", "actor.processes=16", "actor.engine.shard=8", "actor.engine.replicate=2")
    assert check(spec, mesh, as_json=False) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "actor replicate 2 × shard 8 0 0–7 0 CPU" in lines
    assert "1 8–15 0 CPU" in lines


def test_axes_have_the_names_that_their_engine_gives_them(spec: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check(spec, ("actor.engine.kind=megatron", "actor.processes=4", "actor.engine.tensor_parallel=2"), as_json=False)
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "actor data 2 × pipeline 1 × tensor 2 0 0–1 0 CPU" in lines


EIGHT = "[0,1,2,3,4,5,6,7]"


def test_who_sits_on_which_host_and_where_weights_go(spec: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec.with_name("hosts").write_text("a slots=2\nb slots=2\nc slots=2\n")
    far = ("cluster.hostfile=hosts", "rollout.nodes=2", "rollout.first_node=1", "rollout.processes=4")
    assert check(spec, far, as_json=False) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    at = lines.index("host role ranks devices")
    rows = ["this host data 0 CPU", "reward 0 CPU", "actor 0 CPU", "b rollout 0–1 CPU", "c rollout 2–3 CPU"]
    assert lines[at + 1 : at + 6] == rows
    assert "from this host to 2 replicas on b, 2 replicas on c" in lines
    _, found = as_json(spec, capsys, *far)
    assert found["sync"]["to"] == [{"host": "b", "replicas": 2}, {"host": "c", "replicas": 2}]  # type: ignore[index]
    third = {"number": 2, "host": "c", "roles": {"rollout": {"ranks": [2, 3], "devices": []}}}
    assert found["hosts"][2] == third  # type: ignore[index]


def test_who_shares_samples(spec: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Beside who holds the model, or alone where every rank holds it whole."""
    shared = ("actor.processes=8", "actor.sequence_parallel=4", "actor.micro_batch_tokens=16")
    assert check(spec, (*shared, "actor.engine.kind=fsdp2"), as_json=False) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    at = lines.index("actor replicate 1 × shard 8 0 0–7 0 CPU")
    assert lines[at + 1 : at + 3] == ["data 2 × sequence 4 0 0–3 0 CPU", "1 4–7 0 CPU"]
    assert "64 in a row that 4 ranks share" in lines
    assert check(spec, shared, as_json=False) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "actor data 2 × sequence 4 0 0–3 0 CPU" in lines
    assert not any("replicate" in line for line in lines)
    _, found = as_json(spec, capsys, *shared)
    actor: dict[str, object] = found["placement"]["actor"]  # type: ignore[index]
    assert actor["sequence"] == 4
    assert actor["ranks"][6] == {  # type: ignore[index]
        "rank": 6, "node": 0, "local_rank": 6, "devices": [], "replica": 6, "shard": 0, "data": 1, "sequence": 2
    }  # fmt: skip


def test_replicas_of_several_gpus_have_their_own(spec: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec.with_name("hosts").write_text("a slots=8\nb slots=8\n")
    vllm = ("rollout.engine.kind=vllm", "rollout.engine.tensor_parallel=2", f"rollout.devices={EIGHT}")
    vllm += ("rollout.python=bin/python", "actor.devices=[0]")
    two = ("rollout.nodes=2", "rollout.processes=8", "cluster.hostfile=hosts")
    for far, nodes in (((), 1), (two, 2)):
        _, found = as_json(spec, capsys, *vllm, "rollout.processes=4", *far)
        ranks = found["placement"]["rollout"]["ranks"]  # type: ignore[index]
        shown = [(one["node"], one["devices"]) for one in ranks]
        assert shown == [(node, [first, first + 1]) for node in range(nodes) for first in (0, 2, 4, 6)]
    check(spec, (*vllm, "rollout.processes=4"), as_json=False)
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    at = next(n for n, line in enumerate(lines) if line.startswith("rollout tensor 2 "))
    gpus = ["0 GPU 0–1", "0 GPU 2–3", "0 GPU 4–5", "0 GPU 6–7"]
    assert [line[-len(gpus[0]) :] for line in lines[at : at + 4]] == gpus
