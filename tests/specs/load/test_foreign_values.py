"""What a value of another trainer's key is here, with numbers worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest

from specs.load.foreign_values import CONVERSIONS
from specs.load.load import parse
from specs.load.synonyms import CHOICES, SYNONYMS

BATCH = {"data.prompts_per_step": 64, "algorithm.group_size": 16, "algorithm.mini_batches_per_step": 4}
TRL = {"run.per_device_train_batch_size": 8, "run.gradient_accumulation_steps": 4, "run.num_generations": 8}
OPENRLHF = {"run.rollout_batch_size": 128, "run.n_samples_per_prompt": 8, "run.train_batch_size": 256}
PRIME = {"orchestrator.batch_size": 256, "orchestrator.rollouts_per_example": 8}


def hints(keys: dict[str, Any]) -> dict[str, str]:
    raw = {"schema": 1, "run": {"name": "x", "steps": 100}, "algorithm": {"kind": "grpo"}}
    return {one.key: one.hint for one in parse(raw, [f"{key}={value}" for key, value in keys.items()]).problems}


@pytest.mark.parametrize(
    ("keys", "asked", "said"),
    [
        # verl counts an optimizer step in prompts, whatever the group's size.
        (
            {**BATCH, "data.train_batch_size": 1024, "actor_rollout_ref.actor.ppo_mini_batch_size": 256},
            "actor_rollout_ref.actor.ppo_mini_batch_size",
            "`algorithm.mini_batches_per_step`? 1024 prompts of a step / 256 = 4",
        ),
        (
            {**BATCH, "actor_rollout_ref.actor.ppo_mini_batch_size": 24},
            "actor_rollout_ref.actor.ppo_mini_batch_size",
            "64 prompts of a step / 24 is no whole number: change one of them",
        ),
        (
            {"actor_rollout_ref.actor.ppo_mini_batch_size": 0, "data.prompts_per_step": 8},
            "actor_rollout_ref.actor.ppo_mini_batch_size",
            "8 prompts of a step / 0 is no whole number",
        ),
        ({"actor.ppo_mini_batch_size": 256}, "actor.ppo_mini_batch_size", "? prompts of a step / 256"),
        (
            {"data.max_prompt_length": 512, "data.max_response_length": 1024, "actor.ppo_micro_batch_size_per_gpu": 4},
            "actor.ppo_micro_batch_size_per_gpu",
            "`actor.micro_batch_tokens`? it counts tokens and changes no result: 4 sequences of 512 + 1024 are 6144",
        ),
        # TRL: 8 × 4 completions of each process are 32, and with 2 processes 64, of 8 prompts.
        (
            {**BATCH, **TRL, "actor.processes": 2},
            "run.gradient_accumulation_steps",
            "`data.prompts_per_step`? micro-batches are made by themselves; "
            "64 completions of a step (8 × 4 × 2 processes) / 8 = 8",
        ),
        ({**BATCH, **TRL}, "run.num_generations", "`algorithm.group_size`?"),
        # … generated for two optimizer steps at once: 8 × 8 of 8 prompts.
        (
            {**BATCH, **TRL, "run.steps_per_generation": 8},
            "run.gradient_accumulation_steps",
            "(8 × 8 × 1 processes) / 8 = 8",
        ),
        (
            {**BATCH, **TRL, "run.steps_per_generation": 8},
            "run.steps_per_generation",
            "`algorithm.mini_batches_per_step`? 8 micro-batches of a step / 4 = 2",
        ),
        (
            {**BATCH, "data.generation_batch_size": 256},
            "data.generation_batch_size",
            "`data.prompts_per_step`? 256 completions of a step / 16 = 16",
        ),
        # A number that is itself converted: 8 prompts a step, not the 64 that the preset wrote.
        (
            {**BATCH, **TRL, "run.num_train_epochs": 3, "actor.processes": 2},
            "run.num_train_epochs",
            "`run.steps`? 3 × the rows of data.train / 8 prompts of a step",
        ),
        (
            {**BATCH, "algorithm.epochs_per_step": 2, "run.warmup_ratio": 0.05},
            "run.warmup_ratio",
            "0.05 × 800 optimizer steps = 40",
        ),
        # OpenRLHF: train_batch_size counts completions; verl's key of that name counts prompts.
        (
            {**BATCH, **OPENRLHF},
            "run.train_batch_size",
            "`algorithm.mini_batches_per_step`? 1024 completions of a step (128 prompts × 8) / 256 = 4",
        ),
        ({**BATCH, "run.train_batch_size": 256}, "run.train_batch_size", "did you mean `data.prompts_per_step`?"),
        ({**BATCH, **PRIME}, "orchestrator.batch_size", "`data.prompts_per_step`? 256 completions of a step / 8 = 32"),
        ({**BATCH, "orchestrator.batch_size": 256}, "orchestrator.batch_size", "did you mean `data.prompts_per_step`?"),
        (
            {**BATCH, "grpo.train_global_batch_size": 256},
            "grpo.train_global_batch_size",
            "1024 completions of a step (64 prompts × 16) / 256 = 4",
        ),
        ({**BATCH, "run.total_episodes": 10_000}, "run.total_episodes", "10000 completions / 1024 of a step = 10"),
        (
            {"data.max_prompt_tokens": 100, "rollout.max_model_len": 1124},
            "rollout.max_model_len",
            "`data.max_response_tokens`? without the prompt it is 1124 - 100 = 1024",
        ),
        ({"actor.optimizer.lr": 1e-5, "actor.optimizer.min_lr": 1e-6}, "actor.optimizer.min_lr", "1e-06 / 1e-05 = 0.1"),
        ({"algorithm.epsilon": 0.1}, "algorithm.epsilon", "`algorithm.clip_low`? and algorithm.clip_high = 0.1"),
        (
            {"algorithm.epsilon": 0.1, "algorithm.epsilon_high": 0.3},
            "algorithm.epsilon",
            "did you mean `algorithm.clip_low`?",
        ),
        (
            {"run.eps_clip_low_high": "[0.2, 0.27]"},
            "run.eps_clip_low_high",
            "algorithm.clip_low = 0.2 and algorithm.clip_high = 0.27",
        ),
        ({"run.adam_beta1": 0.9, "run.adam_beta2": 0.95}, "run.adam_beta2", "both in one list: [0.9, 0.95]"),
        ({"trainer.save_freq": -1}, "trainer.save_freq", "never: leave it out"),
        ({"trainer.save_freq": 20}, "trainer.save_freq", "did you mean `checkpoint.every`?"),
        ({"trainer.n_gpus_per_node": 4}, "trainer.n_gpus_per_node", "the GPUs themselves, [0, 1, 2, 3]"),
        ({"trainer.logger": "['console', 'wandb']"}, "trainer.logger", '[[tracking]] with kind = "wandb"'),
        ({"trainer.logger": "['console']"}, "trainer.logger", "leave it out"),
        (
            {"custom_reward_function.path": "r.py", "custom_reward_function.name": "grade"},
            "custom_reward_function.path",
            'path = "r.py:grade"',
        ),
        # Choices; words of Python are read too.
        ({"actor.kl_loss_type": "low_var_kl"}, "actor.kl_loss_type", '"low_var_kl" is "k3"'),
        ({"algorithm.scale_rewards": "False"}, "algorithm.scale_rewards", '"False" is "none"'),
        ({"algorithm.scale_rewards": "batch"}, "algorithm.scale_rewards", "did you mean `algorithm.scale`?"),
        ({"algorithm.adv_estimator": "gae"}, "algorithm.adv_estimator", '"gae" is "ppo"'),
        ({"run.bf16": "true"}, "run.bf16", 'true is "bf16"'),
    ],
)
def test_the_arithmetic_has_the_spec_s_own_numbers(keys: dict[str, Any], asked: str, said: str) -> None:
    hint = hints(keys)[asked]
    assert hint.endswith(said) if said.endswith("?") else said in hint, hint


def test_numbers_that_ask_for_each_other_end() -> None:
    sizes = ("train_batch_size", "rollout_batch_size", "generation_batch_size", "batch_size", "ppo_mini_batch_size")
    names = (*sizes, "gradient_accumulation_steps", "steps_per_generation", "rollouts_per_prompt", "warmup_ratio")
    said = hints({f"run.{name}": 4 for name in names})
    assert all(said[f"run.{name}"].startswith("did you mean ") for name in names)


@pytest.mark.parametrize("value", ["0", "-1", "true", '"x"', "[]", "1e400", "nan", str(10**400), "{ a = 1 }"])
def test_no_value_is_too_odd(value: str) -> None:
    """What another tool's key holds is anybody's: no hint of ours may fail on it."""
    names = {*CHOICES, *CONVERSIONS}
    assert names <= SYNONYMS.keys()
    said = hints({name if "." in name else f"run.{name}": value for name in names})
    assert {key.split(".")[1] for key in said if key.startswith("run.")} >= {name for name in names if "." not in name}
