"""A family's model as transformers itself runs it: each sequence alone, without padding, by plain autograd."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from families import FAMILIES
from numpy.typing import NDArray
from torch import Tensor
from train_helpers import make_grouped_batch
from transformers import AutoConfig, AutoModelForCausalLM

from backends.weights.tensor_bytes import DTYPES, named_weights
from rlctl.models.paths import BUILTIN_FOLDER
from specs.schema.role_section import Optimizer
from specs.wire.batch import Batch

TEMPERATURE = 0.7
PROMPTS = [[3, 1, 4, 1], [5, 9]]
# A large epsilon, as in train_helpers; no clipping, so that Adam's first moment is the gradient.
ADAM = Optimizer(lr=1e-2, eps=1e-4, weight_decay=0.1, max_grad_norm=0)

Arrays = Mapping[str, NDArray[np.float32]]


def family_batch() -> Batch:
    """Ragged answers to shared prompts, with holes."""
    return make_grouped_batch(seed=2)


def write_family(folder: Path, name: str) -> Path:
    """A model folder as anyone would download it, with its weights under their published names."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(FAMILIES[name].config))
    torch.manual_seed(FAMILIES[name].seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    for parameter in model.parameters():
        if parameter.dim() == 1:  # norms and biases start as ones and zeros, which would hide one that is left out
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    model.save_pretrained(folder)
    for path in (BUILTIN_FOLDER / "tiny-digits").glob("tokenizer*"):
        shutil.copy(path, folder)
    return folder


def stock_model(folder: Path, dtype: str = "fp32", weights: Arrays | None = None) -> Any:
    """Built by transformers, with its simplest attention and experts. `weights`: instead of the folder's."""
    config = AutoConfig.from_pretrained(folder)
    plain = {"attn_implementation": "eager"}
    if hasattr(config, "num_experts_per_tok"):
        plain["experts_implementation"] = "eager"
    model = AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=DTYPES[dtype], **plain).eval()
    with torch.no_grad():
        for name, values in (weights or {}).items():
            named_weights(model)[name].copy_(torch.from_numpy(values))
    return model


def logprobs(model: Any, batch: Batch, temperature: float = TEMPERATURE) -> Tensor:
    """[T], of the loss tokens, where the batch has a mask, else of all but each first; 0 elsewhere."""
    found = []
    for tokens in batch.sequences("tokens_T"):
        row = torch.from_numpy(tokens.astype(np.int64))
        logits = model(input_ids=row[None], use_cache=False).logits[0, :-1].float() / temperature
        found += [torch.zeros(1), logits.log_softmax(-1).gather(-1, row[1:, None])[:, 0]]
    logprob_T = torch.cat(found)
    return logprob_T * torch.from_numpy(batch["loss_mask_T"] != 0) if "loss_mask_T" in batch else logprob_T


def textbook_loss(model: Any, batch: Batch, clip_high: float = 0.2) -> Tensor:
    """GRPO's clipped surrogate, as a mean over the loss tokens of single sequences."""
    old_T, advantage_T, mask_T = (
        torch.from_numpy(batch[name]) for name in ("old_logprob_T", "advantage_T", "loss_mask_T")
    )
    ratio_T = (logprobs(model, batch) - old_T).exp()
    gain_T = torch.minimum(ratio_T * advantage_T, ratio_T.clamp(0.8, 1 + clip_high) * advantage_T)
    return -(gain_T * mask_T).sum() / mask_T.sum()


@dataclass(frozen=True)
class StockStep:
    """Of one optimizer step on a batch, with the plain policy gradient as its loss."""

    logprob_T: NDArray[np.float32]
    gradients: Arrays
    weights: Arrays  # after the step


def stock_step(model: Any, batch: Batch) -> StockStep:
    named = named_weights(model)
    logprob_T = logprobs(model, batch)
    advantage_T = torch.from_numpy(batch["advantage_T"])
    (-(logprob_T * advantage_T).sum() / int((batch["loss_mask_T"] != 0).sum())).backward()
    learned = {name: tensor.grad for name, tensor in named.items() if tensor.grad is not None}  # not buffers
    gradients = {name: grad.float().numpy().copy() for name, grad in learned.items()}
    groups = [
        {"params": [p for p in named.values() if p.dim() >= 2], "weight_decay": ADAM.weight_decay},
        {"params": [p for p in named.values() if p.dim() < 2], "weight_decay": 0.0},
    ]
    torch.optim.AdamW(groups, lr=ADAM.lr, betas=ADAM.betas, eps=ADAM.eps).step()
    weights = {name: tensor.detach().float().numpy() for name, tensor in named.items()}
    return StockStep(logprob_T.detach().numpy(), gradients, weights)
