"""What engines with several ranks must do: the same training, whoever holds the model and on how many ranks.

Real processes over gloo; one launch per number of ranks works through every case (`sharded_worker.CASES`). The
reference is `ddp` on one rank, in this process.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sharded_worker
import torch
from families import EXPORTED, FAMILIES, TRAINED
from numpy.typing import NDArray
from outcomes import Outcome, outcome
from running import warm_torchrun
from sharded_worker import CASES, EMPTY_STEP, STEPS, UNEVEN_STEP
from stock_model import ADAM, StockStep, family_batch, stock_model, stock_step, write_family
from train_helpers import QWEN2, largest_gap, write_model
from transformers import AutoModelForCausalLM

from backends.export.model_export import Source, prove
from backends.export.model_export import write_model as write_export
from backends.protocol import Rank
from backends.train.tensor_shards import ShardReader
from backends.weights.tensor_bytes import DTYPES, named_weights

# Odd sizes: rows that no number of ranks divides, and (9 rows on 4 ranks) a rank without any.
MODEL = {
    **QWEN2,
    "hidden_size": 30,
    "intermediate_size": 9,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}

# The first test waits for all launches, on a machine that others may use.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

TWO = [name for name in CASES if not name.startswith("4:")]
FOUR = [name for name in CASES if name.startswith("4:")]
# Resumed from another engine, or another number of ranks: (case, number of ranks, what was saved).
RESUMED = [
    ("ddp", 1, "4:fsdp2 2x2"),
    ("fsdp2", 1, "fsdp2"),
    ("fsdp2", 2, "fsdp2"),
    ("fsdp2", 2, "ddp"),
    ("4:fsdp2", 4, "fsdp2"),
    ("fsdp2 critic", 2, "one rank critic"),
    ("4:ddp sequences 4", 4, "fsdp2 sequences"),
]
FAMILY_CASES = [case for case in TRAINED if case in CASES]
# On CPU a storage that numpy has seen cannot be emptied, as ddp's has been here: its turn is on a GPU.
OFFLOADED = ["fsdp2"]
if "zero3" in CASES:  # DeepSpeed is installed
    RESUMED += [
        ("zero1", 1, "zero3"),
        ("zero2", 2, "zero2"),
        ("zero3", 2, "zero3"),
        ("zero2", 2, "fsdp2"),
        ("fsdp2", 2, "zero3"),
        ("zero3 bf16", 2, "zero2 bf16"),
        ("ddp critic", 1, "zero3 critic"),
    ]
    OFFLOADED += ["zero3 bf16", "zero3 small ones whole"]


def resumed_name(case: str, ranks: int, saved: str) -> str:
    return f"{saved} resumed by {case} on {ranks}".replace(":", "-")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All jobs are run; each left its outcome in a folder of its name."""
    root = tmp_path_factory.mktemp("sharded")
    write_model(root / "model", MODEL)

    def resume(ranks: int) -> list[dict[str, Any]]:
        return [
            {"case": case, "out": str(root / resumed_name(case, n, saved)), "load": str(root / saved / "state")}
            for case, n, saved in RESUMED
            if n == ranks
        ]

    alone({"case": "ddp", "out": str(root / "one rank")}, root)
    alone({"case": "ddp critic", "out": str(root / "one rank critic")}, root)
    offloaded = [{"case": case, "out": str(root / f"{case} offloaded"), "offload": True} for case in OFFLOADED]
    torchrun(
        root, 2, [{"case": case, "out": str(root / case)} for case in TWO] + offloaded + resume(2) + family_jobs(root)
    )
    torchrun(root, 4, [{"case": case, "out": str(root / case)} for case in FOUR] + resume(4))
    for job in resume(1):
        alone(job, root)
    return root


def alone(job: dict[str, Any], root: Path) -> None:
    sharded_worker.run(root / "model", job, Rank()).close()


def torchrun(root: Path, processes: int, jobs: list[dict[str, Any]]) -> None:
    jobs_file = root / f"jobs{processes}.json"
    jobs_file.write_text(json.dumps({"model": str(root / "model"), "jobs": jobs}))
    warm_torchrun(processes, "sharded_worker.py", jobs_file, timeout_s=500)


def family_jobs(root: Path) -> list[dict[str, Any]]:
    folders = {family: write_family(root / family / "model", family) for family in FAMILIES}
    return [
        {"case": case, "family": str(folder), "out": str(root / family / case)}
        for family, folder in folders.items()
        for case in FAMILY_CASES
    ]


def reference_name(case: str) -> str:
    return "one rank critic" if "critic" in case else "one rank"


def reference(root: Path, case: str) -> Outcome:
    return outcome(root, reference_name(case))


def degree_of(case: str) -> int:
    degree: int = CASES[case].get("sequence_parallel", 1)
    return degree


@pytest.mark.parametrize("case", [case for case in CASES if "bf16" not in case])
def test_training_is_that_of_one_rank(root: Path, case: str) -> None:
    """Losses, gradient norms, log-probs or values, and weights over four steps, one of them with a rank that has
    nothing to do and one with far more micro-batches on one rank than on the others; after a step that all skip."""
    ours, one = outcome(root, case), reference(root, case)
    uneven = [rank["history"][UNEVEN_STEP]["micro_batches"] for rank in ours.ranks]
    if degree_of(case) == 1:
        assert uneven[0] > 2 * uneven[1] > 0
    else:  # counted once in a group, whose other ranks compute them too
        assert uneven == [uneven[0], *[0] * (len(uneven) - 1)]
        assert uneven[0] > 2
    assert ours.ranks[-1]["history"][EMPTY_STEP]["micro_batches"] == 0
    assert ours.losses() == pytest.approx(one.losses(), rel=1e-5, abs=1e-6)
    assert ours.norms() == pytest.approx(one.norms(), rel=1e-5)
    assert np.abs(one.told(STEPS)).max() > 0.1
    for step in range(STEPS + 1):
        np.testing.assert_allclose(ours.told(step), one.told(step), rtol=0, atol=1e-5)
    # In fp32 the order of sums differs: 1e-6 was seen, 5e-6 of critics, where each step moves a weight by up to 1e-2.
    assert largest_gap(ours.weights, one.weights) < 1e-5


@pytest.mark.parametrize("case", [case for case in CASES if "bf16" not in case])
def test_objectives_are_those_of_one_rank(root: Path, case: str) -> None:
    """Losses, counts, metrics, gradient norms and weights over steps of pairs, labels, tokens, or of scores."""
    ours, one = outcome(root, case).objectives(), reference(root, case).objectives()
    assert [step.keys() for step in ours] == [step.keys() for step in one]
    for found, expected in zip(ours, one, strict=True):
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-5)
    weights = [np.load(root / name / "objectives.npz") for name in (case, reference_name(case))]
    assert largest_gap(*map(dict, weights)) < 1e-5


@pytest.mark.parametrize("case", [case for case in TWO if "bf16" in case and not case.startswith("ddp")])
def test_bf16_is_that_of_ddp(root: Path, case: str) -> None:
    """Both hold fp32 masters and compute in bf16; the sums over ranks are fp32 in both."""
    ours, theirs = outcome(root, case), outcome(root, "ddp bf16")
    assert ours.losses() == pytest.approx(theirs.losses(), rel=1e-4, abs=1e-5)
    assert ours.norms() == pytest.approx(theirs.norms(), rel=1e-4)
    assert largest_gap(ours.weights, theirs.weights) < 1e-4


@pytest.mark.parametrize("case", CASES)
def test_what_travels_in_bf16_is_cast_before_it_is_gathered(root: Path, case: str) -> None:
    """The same weights to the bit, and half of what ranks send one another. Under ZeRO 1 and 2 in bf16 only masters are
    cut: each rank has the cast of them all."""
    table = CASES[case]["engine"].model_dump()
    cut = (table["kind"] == "fsdp2" and table["shard"] != 1) or table.get("stage") == 3
    masters_sharded = cut or (table.get("stage", 3) < 3 and "bf16" in case)
    for rank in outcome(root, case).ranks:
        assert rank["bf16"]["same"]
        in_fp32, in_bf16 = rank["bf16"]["sent"]
        assert (in_fp32 > 0) == masters_sharded
        assert in_bf16 == (in_fp32 / 2 if cut else 0)


@pytest.mark.parametrize("case", CASES)
def test_ranks_agree_and_skip_together(root: Path, case: str) -> None:
    ranks = outcome(root, case).ranks
    first = ranks[0]
    assert len(ranks) == (4 if case in FOUR else 2)
    for rank in ranks:
        assert rank["skipped"]
        assert rank["unchanged"]
        assert not any(step["skipped"] for step in rank["history"])
        assert [step["grad_norm"] for step in rank["history"]] == [step["grad_norm"] for step in first["history"]]
        assert (rank["checksum"], rank["end"], rank["proof"]) == (first["checksum"], first["end"], first["proof"])
        state = root / case / "state" / "trainer.json"
        assert json.loads(state.read_text())["skipped_steps"] == 1


@pytest.mark.parametrize("case", OFFLOADED)
def test_offload_in_every_step_changes_no_bit(root: Path, case: str) -> None:
    plain, moved = outcome(root, case), outcome(root, f"{case} offloaded")
    assert [rank["end"] for rank in moved.ranks] == [rank["end"] for rank in plain.ranks]
    assert moved.norms() == plain.norms()
    assert largest_gap(moved.weights, plain.weights) == 0


@pytest.mark.parametrize(("case", "ranks", "saved"), RESUMED)
def test_resumed_by_others(root: Path, case: str, ranks: int, saved: str) -> None:
    """Whatever wrote the state, the weights are the same to the bit and the next step is the same."""
    before, after = outcome(root, saved), outcome(root, resumed_name(case, ranks, saved))
    assert len(after.ranks) == ranks
    assert {rank["checksum"] for rank in after.ranks} == {before.ranks[0]["checksum"]}
    assert after.losses() == pytest.approx(before.losses()[STEPS:], rel=1e-5, abs=1e-6)
    assert after.norms() == pytest.approx(before.norms()[STEPS:], rel=1e-5)
    assert largest_gap(after.weights, before.weights) < 1e-5
    if (case, ranks) == (saved, 2):  # the same engine on as many ranks
        assert after.ranks[0]["end"] == before.ranks[0]["end"]


# ── families of models, against transformers' own modules ─────────────────────────────────────────


@cache
def stock(folder: Path, dtype: str) -> StockStep:
    return stock_step(stock_model(folder, dtype), family_batch())


def of_ranks(out: Path) -> NDArray[np.float32]:
    """Log-probs of all tokens of the batch, put together from the ranks."""
    logprob_T = np.full(family_batch().num_tokens, np.nan, dtype=np.float32)
    for path in out.glob("rank*.npz"):
        with np.load(path) as found:
            logprob_T[found["token_N"]] = found["logprob_N"]
    return logprob_T


def gradients_of(state: Path) -> dict[str, NDArray[np.float32]]:
    """After one step without clipping, Adam's first moment is (1 - beta1) times the gradient."""
    saved, suffix = ShardReader(state, "optimizer"), ".exp_avg"
    moments = {name: saved.tensor(name).numpy() for name in saved.shapes if name.endswith(suffix)}
    return {name.removesuffix(suffix): moment / (1 - ADAM.betas[0]) for name, moment in moments.items()}


def together(arrays: Mapping[str, NDArray[np.float32]]) -> NDArray[np.float32]:
    return np.concatenate([arrays[name].reshape(-1) for name in sorted(arrays)])


@pytest.mark.parametrize("case", FAMILY_CASES)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_trains_as_stock_modules_do(root: Path, family: str, case: str) -> None:
    """Log-probs, gradients and the weights after a step. In bf16 they are no farther from fp32's than the stock model's
    in bf16 are."""
    out, want = root / family / case, stock(root / family / "model", "fp32")
    logprob_T, gradients = of_ranks(out), gradients_of(out / "state")
    with np.load(out / "weights.npz") as file:
        weights = dict(file)
    assert (gradients.keys(), weights.keys()) == (want.gradients.keys(), want.weights.keys())
    assert want.logprob_T[family_batch()["loss_mask_T"] != 0].std() > 0.3, "a flat distribution hides a wrong token"
    for name in (saved := ShardReader(out / "state", "model")).shapes:
        np.testing.assert_array_equal(saved.tensor(name).numpy(), weights[name], err_msg=name)
    if "bf16" not in case:
        np.testing.assert_allclose(logprob_T, want.logprob_T, rtol=0, atol=2e-5)
        for name, gradient in want.gradients.items():
            limit = 1e-4 * np.abs(gradient).max() + 1e-7
            np.testing.assert_allclose(gradients[name], gradient, rtol=0, atol=limit, err_msg=name)
        assert largest_gap(weights, dict(want.weights)) < 5e-5, "Adam moves a weight by up to 1e-2"
        return
    rounded = stock(root / family / "model", "bf16")
    assert np.abs(logprob_T - want.logprob_T).mean() < 1.5 * np.abs(rounded.logprob_T - want.logprob_T).mean()
    ours, theirs, exact = (together(each) for each in (gradients, rounded.gradients, want.gradients))
    assert np.linalg.norm(ours - exact) < 1.5 * np.linalg.norm(theirs - exact) < 0.2 * np.linalg.norm(exact)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("case", [case for case in EXPORTED if case in FAMILY_CASES])
def test_an_exported_family_loads(root: Path, tmp_path: Path, family: str, case: str) -> None:
    """As a user loads it: with the trained weights, and with the trainer's greedy tokens."""
    state, dtype = root / family / case / "state", "bf16" if "bf16" in case else "fp32"
    source = Source(state, str(root / family / "model"), dtype, False)
    write_export(source, tmp_path / "out", 50_000, lambda *_: None)
    proof = prove(source, tmp_path / "out", state / "greedy_proof.json", 2**30, lambda *_: None)
    assert proof.greedy_tokens > 0
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    with np.load(state.parent / "weights.npz") as file:
        for name, tensor in named_weights(loaded).items():
            assert tensor.dtype == DTYPES[dtype]
            assert torch.equal(tensor, torch.from_numpy(file[name]).to(tensor.dtype)), name


def test_meshes_are_as_asked(root: Path) -> None:
    assert outcome(root, "fsdp2").ranks[0]["mesh"] == {"replicate": 1, "shard": 2}
    assert outcome(root, "fsdp2 replicas").ranks[0]["mesh"] == {"replicate": 2, "shard": 1}
    assert outcome(root, "4:fsdp2 2x2").ranks[0]["mesh"] == {"replicate": 2, "shard": 2}
    for case in (case for case in CASES if case.startswith("zero") and degree_of(case) == 1):
        assert outcome(root, case).ranks[0]["mesh"] == {"shard": 2}
    assert outcome(root, "4:ddp sequences 4").ranks[0]["mesh"] == {"sequence": 4}
    assert outcome(root, "4:fsdp2 2x2 sequences 2").ranks[0]["mesh"] == {"replicate": 2, "shard": 2, "sequence": 2}
