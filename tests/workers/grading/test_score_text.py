"""Samples in a reward model's tokens: equal to what its own tokenizer makes of the conversation, and never cut."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_reward_model import TEMPLATE, own_tokenizer, write_reward_model, write_word_model

from backends.hf.tokenizer import load_codec
from rlctl.models.paths import BUILTIN_FOLDER
from specs.errors import ModelError
from specs.schema.sections import DataSection
from specs.wire.bodies import Row
from specs.wire.role_config import ScoreText
from workers.chat.chat_renderer import renderer_of
from workers.data.prompts import RowReader, read_table
from workers.data.row_source import DataRow
from workers.grading.pool import Grade
from workers.grading.score_text import ScoreTexts
from workers.grading.terms import GradeRequest

pytestmark = pytest.mark.usefixtures("warm_children")

CONVERSATION = [{"role": "system", "content": "be short"}, {"role": "user", "content": "  two and two ?"}]


def told(prompt: str, messages: list[dict[str, str]] | None, completion: str) -> GradeRequest:
    return GradeRequest(0, prompt, {}, completion, 0, messages=messages)


def texts(folder: Path, **keys: Any) -> ScoreTexts:
    actor = load_codec(str(BUILTIN_FOLDER / "tiny-digits"))
    if keys.pop("conversations", True):
        actor.tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}>{% endfor %}"
    config = {"path": str(folder), "trust_remote_code": False, "max_sequence_tokens": 128, "chat": "auto", **keys}
    return ScoreTexts(ScoreText.model_validate(config), actor)


@pytest.mark.parametrize("made", [write_reward_model, write_word_model])
def test_equal_to_the_tokenizers_own_template(tmp_path: Path, made: Any) -> None:
    """Two tokenizers of different kinds, neither of them the actor's."""
    folder = made(tmp_path)
    tokenizer = own_tokenizer(folder)
    whole = [*CONVERSATION, {"role": "assistant", "content": "four"}]
    own = tokenizer.apply_chat_template(whole, tokenize=True, return_dict=False)
    asked = [told("be short two and two ?>", CONVERSATION, "four"), told("3142>", None, " 1 ")]
    found, plain = texts(folder).tokens(asked)
    pad = 0 if made is write_reward_model else None
    assert found == own != []
    assert own[-1] != pad
    whole = [{"role": "user", "content": "3142>"}, {"role": "assistant", "content": " 1 "}]
    assert plain == tokenizer.apply_chat_template(whole, tokenize=True, return_dict=False)


def test_tools_of_a_row_are_shown_as_they_were_when_it_learned(tmp_path: Path) -> None:
    row = {"prompt": CONVERSATION, "tools": '[{"function": {"name": "add"}}]'}
    template = "{% for t in tools or [] %}<{{ t['function']['name'] }}>{% endfor %}" + TEMPLATE
    scorer = texts(write_reward_model(tmp_path, template=template))
    data = DataSection(train="x", prompts_per_step=1, max_prompt_tokens=99, max_response_tokens=1)
    reader = RowReader(data, needs_answer=False, chat=True, tools_column="tools")
    with renderer_of(scorer.codec) as chats:
        table = read_table("x", [DataRow("x:1", row)], reader, scorer.codec, chats)
    told = Row.model_validate(table.rows_of(np.zeros(1, np.int64), (), messages=True)["0"])
    request = GradeRequest(0, told.prompt, told.values, "four", 1, messages=told.messages, tools=told.tools)
    whole, tools = [*CONVERSATION, {"role": "assistant", "content": "four"}], json.loads(row["tools"])
    own = own_tokenizer(tmp_path).apply_chat_template(whole, tools=tools, return_dict=False)
    assert scorer.tokens([request]) == [own]


def test_without_a_template_the_texts_as_they_are(tmp_path: Path) -> None:
    folder = write_word_model(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    tokenizer = own_tokenizer(folder)
    (found,) = texts(folder, conversations=False).tokens([told("two and ", None, "four")])
    assert found == tokenizer("two and four").input_ids == [0, 9, 10, 12, 1]
    with pytest.raises(ModelError, match="has no chat template, and prompts are conversations"):
        texts(folder)
    assert texts(folder, chat="never")


def test_nothing_is_cut(tmp_path: Path) -> None:
    folder = write_reward_model(tmp_path)
    whole = len("<user>1</user>\n<assistant></assistant>\n")
    samples = [told("", [{"role": "user", "content": "1"}], "a" * length) for length in (0, 2, 3)]
    empty, fits, too_long = texts(folder, max_sequence_tokens=whole + 2).tokens(samples)
    assert isinstance(empty, list)
    assert isinstance(fits, list)
    assert (len(empty), len(fits)) == (whole, whole + 2)
    assert too_long == Grade(
        cause="model_overlong",
        text=f"reward_model.max_sequence_tokens = {whole + 2}: it has {whole + 3} tokens of the reward model",
    )


def test_padding_at_the_end_is_where_transformers_does_not_look(tmp_path: Path) -> None:
    folder = write_reward_model(tmp_path, template=TEMPLATE + "<eos><eos>")
    tokenizer = own_tokenizer(folder)
    whole = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]
    own = tokenizer.apply_chat_template(whole, tokenize=True, return_dict=False)
    (found,) = texts(folder).tokens([told("", whole[:1], "2")])
    assert own[-2:] == [0, 0]
    assert found == own[:-2]


def test_a_conversation_that_the_template_refuses(tmp_path: Path) -> None:
    template = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}" + TEMPLATE
    folder = write_reward_model(tmp_path, template=template)
    refused, fine = texts(folder).tokens([told("", CONVERSATION, "4"), told("", CONVERSATION[1:], "4")])
    assert isinstance(refused, Grade)
    assert (refused.cause, "no system" in refused.text) == ("model_template", True)
    assert isinstance(fine, list)
