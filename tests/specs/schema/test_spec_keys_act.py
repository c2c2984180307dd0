"""Keys of tables that a role is handed whole act there: to travel is no proof.

`test_spec_dead_keys.py` sees that every key changes the plan, a build request or what the driver derives. A table that
travels as it is would change its request even if nobody read it. So for each of its keys either the code that gets the
table computes something else (`ACTS`: the losses, the optimizer, the command line of a server, …), or a test is named
that fails when the key is not read (`NAMED`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from test_spec_dead_keys import KEYS, ONE_VALUE, has_test, observed, specs_that_differ

from rlctl.loop.advantages import columns as advantage_columns
from rlctl.loop.kl_control import KlController
from rlctl.processes.role_configs import build_bodies
from specs.errors import SpecError
from specs.load.keys import tables_of
from specs.load.load import spec_from
from specs.schema.algorithms.algorithm_tables import AlgorithmTable
from specs.schema.engines.deepspeed_config import deepspeed_config
from specs.schema.role_section import Optimizer
from specs.schema.spec import Spec
from specs.schema.table import Table
from specs.wire.batch import Batch
from specs.wire.role_config import DataConfig, RewardConfig, RolloutConfig, TrainConfig
from workers.grading.terms import Sample, Setting, make_term

DATA = "tests/workers/data/test_data_set.py"
REWARD = "tests/workers/roles/test_reward.py"
POOL = "tests/workers/grading/test_pool.py"
LORA = "tests/backends/train/test_lora.py"

JUDGE = "tests/workers/grading/test_judge.py"
DYNAMIC = "tests/rlctl/loop/test_dynamic_sampling.py"

# Table.key → the test that fails when the role does not read it.
NAMED = {
    "DataSection.train": f"{DATA}::test_a_source_that_cannot_be_read",
    "DataSection.split": f"{DATA}::test_a_split_is_picked",
    "DataSection.prompt_column": f"{DATA}::test_columns_are_found_under_the_names_given",
    "DataSection.answer_column": f"{DATA}::test_columns_are_found_under_the_names_given",
    "DataSection.template": f"{DATA}::test_chat",
    "DataSection.chat": f"{DATA}::test_chat",
    "DataSection.system": f"{DATA}::test_chat",
    "DataSection.overlong": f"{DATA}::test_overlong_prompts",
    "DataSection.bad_rows": f"{DATA}::test_a_bad_row_is_named_or_dropped",
    "DataSection.shuffle": f"{DATA}::test_columns_of_a_draw",
    "DataSection.max_rows": f"{DATA}::test_columns_are_found_under_the_names_given",
    "RewardSection.terms": f"{REWARD}::test_from_build_to_score",
    "RewardSection.workers": f"{REWARD}::test_workers_grade_side_by_side",
    "RewardSection.timeout_s": f"{REWARD}::test_failures_are_counted_and_saved",
    "RewardSection.fallback": f"{REWARD}::test_failures_are_counted_and_saved",
    **{
        f"RewardSection.{key}": "tests/rlctl/loop/scores/test_graders.py::test_what_a_lost_one_had_goes_to_others"
        for key in ("max_restarts", "min_processes")
    },
    "RewardSection.max_failed_share": "tests/rlctl/loop/scores/test_reward_failure_watch.py::"
    "test_a_step_that_loses_more_than_its_share_ends_the_run",
    **{
        f"{table}.weight": f"{REWARD}::test_from_build_to_score"
        for table in ("ExactMatch", "MathVerify", "Regex", "Overlong", "Function")
    },
    **{
        f"{table.__name__}.{key}_function": "tests/rlctl/check/test_own_functions.py::"
        "test_at_run_time_a_bad_number_stops_the_run"
        for table in tables_of(AlgorithmTable)
        for key in ("advantage", "loss")
    },
    **{
        f"{table.__name__}.{key}": f"{DYNAMIC}::test_{test}"
        for table in tables_of(AlgorithmTable)
        for key, test in (
            ("dynamic_sampling", "a_step_learns_from_groups_with_signal_alone"),
            ("max_refills", "the_bound_on_refills_holds_and_zero_draws_none"),
        )
    },
    **{
        f"{table.__name__}.mask_truncated": "tests/rlctl/loop/test_driver_learning.py::"
        "test_what_was_cut_off_is_left_out_of_the_loss"
        for table in tables_of(AlgorithmTable)
    },
    "ModelScore.weight": "tests/rlctl/run/test_train_reward_model.py::test_a_reward_model_beside_another_term",
    "Judge.weight": "tests/rlctl/run/test_train_judge.py::test_a_judge_beside_another_term",
    **{
        f"Judge.{key}": f"{JUDGE}::test_{test}"
        for test, keys in {
            "a_request_says_what_the_spec_says": "base_url model prompt system body key_env",
            "what_a_judge_cost": "prompt_price completion_price",
            "the_score_in_a_reply": "min_score max_score score_pattern score_key",
            "many_are_asked_at_once": "concurrency",
            "a_deadline_holds_for_the_whole_request": "timeout_s",
            "what_does_not_pass_is_a_failed_grade": "retries",
            "each_request_is_made_once": "cache cache_file",
        }.items()
        for key in keys.split()
    },
    "Function.path": f"{POOL}::test_a_reward_that_cannot_be_loaded_is_named",
    **{
        f"Gmpo.{key}": "tests/backends/train/test_losses.py::test_against_numpy_with_written_out_derivatives"
        for key in ("clip_low", "clip_high")
    },
    **{
        f"ClipCov.{key}": "tests/backends/train/test_losses.py::test_clip_covs_bounds_by_hand"
        for key in ("clip_low", "clip_high")
    },
    **{
        f"{table}.{key}": f"tests/rlctl/loop/loss_columns/test_covariance.py::test_{test}"
        for table, key, test in (
            ("ClipCov", "covariance_share", "tokens_in_the_band_are_drawn"),
            ("ClipCov", "covariance_low", "tokens_in_the_band_are_drawn"),
            ("ClipCov", "covariance_high", "tokens_in_the_band_are_drawn"),
            ("KlCov", "covariance_share", "the_largest_are_chosen"),
        )
    },
    "Lora.rank": f"{LORA}::test_as_built_counts_adapters_apart",
    "Lora.alpha": f"{LORA}::test_merged_weights_are_the_adapted_model",
    "Lora.targets": f"{LORA}::test_unknown_targets_are_named_with_what_there_is",
    "Optimizer.max_grad_norm": "tests/backends/ddp/test_ddp.py::test_five_steps_equal_plain_transformers",
    **{
        f"{table}.kernels": "tests/backends/train/test_liger.py::test_every_engine_asks_for_the_kernels_of_its_table"
        for table in ("DdpTable", "Fsdp2Table", "ZeroTable")
    },
    "DdpTable.logits_chunk_tokens": "tests/backends/ddp/test_ddp.py::test_chunks_of_logits_change_nothing",
    "ZeroTable.logits_chunk_tokens": "tests/backends/zero/test_zero.py::test_the_table_decides_the_chunks_of_logits",
    **{
        f"MegatronTable.{key}": "tests/backends/megatron/test_megatron.py::test_ranks_say_what_they_hold"
        for key in (
            *("tensor_parallel", "pipeline_parallel", "context_parallel", "expert_parallel", "expert_tensor_parallel"),
            "megatron",
        )
    },
    **{
        f"MegatronTable.{key}": "tests/backends/megatron/test_megatron.py::test_a_mixture_of_experts_trains_as_by_ddp"
        for key in ("tensor_sequence_parallel", "virtual_pipeline")
    },
    "MegatronTable.logits_chunk_tokens": "tests/backends/megatron/test_vocab_head.py::"
    "test_losses_and_gradients_are_those_of_the_whole_head",
    **{
        f"Fsdp2Table.{key}": "tests/backends/fsdp2/test_fsdp2.py::test_every_key_of_its_table_acts"
        for key in ("reshard_after_forward", "offload", "sync_every_micro_batch", "logits_chunk_tokens")
    },
    **{
        f"TorchRolloutTable.{key}": "tests/backends/torch_rollout/test_torch_rollout.py::"
        "test_the_table_decides_slots_and_prompts_at_a_time"
        for key in ("max_sequences", "prefill_tokens")
    },
    "SglangTable.weights_dir": "tests/backends/sglang_rollout/test_sglang_rollout.py::"
    "test_no_room_for_the_weights_names_the_key",
}


# ── what the code makes of a table ────────────────────────────────────────────────────────────────


def algorithm(spec: Spec) -> Any:
    """The loss and the advantages of fixed numbers: ratios on both sides of every bound, scores in two groups."""
    import torch

    from backends.packed.packing import loss_weight_T
    from backends.protocol import LossScale
    from backends.train.losses import TokenColumns, policy_loss
    from backends.train.value_loss import ValueColumns, value_loss

    log_ratio, advantage = (grid.ravel() for grid in np.meshgrid([-2.0, -0.15, 0.0, 0.15, 2.0], [-1.0, 1.0]))
    length_B = np.array([4, 6])
    mask_T = np.ones(10, dtype=np.uint8)
    batch = Batch({"tokens_T": np.arange(10, dtype=np.int32), "loss_mask_T": mask_T, "length_B": length_B})
    loss = spec.algorithm.loss("trainer")
    weight_T = loss_weight_T(batch, loss.loss_aggregation, LossScale(10, 2, 8))
    ratio_N, advantage_N, zero_N = (torch.from_numpy(column) for column in (log_ratio, advantage, np.zeros(10)))
    columns = TokenColumns(
        weight_N=torch.from_numpy(weight_T),
        advantage_N=advantage_N,
        rollout_logprob_N=zero_N,
        old_logprob_N=zero_N,
        ref_logprob_N=zero_N + 0.3,
        of_sequence={name: ratio_N for name in loss.sequence_columns},
        correction_N=zero_N + 0.7 if loss.corrected else None,
        covariant_N=(ratio_N > 1.9).double() if loss.selects_covariant else None,
    )
    total, *_ = policy_loss(ratio_N, zero_N + 1.0, columns, loss)
    of_critic = 0.0
    if (table := spec.algorithm.value_loss) is not None:
        weight_T = loss_weight_T(batch, table.loss_aggregation, LossScale(10, 2, 8))
        values = ValueColumns(torch.from_numpy(weight_T), zero_N, 2 * advantage_N)
        of_critic = float(value_loss(ratio_N, values, table)[0])
    controller = KlController(spec.algorithm)
    advantages = {name: column_T.tolist() for name, column_T in advantages_of_six(spec, controller).items()}
    controller.after_step({"actor/kl": 1.0}, 6)
    return float(total), of_critic, advantages, controller.coef, spec.ratio_against


def advantages_of_six(spec: Spec, controller: KlController) -> dict[str, Any]:
    """Columns that the driver makes of two groups of three, of uneven lengths."""
    length_B, order_B = np.array([4, 1, 7, 3, 2, 5]), np.arange(6)
    columns: dict[str, Any] = {"length_B": length_B, "group_B": order_B // 3, "rollout_B": order_B}
    table = spec.algorithm.advantage
    read = (*table.columns, *spec.algorithm.penalty_columns)
    sizes = {"_T": length_B.sum(), "_B": len(length_B)}
    columns |= {name: np.sin(np.arange(sizes[name[-2:]]) * (1 + len(name))) for name in read}
    batch = Batch({**columns, "loss_mask_T": np.ones(length_B.sum(), dtype=np.uint8)})
    scores = np.array([1, 0, 0, 4, 1, 1], dtype=np.float32)
    return advantage_columns(table, batch, scores, np.ones(6, dtype=bool), controller.penalty_T(batch))


def optimizer(spec: Spec) -> Any:
    """Of each role that learns, learning rates of ten steps, and weights after two of them."""
    sections: list[Any] = [spec.role(role) for role in spec.losses]
    return [_learned(section.optimizer) for section in sections]


def _learned(table: Optimizer) -> Any:
    import torch

    from backends.ddp.flat_optimizer import FlatAdamW
    from backends.train.lr_schedule import lr_at

    held: Any = SimpleNamespace(master_P=torch.ones(4), grad_P=torch.tensor([1e-8, 1.0, -1e-8, 2.0]), num_decayed=2)
    adamw = FlatAdamW(held, table)
    rates = [lr_at(step, table, 10) for step in range(10)]
    for rate in (0.1, 0.2):
        adamw.step(rate)
        held.grad_P.mul_(-0.5)
    return rates, held.master_P.tolist()


def of_deepspeed(spec: Spec) -> Any:
    """What DeepSpeed is told, for each role that it holds."""
    held = [(role, spec.role(role)) for role in ("actor", "ref", "critic", "reward_model") if role in spec.roles]
    return [
        deepspeed_config(section.engine, section.dtype, getattr(section, "optimizer", None), device="cuda")
        for _, section in held
        if section.engine.kind.startswith("zero")
    ]


def of_vllm(config: RolloutConfig) -> Any:
    from backends.vllm_rollout.vllm_start import arguments

    shape: Any = SimpleNamespace(architecture="Qwen2ForCausalLM", adapters=())
    return arguments(config, shape, on_cpu=False)


def of_sglang(config: RolloutConfig) -> Any:
    from backends.sglang_rollout.server import arguments

    return arguments(config, 1)


def term(spec: Spec) -> Any:
    """The first term's scores of some completions."""
    scores = []
    made = make_term(spec.reward.terms[0].model_dump(), Setting("answer", 8, "."))
    for completion, tokens in (("ab", 2), ("AB", 5), ("ac", 7), ("x", 8), ("0.50", 3)):
        scores.append(made(Sample("p", completion, {"answer": "ab" if tokens != 3 else "1/2"}, tokens)))
    return scores


def rollout(compute: Callable[[RolloutConfig], Any]) -> Callable[[Spec], Any]:
    return lambda spec: compute(RolloutConfig.model_validate(build_bodies(spec, Path(), Path())["rollout"]))


ACTS: Mapping[str, Callable[[Spec], Any]] = {
    **dict.fromkeys((table.__name__ for table in tables_of(AlgorithmTable)), algorithm),
    "Optimizer": optimizer,
    "ZeroTable": of_deepspeed,
    "VllmTable": rollout(of_vllm),
    "SglangTable": rollout(of_sglang),
    **dict.fromkeys(("ExactMatch", "MathVerify", "Regex", "Overlong"), term),
}


# ── the keys ──────────────────────────────────────────────────────────────────────────────────────


def handed_whole() -> set[str]:
    """Names of tables that travel as they are: those inside a build request, and those of the algorithms."""
    found: set[str] = set()

    def walk(table: type[Table]) -> None:
        for field in table.model_fields.values():
            for inner in tables_of(field.annotation):
                if inner.__module__ != RolloutConfig.__module__:
                    found.add(inner.__name__)
                walk(inner)

    for config in (TrainConfig, RolloutConfig, DataConfig, RewardConfig):
        walk(config)
    return found | {table.__name__ for table in tables_of(Spec.model_fields["algorithm"].annotation)}


def keys_that_travel() -> list[tuple[str, str]]:
    whole = handed_whole()
    return [
        (key, owner) for key, owner in KEYS if owner in whole and not key.endswith(".kind") and key not in ONE_VALUE
    ]


def beyond_travel(spec: Spec, folder: Path) -> dict[str, Any]:
    """What a spec decides besides the requests that carry its tables."""
    return {name: value for name, value in observed(spec, folder).items() if name not in ("build", "update")}


@pytest.mark.parametrize(("key", "owner"), keys_that_travel(), ids=[f"{k}-{o}" for k, o in keys_that_travel()])
def test_a_key_that_travels_acts(key: str, owner: str, folder: Path) -> None:
    named = NAMED.get(f"{owner}.{key.rpartition('.')[2]}")
    if named is not None:
        assert has_test(named), f"{named}, which is to prove {key}, is not there"
        return
    raw = specs_that_differ(key, KEYS[key, owner])
    try:
        before, after = (spec_from(one) for one in raw)
    except SpecError as error:
        pytest.fail(f"say in CONTEXT of test_spec_dead_keys.py what {key} needs: {error}")
    compute = ACTS.get(owner, lambda spec: None)
    acts = compute(before) != compute(after) or beyond_travel(before, folder) != beyond_travel(after, folder)
    assert acts, f"{owner} is handed on whole, and nothing shows that {key} is read: compute it in ACTS, or name a test"


def test_the_lists_name_what_there_is() -> None:
    keys = {f"{owner}.{key.rpartition('.')[2]}" for key, owner in keys_that_travel()}
    assert set(NAMED) <= keys, set(NAMED) - keys
    assert set(ACTS) <= handed_whole()
