"""A quick check counts the tokens of a prompt as the run does."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import specs
from backends.hf.tokenizer import TextCodec, load_codec
from workers.data.tokenizer_file import TokenizerFile

BUILTIN = Path(specs.__file__).parent / "builtin"
TEXTS = ["3142>", "a b  c\n\n", " leading", "Ünïcödé ☃ 漢字", "<eos>", "text<eos>", ""]


@pytest.mark.parametrize("name", ["tiny-digits", "tiny-bytes"])
@pytest.mark.parametrize("rendered", [True, False])
def test_it_reads_and_writes_as_transformers_does(name: str, rendered: bool) -> None:
    ours, theirs = TokenizerFile(BUILTIN / name), load_codec(str(BUILTIN / name))
    ids = theirs.encode(TEXTS, rendered=rendered)
    assert ours.encode(TEXTS, rendered=rendered) == ids
    for special in (True, False):
        assert ours.decode(ids, special_tokens=special) == theirs.decode(ids, special_tokens=special)
    assert ours.unknown_id == theirs.unknown_id
    assert ours.stop_ids == theirs.stop_ids
    assert ours.special_tokens == theirs.tokenizer.special_tokens_map


def test_what_stands_around_plain_text_is_counted(tmp_path: Path) -> None:
    """A token stands before it as transformers puts it there; none after it, where the model is to continue."""
    from transformers import PreTrainedTokenizerFast  # the class itself: to choose one, transformers imports torch

    folder = shutil.copytree(BUILTIN / "tiny-bytes", tmp_path / "model")
    file = folder / "tokenizer.json"
    around = [{"SpecialToken": {"id": "<eos>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    tokens = {"<eos>": {"id": "<eos>", "ids": [0], "tokens": ["<eos>"]}}
    processor = {"type": "TemplateProcessing", "single": [*around, around[0]], "pair": around, "special_tokens": tokens}
    file.write_text(json.dumps({**json.loads(file.read_text()), "post_processor": processor, "truncation": None}))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "tokenizer_class": "PreTrainedTokenizerFast"}))
    (folder / "generation_config.json").write_text('{"eos_token_id": [5, 7]}')
    ours, theirs = TokenizerFile(folder), TextCodec(PreTrainedTokenizerFast.from_pretrained(folder), str(folder))
    assert ours.stop_ids == theirs.stop_ids > {5, 7}
    assert ours.encode(["ab"], rendered=False) == theirs.encode(["ab"], rendered=False)
    assert len(ours.encode(["ab"], rendered=False)[0]) == 3
    assert len(ours.encode(["ab"], rendered=True)[0]) == 2


@pytest.mark.parametrize("content", ["", '{"eos_token_id": ', "[5]", '{"eos_token_id": "5"}', '{"eos_token_id": 1.5}'])
def test_a_generation_config_that_names_no_token(tmp_path: Path, content: str) -> None:
    folder = shutil.copytree(BUILTIN / "tiny-bytes", tmp_path / "model")
    (folder / "generation_config.json").write_text(content)
    assert TokenizerFile(folder).stop_ids == load_codec(str(folder)).stop_ids == {0}


def test_a_file_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not there"):
        TokenizerFile(tmp_path)
