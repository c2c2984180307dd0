"""The models that ship without weights: every reader makes the same tokens, and text survives the round trip."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

from rlctl.models.paths import BUILTIN_FOLDER, builtin_models

ROOT = Path(__file__).resolve().parents[3]
TEXTS = {
    "mini-digits": ["3142>"],
    "tiny-digits": ["3142>", "1+2=3-4", "0"],
    "tiny-chat": ["What is 2 + 3?\n<tool_call>\n{}\n</tool_call>"],
    "tiny-bytes": ["héllo\n\tworld  'x'", "漢字 🙂", "a\x00b", "Natalia sold 48/2 = <<48/2=24>>24 clips\n#### 72"],
}


def test_they_are_what_the_script_writes(tmp_path: Path) -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "tiny_model.py"))
    mini = {"hidden": 64, "intermediate": 128}
    for name, kind, tied, other in (
        ("tiny-digits", "digits", False, {}),
        ("mini-digits", "digits", False, mini),
        ("tiny-bytes", "bytes", True, {}),
        ("tiny-chat", "chat", False, {}),
    ):
        script["write_folder"](tmp_path / name, kind, {**script["SIZES"][kind], **other}, tied)
        for file in (BUILTIN_FOLDER / name).iterdir():
            assert json.loads((tmp_path / name / file.name).read_text()) == json.loads(file.read_text()), file
    assert builtin_models() == sorted(TEXTS)


@pytest.mark.parametrize("name", sorted(TEXTS))
def test_tokenizers_agree_and_text_survives(name: str) -> None:
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer

    folder = BUILTIN_FOLDER / name
    plain, auto = Tokenizer.from_file(str(folder / "tokenizer.json")), AutoTokenizer.from_pretrained(folder)
    vocab_size = json.loads((folder / "config.json").read_text())["vocab_size"]
    assert len(auto) == vocab_size == plain.get_vocab_size()
    assert (auto.pad_token_id, auto.eos_token_id, auto.all_special_ids) == (0, 0, [0])
    for text in TEXTS[name]:
        ids = auto.encode(text)
        assert plain.encode(text).ids == ids
        assert auto.decode(ids) == text
        assert auto.decode([0, *ids, 0], skip_special_tokens=True) == text
    if name == "tiny-bytes":
        assert len(auto.encode("漢")) == 3
