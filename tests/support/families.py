"""Model families in their own module layouts, at a few thousand parameters, and which engines they are tried with.

Needs no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

TRAINED = ("ddp", "fsdp2", "zero2 bf16", "zero3")
"""Cases of `sharded_worker.CASES` that every family is trained with."""
EXPORTED = ("fsdp2",)
"""Those whose checkpoints are exported: all engines write the same."""

VOCAB = 23
LLAMA_LIKE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,  # far from uniform, so that differences show
}
# Two layers, which have experts beside them, in its one block.
LONGCAT: dict[str, Any] = {
    **{"model_type": "longcat_flash", "vocab_size": VOCAB, "hidden_size": 32, "num_layers": 1, "head_dim": 4},
    **{"num_attention_heads": 4, "kv_lora_rank": 8, "q_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8},
    **{"v_head_dim": 8, "ffn_hidden_size": 48, "expert_ffn_hidden_size": 16, "n_routed_experts": 4},
    **{"zero_expert_num": 2, "moe_topk": 2, "initializer_range": 0.2},
}
_WINDOWS: dict[str, Any] = {
    **LLAMA_LIKE,
    "head_dim": 8,
    "sliding_window": 4,
    "layer_types": ["sliding_attention", "full_attention"],
    "tie_word_embeddings": True,
}
_DELTA_NETS: dict[str, Any] = {
    **LLAMA_LIKE,
    "initializer_range": 0.05,  # wider, and a state grows so that in bf16 gradients are noise
    "head_dim": 8,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
# Layers of one with experts; in two families they lie in other modules.
_DELTA_NETS_AND_EXPERTS: dict[str, Any] = {
    **_DELTA_NETS,
    "layer_types": ["linear_attention", "full_attention"],
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
_MAMBA: dict[str, Any] = {
    "mamba_n_heads": 4,
    "mamba_d_head": 8,
    "mamba_n_groups": 1,
    "mamba_d_state": 8,
    "mamba_chunk_size": 16,
}


@dataclass(frozen=True)
class Family:
    """`config`: of the tiny model. `seed`: of its weights; of a mixture one with which no token is nearly undecided
    between two experts: in bf16 rounding would decide, in one engine so, in another otherwise. `layout`: what of its
    modules is its own. `megatron`: the case of `sharded_worker.MEGATRON` that it is read with; "": refused. `vllm`: how
    it was tried there."""

    models: str
    layout: str
    config: dict[str, Any]
    seed: int = 5
    megatron: str = ""
    vllm: str = "not tried"


FAMILIES = {
    "qwen2": Family(
        "Qwen2, Qwen2.5",
        "biases of queries, keys and values",
        {**LLAMA_LIKE, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": True},
        megatron="4:tensor pipeline",
        vllm="fp32",
    ),
    "qwen3": Family(
        "Qwen3",
        "norms of queries and keys; heads × head dim above the hidden size",
        {
            **LLAMA_LIKE,
            "model_type": "qwen3",
            "architectures": ["Qwen3ForCausalLM"],
            "head_dim": 16,
            "tie_word_embeddings": True,
        },
        megatron="4:tensor pipeline",
        vllm="fp32",
    ),
    "llama": Family(
        "Llama 2, 3",
        "an untied head; scaled rotary embeddings",
        {
            **LLAMA_LIKE,
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500.0,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        },
        megatron="4:tensor pipeline",
    ),
    "gemma2": Family(
        "Gemma 2",
        "norms around each block; capped scores and logits; windows in every second layer",
        {
            **_WINDOWS,
            "model_type": "gemma2",
            "architectures": ["Gemma2ForCausalLM"],
            "final_logit_softcapping": 2.0,
            "attn_logit_softcapping": 5.0,
        },
    ),
    "gemma3_text": Family(
        "Gemma 3 (text)",
        "norms around each block, of queries and of keys; a rotary embedding for each kind of layer",
        {**_WINDOWS, "model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"]},
    ),
    "mistral": Family(
        "Mistral",
        "a sliding window",
        {**LLAMA_LIKE, "model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 4},
    ),
    "phi3": Family(
        "Phi 3, Phi 4",
        "queries, keys and values in one matrix, gate and up in another; LongRoPE on a part of each head",
        {
            **LLAMA_LIKE,
            "model_type": "phi3",
            "architectures": ["Phi3ForCausalLM"],
            "partial_rotary_factor": 0.5,
            "original_max_position_embeddings": 100,
            "rope_scaling": {"type": "longrope", "short_factor": [1.0, 1.5], "long_factor": [2.0, 3.0]},
            "pad_token_id": 0,
            "eos_token_id": 2,
        },
        vllm="fp32",
    ),
    "qwen3_moe": Family(
        "Qwen3 MoE (30B-A3B, …)",
        "mixture of experts (tried with four, two for each token); a dense layer below them",
        {
            **LLAMA_LIKE,
            "model_type": "qwen3_moe",
            "architectures": ["Qwen3MoeForCausalLM"],
            "head_dim": 16,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
            "mlp_only_layers": [0],
        },
        megatron="4:experts, tensor pipeline",
        vllm="refused on the CPU, not tried on GPUs",
    ),
    "mixtral": Family(
        "Mixtral",
        "mixture of experts in every layer (tried with four, two for each token); files with names of their own",
        {
            **LLAMA_LIKE,
            "model_type": "mixtral",
            "architectures": ["MixtralForCausalLM"],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "router_jitter_noise": 0.01,  # which no engine adds
            "output_router_logits": True,  # as fine-tuning with a balancing loss leaves it, which no engine computes
        },
        seed=47,
        megatron="4:experts, tensor pipeline",
        vllm="refused on the CPU, not tried on GPUs",
    ),
    "qwen3_5_text": Family(
        "Qwen3.5 (text)",
        "gated delta nets, with a state and a convolution, between layers of gated attention",
        {
            **_DELTA_NETS,
            "model_type": "qwen3_5_text",
            "architectures": ["Qwen3_5ForCausalLM"],
            "num_hidden_layers": 3,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        },
    ),
    "qwen3_next": Family(
        "Qwen3-Next",
        "gated delta nets; experts, and one that every token visits",
        {**_DELTA_NETS_AND_EXPERTS, "model_type": "qwen3_next", "architectures": ["Qwen3NextForCausalLM"]},
    ),
    "falcon_h1": Family(
        "Falcon-H1",
        "attention and Mamba 2 side by side in every layer",
        {
            **LLAMA_LIKE,
            **_MAMBA,
            "model_type": "falcon_h1",
            "architectures": ["FalconH1ForCausalLM"],
            "head_dim": 8,
            "mamba_d_ssm": 32,
            # Published ones have all of these.
            **{"embedding_multiplier": 1.5, "lm_head_multiplier": 0.5, "key_multiplier": 0.7},
            **{"attention_out_multiplier": 0.8, "ssm_in_multiplier": 1.2, "ssm_out_multiplier": 0.9},
            **{"mlp_multipliers": [0.9, 1.1], "ssm_multipliers": [0.9, 1.1, 1.2, 0.8, 0.7]},
        },
    ),
    "granitemoehybrid": Family(
        "Granite 4",
        "Mamba 2 between layers of attention",
        {
            **LLAMA_LIKE,
            **_MAMBA,
            "model_type": "granitemoehybrid",
            "architectures": ["GraniteMoeHybridForCausalLM"],
            "num_hidden_layers": 3,
            "shared_intermediate_size": 48,
            "num_local_experts": 0,
            "layer_types": ["mamba", "attention", "mamba"],
            "mamba_n_heads": 8,
        },
        vllm="fp32",
    ),
    "qwen3_5_moe_text": Family(
        "Qwen3.5 MoE (text)",
        "gated delta nets; experts, and one that every token visits; heads of attention with a gate",
        {**_DELTA_NETS_AND_EXPERTS, "model_type": "qwen3_5_moe_text", "architectures": ["Qwen3_5MoeForCausalLM"]},
    ),
    "nemotron_h": Family(
        "Nemotron-H",
        "layers of one block each: Mamba 2, attention, or experts that are chosen with a bias",
        {
            **LLAMA_LIKE,
            "model_type": "nemotron_h",
            "architectures": ["NemotronHForCausalLM"],
            "head_dim": 8,
            "num_hidden_layers": 4,
            "layers_block_type": ["mamba", "attention", "mamba", "moe"],
            "ssm_state_size": 8,
            "mamba_num_heads": 4,
            "mamba_head_dim": 8,
            "n_groups": 1,
            "mamba_n_groups": 1,
            "chunk_size": 16,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "moe_shared_expert_intermediate_size": 16,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
    "gpt_oss": Family(
        "gpt-oss",
        "a learned sink in every softmax; windows in every second layer; experts with biases",
        {
            **_WINDOWS,
            "model_type": "gpt_oss",
            "architectures": ["GptOssForCausalLM"],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "tie_word_embeddings": False,
        },
    ),
    "deepseek_v3": Family(
        "DeepSeek V3, R1, Kimi K2",
        "keys and values in latent form; experts in groups, chosen with a bias that does not learn",
        {
            **LLAMA_LIKE,
            "model_type": "deepseek_v3",
            "architectures": ["DeepseekV3ForCausalLM"],
            "num_key_value_heads": 4,
            "kv_lora_rank": 8,
            "q_lora_rank": 16,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "n_shared_experts": 1,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
        },
    ),
    "llama4_text": Family(
        "Llama 4 (text)",
        "attention in chunks, and layers without positions; experts, and one that every token visits",
        {
            **LLAMA_LIKE,
            "model_type": "llama4_text",
            "architectures": ["Llama4ForCausalLM"],
            "head_dim": 8,
            "intermediate_size_mlp": 48,
            "num_local_experts": 2,
            "interleave_moe_layer_step": 2,
            "attention_chunk_size": 4,
            "layer_types": ["chunked_attention", "full_attention"],
            "no_rope_layers": [1, 0],
            **{"floor_scale": 4, "attn_scale": 0.5},  # its queries grow every 4 tokens, published ones every 8192
        },
    ),
    "lfm2": Family(
        "LFM2",
        "short convolutions between layers of attention",
        {
            **LLAMA_LIKE,
            "model_type": "lfm2",
            "architectures": ["Lfm2ForCausalLM"],
            "num_hidden_layers": 3,
            "layer_types": ["conv", "full_attention", "conv"],
        },
    ),
}

# Folders that hold more than a language model, by `model_type`.
_TOWER = {"hidden_size": 16, "intermediate_size": 16, "patch_size": 4}
_OF_LAYERS = {**_TOWER, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16}
COMPOSITES: dict[str, dict[str, Any]] = {
    "qwen3_5": {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "tie_word_embeddings": False,
        **{"image_token_id": 20, "video_token_id": 21, "vision_start_token_id": 18, "vision_end_token_id": 19},
        "text_config": FAMILIES["qwen3_5_text"].config,
        "vision_config": {**_TOWER, "depth": 1, "num_heads": 2, "out_hidden_size": 32, "num_position_embeddings": 16},
    },
    "gemma3": {
        "architectures": ["Gemma3ForConditionalGeneration"],
        **{"mm_tokens_per_image": 4, "boi_token_index": 20, "eoi_token_index": 21, "image_token_index": 22},
        "text_config": FAMILIES["gemma3_text"].config,
        "vision_config": {**_OF_LAYERS, "model_type": "siglip_vision_model"},
    },
    "mistral3": {
        "architectures": ["Mistral3ForConditionalGeneration"],
        "image_token_index": 20,
        "text_config": FAMILIES["mistral"].config,
        "vision_config": {**_OF_LAYERS, "model_type": "pixtral", "head_dim": 8},
    },
    "idefics3": {
        "architectures": ["Idefics3ForConditionalGeneration"],
        **{"image_token_id": 20, "scale_factor": 2, "pad_token_id": 0},
        "text_config": {**FAMILIES["llama"].config, "pad_token_id": 0},
        "vision_config": {**_OF_LAYERS, "model_type": "idefics3_vision"},
    },
}
