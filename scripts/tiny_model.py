"""Make a tiny Qwen2 model folder: config, tokenizer, generation config, and weights when asked.

    python scripts/tiny_model.py specs/builtin/tiny-digits --kind digits      # what ships with rlctl
    python scripts/tiny_model.py specs/builtin/mini-digits --kind digits --hidden 64 --intermediate 128
    python scripts/tiny_model.py specs/builtin/tiny-chat --kind chat
    python scripts/tiny_model.py /tmp/bytes --kind bytes --hidden 64 --layers 2 --weights 7

Without `--weights SEED` only JSON is written and neither torch nor transformers is imported.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# One special token and no blank: a reward strips both, so a model with more of them fills its answers with what nobody
# sees and never learns to end them.
END = "<eos>"
DIGITS_ALPHABET = "0123456789>=+-"
CHAT_ALPHABET = "\n" + "".join(map(chr, range(32, 127)))
# Turns end with <|im_end|>, calls are written as Qwen's and Hermes' models write them, and roles and tools are shown in
# as few characters as possible, each of which is a token here.
CHAT_TOKENS = {"<|im_end|>": True, "<|im_start|>": True, "<tool_call>": False, "</tool_call>": False}  # True: special
CHAT_TEMPLATE = """\
{%- if tools %}<|im_start|>s
{% for tool in tools %}{{ tool.function.name }}({{ tool.function.parameters.properties | join(', ') }})
{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role[0] }}
{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}<tool_call>
{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}
</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>a
{% endif %}"""

SIZES: dict[str, dict[str, int]] = {
    "digits": {"hidden": 128, "layers": 2, "heads": 4, "kv_heads": 2, "intermediate": 256, "positions": 64},
    "chat": {"hidden": 128, "layers": 3, "heads": 4, "kv_heads": 2, "intermediate": 384, "positions": 512},
    "bytes": {"hidden": 192, "layers": 3, "heads": 6, "kv_heads": 2, "intermediate": 384, "positions": 1024},
}


def byte_alphabet() -> list[str]:
    """The 256 printable characters that byte-level BPE writes bytes as (GPT-2, Radford et al. 2019)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {byte: chr(byte) for byte in printable}
    for byte in range(256):
        table.setdefault(byte, chr(256 + len(table) - len(printable)))
    return [table[byte] for byte in range(256)]


def alphabet_of(kind: str) -> list[str]:
    table, characters = byte_alphabet(), {"digits": DIGITS_ALPHABET, "chat": CHAT_ALPHABET}
    return [table[ord(char)] for char in characters[kind]] if kind in characters else table


def added_tokens(kind: str) -> dict[str, bool]:
    """Return tokens that are no characters, and whether they are special; the first ends a turn."""
    return CHAT_TOKENS if kind == "chat" else {END: True}


def tokenizer_json(kind: str) -> dict[str, Any]:
    """The file that the `tokenizers` library reads: byte-level BPE without merges, one token per byte.

    transformers reads the files of a qwen2 model with its own Qwen2 tokenizer, whatever `tokenizer_class` says: same
    alphabet, NFC normaliser, byte-level. So this file says the same, and every reader agrees on the tokens.
    """
    alphabet = alphabet_of(kind)
    vocab = {token: index for index, token in enumerate([*added_tokens(kind), *alphabet])}
    added = [
        {"id": index, "content": token, "single_word": False, "lstrip": False, "rstrip": False}
        | {"normalized": False, "special": special}
        for index, (token, special) in enumerate(added_tokens(kind).items())
    ]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": [],
        },
    }


def model_config(kind: str, size: dict[str, int], tied: bool) -> dict[str, Any]:
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": len(added_tokens(kind)) + len(alphabet_of(kind)),
        "hidden_size": size["hidden"],
        "intermediate_size": size["intermediate"],
        "num_hidden_layers": size["layers"],
        "num_attention_heads": size["heads"],
        "num_key_value_heads": size["kv_heads"],
        "hidden_act": "silu",
        "max_position_embeddings": size["positions"],
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": tied,
        "use_sliding_window": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "eos_token_id": 0,
        "pad_token_id": 0,
    }


def write_folder(folder: Path, kind: str, size: dict[str, int], tied: bool) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    end = next(iter(added_tokens(kind)))
    tokenizer_config = {
        "tokenizer_class": "Qwen2Tokenizer",
        "pad_token": end,
        "eos_token": end,
        "unk_token": end,
        "bos_token": None,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": size["positions"],
        **({"chat_template": CHAT_TEMPLATE} if kind == "chat" else {}),
    }
    files = {
        "config.json": model_config(kind, size, tied),
        "tokenizer.json": tokenizer_json(kind),
        "tokenizer_config.json": tokenizer_config,
        "generation_config.json": {"eos_token_id": 0, "pad_token_id": 0},
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def write_bytes_tokenizer(folder: Path, vocab_size: int) -> None:
    """Write the byte tokenizer, cut or filled up to so many tokens, and what ends a completion."""
    tokenizer = tokenizer_json("bytes")
    tokens = [*tokenizer["model"]["vocab"], *(f"w{index}" for index in range(257, vocab_size))]
    tokenizer["model"]["vocab"] = {token: index for index, token in enumerate(tokens[:vocab_size])}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    about = {"tokenizer_class": "Qwen2Tokenizer", "pad_token": END, "eos_token": END, "unk_token": END}
    (folder / "tokenizer_config.json").write_text(json.dumps({**about, "bos_token": None, "add_prefix_space": False}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 0, "pad_token_id": 0}))


def write_task(folder: Path, prompts: Sequence[str]) -> None:
    """Write `data.jsonl` and `reward.py`, whose reward is 1 for completions of odd length."""
    rows = [json.dumps({"prompt": prompt, "answer": ""}) for prompt in prompts]
    (folder / "data.jsonl").write_text("\n".join(rows) + "\n")
    reward = "def score(prompt: str, completion: str, row: dict) -> float:\n    return float(len(completion) % 2)\n"
    (folder / "reward.py").write_text(reward)


def write_weights(folder: Path, seed: int) -> int:
    """Random weights, drawn as `model.from_scratch` draws them. Returns the number of parameters."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    generation, config = folder / "generation_config.json", folder / "config.json"
    kept = {path: path.read_text(encoding="utf-8") for path in (generation, config)}
    model.save_pretrained(folder)
    for path, text in kept.items():
        path.write_text(text, encoding="utf-8")
    return sum(parameter.numel() for parameter in model.parameters())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kind", choices=sorted(SIZES), default="digits")
    for name in SIZES["digits"]:
        parser.add_argument(f"--{name.replace('_', '-')}", type=int)
    parser.add_argument("--tied", action="store_true", help="share embedding and head")
    parser.add_argument("--weights", type=int, metavar="SEED", help="also write model.safetensors (imports torch)")
    given = parser.parse_args()
    size = {name: getattr(given, name) or value for name, value in SIZES[given.kind].items()}
    write_folder(given.folder, given.kind, size, given.tied)
    made = f"{given.folder}: {given.kind}, hidden {size['hidden']}, {size['layers']} layers"
    if given.weights is not None:
        made += f", {write_weights(given.folder, given.weights):,} parameters"
    print(made)


if __name__ == "__main__":
    main()
