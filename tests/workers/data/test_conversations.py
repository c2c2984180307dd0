"""Which text of a conversation learns, by templates written as popular families write theirs."""

from __future__ import annotations

import atexit
from functools import cache
from typing import Any

import pytest

from specs.schema.rows import LearnFrom
from workers.chat.chat_renderer import ChatRenderer
from workers.data.conversations import (
    LearnedText,
    TurnEnds,
    checked_messages,
    chosen_messages,
    learned_text,
    mask_of,
)
from workers.data.row_source import BadRow

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HEADERS = (
    "<|begin|>{% if tools %}<|tools|>{{ tools | tojson }}<|eot|>{% endif %}{% for m in messages %}"
    "<|header|>{{ m.role }}<|/header|>\n\n{{ m.content | trim }}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|header|>assistant<|/header|>\n\n{% endif %}"
)
GENERATION = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|a|>{% generation %}{{ m.content }}<|end|>"
    "{% endgeneration %}{% else %}<|u|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|a|>{% endif %}"
)
# Thinking is written for the last answer alone.
DROPS_THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n"
    "{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Nothing ends an answer but the token of who speaks next; earlier thinking is dropped.
NEXT_SPEAKER = (
    "[gMASK]{% set last = messages | length - 1 %}{% for m in messages %}<|{{ m.role }}|>\n"
    "{% if m.role == 'assistant' %}"
    "<think>{{ m.reasoning_content if loop.index0 == last and m.reasoning_content }}</think>\n{% endif %}"
    "{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
ENDS = TurnEnds(
    ("<|im_end|>", "<|eot|>", "<|end|>", "<|user|>", "<|tool|>", "<|assistant|>"), ("<eos>", "<|user|>", "<|tool|>")
)
TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "one?"},
    {"role": "assistant", "content": "1"},
    {"role": "user", "content": "two?"},
    {"role": "assistant", "content": "2", "train": True},
]


@cache
def chats_of(template: str) -> ChatRenderer:
    """Return a template in its process, which ends with this one."""
    made = ChatRenderer(template, {}, library=False)
    atexit.register(made.close)
    return made


def learned_of(template: str, learned: list[int] | None, messages: Any = TALK, tools: Any = None) -> LearnedText:
    return learned_text(messages, learned, chats_of(template), ENDS, tools)


def learned(template: str, learn_from: LearnFrom, messages: Any = TALK) -> list[str]:
    found = learned_of(template, None if learn_from == "all" else chosen_messages(messages, learn_from), messages)
    return [found.text[start:end] for start, end in found.spans]


@pytest.mark.parametrize("template", [CHATML, HEADERS, GENERATION])
def test_answers_learn_with_the_end_of_their_turn(template: str) -> None:
    end = next(end for end in ENDS.specials if end in template)
    assert learned(template, "assistant") == [f"1{end}", f"2{end}"]
    assert learned(template, "last_assistant") == learned(template, "flagged") == [f"2{end}"]
    assert learned(template, "all") == [chats_of(template).render(TALK, begins_answer=False)]


def test_who_speaks_next_ends_an_answer_where_the_model_stops_there() -> None:
    """GLM: its template writes no other end, and its generation_config.json names these tokens."""
    talk = [*TALK[:3], {"role": "tool", "content": "3"}, {**TALK[4], "reasoning_content": "mm"}]
    found = learned_of(NEXT_SPEAKER, [2, 4], talk)
    parts = [found.text[start:end] for start, end in found.spans]
    assert parts == ["<think></think>\n1<|tool|>", "<think>mm</think>\n2<|user|>"]
    assert found.text == chats_of(NEXT_SPEAKER).render(talk, begins_answer=False) + "<|user|>"
    alone = "{% if messages | length > 2 %}{{ raise_exception('one turn') }}{% endif %}" + NEXT_SPEAKER
    found = learned_of(alone, [1], TALK[1:3])
    assert [found.text[start:end] for start, end in found.spans] == ["<think></think>\n1"]
    named = TurnEnds(ENDS.specials, ("<eos>",))  # by a model that goes on behind them
    found = learned_text(talk, [2, 4], chats_of(NEXT_SPEAKER), named)
    assert [found.text[start:end] for start, end in found.spans] == ["<think></think>\n1", "<think>mm</think>\n2"]


def test_an_end_behind_the_whole_conversation_rewrites_no_turn() -> None:
    template = CHATML.replace("{% if add", "{% if not add_generation_prompt %}<|eot|>{% endif %}{% if add")
    assert learned(template, "assistant") == ["1<|im_end|>", "2<|im_end|>\n<|eot|>"]


def test_a_template_that_rewrites_earlier_turns_is_refused_but_for_the_last() -> None:
    with pytest.raises(BadRow, match="message 2: the chat template writes the conversation up to it otherwise"):
        learned(DROPS_THINKING, "assistant")
    assert learned(DROPS_THINKING, "last_assistant") == ["<think>\n\n</think>\n2<|im_end|>"]


@pytest.mark.parametrize(
    ("template", "messages", "why"),
    [
        (CHATML.replace("assistant\n{% endif", "assistant\n<think>\n{% endif"), TALK, "begins it otherwise"),
        (CHATML, [{"role": "assistant", "content": "hi"}, *TALK], "message 0: nothing comes before it"),
        (CHATML, [*TALK[:2], {"role": "assistant", "content": ""}], "message 2: it is empty"),
        (CHATML.replace("{{ m.content }}<|im_end|>", ""), TALK, "message 2: .* writes nothing for it"),
        ("{{ raise_exception('roles must alternate') }}", TALK, "refuses the messages: roles must"),
    ],
)
def test_what_cannot_be_proven_is_refused(template: str, messages: Any, why: str) -> None:
    with pytest.raises(BadRow, match=why):
        learned(template, "assistant", messages)


def test_tools_reach_the_template() -> None:
    found = learned_of(HEADERS, [4], tools=[{"name": "add"}])
    assert '<|tools|>[{"name": "add"}]<|eot|>' in found.text
    assert [found.text[start:end] for start, end in found.spans] == ["2<|eot|>"]


@pytest.mark.parametrize(
    ("writes", "wanted"),
    [
        ("{{ f.arguments | tojson }}", '{"a": 1}'),
        ("{{ f.arguments }}", '{"a":1}'),
        ("{{ '' + f.arguments }}", '{"a":1}'),
    ],
)
def test_arguments_of_calls_are_written_once_as_json(writes: str, wanted: str) -> None:
    """OpenAI's are JSON in a text, others' objects. Most templates write objects as JSON; some take text alone."""
    template = (
        "{% for m in messages %}<{{ m.role }}>{% for c in m.tool_calls or [] %}{% set f = c.function %}{{ f.name }}"
        + writes
        + "{% endfor %}{{ m.content or '' }}<|end|>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    call = {"type": "function", "function": {"name": "add", "arguments": '{"a":1}'}}
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "tool_calls": [call]}]
    assert learned(template, "assistant", messages) == [f"add{wanted}<|end|>"]
    assert call["function"] == {"name": "add", "arguments": '{"a":1}'}, "the row stays"
    call["function"] = {"name": "add", "arguments": {"a": 1}}
    assert learned(template, "assistant", messages) == ['add{"a": 1}<|end|>']


def test_a_template_that_leaves_calls_out_is_refused() -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": {}}}
    for content in ({}, {"content": "let me see"}):
        messages = [TALK[1], {"role": "assistant", "tool_calls": [call], **content}]
        with pytest.raises(BadRow, match="message 1: the chat template leaves out its call of add"):
            learned(CHATML, "assistant", messages)


def test_a_template_that_leaves_some_of_what_learns_out_is_refused() -> None:
    one_call = CHATML.replace("{{ m.content }}", "{{ m.tool_calls[0].name if m.tool_calls else m.content }}")
    call = {"name": "add", "arguments": {}}
    said = {"role": "assistant", "content": "", "tool_calls": [call]}
    assert learned(one_call, "assistant", [TALK[1], said]) == ["add<|im_end|>"]
    for more, why in (
        ({"tool_calls": [call, call]}, "its call of add"),
        ({"content": "let me add"}, "what it says .*beside calls"),
        ({"tool_calls": None, "content": "1", "reasoning_content": "hm"}, "its reasoning_content, which is to be"),
    ):
        with pytest.raises(BadRow, match=f"message 1: the chat template leaves out {why}"):
            learned(one_call, "assistant", [TALK[1], said | more])
    for more in ({"content": "let me add"}, {"reasoning_content": "hm"}):
        assert learned(one_call, "last_assistant", [TALK[1], said | more, *TALK[3:]]) == ["2<|im_end|>"]


def test_a_template_that_leaves_a_message_out_is_refused() -> None:
    knows_two = "{% for m in messages if m.role != 'developer' %}" + CHATML.removeprefix("{% for m in messages %}")
    with pytest.raises(BadRow, match=r"message 0: the chat template leaves out what it says.*developer"):
        learned(knows_two, "assistant", [{"role": "developer", "content": "be brief"}, *TALK[1:3]])
    takes_text = CHATML.replace("m.content", "m.content if m.content is string")
    with pytest.raises(BadRow, match=r"message 1: the chat template leaves out what it says.*content as parts"):
        learned(takes_text, "assistant", [TALK[1], {"role": "assistant", "content": [{"type": "text", "text": "1"}]}])


def test_a_token_across_the_end_of_what_is_learned_is_refused() -> None:
    text = LearnedText("ab cd", [(3, 5)])
    assert mask_of([(0, 2), (2, 3), (3, 4), (4, 5)], text) == [0, 0, 1, 1]
    assert mask_of([(0, 3), (3, 3), (3, 5)], text) == [0, 1, 1]
    for across in ([(0, 2), (2, 4), (4, 5)], [(0, 5)]):
        with pytest.raises(BadRow, match="a token lies across the end of what is learned"):
            mask_of(across, text)


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("hi", "must be a list of messages"),
        ([{"content": "x"}], "message 0: no message with role and content"),
        ([{"role": "user", "content": None}], "message 0: no content and no tool calls"),
        ([{"role": "user", "content": "x", "train": 1}], "train must be true or false"),
        ([{"role": "user", "content": 3}], "message 0: content is neither text nor a list of parts of text"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "neither text nor a list of parts"),
        ([{"role": "assistant", "content": ["x"]}], "neither text nor a list of parts"),
        ([{"role": "user", "content": "x", "train": None}, 3], "message 1: no message"),
    ],
)
def test_what_is_no_conversation_is_refused(value: Any, why: str) -> None:
    with pytest.raises(BadRow, match=why):
        checked_messages(value, "messages")


def test_nothing_to_learn_is_refused() -> None:
    with pytest.raises(BadRow, match="no message of the assistant"):
        chosen_messages(TALK[:2], "assistant")
    with pytest.raises(BadRow, match="no message has train = true"):
        chosen_messages(TALK[:3], "flagged")
