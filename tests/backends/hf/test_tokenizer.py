"""The tokenizer without torch is the tokenizer that AutoTokenizer gives."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import specs
from backends.hf.tokenizer import load_codec
from specs.errors import ModelError
from workers.chat_renderer import ChatTemplateError, renderer_of

BUILTIN = Path(specs.__file__).parent / "builtin"
TEXTS = ["3142>", "0123456789>", "a b  c\n\n", " leading", "Ünïcödé ☃ 漢字", "<eos>", "1 + 1 = 2 , 3 .", "don 't"]
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('role ' + m['role']) }}{% endif %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture
def chat_model(tmp_path: Path) -> Path:
    folder = tmp_path / "chat-model"
    shutil.copytree(BUILTIN / "tiny-bytes", folder)
    config = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": TEMPLATE}), "utf-8")
    return folder


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


def test_bytes_survive_the_round_trip() -> None:
    codec = load_codec(str(BUILTIN / "tiny-bytes"))
    texts = [text for text in TEXTS if text != "<eos>"]
    assert codec.decode(codec.encode(texts, rendered=False)) == texts


def test_special_tokens_are_not_part_of_an_answer() -> None:
    codec = load_codec(str(BUILTIN / "tiny-digits"))
    (ids,) = codec.encode(["1234"], rendered=False)
    assert codec.decode([[*ids, codec.tokenizer.eos_token_id], []]) == ["1234", ""]


def test_chat_template(chat_model: Path) -> None:
    codec = load_codec(str(chat_model))
    assert codec.has_chat_template
    with renderer_of(codec) as chats:
        text = chats.render([{"role": "system", "content": "S"}, {"role": "user", "content": "Q"}])
        assert text == "<system>S<user>Q<assistant>"
        with pytest.raises(ChatTemplateError, match="role tool"):
            chats.render([{"role": "tool", "content": ""}])


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
