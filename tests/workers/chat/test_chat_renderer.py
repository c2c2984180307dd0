"""Chat templates are foreign code: what they may do, and that they are rendered as transformers renders them."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from backends.hf.tokenizer import load_codec
from rlctl.models.paths import BUILTIN_FOLDER
from rlctl.models.tokenizer_files import chat_template_of
from specs.errors import ModelError
from workers.chat import chat_renderer
from workers.chat.chat_renderer import ChatRenderer, ChatTemplateError, renderer_of

pytestmark = pytest.mark.usefixtures("warm_children")

ASKED = [{"role": "user", "content": "Q"}]
TEMPLATE = (
    "{%- for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no role tool') }}{% endif %}"
    "<{{ m.role }}>{{ m.content | tojson }}{% if m.name is defined %}{{ m.name }}{% endif %}{{ eos_token }}\n"
    "{% if loop.index > 3 %}{% break %}{% endif %}{% endfor %}"
    "|\n  {% generation %}\n{% set a = 1 %}{{ tools is none }}{% endgeneration %}\n{{ a is defined }}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.mark.parametrize("library", [False, True])
def test_rendered_as_transformers_renders_it(library: bool) -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    plain = Tokenizer(models.WordLevel({"a": 0, "</s>": 1}, unk_token="a"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="</s>", chat_template=TEMPLATE)
    messages: list[dict[str, Any]] = [{"role": "user", "content": "é<'", "name": None}, *ASKED]
    with ChatRenderer(TEMPLATE, tokenizer.special_tokens_map, library=library) as chats:
        for begins in (True, False):
            wanted = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=begins)
            assert chats.render(messages, begins_answer=begins) == wanted
        with pytest.raises(ChatTemplateError, match="no role tool"):
            chats.render([{"role": "tool", "content": ""}])
        assert chats.render(ASKED).endswith("<assistant>"), "a refusal ends nothing"


CALL = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "S", "name": None},
    *ASKED,
    {"role": "assistant", "content": "é<", "reasoning": "R"},
    *ASKED,
    {"role": "assistant", "content": "", "tool_calls": [CALL, {"name": "x"}]},
    {"role": "tool", "content": {"a": 1}},
    {"role": "assistant", "content": [{"type": "text", "text": "A"}]},
]
SAYS = "{% for m in messages %}<{{ m.role }}>{{ m.thinking }}{{ m.content | tojson }}{{ m.tool_calls }}{% endfor %}"
WRITES = SAYS.replace("{{ m.tool_calls }}", "{% for c in m.tool_calls or [] %}ARGUMENTS{% endfor %}")
ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "library", "requests"),
    [
        (SAYS, False, 2),  # as Python writes a dict
        (WRITES.replace("ARGUMENTS", "{{ c.function.arguments | tojson if c.function }}"), True, 1),
        (WRITES.replace("ARGUMENTS", "{{ '' + c.function.arguments if c.function }}"), False, 2),
        (WRITES.replace("| tojson", "| trim"), False, 2),  # refuses parts
        (SAYS + "{% if messages | length == 5 %}{{ raise_exception('five') }}{% endif %}", True, 2),
        (
            "{% if messages | length == 7 %}A{% endif %}" + WRITES + "{% if add_generation_prompt %}<a>{% endif %}",
            True,
            1,
        ),
        (WRITES + "{% if messages | length == 4 %}" + ENDLESS + "{% endif %}", False, 1),
    ],
)
def test_beginnings_are_what_each_is_rendered_as_alone(
    template: str, library: bool, requests: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They travel in one request, or in two where some calls have to be JSON."""
    monkeypatch.setattr(chat_renderer, "RENDER_S", 1.0 if ENDLESS in template else 60.0)
    asked, ask = list[Any](), ChatRenderer._ask

    def outcomes(texts: Iterator[str]) -> Iterator[str]:
        try:
            yield from texts
        except (ChatTemplateError, ModelError) as error:
            yield f"{type(error).__name__}: {error}"

    def counted(chats: ChatRenderer, *request: Any) -> Any:
        asked.append(request)
        return ask(chats, *request)

    monkeypatch.setattr(ChatRenderer, "_ask", counted)
    forwards = list(product(range(1, len(TALK) + 1), (True, False)))
    for cuts in (forwards, forwards[::-1]):
        with ChatRenderer(template, {"eos_token": "</s>"}, library=library) as chats:
            alone = list(outcomes(chats.render(TALK[:count], begins_answer=begins) for count, begins in cuts))
            asked.clear()
            assert list(outcomes(chats.beginnings(TALK, cuts, tools=None))) == alone
            assert len(asked) == requests


@pytest.mark.parametrize("library", [False, True])
def test_today_is_the_day_that_is_named(library: bool) -> None:
    with ChatRenderer("{{ strftime_now('%d %b %Y') }}", {}, library=library, today="2001-02-03") as chats:
        assert chats.render(ASKED) == "03 Feb 2001"


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{{ 'A' * 10**11 }}", "MiB of memory"),
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "longer than 1 s"),
        ("{{ 'A' * 2**25 }}", "characters"),
        ("one\n{% if %}", "not Jinja: line 2"),
        ("{{ ''.__class__.__mro__ }}", "not safe"),
    ],
)
def test_a_hostile_template_ends_in_an_error(template: str, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_renderer, "RENDER_S", 1.0 if "longer" in why else 60.0)
    began = time.monotonic()
    with ChatRenderer(template, {}, library=False) as chats, pytest.raises(ModelError, match=why) as error:
        chats.render(ASKED)
    assert 'data.chat = "never"' in error.value.hint
    assert time.monotonic() - began < 30


def test_content_in_parts_is_never_written_as_python_writes_a_list() -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "Q"}]}]
    takes_text = "{% for m in messages %}{{ m.content | trim }}{% endfor %}"
    takes_parts = "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}"
    with ChatRenderer(takes_parts, {}, library=False) as chats:
        assert chats.render(parts) == "Q"
    with ChatRenderer("{{ messages[0].content | tojson }}", {}, library=False) as chats:
        assert chats.render(parts) == '[{"type": "text", "text": "Q"}]'
    with ChatRenderer(takes_text, {}, library=False) as chats:
        assert chats.render(ASKED) == "Q"
        with pytest.raises(ChatTemplateError, match=r"takes no content in parts, and would write \[\{'type': 'text'"):
            chats.render(parts)


@pytest.mark.parametrize(
    ("template", "content", "why"),
    [
        # As Qwen3's, which writes nothing for a list; as those of models that see, which take nothing else; the first.
        ("{{ m.content if m.content is string }}", [{"type": "text", "text": "Q"}], "content as parts"),
        ("{% for p in m.content %}{{ p.text }}{% endfor %}", "Q", "content as one text"),
        ("{{ m.content[0].text }}", [{"type": "text", "text": "Q"}, {"type": "text", "text": "R"}], "content as parts"),
        ("{% if m.role in ('user', 'assistant') %}{{ m.content }}{% endif %}", None, "role developer"),
    ],
)
def test_what_a_template_leaves_out_is_seen(template: str, content: Any, why: str) -> None:
    messages = [{"role": "user", "content": content}] if content else [{"role": "developer", "content": "D"}, *ASKED]
    why = f"message 0: the chat template leaves out what it says.*{why}"
    leaves_out = ChatRenderer(f"{{% for m in messages %}}{template}{{% endfor %}}", {}, library=False)
    with leaves_out as chats, pytest.raises(ChatTemplateError, match=why):
        chats.check_written(messages, tools=None)
    with ChatRenderer("{% for m in messages %}{{ m.content | tojson }}{% endfor %}", {}, library=False) as chats:
        chats.check_written([*messages, {"role": "tool", "content": {"a": 1}}], tools=None)


@pytest.mark.parametrize("library", [False, True])
def test_what_transformers_gives_a_template_is_there_without_it(library: bool) -> None:
    template = "{{ messages[0].reasoning_content }} {{ messages[0].thinking | tojson(ensure_ascii=false) }}"
    with ChatRenderer(template, {}, library=library) as chats:
        for key in ("reasoning_content", "thinking", "reasoning"):
            assert chats.render([{"role": "assistant", key: "é"}]) == 'é "é"'


@pytest.mark.parametrize("in_one_file", [False, True])
def test_of_several_templates_tools_take_the_one_that_writes_them(in_one_file: bool, tmp_path: Path) -> None:
    tokenizer = load_codec(str(BUILTIN_FOLDER / "tiny-bytes")).tokenizer
    texts = {"default": "{{ messages[0].content }}", "tool_use": "{{ tools | tojson }}{{ messages[0].content }}"}
    tokenizer.chat_template = texts
    tokenizer.save_pretrained(tmp_path)
    if in_one_file:  # as older versions of transformers wrote them
        (tmp_path / "chat_template.jinja").unlink()
        (tmp_path / "additional_chat_templates" / "tool_use.jinja").unlink()
        config = json.loads((tmp_path / "tokenizer_config.json").read_text())
        config["chat_template"] = [{"name": name, "template": text} for name, text in texts.items()]
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    codec, found = load_codec(str(tmp_path)), chat_template_of(tmp_path)
    quick = ChatRenderer(found.text, {}, library=False, tool_template=found.with_tools)
    tools: list[dict[str, Any]] = [{"type": "function", "function": {"name": "add"}}]
    with renderer_of(codec) as chats, quick:
        for given in (None, [], tools):
            wanted = codec.tokenizer.apply_chat_template(ASKED, tools=given, tokenize=False)
            assert chats.render(ASKED, tools=given) == quick.render(ASKED, tools=given) == wanted
