"""`rlctl plan`: what each role takes in each phase, on which device, and what fits. No torch, no GPU."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rlctl.cli import main
from rlctl.memory import compare
from rlctl.memory.memory_plan import plan_memory
from rlctl.presets import presets
from rlctl.show.report import render
from specs.load.load import load_spec
from specs.memory_parts import GIB

QWEN_7B: dict[str, Any] = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
}
LLAMA_70B: dict[str, Any] = {
    **QWEN_7B,
    "model_type": "llama",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
PARAMETERS_7B = 7_615_616_512  # as published
GPUS = tuple(f"node 0 GPU {number}" for number in range(8))


def spec_of(folder: Path, preset: str, config: dict[str, Any]) -> Path:
    """The preset beside a model folder that has nothing but a config."""
    (folder / "model").mkdir(parents=True, exist_ok=True)
    (folder / "model" / "config.json").write_text(json.dumps(config))
    spec = folder / f"{preset}.toml"
    spec.write_text(presets()[preset].read_text())
    return spec


@pytest.fixture
def planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    def plan(preset: str, *changes: str, config: dict[str, Any] = QWEN_7B, gpu: float = 80) -> dict[str, Any]:
        spec = spec_of(tmp_path, preset, config)
        sets = [word for change in (f"model.path={tmp_path / 'model'}", *changes) for word in ("--set", change)]
        assert main(["plan", str(spec), "--json", "--gpu-GiB", str(gpu), "--host-GiB", "1000", *sets]) == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    return plan


def part(plan: dict[str, Any], role: str, name: str) -> int:
    return next(p["bytes"] for p in plan["roles"][role]["parts"] if p["name"] == name)


def test_a_7b_cut_over_8_gpus_by_hand(planned: Any) -> None:
    plan = planned("grpo-8gpu-colocated")
    assert part(plan, "actor", "master weights") == pytest.approx(PARAMETERS_7B * 4 / 8, rel=1e-3)
    assert part(plan, "actor", "gradients") == pytest.approx(PARAMETERS_7B * 4 / 8, rel=1e-3)
    assert part(plan, "actor", "Adam moments") == pytest.approx(PARAMETERS_7B * 8 / 8, rel=1e-3)
    assert part(plan, "rollout", "weights") == PARAMETERS_7B * 2
    rollout = plan["roles"]["rollout"]["phases"]
    assert rollout["rollout"] == pytest.approx(0.6 * 80 * GIB + 0.7 * GIB, rel=1e-3)
    [gpus, host] = plan["places"]
    assert tuple(gpus["names"]) == GPUS
    assert gpus["fits"]
    # While others sample, the weights and moments of all eight ranks wait in the memory of one host.
    assert host["phases"]["rollout"] == pytest.approx(PARAMETERS_7B * 12, rel=1e-3)


def test_stages_and_tensor_ranks_by_hand(planned: Any) -> None:
    """Megatron: 8 tensor ranks of 4 stages, two replicas. The first stage has the embedding, and micro-batches of four
    stages under way; every rank holds an eighth of what lies inside the layers."""
    seen = ("megatron-70b-64gpu", "actor.micro_batch_tokens=8192", "actor.engine.tensor_sequence_parallel=false")
    layer = 8192 * (2 * 8192 + 2 * 1024) + 3 * 8192 * 28672
    stage = (20 * layer + 128256 * 8192) // 8
    plan, row = planned(*seen, config=LLAMA_70B), 8192 * 8192 * 2
    assert part(plan, "actor", "weights") == pytest.approx(2 * stage, rel=1e-3)
    assert part(plan, "actor", "gradients") == pytest.approx(4 * stage, rel=1e-3)
    assert part(plan, "actor", "master weights") == pytest.approx(4 * stage / 2, rel=1e-3)
    assert part(plan, "actor", "Adam moments") == pytest.approx(8 * stage / 2, rel=1e-3)
    inside = 8192 * 2 * (3 * 8192 + 2 * 1024 + 3 * 28672) // 8 + 8192 * 2 * 4 * 128  # fused; cos, sin
    again = 8192 * 2 * 8192 * (4 + 2 * 2) + inside  # norms keep fp32 and twice bf16, whole
    assert part(plan, "actor", "activations") == 4 * (20 + 1) * row + again  # and what each sent on
    cut = planned(*seen[:2], "actor.engine.tensor_sequence_parallel=true", config=LLAMA_70B)
    assert part(cut, "actor", "activations") == (4 * (20 + 1) * row + again - inside) // 8 + inside
    # One replica instead of two, whose context ranks share rows and cut masters and moments as data ranks do.
    shared = planned(*seen, "actor.engine.context_parallel=2", config=LLAMA_70B)
    repeated = 4096 * 2 * 2 * 128  # a tensor rank has one key head, and each of the two needs one
    assert part(shared, "actor", "activations") == part(plan, "actor", "activations") // 2 + repeated
    assert part(shared, "actor", "weights") == part(plan, "actor", "weights")
    assert part(shared, "actor", "Adam moments") == part(plan, "actor", "Adam moments")


@pytest.mark.parametrize(
    ("changes", "slots"),
    [
        ((), 3 * 8),  # whole groups
        (("eval.prompts=50", "eval.samples_per_prompt=3", "eval.temperature=1"), 13 * 3),  # as of an evaluation
        (("rollout.max_staleness=2",), 3 * 3 * 8),  # of three steps at a time
        (("rollout.max_staleness=2", "rollout.repeatable=true"), 3 * 8),  # one after another
        (("algorithm.kind=remax",), 3 * 9),  # and a greedy one in each group
    ],
)
def test_the_cache_has_room_for_what_a_replica_draws(planned: Any, changes: tuple[str, ...], slots: int) -> None:
    shape = ("data.prompts_per_step=9", "algorithm.group_size=8", "data.max_prompt_tokens=512", "eval.prompts=8")
    torch = ("rollout.engine={kind='torch'}", "rollout.processes=4", "data.max_response_tokens=512")
    plan = planned("grpo-8gpu-separate", "rollout.max_staleness=0", *shape, *torch, *changes)
    assert part(plan, "rollout", "KV cache") == slots * 1024 * 2 * 28 * 4 * 128 * 2


def test_a_run_that_samples_nothing_has_no_phases_of_sampling(planned: Any) -> None:
    assert list(planned("dpo-8gpu")["roles"]["actor"]["phases"]) == ["train", "optimizer"]


def test_the_table_is_for_people(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = spec_of(tmp_path, "fsdp2-8gpu", QWEN_7B)
    sets = ["--set", f"model.path={tmp_path / 'model'}", "--set", "run.colocate=never"]
    assert main(["plan", str(spec), "--gpu-GiB", "40", *sets]) == 0
    shown = capsys.readouterr().out
    for word in ("optimizer", "Adam moments", "does not fit", "CUDA context"):
        assert word in shown
    assert main(["plan", str(spec), "--gpu-GiB", "0", *sets]) == 2


@pytest.mark.parametrize("option", ["--gpu-GiB", "--host-GiB"])
@pytest.mark.parametrize("size", ["nan", "inf", "1e+300", "1e-300"])
def test_no_memory_has_such_a_size(tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str, size: str) -> None:
    assert main(["plan", str(spec_of(tmp_path, "quickstart", QWEN_7B)), option, size]) == 2
    assert f"Invalid value for '{option}'" in capsys.readouterr().err


@pytest.mark.parametrize("preset", [*presets()])
def test_every_preset_fits_by_its_own_plan_without_a_network(
    preset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On GPUs of 80 GiB, which they are written for."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "empty"))
    teacher = ["ref.model=builtin:tiny-digits"] if preset == "distill-cpu" else []  # which another preset trains
    warm = ["model.path=builtin:tiny-chat"] if preset in ("agent-cpu", "game-cpu", "tools-cpu") else []
    spec = load_spec(spec_of(tmp_path, preset, QWEN_7B), [*teacher, *warm])
    plan = plan_memory(spec, tmp_path, gpu_GiB=80, host_GiB=1000)
    assert all(place.fits for place in plan.places)
    assert bool(plan.roles) == (preset != "fake")


def test_a_model_that_is_not_here_says_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "empty"))
    spec = spec_of(tmp_path, "fsdp2-8gpu", {**QWEN_7B, "model_type": "mamba9"})
    for path, words in (
        ("org/model", "hint: `hf download org/model config.json`"),
        ("/of/the/cluster", "copy that file into a folder and add `--set model.path=FOLDER`"),
        (tmp_path / "model", "parameters of the family mamba9 are not known from config.json alone"),
    ):
        assert main(["plan", str(spec), "--target", "cluster", "--set", f"model.path={path}"]) == 2
        assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("3584", 'has hidden_size = "3584", where a whole number from 1 to 1,048,576 belongs'),
        (None, "its config.json lacks hidden_size"),
    ],
)
def test_a_config_without_a_sound_size_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], wrong: object, message: str
) -> None:
    spec = spec_of(tmp_path, "fsdp2-8gpu", {**QWEN_7B, "hidden_size": wrong})
    assert main(["plan", str(spec), "--target", "cluster", "--set", "model.path=./model"]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(("gpu", "starts"), [(24, False), (40, True)])
def test_a_share_without_room_for_a_cache_does_not_fit(planned: Any, gpu: float, starts: bool) -> None:
    """Half of 24 GiB, where the weights are 14.2."""
    plan = planned("grpo-8gpu-separate", "rollout.engine.gpu_memory_utilization=0.5", gpu=gpu)
    keys = [each["key"] for each in plan["problems"] if "without a KV cache it cannot start" in each["message"]]
    assert keys == ([] if starts else ["rollout.engine"])
    assert starts or plan["fits"] is False


def test_experts_that_a_token_visits_are_counted_by_any_name(planned: Any, tmp_path: Path) -> None:
    mixture = {**QWEN_7B, "model_type": "qwen3_moe", "num_experts": 8, "moe_intermediate_size": 512}
    kept = []
    for name, visits in (("num_experts_per_tok", 6), ("moe_topk", 6), ("top_k", None), ("num_experts_per_tok", None)):
        spec_of(folder := tmp_path / str(len(kept)), "fsdp2-8gpu", {**mixture, name: visits})
        kept.append(part(planned("fsdp2-8gpu", f"model.path={folder / 'model'}"), "actor", "activations"))
    assert kept[0] == kept[1] > kept[2] == kept[3]


def test_adapters_that_the_sampler_applies(planned: Any) -> None:
    """Their room is vLLM's: two matrices beside each of 7 linear layers, of the next rank that vLLM has. Asleep the
    model waits in host memory, for only adapters come with a sync."""
    lora = ("actor.lora.rank=10", "rollout.engine.lora=adapters", "rollout.engine.tensor_parallel=1")
    plan, merged = planned("grpo-8gpu-colocated", *lora), planned("grpo-8gpu-colocated", *lora[:1], lora[2])
    query, key, width, inner = 3584, 512, QWEN_7B["hidden_size"], QWEN_7B["intermediate_size"]
    outs_and_ins = (2 * (width + query)) + 2 * (width + key) + 3 * (width + inner)
    assert part(plan, "rollout", "adapters") == 28 * 16 * outs_and_ins * 2
    assert part(plan, "rollout", "weights, asleep") == part(plan, "rollout", "weights")
    rollout = plan["roles"]["rollout"]
    rounding = part(plan, "rollout", "weights, asleep, rounding of pinned memory")
    assert rollout["host_phases"]["train"] == part(plan, "rollout", "weights") + rounding
    assert rounding == pytest.approx(0.44 * part(plan, "rollout", "weights"), abs=1)
    assert rollout["host_phases"]["rollout"] == rollout["host_phases"]["sync"] == 0
    assert rollout["phases"]["rollout"] == merged["roles"]["rollout"]["phases"]["rollout"], "one share, cut otherwise"
    assert merged["roles"]["rollout"]["host_phases"]["train"] == 0
    apart = planned("grpo-8gpu-separate", "actor.lora.rank=10", "rollout.engine.lora=adapters")
    assert apart["roles"]["rollout"]["host_phases"]["train"] == 0, "it never sleeps"


# ── against what a run held ───────────────────────────────────────────────────────────────────────


@dataclass
class Ranks:
    """What a group's ranks said at most."""

    used_GiB: float


def test_a_run_compares_the_plan_with_what_was_held(tmp_path: Path) -> None:
    spec = load_spec(spec_of(tmp_path, "quickstart", QWEN_7B), [f'model.path="{tmp_path / "model"}"'])
    groups: Any = {"actor": Ranks(120.0), "rollout": Ranks(0.0)}
    compared = compare.compare(spec, tmp_path, groups)
    assert compared["actor"]["planned_GiB"] * GIB > 16 * PARAMETERS_7B
    assert set(compared) == {"actor"}, "a role whose ranks said nothing has nothing to compare"
    assert compared["actor"]["used_GiB"] == 120.0
    compare.write(compared, tmp_path)
    assert "actor 120.00 GiB (planned " in compare.line(compared)
    page = render(tmp_path)
    assert "Memory of a rank" in page
    assert f"{compared['actor']['planned_GiB'] / 120 - 1:+.0%}" in page
