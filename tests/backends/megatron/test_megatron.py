"""The engine `megatron` trains what `ddp` trains: cut across tensor ranks, in pipeline stages, over data ranks.

Real processes over gloo, in the interpreter that `scripts/setup-engine megatron` makes: two ranks, and then four. The
reference is `ddp` on one rank, and transformers' own model, in this process.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sharded_worker
from families import FAMILIES
from optional import MEGATRON_PYTHON, needs_megatron
from outcomes import Outcome, outcome
from sharded_worker import EMPTY_STEP, MEGATRON, MEGATRON_ON_GPU, STEPS
from stock_model import PROMPTS, family_batch, logprobs, stock_model, write_family
from train_helpers import QWEN2, QWEN3_MOE, build_engine, largest_gap, train_config, weights_of, write_model

from backends.protocol import Rank
from rlctl.memory.activations import Pass, learning_parts
from rlctl.models.model_tensors import tensors_of_config
from specs.model_facts import model_facts
from specs.schema.engines.ddp_table import DdpTable
from specs.schema.engines.held_model import HeldTrainer
from specs.schema.engines.megatron_table import MegatronTable
from specs.schema.rank_groups import shard_groups
from specs.schema.role_section import Optimizer
from specs.schema.spec import ActorSection

ROOT = Path(__file__).parents[3]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), needs_megatron]

MIXED = [name for name in MEGATRON if "experts" in name and name != "4:experts, tensor pipeline"]
DENSE = [name for name in MEGATRON if "experts" not in name]
FOUR = [name for name in DENSE if name.startswith("4:")]
TWO = [name for name in DENSE if not name.startswith("4:") and name != "data bf16"]  # which only resumes
IN_FP32 = [name for name in TWO if "bf16" not in name]
RESUMED = [
    ("pipeline", "tensor"),
    ("tensor", "pipeline"),
    ("data", "one rank"),
    ("context recompute", "tensor"),
    ("pipeline critic", "tensor critic"),
    ("data bf16", "tensor bf16"),
]
READ = [name for name, family in FAMILIES.items() if family.megatron]
# What a rank keeps of a row is counted: in bf16, with these models and options.
WIDE = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 4}
KEPT: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dense": ({**QWEN2, **WIDE}, {}),
    "norms of queries and keys": ({**FAMILIES["qwen3"].config, **WIDE}, {}),
    "activation fused": ({**QWEN2, **WIDE}, {"bias_activation_fusion": True}),
    "experts": ({**FAMILIES["mixtral"].config, **WIDE}, {}),
}
RESUMED_MIXED = [("4:experts, pipeline data", "experts, tensor")]


def launch(root: Path, jobs: dict[int, list[dict[str, Any]]]) -> None:
    """`jobs`: by the number of ranks."""
    command = [MEGATRON_PYTHON, ROOT / "tests" / "support" / "megatron_worker.py"]
    for processes, those in jobs.items():
        file = root / f"jobs{processes}.json"
        file.write_text(json.dumps({"model": str(root / "model"), "jobs": those}))
        command += [str(processes), file]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    # Ranks are forks: the process before them only counts GPUs, and must not open them.
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=400, check=False)
    said = [line for line in done.stderr.splitlines() if line.startswith("[rank")]
    assert done.returncode == 0, "\n".join(said)[:6000]


def train_references(root: Path) -> dict[str, str]:
    """`ddp` on one rank of the CPU; what a job says of the model with experts."""
    write_model(root / "model", QWEN2)
    four_layers = {**QWEN3_MOE, "num_hidden_layers": 4, "tie_word_embeddings": True, "norm_topk_prob": False}
    mixture = {"model": str(write_model(root / "mixture", four_layers))}
    for case, out, more in (
        ("ddp", "one rank", {}),
        ("ddp critic", "one rank critic", {}),
        ("ddp bf16", "one rank bf16", {}),
        ("ddp", "one rank experts", mixture),
    ):
        sharded_worker.run(root / "model", {"case": case, "out": str(root / out), **more}, Rank()).close()
    return mixture


def reference(root: Path, case: str) -> Outcome:
    kind = " experts" if "experts" in case else " critic" if "critic" in case else ""
    return outcome(root, f"one rank{kind}")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("megatron")
    mixture = train_references(root)
    resumed = [
        {"case": case, "out": str(root / f"{saved} resumed by {case}"), "load": str(root / saved / "state")}
        for case, saved in [*RESUMED, *RESUMED_MIXED]
    ]
    mixed = [{"case": case, "out": str(root / case), **mixture} for case in MIXED]
    two, four = ([job for job in mixed if job["case"].startswith("4:") is many] for many in (False, True))
    counted = [
        {"kept": str(write_model(root / name / "model", config)), "options": options, "out": str(root / name / "kept")}
        for name, (config, options) in KEPT.items()
    ]
    two = [{"case": case, "out": str(root / case)} for case in TWO] + resumed[: len(RESUMED)] + two + counted
    families = [
        {
            "case": FAMILIES[name].megatron,
            "family": str(write_family(root / name / "model", name)),
            "out": str(root / name),
        }
        for name in READ
    ]
    four += [{**job, **mixture} for job in resumed[len(RESUMED) :]]
    launch(root, {2: two, 4: [*({"case": case, "out": str(root / case)} for case in FOUR), *four, *families]})
    return root


@pytest.mark.parametrize("case", [*IN_FP32, *FOUR])
def test_training_is_that_of_ddp(root: Path, case: str) -> None:
    """Four steps, one of them with data ranks that have nothing, after a step that all skip. Rounding differs: queries,
    keys and values are one multiplication here, and three there."""
    check_training(outcome(root, case), reference(root, case))


@pytest.mark.parametrize("case", [*IN_FP32, *FOUR])
def test_objectives_are_those_of_ddp(root: Path, case: str) -> None:
    """Pairs whose sequences lie on several context ranks, whose logits are cut along the vocabulary, or whose loss the
    last stage alone has."""
    one = "one rank critic" if "critic" in case else "one rank"
    for found, expected in zip(outcome(root, case).objectives(), outcome(root, one).objectives(), strict=True):
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-4)
    weights = [np.load(root / name / "objectives.npz") for name in (case, one)]
    assert largest_gap(*map(dict, weights)) < 2e-5


@pytest.mark.parametrize("case", MIXED)
def test_a_mixture_of_experts_trains_as_by_ddp(root: Path, case: str) -> None:
    """A dense layer and three with experts, which lie on data ranks, on tensor ranks, or on data ranks of two stages
    that have two groups of layers each. Weights of the chosen experts add up to less than 1, unlike in the models that
    are read."""
    check_training(outcome(root, case), reference(root, case))


def check_training(ours: Outcome, one: Outcome) -> None:
    assert sum(rank["history"][EMPTY_STEP]["micro_batches"] for rank in ours.ranks) == 1
    assert ours.losses() == pytest.approx(one.losses(), rel=1e-4)
    for rank in ours.ranks:
        assert [step["grad_norm"] for step in rank["history"]] == pytest.approx(one.norms(), rel=1e-4)
        assert rank["skipped"] is True
        np.testing.assert_allclose(rank["proof"], one.ranks[0]["proof"], rtol=0, atol=1e-5)
    for step in range(STEPS + 1):
        np.testing.assert_allclose(ours.told(step), one.told(step), rtol=0, atol=1e-4)
    assert largest_gap(ours.weights, one.weights) < 2e-5


def test_megatron_checks_the_options_that_a_spec_adds(root: Path) -> None:
    """Names, types, what only a learner has, what rlctl sets itself, and what Megatron-core refuses as a whole."""
    said = json.loads((root / "megatron_facts.json").read_text())["own options"]
    assert said == [
        "",
        "actor.engine.megatron.deallocate_pipeline_output = true: Megatron-core has no such option",
        "actor.engine.megatron.bias_dropout_fusion = 1: Megatron-core refuses it: Input should be a valid boolean",
        "ref.engine.megatron.overlap_grad_reduce = true: has no effect, ref does not learn",
        "engine.megatron.hidden_size = 64 contradicts what rlctl sets: 32",
        said[5],
    ]
    assert said[5].startswith("Megatron-core refuses engine.megatron (num_query_groups): ")


def test_placement_numbers_ranks_as_megatron_does(root: Path) -> None:
    """Of sixteen ranks: those of each copy of the model, for every mesh of these tests."""
    copies = json.loads((root / "megatron_facts.json").read_text())["copies"]
    assert copies.keys() == MEGATRON.keys()
    for name, expected in copies.items():
        section = ActorSection(engine=MEGATRON[name]["engine"], processes=16)
        ours = [sorted(rank.rank for rank in group.ranks) for group in shard_groups(section)]
        assert ours == sorted(sorted(ranks) for ranks in expected), name


@pytest.mark.parametrize("case", [*TWO, *FOUR, *MIXED])
def test_ranks_say_what_they_hold(root: Path, case: str) -> None:
    table = MEGATRON[case]["engine"]
    for rank in outcome(root, case).ranks:
        assert rank["mesh"] == table.mesh(4 if case.startswith("4:") else 2).axes
        told = table.library_config("bf16" if "bf16" in case else "fp32", train_config(root).optimizer, "cpu")
        assert rank["options"] == told["megatron"]
        assert rank["unchanged"] is True, "neither a skipped step nor a checkpoint changes weights"
        assert rank["bf16"]["same"] is True


@pytest.mark.parametrize(("case", "saved"), [*RESUMED, *RESUMED_MIXED])
def test_a_checkpoint_resumes_on_other_axes(root: Path, case: str, saved: str) -> None:
    """Weights to the bit, and the step after it as it would have been."""
    ours, before = outcome(root, f"{saved} resumed by {case}"), outcome(root, saved)
    assert ours.ranks[0]["checksum"] == before.ranks[0]["checksum"]
    assert ours.losses()[-1] == pytest.approx(before.losses()[-1], rel=0.05 if "bf16" in case else 1e-4)
    assert largest_gap(ours.weights, before.weights) < (2e-3 if "bf16" in case else 2e-5)


@pytest.mark.parametrize("case", ["tensor", *FOUR])
def test_ddp_goes_on_from_its_checkpoint(root: Path, case: str, tmp_path: Path) -> None:
    job = {"case": "ddp", "out": str(tmp_path), "load": str(root / case / "state")}
    sharded_worker.run(root / "model", job, Rank()).close()
    assert largest_gap(outcome(tmp_path, "").weights, outcome(root, case).weights) < 2e-5


@pytest.mark.parametrize("family", READ)
def test_a_model_is_read_and_written_to_the_bit(root: Path, family: str) -> None:
    """Two tensor ranks in two stages, from files: every weight back as it was, under its own name."""
    with np.load(root / family / "weights.npz") as exported:
        ours = dict(exported)
    engine = build_engine(train_config(root / family / "model", model={"from_scratch": False}, engine=DdpTable()))
    theirs = weights_of(engine)
    assert list(ours) == list(theirs)
    assert all((ours[name] == theirs[name]).all() for name in theirs)
    answers = [answer.tokens for answer in engine.greedy(PROMPTS, 4)]
    assert json.loads((root / family / "greedy.json").read_text()) == answers


@pytest.mark.parametrize("family", READ)
def test_log_probs_are_those_of_transformers(root: Path, family: str) -> None:
    import torch

    batch, model = family_batch(), stock_model(root / family / "model")
    told_T = np.zeros(batch.num_tokens, dtype=np.float32)
    for rank in range(4):
        with np.load(root / family / f"rank{rank}.npz") as found:
            told_T[found["token_N"]] = found["logprob_N"]
    assert FAMILIES[family].config["num_hidden_layers"] == 2, "one layer in each stage"
    with torch.no_grad():
        expected_T = logprobs(model, batch).numpy()
    mask_T = batch["loss_mask_T"] != 0
    np.testing.assert_allclose(told_T[mask_T], expected_T[mask_T], rtol=0, atol=1e-5)


def test_the_plan_knows_what_a_rank_holds(root: Path) -> None:
    """The fullest of two tensor ranks in two stages; Megatron pads its flat gradients to whole blocks."""
    for family in READ:
        tried = FAMILIES[family]
        table, tensors = MEGATRON[tried.megatron]["engine"], tensors_of_config(tried.config)
        assert tensors is not None
        parts = table.memory(HeldTrainer(tensors, "fp32", 4, "cpu", Optimizer()))
        planned = {part.name: part.nbytes for part in parts}
        held = [np.load(root / family / f"rank{rank}.npz")["bytes"] for rank in range(4)]
        weights, gradients, moments = np.max(held, axis=0)
        assert (planned["weights"], planned["Adam moments"]) == (weights, moments)
        assert planned["gradients"] <= gradients <= planned["gradients"] + 4 * 64 * 40


@pytest.mark.parametrize("name", KEPT)
def test_the_plan_knows_what_layers_keep(root: Path, name: str) -> None:
    """Of a layer to 5 %, where one tensor of the MLP's width more or less is 10 % or more."""
    config, options = KEPT[name]
    nbytes, tokens = json.loads((root / name / "kept").read_text())
    facts, tensors = model_facts(config), tensors_of_config(config)
    assert facts is not None
    assert tensors is not None
    table = MegatronTable(megatron=options)
    work = Pass(
        facts=facts,
        config=config,
        dtype="bf16",
        device="cpu",
        tokens=tokens,
        longest=tokens,
        logits_chunk=1,
        attention="sdpa",
        recomputed=0,
        angles=table.angles_kept,
        mlp_tensors=table.mlp_tensors(facts),
        head_norms=tensors.norms_heads,
    )
    planned = next(part.nbytes for part in learning_parts(work) if part.name == "activations")
    assert planned == pytest.approx(nbytes, rel=0.05)


# ── on a GPU ──────────────────────────────────────────────────────────────────────────────────────

WITHOUT_TE = [case for case in MEGATRON if "bf16" not in case and "fused" not in case]
ON_GPU = {ranks: [case for case in WITHOUT_TE if case.startswith("4:") is (ranks == 4)] for ranks in (2, 4)}


@pytest.fixture(scope="module")
def gpu_root(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    if subprocess.run([MEGATRON_PYTHON, "-c", "import torch; assert torch.cuda.is_available()"]).returncode:
        pytest.skip(f"needs a GPU that {MEGATRON_PYTHON} can use")
    root = tmp_path_factory.mktemp("megatron_on_gpu")
    return root, train_references(root)


@pytest.mark.gpu
@pytest.mark.parametrize(("ranks", "cases"), [(1, ["data"]), *ON_GPU.items()])
def test_training_over_nccl_is_that_of_ddp_on_the_cpu(
    gpu_root: tuple[Path, dict[str, str]], ranks: int, cases: list[str]
) -> None:
    """On one GPU where there are no more, with Megatron-core's own layers."""
    root, mixture = gpu_root
    names = {case: f"{case} on {ranks}" for case in cases}
    jobs = [
        {"case": case, "out": str(root / out), "device": "cuda", **(mixture if "experts" in case else {})}
        for case, out in names.items()
    ]
    launch(root, {ranks: jobs})
    for case, out in names.items():
        check_training(outcome(root, out), reference(root, case))


@pytest.mark.gpu
def test_transformer_engines_layers_train_as_local_ones(tmp_path: Path) -> None:
    """In bf16 both round, each in its own order. A role that says nothing takes TransformerEngine's, as it is there."""
    there = "import torch, transformer_engine; assert torch.cuda.is_available()"
    if subprocess.run([MEGATRON_PYTHON, "-c", there], capture_output=True).returncode:
        pytest.skip(f"needs a GPU and TransformerEngine in {MEGATRON_PYTHON}")
    write_model(tmp_path / "model", QWEN2)
    launch(tmp_path, {1: [{"case": case, "out": str(tmp_path / case)} for case in MEGATRON_ON_GPU]})
    local, fused, chosen = (outcome(tmp_path, case) for case in MEGATRON_ON_GPU)
    assert local.ranks[0]["options"]["transformer_impl"] == "local"
    assert fused.ranks[0]["options"]["transformer_impl"] == "transformer_engine"
    assert chosen.ranks[0]["options"]["transformer_impl"] == "transformer_engine"
    assert fused.losses()[0] == pytest.approx(local.losses()[0], rel=0.02)
    assert fused.norms()[0] == pytest.approx(local.norms()[0], rel=0.05)
    assert np.abs(fused.told(0) - local.told(0)).mean() < 0.02
    assert fused.losses() == pytest.approx(chosen.losses(), rel=0.02)
