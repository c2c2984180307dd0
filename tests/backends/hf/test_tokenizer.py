"""The tokenizer without torch is the tokenizer that AutoTokenizer gives."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import specs
from backends.hf.tokenizer import load_codec, pad_token_of
from specs.errors import ModelError

BUILTIN = Path(specs.__file__).parent / "builtin"
TEXTS = ["3142>", "0123456789>", "a b  c\n\n", " leading", "Ünïcödé ☃ 漢字", "<eos>", "1 + 1 = 2 , 3 .", "don 't"]


@pytest.mark.parametrize("name", ["tiny-digits", "tiny-bytes"])
def test_equal_to_auto_tokenizer(name: str) -> None:
    from transformers import AutoTokenizer

    ours, auto = load_codec(str(BUILTIN / name)), AutoTokenizer.from_pretrained(str(BUILTIN / name))
    assert type(ours.tokenizer) is type(auto)
    encoded = [auto(text).input_ids for text in TEXTS]
    assert ours.encode(TEXTS, rendered=False) == encoded
    assert ours.decode(encoded) == [auto.decode(ids, skip_special_tokens=True) for ids in encoded]


def test_no_torch_for_a_shipped_model() -> None:
    code = (
        "import sys\nfrom backends.hf.tokenizer import load_codec\n"
        f"codec = load_codec({str(BUILTIN / 'tiny-digits')!r})\n"
        "assert codec.decode(codec.encode(['3142>'], rendered=False)) == ['3142>']\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=400, check=False).returncode == 0


def test_a_rendered_prompt_gets_no_second_special_token(tmp_path: Path) -> None:
    """A tokenizer that puts <eos> behind plain text, as some do: a prompt must not end the answer before it starts."""
    from tokenizers import processors
    from transformers import PreTrainedTokenizerFast

    plain = load_codec(str(BUILTIN / "tiny-digits")).tokenizer
    end = plain.eos_token_id
    backend = plain.backend_tokenizer
    backend.post_processor = processors.TemplateProcessing(
        single="<pad> $A <eos>", special_tokens=[("<pad>", plain.pad_token_id), ("<eos>", end)]
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", pad_token="<pad>")
    fast.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}', "utf-8")
    codec = load_codec(str(tmp_path))
    (with_bos,) = codec.encode(["12>"], rendered=False)
    (rendered,) = codec.encode(["12>"], rendered=True)
    assert with_bos == [plain.pad_token_id, *rendered]
    assert codec.encode(["12<eos>"], rendered=False)[0][-1] == end


@pytest.mark.parametrize("content", [None, "not json", "{}"])
def test_a_missing_or_broken_tokenizer_is_a_model_error(tmp_path: Path, content: str | None) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen2", "vocab_size": 16}', "utf-8")
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content, "utf-8")
    with pytest.raises(ModelError) as error:
        load_codec(str(tmp_path))
    assert str(tmp_path) in error.value.message
    assert "tokenizer.json" in error.value.hint


def test_a_config_with_code_of_its_own_names_the_key_that_lets_it_run(tmp_path: Path) -> None:
    own = '{"model_type": "of_its_own", "auto_map": {"AutoConfig": "configuration.OwnConfig"}}'
    (tmp_path / "config.json").write_text(own, "utf-8")
    with pytest.raises(ModelError, match="contains custom code") as error:
        pad_token_of(str(tmp_path))
    assert "model.trust_remote_code = true" in error.value.hint
