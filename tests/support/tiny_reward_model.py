"""A tiny reward model as anyone would save one: transformers' own class, with a tokenizer other than the actor's."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedTokenizerFast, Qwen2Config

from rlctl.models.paths import BUILTIN_FOLDER

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] | trim }}</{{ m['role'] }}>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def write_reward_model(folder: Path, *, template: str = TEMPLATE, labels: int = 1, like: str = "tiny-bytes") -> Path:
    """Reads bytes; its scores are of random weights, and far from 0."""
    torch.manual_seed(3)
    config = Qwen2Config(
        vocab_size=257,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        num_labels=labels,
        pad_token_id=0,
        tie_word_embeddings=False,
    )
    model = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    model.save_pretrained(folder)
    for path in (BUILTIN_FOLDER / like).glob("tokenizer*"):
        shutil.copy(path, folder)
    if template:
        file = folder / "tokenizer_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": template}))
    return folder


WORDS = "{{ bos_token }}{% for m in messages %}{{ m['role'] }} : {{ m['content'] }} {% endfor %}{{ eos_token }}"


def write_word_model(folder: Path) -> Path:
    """A reward model whose tokenizer is of another kind: words, with a token before every text."""
    write_reward_model(folder)
    vocabulary = "<s> </s> <unk> system user assistant : be short two and ? four".split()  # noqa: SIM905
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(vocabulary)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    fast.chat_template = WORDS
    for old in folder.glob("tokenizer*"):
        old.unlink()
    fast.save_pretrained(folder)
    (folder / "config.json").write_text('{"model_type": "llama"}')  # a Qwen2 model's is always one of bytes
    return folder


def own_tokenizer(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder)


def own_score(folder: Path, prompt: str, completion: str) -> float:
    """What transformers itself says of one conversation."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]
    ids = tokenizer.apply_chat_template(messages, tokenize=True, return_tensors="pt", return_dict=True)
    with torch.no_grad():
        return float(model(**ids).logits[0, 0])
