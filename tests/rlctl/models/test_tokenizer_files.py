"""Tokenizers whose files are too large to be parsed in passing, as `check-config` looks into them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlctl.models.paths import BUILTIN_FOLDER
from rlctl.models.tokenizer_files import TokenTable, special_texts, token_table

WORDS = 150_000
END = {"id": WORDS + 257, "content": "<|im_end|>", "special": True}
MARK = {"id": WORDS + 258, "content": "<answer>", "special": False}
PLAIN = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}


def large(folder: Path, *, indent: int | None = None, ascii_only: bool = False, **changes: Any) -> Path:
    """The built-in byte tokenizer with as many words, as those of large models."""
    content = json.loads((BUILTIN_FOLDER / "tiny-bytes" / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    for number in range(WORDS):
        vocabulary[f"w{number:06d}"] = len(vocabulary)
    content["added_tokens"] += [{**PLAIN, **END}, {**PLAIN, **MARK}]
    content |= changes
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(content, indent=indent, ensure_ascii=ascii_only))
    return folder


@pytest.mark.parametrize("form", [{}, {"indent": 2}, {"ascii_only": True}])
def test_tokens_are_found_without_parsing_the_vocabulary(tmp_path: Path, form: dict[str, Any]) -> None:
    from tokenizers import Tokenizer

    folder = large(tmp_path, **form)
    assert (folder / "tokenizer.json").stat().st_size > 1 << 21
    table, whole = token_table(folder), Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert table is not None
    known = whole.get_vocab(with_added_tokens=True)
    for text in ("w000000", "w149999", "Ċ", '"', "\\", "<|im_end|>", "<answer>", "w15000", "w150000", "</answer>", ""):
        assert (text in table, table.id_of(text)) == (text in known, known.get(text)), text
    for number in (0, 1, 12, 257, WORDS // 2, WORDS + 256, END["id"], WORDS + 9_000):
        assert table.text_of(int(number)) == whole.id_to_token(int(number)), number
    assert table.highest == max(known.values())
    assert special_texts(folder) == {"<eos>", "<|im_end|>"}


def test_a_text_that_is_one_token_is_told_from_one_that_is_several(tmp_path: Path) -> None:
    table = token_table(large(tmp_path))
    assert table is not None
    assert [text for text in ("\n", " ", "w000007", "<|im_end|>", "</answer>", "\n\n") if table.says(text)] == [
        "\n",
        " ",
        "w000007",
        "<|im_end|>",
    ]


@pytest.mark.parametrize(
    "processor",
    [
        {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}]},
        {"type": "Sequence", "processors": [{"type": "ByteLevel"}, {"single": [{"SpecialToken": {"id": "<s>"}}]}]},
        {"type": "RobertaProcessing", "sep": ["</s>", 2], "cls": ["<s>", 0]},
    ],
)
def test_the_token_before_a_text_is_known(processor: dict[str, Any]) -> None:
    text = json.dumps({"post_processor": processor, "model": {"type": "BPE", "vocab": {"a": 0}}}).encode()
    assert TokenTable(text).begins_with == "<s>"
    assert TokenTable(text.replace(b'"<s>"', b"7").replace(b"single", b"none").replace(b"cls", b"no")).begins_with == ""


@pytest.mark.parametrize("text", [b"", b"{}", b"[1]", b'{"model": 3}', b'{"added_tokens": 3, "model": {"vocab": {}}}'])
def test_a_file_of_another_form_is_no_table(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(text)
    assert token_table(tmp_path) is None
