"""Keys as other tools call them, collected from their published configurations: what a person is told of each."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from specs.load.keys import homes, walk
from specs.load.load import parse
from specs.load.synonyms import ABSENT, NOT_YET, NOT_YET_KINDS, SYNONYMS
from specs.load.unknown_keys import unknown_key

NAMES = {
    "trl": """
        cast_lm_head_to_fp32 num_generations_eval max_completion_length ds3_gather_for_generation
        shuffle_dataset generation_batch_size steps_per_generation min_p generation_kwargs
        chat_template_kwargs repetition_penalty use_transformers_paged cache_implementation use_vllm
        vllm_mode vllm_model_impl vllm_structured_outputs_regex vllm_server_base_url vllm_server_host
        vllm_server_port vllm_server_timeout vllm_group_port vllm_gpu_memory_utilization
        vllm_max_model_length vllm_tensor_parallel_size vllm_enable_sleep_mode beta num_iterations epsilon
        delta epsilon_high sapo_temperature_neg sapo_temperature_pos importance_sampling_level
        reward_weights multi_objective_aggregation scale_rewards loss_type mask_truncated_completions
        sync_ref_model ref_model_mixup_alpha ref_model_sync_steps top_entropy_quantile
        max_tool_calling_iterations vllm_importance_sampling_correction vllm_importance_sampling_mode
        vllm_importance_sampling_cap off_policy_mask_threshold use_bias_correction_kl log_completions
        num_completions_to_print log_unique_prompts log_completions_hub_repo model_init_kwargs
        disable_dropout remove_unused_columns num_generations learning_rate gradient_checkpointing
        per_device_train_batch_size gradient_accumulation_steps num_train_epochs max_steps warmup_ratio
        lr_scheduler_type weight_decay max_grad_norm save_steps save_total_limit eval_steps report_to
        run_name output_dir bf16 fp16 tf32 seed dataloader_num_workers torch_compile push_to_hub
        hub_private_repo optim adafactor label_smoothing_factor auto_find_batch_size
        average_tokens_across_devices neftune_noise_alpha ddp_find_unused_parameters num_ppo_epochs
        whiten_rewards kl_coef kl_estimator cliprange vf_coef cliprange_value gamma lam missing_eos_penalty
        response_length stop_token local_rollout_forward_batch_size num_mini_batches total_episodes
        reward_model_path sft_model_path exp_name
    """,
    "verl": """
        train_files val_files prompt_key reward_fn_key max_prompt_length max_response_length
        train_batch_size val_batch_size return_raw_input_ids return_raw_chat shuffle filter_overlong_prompts
        filter_overlong_prompts_workers truncation image_key video_key custom_cls hybrid_engine external_lib
        override_config enable_gradient_checkpointing use_remove_padding use_liger return_last_hidden_state
        use_fused_loss strategy ppo_mini_batch_size ppo_micro_batch_size ppo_micro_batch_size_per_gpu
        use_dynamic_bsz ppo_max_token_len_per_gpu grad_clip clip_ratio clip_ratio_low clip_ratio_high
        clip_ratio_c loss_agg_mode entropy_coeff use_kl_loss use_torch_compile kl_loss_coef kl_loss_type
        ppo_epochs ulysses_sequence_parallel_size contents lr_warmup_steps lr_warmup_steps_ratio
        min_lr_ratio warmup_style total_training_steps weight_decay fsdp_config wrap_policy min_num_params
        transformer_layer_cls_to_wrap param_offload optimizer_offload offload_policy reshard_after_forward
        fsdp_size log_prob_micro_batch_size log_prob_micro_batch_size_per_gpu log_prob_use_dynamic_bsz
        log_prob_max_token_len_per_gpu mode chat_scheduler use_fire_sampling prompt_length response_length
        gpu_memory_utilization ignore_eos enforce_eager free_cache_engine load_format
        tensor_model_parallel_size max_num_batched_tokens max_model_len max_num_seqs disable_log_stats
        enable_chunked_prefill do_sample n engine_kwargs swap_space val_kwargs multi_turn max_turns
        tool_config_path rollout_n tokenizer_path forward_micro_batch_size forward_micro_batch_size_per_gpu
        forward_max_token_len_per_gpu cliprange_value input_tokenizer micro_batch_size
        micro_batch_size_per_gpu max_length reward_manager launch_reward_fn_async custom_reward_function
        gamma lam adv_estimator norm_adv_by_std_in_grpo use_kl_in_reward kl_penalty kl_ctrl horizon
        target_kl balance_batch total_epochs project_name experiment_name logger log_val_generations
        rollout_data_dir validation_data_dir nnodes n_gpus_per_node save_freq resume_mode resume_from_path
        val_before_train test_freq critic_warmup default_hdfs_dir del_local_ckpt_after_load
        default_local_dir max_actor_ckpt_to_keep max_critic_ckpt_to_keep ray_wait_register_center_timeout
        num_cpus agent_loop num_workers esi_redundant_time
    """,
    "openrlhf": """
        ref_num_nodes ref_num_gpus_per_node reward_num_nodes reward_num_gpus_per_node colocate_actor_ref
        actor_num_nodes actor_num_gpus_per_node critic_num_nodes critic_num_gpus_per_node
        colocate_critic_reward colocate_all_models vllm_num_engines vllm_sync_backend vllm_sync_with_ray
        enable_prefix_caching enforce_eager vllm_enable_sleep enable_vllm_is_correction
        vllm_is_truncated_threshold async_train async_queue_size logging_steps ckpt_path save_hf_ckpt
        disable_ds_ckpt max_ckpt_num max_ckpt_mem load_checkpoint use_ds_universal_ckpt local_rank
        zero_stage deepcompile enable_ema ema_beta zpg adam_offload actor_init_on_gpu attn_implementation
        use_liger_kernel grad_accum_dtype overlap_comm gradient_checkpointing_use_reentrant
        disable_fast_tokenizer deepspeed_enable_sleep ds_tensor_parallel_size packing_samples
        use_dynamic_batch rollout_max_tokens_per_gpu train_max_tokens_per_gpu load_in_4bit lora_rank
        lora_alpha target_modules lora_dropout save_path num_episodes rollout_batch_size
        vllm_generate_batch_size rollout_tasks_per_gpu micro_rollout_batch_size max_epochs prompt_max_len
        generate_max_len max_len max_samples max_norm l2 ptx_coef eps_clip eps_clip_low_high dual_clip
        value_clip lambd micro_train_batch_size normalize_reward full_determinism freezing_actor_steps
        n_samples_per_prompt save_value_network actor_learning_rate critic_learning_rate lr_warmup_ratio
        lr_scheduler kl_target kl_horizon init_kl_coef policy_loss_type aux_loss_coef entropy_loss_coef
        adam_betas reward_clip_range advantage_estimator no_advantage_std_norm overlong_buffer_len
        overlong_penalty_factor ring_attn_size ring_head_stride pretrain reward_pretrain remote_rm_url
        critic_pretrain value_head_prefix ref_reward_offload agent_func_path prompt_data prompt_data_probs
        prompt_split eval_dataset eval_split eval_temperature eval_n_samples_per_prompt input_key label_key
        input_template apply_chat_template use_wandb wandb_org wandb_group wandb_project wandb_run_name
        dynamic_filtering dynamic_filtering_reward_range use_tensorboard perf use_ms
    """,
    "slime": """
        rollout_function_path num_rollout rollout_num_gpus rollout_num_gpus_per_engine hf_checkpoint
        ref_load megatron_to_hf_mode update_weight_buffer_size rollout_max_response_len rollout_temperature
        rollout_top_p rollout_stop over_sampling_batch_size dynamic_sampling_filter_path partial_rollout
        custom_generate_function_path custom_rm_path rm_type group_rm use_tis tis_clip
        n_samples_per_eval_prompt eval_prompt_data eval_max_response_len global_batch_size
        use_dynamic_batch_size max_tokens_per_gpu calculate_per_token_loss use_rollout_logprobs
        keep_old_actor offload_train offload_rollout debug_rollout_only debug_train_only
        sglang_mem_fraction_static sglang_server_concurrency use_fault_tolerance num_steps_per_rollout
        apply_chat_template_kwargs use_slime_router expert_model_parallel_size pipeline_model_parallel_size
        context_parallel_size recompute_granularity recompute_method
    """,
    "nemo-rl": """
        num_prompts_per_step num_generations_per_prompt max_rollout_turns max_num_steps normalize_rewards
        use_leave_one_out_baseline val_period val_at_start max_val_samples overlong_filtering
        use_dynamic_sampling reward_shaping reward_scaling reference_policy_kl_penalty
        reference_policy_kl_type ratio_clip_min ratio_clip_max ratio_clip_c use_on_policy_kl_approximation
        use_importance_sampling_correction token_level_loss train_global_batch_size train_micro_batch_size
        logprob_batch_size max_total_sequence_length dtensor_cfg megatron_cfg sequence_packing
        dynamic_batching make_sequence_length_divisible_by async_engine kv_cache_dtype colocated
        stop_token_ids num_val_samples_to_print checkpoint_must_save_by keep_top_k higher_is_better
        metric_name cluster_config gpus_per_node num_nodes truncated_importance_sampling_ratio
        force_on_policy_ratio
    """,
    "prime-rl": """
        rollouts_per_example max_async_level token_mask_high token_mask_low sequence_mask_low adv_tau
        teacher_tau oversampling_factor max_off_policy_steps env_workers online_difficulty_filtering
        easy_threshold hard_threshold buffer length_penalty fp8 optimization_dtype reduce_dtype
        ac_offloading ep ep_comm_backend cp muon gc_interval bench dump_config num_infer_gpus
        weight_broadcast heartbeat matmul_precision
    """,
}
SECTIONS = ("run", "data", "algorithm", "actor", "rollout", "eval")


@pytest.mark.parametrize("tool", NAMES)
def test_every_key_of_another_tool_has_an_answer(tool: str) -> None:
    """Ours, what rlctl does instead, or that it is not there yet; never a key that merely reads alike."""
    guessed = []
    for name in NAMES[tool].split():
        if name in homes():
            continue
        assert name in SYNONYMS or name in ABSENT or name in NOT_YET, (
            f"{name}: say in specs/load/synonyms.py what it is"
        )
        for section in SECTIONS:
            hint = unknown_key((section, name), {section: {name: 1}}).hint
            last = SYNONYMS.get(f"{section}.{name}", SYNONYMS.get(name, "")).rpartition(".")[2]
            if not (hint == ABSENT.get(name) or "not in rlctl yet" in hint or (last and f"{last}`" in hint)):
                guessed.append((section, name, hint))
    assert not guessed


def test_each_name_has_one_answer_and_each_answer_is_a_key() -> None:
    keys = {key for key, _ in walk()}
    assert {name: key for name, key in SYNONYMS.items() if key not in keys} == {}
    assert not NOT_YET & SYNONYMS.keys()
    assert not NOT_YET & ABSENT.keys()


@pytest.mark.parametrize("kind", sorted(NOT_YET_KINDS))
def test_a_kind_that_is_not_there_yet_is_not_taken_for_another(kind: str) -> None:
    raw = {"schema": 1, "run": {"name": "x", "steps": 1}, "algorithm": {"kind": kind}}
    (problem,) = [one for one in parse(raw, []).problems if one.key == "algorithm.kind"]
    assert problem.hint == f"{kind} is not in rlctl yet"


@pytest.mark.parametrize("page", ["trl", "verl"])
def test_the_page_for_who_comes_from_there_names_keys_that_exist(page: str) -> None:
    """Both columns: ours are keys of the schema, theirs get the same answer from check-config."""
    keys = {key for key, _ in walk()}
    text = (Path(__file__).resolve().parents[3] / "docs" / "coming-from.md").read_text()
    (section,) = re.findall(rf"^## From {page}$(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE | re.IGNORECASE)
    rows = re.findall(r"^\| `([^`]+)` \| `([^`]+)`", section, re.MULTILINE)
    assert len(rows) >= 20
    for theirs, ours in rows:
        assert ours in keys, ours
        name = theirs.rpartition(".")[2]
        assert SYNONYMS.get(name, ours).rpartition(".")[2] == ours.rpartition(".")[2] or name in homes(), theirs


# Keys in the other tool's own tables → the key that is named, or words of what is said.
WHOLE = {
    "actor_rollout_ref.model.path": "`model.path`",
    "actor_rollout_ref.actor.optim.lr": "`actor.optimizer.lr`",
    "actor_rollout_ref.actor.optim.lr_warmup_steps": "`actor.optimizer.warmup_steps`",
    "actor_rollout_ref.model.use_remove_padding": "always packed",
    "actor_rollout_ref.model.override_config": "config.json",
    "actor_rollout_ref.actor.ppo_mini_batch_size": "`algorithm.mini_batches_per_step`",
    "actor_rollout_ref.actor.fsdp_config.param_offload": "`actor.engine.offload`",
    "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size": "`actor.engine.pipeline_parallel`",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": "`ref.micro_batch_tokens`",
    "actor_rollout_ref.ref.fsdp_config.param_offload": "`ref.engine.offload`",
    "actor_rollout_ref.rollout.name": "`rollout.engine.kind`",
    "actor_rollout_ref.rollout.n": "`algorithm.group_size`",
    "actor_rollout_ref.rollout.gpu_memory_utilization": "`rollout.engine.gpu_memory_utilization`",
    "actor_rollout_ref.rollout.temperature": "`rollout.temperature`",
    "actor_rollout_ref.rollout.val_kwargs": "[eval]",
    "trainer.project_name": "`tracking.N.project`",
    "trainer.total_epochs": "`run.steps`",
    "trainer.n_gpus_per_node": "`actor.devices`",
    "trainer.resume_mode": "--resume",
    "algorithm.filter_groups.enable": "`algorithm.dynamic_sampling`",
    "algorithm.filter_groups.max_num_gen_batches": "`algorithm.max_refills`",
    "algorithm.kl_ctrl.kl_coef": "`algorithm.kl_coef`",
    "custom_reward_function.path": "`reward.terms.N.path`",
    "custom_reward_function.overlong_buffer.len": "`reward.terms.N.buffer_tokens`",
    "orchestrator.batch_size": "`data.prompts_per_step`",
    "trainer.optim.lr": "`actor.optimizer.lr`",
    "trainer.model.attn": "`model.attn_implementation`",
    "inference.vllm.tensor_parallel_size": "`rollout.engine.tensor_parallel`",
    "ckpt.interval": "`checkpoint.every`",
    "deployment.num_infer_nodes": "`rollout.nodes`",
    "wandb.project": "`tracking.N.project`",
    "log": "remove the section",
    "grpo.num_prompts_per_step": "`data.prompts_per_step`",
}


@pytest.mark.parametrize("theirs", WHOLE)
def test_a_key_in_another_tool_s_table_is_told_by_itself(theirs: str) -> None:
    raw = {"schema": 1, "run": {"name": "x", "steps": 1}, "algorithm": {"kind": "grpo"}}
    said = {
        one.key: one.hint for one in parse(raw, [f"{theirs}=" + ("1" if "." in theirs else "{ level = 1 }")]).problems
    }
    assert WHOLE[theirs] in said.get(theirs, ""), said


def test_every_key_of_another_tool_s_table_is_told() -> None:
    raw = {"actor_rollout_ref": {"actor": {"grad_clip": 1.0, "optim": {"lr": 1e-6}}, "rollout": {"n": 8}}}
    said = [one.key for one in parse(raw, []).problems]
    assert [key for key in said if key.startswith("actor_rollout_ref")] == [
        "actor_rollout_ref.actor.grad_clip",
        "actor_rollout_ref.actor.optim.lr",
        "actor_rollout_ref.rollout.n",
    ]
