"""Files of other tools become specs that load: of TRL, verl and prime-rl, as their users write them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from rlctl.translate.foreign_files import read_foreign
from rlctl.translate.translation import Translation, as_toml, translate
from specs.load.keys import keys_of
from specs.load.load import load_spec
from specs.load.unknown_keys import translation_table
from specs.schema.recipes import RECIPES

TRL_GRPO = """
raise RuntimeError("this script is never run")
MODEL, STEPS = "Qwen/Qwen2.5-0.5B-Instruct", 200
LR = 5e-6

def correct(completions, answer, **kwargs): ...
def short(completions, **kwargs): ...

dataset = load_dataset("openai/gsm8k", "main", split="train")
args = GRPOConfig(
    output_dir="out/gsm8k", run_name="gsm8k grpo", learning_rate=LR, per_device_train_batch_size=8,
    gradient_accumulation_steps=4, num_generations=8, max_completion_length=512, max_steps=200, beta=0.04,
    epsilon=0.2, epsilon_high=0.28, loss_type="dr_grpo", scale_rewards=False, warmup_ratio=0.05,
    lr_scheduler_type="cosine", bf16=True, logging_steps=1, report_to="wandb", use_vllm=True, vllm_mode="colocate",
    vllm_gpu_memory_utilization=0.4, reward_weights=[1.0, 0.2], seed=int("7"), min_p=0.1, push_to_hub=False,
)
GRPOTrainer(model="Qwen/Qwen2.5-0.5B-Instruct", args=args, reward_funcs=[correct, short], train_dataset=dataset,
            peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")).train()
"""
TRL_SFT = """
def main():
    rows = load_dataset("trl-lib/Capybara", split="train")
    training_args = SFTConfig("out", max_length=2048, packing=True, assistant_only_loss=True,
        per_device_train_batch_size=2, gradient_accumulation_steps=2 * 4, num_train_epochs=1, optim="adamw_torch")
    SFTTrainer("Qwen/Qwen2.5-0.5B", args=training_args, train_dataset=rows).train()
"""
TRL_DPO = """
model_name_or_path: Qwen/Qwen2-0.5B-Instruct
dataset_name: trl-lib/ultrafeedback_binarized
loss_type: [sigmoid]
beta: 0.2
learning_rate: 5e-7
per_device_train_batch_size: 2
gradient_accumulation_steps: 16
max_steps: 1000
use_peft: true
lora_r: 32
eval_strategy: steps
eval_steps: 50
precompute_ref_log_probs: true
"""
VERL_GRPO = """#!/usr/bin/env bash
set -x
MODEL_PATH=${MODEL_PATH:-Qwen/Qwen3-4B}   # comments go
max_prompt=$((1024 * 1))
max_response=2048
DATA=(
    algorithm.adv_estimator=grpo
    data.train_files=$HOME/data/gsm8k/train.parquet
    data.train_batch_size=512
    data.max_prompt_length=${max_prompt}
    data.max_response_length=${max_response}
    data.filter_overlong_prompts=True
    data.truncation='error'
)
python3 -m verl.trainer.main_ppo "${DATA[@]}" \\
    actor_rollout_ref.model.path=${MODEL_PATH} \\
    actor_rollout_ref.actor.ppo_mini_batch_size=256 \\
    actor_rollout_ref.actor.use_kl_loss=True \\
    actor_rollout_ref.actor.kl_loss_coef=0.001 \\
    actor_rollout_ref.actor.kl_loss_type=low_var_kl \\
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=$((max_prompt + max_response)) \\
    actor_rollout_ref.rollout.name=vllm \\
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 \\
    actor_rollout_ref.rollout.n=5 \\
    trainer.critic_warmup=0 trainer.logger='["console","wandb"]' trainer.project_name='verl_example' \\
    trainer.n_gpus_per_node=8 trainer.nnodes=1 trainer.save_freq=-1 trainer.total_epochs=15 "$@"
"""
VERL_PPO = """
data: {train_files: data/train.jsonl, prompt_key: question, train_batch_size: 256, max_response_length: 1024}
actor_rollout_ref:
  model: {path: Qwen/Qwen2.5-1.5B-Instruct}
  actor: {strategy: fsdp, ppo_mini_batch_size: 64, clip_ratio: 0.3, optim: {lr: 1e-6, lr_warmup_steps: 10}}
  rollout: {name: vllm, temperature: 0.9, n: 1, val_kwargs: {do_sample: true, temperature: 0.6, top_k: -1, n: 4}}
critic: {cliprange_value: 0.5}
algorithm: {adv_estimator: gae, lam: 0.95, use_kl_in_reward: true,
  kl_ctrl: {type: fixed, kl_coef: 0.002, horizon: 10000, target_kl: 0.1}}
trainer: {n_gpus_per_node: 4, total_training_steps: 300}
custom_reward_function: {path: reward.py, name: score_answer}
"""
VERL_TURNS = """
export ROOT=${ROOT:-/data}
TRAIN=${TRAIN:-"${ROOT}/turns.parquet"}
python3 -m verl.trainer.main_ppo --config-name='turns' data.train_files="${TRAIN}" algorithm.adv_estimator=grpo \\
    data.max_prompt_length=512 data.max_response_length=4096 actor_rollout_ref.rollout.n=4 \\
    actor_rollout_ref.rollout.multi_turn.max_assistant_turns=5 trainer.logger=tensorboard trainer.save_freq=-1 \\
    actor_rollout_ref.rollout.multi_turn.tool_config_path=tools.yaml
"""
VERL_CRITIC = """
python3 -m verl.trainer.main_ppo data.train_files=a.parquet actor_rollout_ref.model.path=Qwen/Qwen2.5-7B-Instruct \\
    algorithm.use_kl_in_reward=True data.train_batch_size=1024 actor_rollout_ref.actor.ppo_mini_batch_size=256 \\
    critic.optim.lr_warmup_steps_ratio=0.05 trainer.total_training_steps=100 actor_rollout_ref.rollout.dtype=bfloat16
"""
VERL_SFT = """
torchrun --nproc_per_node=8 -m verl.trainer.sft_trainer data.train_files=$HOME/train.parquet model.lora_rank=32 \\
    data.val_files=$HOME/test.parquet data.micro_batch_size_per_gpu=4 data.messages_key=messages \\
    optim.lr_warmup_steps=10 model.path=Qwen/Qwen3-8B trainer.test_freq=5 trainer.total_training_steps=100
"""
TRL_SETS = """
config = GRPOConfig(generation_batch_size=64, per_device_train_batch_size=8, gradient_accumulation_steps=2,
    num_generations=8, num_iterations=2, max_steps=400, eval_steps=80)
rows = load_dataset("org/sums", "easy", split="train")
held_out = load_dataset("json", data_files="test.jsonl", split="train")
other = load_dataset("json", data_files="other.jsonl", split="train")
GRPOTrainer(model="Qwen/Qwen3-0.6B", args=config, train_dataset=rows.shuffle(seed=1), eval_dataset=held_out).train()
"""
PRIME_RL = """
max_steps = 100
seq_len = 2048
ckpt = { interval = 20, keep_last = 2 }
deployment = { num_train_gpus = 2, num_infer_gpus = 6 }
model = { name = "PrimeIntellect/Qwen3-0.6B-Reverse-Text-SFT" }
wandb = { project = "reverse-text", name = "first" }
[orchestrator]
batch_size = 128
group_size = 16
[orchestrator.train.sampling]
max_completion_tokens = 128
temperature = 0.8
[[orchestrator.train.env]]
name = "reverse-text"
[trainer]
optim = { lr = 3e-6 }
scheduler = { type = "cosine", warmup_steps = 5 }
[inference]
"""
PRIME_NODES = """
max_steps = 1000
slurm = {}
weight_broadcast = { type = "nccl" }
deployment = { type = "multi_node", num_train_nodes = 2, num_infer_nodes = 2 }
model = { name = "Qwen/Qwen3-30B-A3B-Thinking-2507" }
[trainer.model]
impl = "custom"
ep = 8
cp = 2
ac = { freq = 1 }
[orchestrator]
batch_size = 512
max_off_policy_steps = 16
[inference.vllm]
tensor_parallel_size = 8
"""
FILES: dict[str, tuple[str, dict[str, Any]]] = {
    "grpo.py": (
        TRL_GRPO,
        {
            "model.path": "Qwen/Qwen2.5-0.5B-Instruct",
            "data.train": "openai/gsm8k:main",
            "data.prompts_per_step": 4,  # 8 completions of a process × 4 accumulated ÷ 8 of a prompt
            "algorithm.group_size": 8,
            "algorithm.loss_aggregation": "token-sum-constant",
            "algorithm.scale": "none",
            "algorithm.clip_high": 0.28,
            "algorithm.kl_coef": 0.04,
            "actor.optimizer.lr": 5e-6,
            "actor.optimizer.warmup_steps": 10,
            "actor.lora.targets": ["all-linear"],
            "rollout.engine.kind": "vllm",
            "run.name": "gsm8k-grpo",
            "run.steps": 200,
        },
    ),
    "updates.py": (
        TRL_GRPO.replace("max_steps=200", "max_steps=200, num_iterations=4, eval_steps=40, save_steps=100"),
        {"run.steps": 50, "algorithm.epochs_per_step": 4, "eval.every": 10, "checkpoint.every": 25},
    ),
    "sft.py": (
        TRL_SFT,
        {
            "model.path": "Qwen/Qwen2.5-0.5B",
            "data.rows_per_step": 16,
            "data.learn_from": "assistant",
            "actor.optimizer.lr": 2e-5,  # the default of theirs
        },
    ),
    "dpo.yaml": (
        TRL_DPO,
        {"objective.kind": "dpo", "objective.beta": 0.2, "data.rows_per_step": 32, "eval.every": 50, "run.steps": 1000},
    ),
    "grpo.sh": (
        VERL_GRPO,
        {
            "model.path": "Qwen/Qwen3-4B",
            "data.train": "~/data/gsm8k/train.parquet",
            "data.prompts_per_step": 512,
            "data.max_prompt_tokens": 1024,
            "data.overlong": "drop",
            "algorithm.mini_batches_per_step": 2,
            "algorithm.kl_in": "loss",
            "actor.micro_batch_tokens": 3072,
            "actor.devices": list(range(8)),
            "ref.processes": 8,
            "rollout.processes": 4,
            "tracking": [{"kind": "wandb", "project": "verl_example"}],
        },
    ),
    "ppo.yaml": (
        VERL_PPO,
        {
            "algorithm.kind": "ppo",
            "algorithm.kl_coef": 0.002,
            "algorithm.kl_target": None,  # its type is fixed
            "algorithm.kl_horizon": None,
            "rollout.temperature": 0.9,
            "rollout.top_k": None,
            "eval.temperature": 0.6,
            "eval.samples_per_prompt": 4,
            "algorithm.clip_low": 0.3,
            "algorithm.clip_high": 0.3,
            "data.max_prompt_tokens": 512,
            "critic.optimizer.lr": 1e-5,
            "reward.terms": [{"kind": "function", "path": "reward.py:score_answer"}],
        },
    ),
    "turns.sh": (
        VERL_TURNS,
        {
            "data.train": "/data/turns.parquet",
            "data.max_response_tokens": 4096,
            "environment.max_turns": 5,
            "environment.max_episode_tokens": 4608,
            "rollout.engine.kind": "vllm",
            "tracking": [{"kind": "tensorboard"}],
        },
    ),
    "critic.sh": (
        VERL_CRITIC,
        {
            "algorithm.kl_coef": 0.001,
            "algorithm.gae_lambda": 1.0,
            "algorithm.value_clip": 0.5,
            "actor.optimizer.warmup_steps": None,
            "critic.optimizer.warmup_steps": 20,  # of 100 steps with four mini-batches each
            "critic.optimizer.weight_decay": 0.01,
            "data.overlong": "refuse",
            "rollout.dtype": "bf16",
        },
    ),
    "sets.py": (
        TRL_SETS,
        {
            "data.train": "org/sums:easy",
            "eval.data": "test.jsonl",
            "data.prompts_per_step": 8,
            "algorithm.mini_batches_per_step": 4,
            "run.steps": 50,
            "eval.every": 10,
        },
    ),
    "sft.sh": (
        VERL_SFT,
        {
            "run.recipe": "sft",
            "model.path": "Qwen/Qwen3-8B",
            "data.rows_per_step": 256,
            "data.max_tokens": 1024,
            "data.overlong": "refuse",
            "actor.engine.kind": "fsdp2",
            "actor.lora.alpha": 16,
            "actor.optimizer.warmup_steps": 10,
            "actor.optimizer.lr": None,  # the comment says which of verl's is meant
            "eval.data": "~/test.parquet",
        },
    ),
    "untrained.py": (
        'LR = 1e-5\nargs = GRPOConfig(learning_rate=LR)\nrows = load_dataset("org/sums", split="main")',
        {"data.train": "org/sums", "data.split": "main", "actor.optimizer.lr": 1e-5},
    ),
    "splits.py": (
        TRL_SETS.replace("=rows.shuffle(seed=1)", '=both["train"]').replace("=held_out", '=both["validation"]')
        + 'both = load_dataset("org/both")',
        {"data.train": "org/both", "eval.data": "org/both", "eval.split": "validation"},
    ),
    "split_of_a_call.py": (
        TRL_SETS.replace('"json", data_files="test.jsonl", split="train")', '"org/sums", "easy")["test"]'),
        {"data.train": "org/sums:easy", "eval.data": "org/sums:easy", "eval.split": "test"},
    ),
    "files.py": (
        TRL_SETS.replace('"org/sums", "easy"', '"json", data_files={"train": "rows.jsonl", "test": "test.jsonl"}'),
        {"data.train": "rows.jsonl", "eval.data": "test.jsonl"},
    ),
    "rl.toml": (
        PRIME_RL,
        {
            "data.prompts_per_step": 8,
            "rollout.devices": [2, 3, 4, 5, 6, 7],
            "rollout.temperature": 0.8,
            "rollout.max_staleness": 8,
            "checkpoint.keep": 2,
            "run.name": "first",
        },
    ),
    "nodes.toml": (
        PRIME_NODES,
        {"actor.processes": 16, "actor.nodes": 2, "cluster.kind": "ray", "actor.gradient_checkpointing": True},
    ),
}


def translated(folder: Path, name: str, text: str) -> Translation:
    (folder / name).write_text(text)
    return translate(*read_foreign(folder / name), name)


@pytest.mark.parametrize("name", FILES)
def test_what_users_write_becomes_a_spec(tmp_path: Path, name: str) -> None:
    text, expected = FILES[name]
    made = translated(tmp_path, name, text)
    assert {key: made.values.get(key) for key in expected} == expected
    spec = tmp_path / "spec.toml"
    spec.write_text(as_toml(made))
    load_spec(spec)
    left = {key for key, value in read_foreign(tmp_path / name)[1].items() if value not in (None, {})}
    left -= made.translated.keys() | made.dropped.keys()
    comments = "\n".join(note for notes in made.notes.values() for note in notes)
    assert not [key for key in left if f"{key} = " not in comments], "every key is accounted for"


def test_a_person_is_asked_where_a_value_is_computed_or_missing(tmp_path: Path) -> None:
    made = translated(tmp_path, "grpo.py", TRL_GRPO)
    assert made.notes["run.seed"] == ["seed = int('7'): could not be translated"]
    assert made.notes["data.max_prompt_tokens"] == ["fill in: grpo.py does not say it"]
    assert "grpo.py is not run" in made.notes["reward.terms"][0]
    assert made.dropped["min_p"][1].startswith("log-probs must be those of the samples")
    trainer = "GRPOTrainer(eval_dataset=rows['test'], deepspeed='zero3.json', vllm_mode='server')"
    made = translated(
        tmp_path, "more.py", TRL_GRPO.replace('vllm_mode="colocate",', "") + f"rows = rows.map(as_chat)\n{trainer}"
    )
    for key, shown in (
        ("data.template", "dataset_map = rows.map(as_chat)"),
        ("eval.data", "eval_dataset = rows['test']"),
        ("actor.engine.kind", 'deepspeed = "zero3.json"'),
        ("run.colocate", 'vllm_mode = "server"'),
    ):
        assert made.notes[key][0].startswith(shown)


def test_numbers_in_quotes_are_numbers_and_infinite_ones_a_persons(tmp_path: Path) -> None:
    made = translated(tmp_path, "a.yaml", 'num_generations: "8"\nmax_steps: .inf\nlearning_rate: .nan')
    assert made.values["algorithm.group_size"] == 8
    assert any(note.startswith("max_steps = inf: ") for note in made.notes["run.steps"])
    assert "actor.optimizer.lr" not in made.values
    made = translated(tmp_path, "a.py", "GRPOConfig(num_generations=..., beta=1j, reward_weights=[b'x'], epsilon=0.1)")
    assert "num_generations = ...: could not be translated" in made.notes["algorithm.group_size"]
    made = translated(tmp_path, "a.py", "GRPOConfig(epsilon=0.1, model_init_kwargs=dict(dtype=torch.bfloat16))")
    assert made.translated["model_init_kwargs.dtype"][1] == 'actor.dtype = "bf16"'
    assert "algorithm.kl_coef" in translated(tmp_path, "b.yaml", "num_generations: 8\nbeta: !!binary aGk=").notes


def test_rewards_in_their_place_of_the_call_have_their_weights(tmp_path: Path) -> None:
    script = 'GRPOTrainer("m", [right, short], GRPOConfig(reward_weights=[1.0, 0.5], num_generations=8))'
    terms = translated(tmp_path, "a.py", script).values["reward.terms"]
    assert terms == [
        {"kind": "function", "path": "rewards.py:right", "weight": 1.0},
        {"kind": "function", "path": "rewards.py:short", "weight": 0.5},
    ]
    assert translated(tmp_path, "a.yaml", "num_generations: 8\nreward_weights: [1.0, 0.5]").values


def test_what_a_spec_refuses_is_left_out_with_the_reason(tmp_path: Path) -> None:
    made = translated(tmp_path, "dpo.yaml", TRL_DPO.replace("lora_r: 32", "lora_r: 0"))
    assert "actor.lora.rank" not in made.values
    assert made.dropped["lora_r"] == ("lora_r = 0", "actor.lora.rank: the whole model learns")
    assert made.notes["actor.lora.rank"] == ["left out: rank = 0: the whole model learns"]


CISPO = {"algorithm.clip_high": 4.0, "algorithm.clip_low": None}
MASKED = {"algorithm.correction.mode": "mask", "algorithm.correction.low": 1e-9}
CLIPPED = {"algorithm.correction.mode": "clip", "algorithm.correction.low": 0.1}
ALL_LINEAR = {"actor.lora.targets": ["all-linear"]}
CONSTANT = "token-sum-constant"
TAUGHT = {"algorithm.kind": "distill", "ref.model": "t", "algorithm.scale": None}
NOTHING_MASKED = dict.fromkeys(MASKED)
VLLM = "use_vllm=True, vllm_importance_sampling_mode='{}', vllm_importance_sampling_clip_max={}"
SEQUENCES = {"algorithm.kind": "gspo", "algorithm.clip_low": 0.2, "algorithm.loss_aggregation": "token-mean"}
PRIME_EVAL = "[orchestrator.eval]\ninterval = 5\ngroup_size = 4\nsampling = { top_p = 0.9, temperature = 0.5 }"
EVALUATED = {"eval.samples_per_prompt": 4, "eval.top_p": 0.9}
PRIME_SFT = "data = { seq_len = 128, batch_size = 64, micro_batch_size = 1 }\nscheduler = { type = 'cosine' }"
GRPO = "GRPOTrainer(model='m', reward_funcs={}, args=GRPOConfig(num_generations=8, {}), peft_config=LoraConfig({}))"
TWICE = "per_device_train_batch_size=8, gradient_accumulation_steps=8, steps_per_generation=4, max_steps=9"
SIZE = "rollout.tensor_model_parallel_size"
TP = {"rollout.engine.tensor_parallel": 2}
DECAY = {"actor.optimizer.schedule": "cosine", "actor.optimizer.min_lr_ratio": 0.5}
BF16 = {"actor.dtype": "bf16"}
MEGATRON = " ".join(f"a.{role}.megatron.tensor_model_parallel_size={size}" for role, size in (("actor", 4), ("ref", 2)))
MEGATRONS = {"actor.engine.kind": "megatron", "actor.engine.tensor_parallel": 4, "rollout.engine.tensor_parallel": None}
VERL = "actor_rollout_ref.rollout.n=8 data.train_batch_size=8 trainer.total_training_steps=5 trainer.project_name=p "


@pytest.mark.parametrize(
    ("name", "text", "values", "note"),
    [
        ("a.yaml", "max_length: 8\nmax_steps: -1\nwarmup_ratio: 0.1", {"run.steps": 100}, "num_train_epochs = 3"),
        ("a.yaml", "max_length: null\npacking: true", {"data.max_tokens": 2048}, "max_length is null: no limit there"),
        ("a.yaml", "max_length: 8\nmax_steps: 50\nwarmup_steps: 0.1", {"actor.optimizer.warmup_steps": 5}, ""),
        ("a.yaml", "max_length: 8\nsave_steps: 0.25", {"checkpoint.every": None}, "save_steps = 0.25 of all steps"),
        ("a.yaml", 'max_length: 8\neval_strategy: "no"\neval_steps: 5', {"eval.every": None}, ""),
        ("a.yaml", 'max_length: 8\neval_strategy: "no"\neval_dataset: b.jsonl', {"eval.data": None}, "is evaluated"),
        ("a.sh", f"verl {VERL} trainer.test_freq=-1 data.val_files=b.parquet", {"eval.every": None}, "is evaluated"),
        ("a.py", GRPO.format("f", TWICE, ""), {"data.prompts_per_step": 8, "run.steps": 9}, ""),
        ("a.yaml", "max_length: 8\nuse_peft: true", {"actor.lora.rank": 16, "actor.lora.alpha": 32}, ""),
        ("a.yaml", "max_length: 8\nuse_peft: false\nlora_r: 16", {"actor.lora.rank": None}, "the whole model learns"),
        ("a.py", GRPO.format("f", "delta=3.0", "r=16"), {"actor.lora.alpha": 8, "algorithm.dual_clip": 3.0}, ""),
        ("a.py", GRPO.format("f", "beta=0.1", ""), {"algorithm.kl_estimator": "k3-unbiased"}, ""),
        ("a.py", GRPO.format("[f, 'some/rm']", "", ""), {"actor.lora.rank": 8, "algorithm.group_size": 8}, ""),
        ("a.yaml", "max_length: 8\nuse_peft: true", {"actor.lora.targets": ["q_proj", "v_proj"]}, ""),
        ("a.yaml", "max_length: 8\nuse_peft: true\nlora_target_modules: all-linear", ALL_LINEAR, ""),
        ("a.py", GRPO.format("f", "", ""), {"actor.lora.targets": ["q_proj", "v_proj"]}, ""),
        ("a.sh", VERL + "m.lora_rank=0 m.lora_alpha=16", {"actor.lora.alpha": None}, "alpha = 16: the whole"),
        ("a.sh", VERL + "trainer.logger='[\"console\"]'", {"tracking": None}, ""),
        ("a.sh", VERL.replace("n=8", "n=1") + "a.adv_estimator=grpo", {"algorithm.group_size": 8}, "group_size = 1"),
        ("a.sh", VERL + "m.lr_warmup_steps=-1 m.ppo_mini_batch_size=2", {"actor.optimizer.warmup_steps": None}, ""),
        ("a.sh", VERL + "m.lr_warmup_steps_ratio=0.0", {"actor.optimizer.warmup_steps": 0}, ""),
        ("a.sh", VERL + "critic.lora.rank=0 critic.lora.alpha=8", {"critic.lora.alpha": None}, "the whole model"),
        ("a.sh", VERL + "a.model_dtype=fp32 global_profiler.save_path=p", {"actor.dtype": "bf16", "run.dir": None}, ""),
        ("a.sh", VERL + "a.use_kl_in_reward=true", {"algorithm.kl_estimator": "k1"}, ""),
        ("a.sh", VERL + "a.use_kl_in_reward=true m.kl_loss_type=k3", {"algorithm.kl_estimator": "k1"}, ""),
        ("a.sh", VERL + "m.use_kl_loss=true m.kl_loss_type=mse a.kl_penalty=kl", {"algorithm.kl_estimator": "k2"}, ""),
        ("a.sh", VERL + "r.rollout_is_threshold=3 r.rollout_is=null", {"algorithm.correction.high": None}, ""),
        ("a.sh", VERL + "r.rollout_is_threshold=3 r.rollout_is=token", {"algorithm.correction.high": 3}, ""),
        ("a.sh", VERL + "a.adv_estimator=rloo", {"algorithm.loss_aggregation": "token-mean"}, ""),
        ("a.sh", VERL + "m.loss_agg_mode=seq-mean-token-sum-norm", {"algorithm.loss_aggregation": CONSTANT}, ""),
        ("a.sh", VERL + "m.loss_agg_mode=token-mean m.loss_mode=gspo", {"algorithm.loss_aggregation": None}, ""),
        ("a.sh", VERL + "m.loss_mode=gspo", {"algorithm.clip_low": 0.2, "algorithm.clip_high": 0.2}, ""),
        ("a.sh", VERL + "m.loss_mode=gspo m.clip_ratio_low=3e-4", {"algorithm.clip_low": 3e-4}, ""),
        ("a.sh", VERL + "m.loss_mode=kl_cov", {"algorithm.covariance_share": 2e-4, "algorithm.clip_low": None}, ""),
        ("a.sh", VERL + MEGATRON, MEGATRONS, "tensor_parallel = 2: has no effect: algorithm.kl_coef is 0"),
        ("a.sh", VERL + "m.use_kl_loss=true m.kl_loss_type=k3+", {"algorithm.kl_estimator": "k3-straight-through"}, ""),
        ("a.sh", VERL + "a.adv_estimator=rloo_vectorized", {"algorithm.kind": "rloo"}, ""),
        ("a.sh", VERL + "data.val_files=t data.val_batch_size=1", {"eval.prompts": None}, "evaluates on all rows"),
        (
            "a.sh",
            VERL + "a.actor.optim.lr_decay_style=cosine a.actor.optim.lr=1e-5 a.actor.optim.min_lr=5e-6",
            DECAY,
            "",
        ),
        ("a.sh", VERL + "m.loss_mode=gpg a.adv_estimator=grpo", {"algorithm.kind": "grpo"}, 'loss_mode = "gpg"'),
        ("a.sh", VERL + "rollout.name=vllm reward_model.rollout.name=sglang", {"rollout.engine.kind": "vllm"}, ""),
        ("a.sh", f"reward_model.{SIZE}=4 {VERL} a.{SIZE}=2", {"rollout.processes": 4}, ""),
        ("a.sh", VERL + "rollout.data_parallel_size=1", {"rollout.processes": 8}, ""),
        (
            "a.sh",
            VERL + "distillation.n_gpus_per_node=4 distillation.enabled=True",
            {"actor.processes": 8},
            '"distill"',
        ),
        ("a.sh", VERL + "m.model.lora_rank=8", {"actor.lora.alpha": 16}, ""),
        (
            "a.sh",
            VERL + "a.adv_estimator=grpo f.filter_groups.enable=true f.max_num_gen_batches=10",
            {"algorithm.max_refills": 9},
            "",
        ),
        ("a.sh", VERL + "p.mixed_precision.param_dtype=bf16 p.mixed_precision.buffer_dtype=fp32", BF16, ""),
        (
            "a.sh",
            VERL + "rollout.name=vllm rollout.tensor_model_parallel_size=2 c.turbo_config.x.tensor_parallel_size=1",
            TP,
            "",
        ),
        ("a.sh", VERL + "a.bypass_mode=true a.rollout_is=token", {"algorithm.anchor": None}, '"sampler", without'),
        ("a.yaml", "max_length: 8\nmodel_revision: it-SFT\nmodel_name_or_path: m", {}, 'model_revision = "it-SFT"'),
        ("a.yaml", 'max_length: 8\nsave_strategy: "no"', {"checkpoint.every": None}, 'save_strategy = "no"'),
        ("a.yaml", "max_length: 8\nbf16: true\ntorch_dtype: float32", BF16, ""),
        (
            "a.sh",
            VERL.replace("n=8", "n=4") + "a.adv_estimator=gpg",
            {"algorithm.group_size": 4},
            'adv_estimator = "gpg"',
        ),
        ("a.sh", VERL + "trainer.n_gpus_per_node=$N", {"actor.devices": None}, 'n_gpus_per_node = "$N"'),
        (
            "a.py",
            GRPO.format("f", "lr_scheduler_type='cosine_with_min_lr', lr_scheduler_kwargs={'min_lr_rate': 0.1}", ""),
            {"actor.optimizer.min_lr_ratio": 0.1},
            "",
        ),
        (
            "a.py",
            GRPO.format("f", "model_init_kwargs=dict(attn_implementation='sdpa', dtype=D)", ""),
            {"model.attn_implementation": "sdpa"},
            "",
        ),
        ("a.sh", VERL + "data.max_response_length=9000", {"actor.micro_batch_tokens": 9512}, ""),
        (
            "a.py",
            GRPO.format("f", "max_steps=5", ""),
            {"data.max_response_tokens": 512, "algorithm.correction.mode": None},
            "",
        ),
        ("a.py", GRPO.format("f", "loss_type='cispo', epsilon=0.2, epsilon_high=5.0", ""), CISPO, ""),
        ("a.py", GRPO.format("f", "use_vllm=True", ""), {**MASKED, "algorithm.correction.high": 3.0}, ""),
        (
            "a.py",
            GRPO.format("f", VLLM.format("sequence_mask", 4.0), ""),
            {**MASKED, "algorithm.correction.high": 4.0},
            "",
        ),
        (
            "a.py",
            GRPO.format("f", VLLM.format("token_truncate", "4.0, vllm_importance_sampling_clip_min=0.1"), ""),
            CLIPPED,
            "",
        ),
        ("a.py", GRPO.format("f", "use_vllm=True, vllm_importance_sampling_correction=False", ""), NOTHING_MASKED, ""),
        ("a.py", GRPO.format("f", "importance_sampling_level='sequence'", ""), SEQUENCES, ""),
        ("a.py", GRPO.format("f", "entropy_coef=0.01", ""), {"algorithm.entropy_coef": 0.01}, ""),
        ("a.py", "RLOOTrainer(args=RLOOConfig(beta=0.1))", {"algorithm.kl_in": "reward", "algorithm.kl_coef": 0.1}, ""),
        ("a.py", "KTOTrainer(args=KTOConfig(beta=1))", {"data.overlong": "truncate"}, ""),
        (
            "a.py",
            "SFTTrainer(args=SFTConfig(packing=True))",
            {"data.learn_from": None},
            "TRL learns every token of conversations",
        ),
        ("rl.toml", PRIME_RL.replace(', name = "first"', ""), {"run.name": "rl", "run.steps": 100}, ""),
        ("a.toml", PRIME_NODES.replace("nodes = 2", "nodes = 1"), {"cluster.kind": "ray"}, ""),
        ("a.toml", PRIME_RL + "[orchestrator.algo]\ntype = 'opd'\nteacher = { name = 't' }", TAUGHT, ""),
        ("a.toml", PRIME_RL, {"algorithm.scale": "none", "rollout.in_flight": True}, ""),
        ("a.toml", PRIME_RL.replace("num_", "n_"), {"actor.devices": [0], "rollout.devices": [1]}, ""),
        ("a.toml", PRIME_RL + PRIME_EVAL, {**EVALUATED, "algorithm.group_size": 16, "rollout.top_p": None}, ""),
        ("a.toml", PRIME_RL.replace("lr = 3e-6", "type = 'muon'"), {"actor.optimizer.lr": None}, 'optim.type = "muon"'),
        ("a.toml", PRIME_RL.replace("lr =", "betas2 = 0.95, lr ="), {"actor.optimizer.betas": [0.9, 0.95]}, ""),
        ("a.toml", PRIME_NODES, {"data.prompts_per_step": 64, "algorithm.group_size": 8}, "own loss does not clip"),
        ("a.yaml", "packing: true\nmax_length: 8", {}, "with packing TRL counts packed sequences"),
        ("a.toml", PRIME_SFT, {"data.rows_per_step": 64, "actor.optimizer.warmup_steps": 10}, "packed sequences"),
        ("a.sh", VERL + 'data.train_files=\'["a","b"]\'', {"data.train": "a"}, 'the first of ["a", "b"]'),
    ],
)
def test_what_would_be_trained_otherwise_and_not_said(
    tmp_path: Path, name: str, text: str, values: dict[str, Any], note: str
) -> None:
    made = translated(tmp_path, name, text)
    assert {key: made.values.get(key) for key in values} == values
    assert note in " ".join(note for notes in made.notes.values() for note in notes)
    (tmp_path / "spec.toml").write_text(as_toml(made))
    load_spec(tmp_path / "spec.toml")


def test_comments_of_hostile_values_stay_comments(tmp_path: Path) -> None:
    made = translated(tmp_path, "dpo.yaml", TRL_DPO + 'optim: "x\\n[run]\\nname = 1\\e]0;"\n')
    lines = as_toml(made).splitlines()
    assert len([line for line in lines if line == "[run]"]) == 1
    assert not [line for line in lines if "\x1b" in line]


def test_the_table_sets_keys_that_exist() -> None:
    known = frozenset().union(*map(keys_of, RECIPES.values()))
    assert translation_table("needed").keys() <= known
    for source in translation_table("sources").values():
        notes = source.get("notes", {})
        named = re.findall(r"\b(?:actor|reward_model)\.\w+", " ".join(notes.values()))
        brought = {key for values in source.get("with", {}).values() for key in values}
        assert {*source["set"], *notes, *named, *source.get("unset", {}), *brought} <= keys_of(
            RECIPES[source["recipe"]]
        )


def test_a_default_of_theirs_gives_way_to_what_its_older_name_was_given() -> None:
    assert translate("SFTConfig", {"max_seq_length": 2048}, "x").values["data.max_tokens"] == 2048
