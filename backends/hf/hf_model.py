"""Building Hugging Face causal language models, and reading back what was built."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    AutoConfig,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.initialization import no_init_weights

from backends.hf.adapter_names import base_name, is_adapter
from backends.hf.attention_choice import choose, functions_called, in_effect, refuse_a_swap, refuse_own_attention
from backends.hf.constant_parameters import constants_as_buffers
from backends.hf.language_model import KEY_MAPPING, language_model_config
from backends.hf.model_shape import check_positions
from backends.hf.recompute import recomputed_layers
from backends.hf.score_layer import (
    auto_class,
    backbone,
    has_score_layer,
    make_score_layer,
    score_names,
    wrong_score_layer,
)
from backends.hf.tokenizer import own_code_hint
from backends.packed import packed_attention, state_layers
from backends.weights.checksum import checksum_bytes, checksum_weights
from backends.weights.tensor_bytes import DTYPES, named_weights, tensor_bytes, wire_dtype
from specs.errors import ModelError
from specs.model_facts import LAYER_KINDS, model_facts, tokens_of_one_rope
from specs.wire.as_built import ModelBuilt
from specs.wire.model_flops import DecoderSize
from specs.wire.role_config import ModelConfig

# ── building ──────────────────────────────────────────────────────────────────────────────────────


def build_model(config: ModelConfig, *, load_weights: bool) -> PreTrainedModel:
    """The model on its device, in eval mode, without dropout.

    `load_weights` False leaves the weights unset: for a model that gets them by sync. Raises ModelError.
    """
    hf_config = read_config(config)
    decision = choose(config, hf_config)
    packed_attention.install()
    dtype = DTYPES[config.dtype]
    if load_weights and not config.from_scratch:
        model = _from_pretrained(config, hf_config, dtype, decision.implementation)
    else:
        model = _from_config(config, hf_config, dtype, decision.implementation, draw=load_weights)
    refuse_a_swap(model, decision)
    state_layers.install(model)
    packed_attention.tell_positions(model)
    cast(nn.Module, model).to(config.device)  # a `PreTrainedModel` wraps it in a way that no type checker can call
    model.eval()
    return model


def build_on_meta(config: ModelConfig) -> PreTrainedModel:
    """The model with parameters that have shape and dtype but no memory, and with its buffers on the device.

    In eval mode, without dropout. Raises ModelError.
    """
    model = build_without_memory(config)
    for module in model.modules():
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.to(config.device)
    return model


def build_without_memory(config: ModelConfig) -> PreTrainedModel:
    """Do the same as `build_on_meta`, with the buffers still on the host: the device need not be there. Raises
    ModelError."""
    hf_config = read_config(config)
    decision = choose(config, hf_config)
    packed_attention.install()
    with init_empty_weights(include_buffers=False):
        model = _from_config(config, hf_config, DTYPES[config.dtype], decision.implementation, draw=False)
    refuse_own_attention(model, decision)
    refuse_a_swap(model, decision)
    state_layers.install(model)
    packed_attention.tell_positions(model)
    facts = model_facts(model.config.to_dict())
    if facts is not None and facts.state_layers and not state_layers.has_state_layers(model):
        raise ModelError(
            f"{type(model).__name__} has layers that carry a state past transformers' cache of convolutions and "
            "recurrences, so sequences cannot be packed",
            hint="name a causal language model of another family",
        )
    model.tie_weights()  # moving to meta unties tied weights
    model.eval()
    return model


def import_code(config: ModelConfig) -> None:
    """The code of the model's family, where transformers has it. Raises ModelError as `read_config`."""
    mapping = MODEL_FOR_CAUSAL_LM_MAPPING if config.head == "lm" else MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
    mapping.get(type(read_config(config)), None)


def read_config(config: ModelConfig) -> PretrainedConfig:
    """Return the model's `config.json`, or its part for the language model, without dropout and balancing of experts.

    Raises ModelError when it is missing or unfit."""
    hf_config: PretrainedConfig
    try:
        hf_config = AutoConfig.from_pretrained(config.path, trust_remote_code=config.trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise _unusable(config, error) from None
    hf_config = language_model_config(hf_config, config.path)
    text = hf_config.get_text_config()
    _check_fits(config, text)
    for name, value in list(vars(text).items()):
        # Log-probs must not be random: sampler and trainer would never agree.
        if isinstance(value, float) and "drop" in name:  # of numbers, or of whole layers
            setattr(text, name, 0.0)
    if getattr(text, "output_router_logits", False):
        text.output_router_logits = False  # else each call computes a balancing loss, by a mask that a packed row lacks
    if config.head != "lm":
        hf_config.num_labels = 1
    return hf_config


def _check_fits(config: ModelConfig, text: PretrainedConfig) -> None:
    check_positions(config, text)
    _check_one_rope(config, text)
    unknown = set(getattr(text, "layer_types", None) or ()) - LAYER_KINDS
    if getattr(text, "use_bidirectional_attention", None) is True:  # PaliGemma's; Gemma 4 says "vision"
        unknown.add("bidirectional_attention")
    if unknown:
        raise ModelError(f"model {config.path}: layers of kind {', '.join(sorted(unknown))} are not supported")


def _check_one_rope(config: ModelConfig, text: PretrainedConfig) -> None:
    """Raises ModelError where a sequence may be longer than one set of rotary frequencies serves."""
    short = tokens_of_one_rope(text.to_dict())
    if 0 < short < config.max_sequence_tokens:
        raise ModelError(
            f"model {config.path} rotates positions otherwise beyond {short} tokens (longrope), for the whole call: "
            f"log-probs would depend on the micro-batch, and a sequence may have {config.max_sequence_tokens}",
            hint="lower data.max_prompt_tokens or data.max_response_tokens",
        )


def _from_pretrained(
    config: ModelConfig, hf_config: PretrainedConfig, dtype: torch.dtype, implementation: str
) -> PreTrainedModel:
    made_by = auto_class(config.head, hf_config, config.path)
    try:
        with constants_as_buffers():
            loaded = made_by.from_pretrained(
                config.path,
                config=hf_config,
                dtype=dtype,
                attn_implementation=implementation,
                trust_remote_code=config.trust_remote_code,
                output_loading_info=True,
                key_mapping=KEY_MAPPING,
                ignore_mismatched_sizes=config.head != "lm",  # said in our own words
            )
    except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
        raise _unusable(config, error) from None
    model, info = cast(tuple[PreTrainedModel, dict[str, Any]], loaded)  # because of `output_loading_info`
    # transformers fills a missing weight with random numbers and only warns.
    missing = sorted(set(info["missing_keys"]) - {*_new_head(config, model, info)})
    if missing:
        raise ModelError(
            f"model {config.path} lacks {len(missing)} weights of {type(model).__name__}, first {missing[0]}",
            hint="is it a causal language model, and are all its weight files there?",
        )
    for name, first in model.get_expanded_tied_weights_keys(all_submodels=True).items():
        if name not in model.all_tied_weights_keys:  # transformers unties what differs, and only warns
            raise differ_on_disk(config.path, first, name)
    return model


def differ_on_disk(path: str, first: str, other: str) -> ModelError:
    """Return the error for weights that are to be one."""
    return ModelError(
        f"model {path}: {first} and {other} are tied by config.json, but differ on disk",
        hint="set tie_word_embeddings to false in its config.json",
    )


def _new_head(config: ModelConfig, model: PreTrainedModel, info: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of a score layer that the files do not have. Raises ModelError for one of another width, or of a reward
    model."""
    for name, found, _ in info["mismatched_keys"]:
        if name in score_names(model):
            raise wrong_score_layer(config.path, name, found)
        raise ModelError(f"model {config.path}: {name} has shape {list(found)} on disk, config.json makes it another")
    new = tuple(name for name in score_names(model) if name in info["missing_keys"])
    if new:
        make_score_layer(config, model)
    return new


def _from_config(
    config: ModelConfig, hf_config: PretrainedConfig, dtype: torch.dtype, implementation: str, *, draw: bool
) -> PreTrainedModel:
    """Weights drawn from the seed on CPU in fp32 (the same in every process; a value head is of zeros), or left
    unset."""
    made_by = auto_class(config.head, hf_config, config.path)
    model: PreTrainedModel
    kwargs: dict[str, Any] = {
        "dtype": torch.float32,
        "attn_implementation": implementation,
        "trust_remote_code": config.trust_remote_code,
    }
    try:
        with torch.random.fork_rng(devices=[]), constants_as_buffers():
            torch.manual_seed(config.seed)
            if draw:
                model = made_by.from_config(hf_config, **kwargs)
                if has_score_layer(model):
                    make_score_layer(config, model)
            else:
                with no_init_weights():
                    model = made_by.from_config(hf_config, **kwargs)
                model.tie_weights()
    except (ValueError, KeyError, ImportError) as error:
        raise _unusable(config, error) from None
    cast_parameters(model, dtype)
    return model


def cast_parameters(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Cast parameters but not buffers: rotary frequencies in bf16 would put far positions in the wrong place."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    for module in model.modules():
        module_config = getattr(module, "config", None)
        if isinstance(module_config, PretrainedConfig):
            module_config.dtype = dtype


def _unusable(config: ModelConfig, error: BaseException) -> ModelError:
    """The error of transformers in one line, with a hint."""
    reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    if own := own_code_hint(error):
        hint = own
    elif isinstance(error, KeyError):
        reason = f"config.json names {reason}, which this transformers does not know"
        hint = "repair config.json, or give the role an interpreter with the transformers that the model needs"
    elif "attention implementation" in reason:
        hint = 'set attn_implementation = "eager" for this model'
    elif config.path.startswith((".", "/")) and not Path(config.path).is_dir():
        hint = "model.path names a folder that does not exist"
    else:
        hint = "model.path must be a folder with config.json, or the id of a model on the hub"
    return ModelError(f"model {config.path}: {reason}", hint=hint)


# ── reading back ──────────────────────────────────────────────────────────────────────────────────


def decoder_size(model: PreTrainedModel) -> DecoderSize | None:
    """Return the sizes that decide the model's arithmetic, where its config names them. Weights of its layers are the
    model's own: hybrids have several kinds."""
    size = DecoderSize.of(model.config.to_dict())
    if size is None:
        return None
    size = replace(size, layer_weights=_weights_met(model))
    return replace(size, head_weights=model.config.get_text_config().hidden_size) if has_score_layer(model) else size


def _weights_met(model: PreTrainedModel) -> int:
    """Count the elements of matrices that each token is multiplied with: of experts [n, out, in], those that it
    visits."""
    facts, count = model_facts(model.config.to_dict()), 0
    visited = facts.experts_per_token if facts else 0
    for module in backbone(model).modules():
        for name, parameter in module.named_parameters(recurse=False):
            shape = tuple(getattr(parameter, "ds_shape", parameter.shape))  # DeepSpeed's: whole, of a partitioned one
            if (
                len(shape) < 2
                or name.endswith("bias")
                or is_adapter(name)
                or isinstance(module, nn.Embedding | nn.Conv1d)
            ):
                continue
            count += prod(shape) if len(shape) == 2 else prod(shape[1:]) * visited
    return count


def describe(model: PreTrainedModel, config: ModelConfig, *, checksum: bool) -> ModelBuilt:
    """Describes the model, read back from it: adapters count as trainable, but not as parameters or in the checksum.
    `checksum` reads every weight once."""
    text = model.config.get_text_config()
    parameters = [p for name, p in model.named_parameters() if not is_adapter(name)]
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    dtypes = sorted({wire_dtype(p.dtype) for p in model.parameters()})
    own = {base_name(name): tensor for name, tensor in named_weights(model).items() if not is_adapter(name)}
    digests = ((name, checksum_bytes(tensor_bytes(t))) for name, t in own.items()) if checksum else ()
    tied = model.get_output_embeddings() is not None and (
        model.get_output_embeddings().weight is model.get_input_embeddings().weight
    )
    return ModelBuilt(
        model_class=type(model).__name__,
        path=str(getattr(model.config, "_name_or_path", "") or config.path),
        parameters=sum(p.numel() for p in parameters),
        trainable_parameters=trainable,
        hidden_size=text.hidden_size,
        layers=text.num_hidden_layers,
        vocab_size=text.vocab_size,
        dtype=",".join(dtypes),
        attn_implementation=",".join(in_effect(model)),
        attn_function=",".join(functions_called(model)),
        tied_embeddings=tied,
        head="score" if has_score_layer(model) else "lm",
        size=decoder_size(model),
        recomputed_layers=recomputed_layers(model),
        state_layers=dict(Counter(type(layer).__name__ for layer in state_layers.state_layers(model))),
        weights_checksum=checksum_weights(digests) if checksum else "",
    )
