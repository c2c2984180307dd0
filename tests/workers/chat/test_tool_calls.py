"""Tool calls as models write them, well and badly: what is read of each, and what the model is told."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from workers.chat.tool_calls import FORMATS, CallFormat, ToolCall, format_of

HARMONY, GEMMA, PYTHON, ELEMENTS, MINIMAX, GLM, DEEPSEEK, NEMOTRON, HERMES, MISTRAL, LLAMA = FORMATS
SCHEMAS = {
    "add": {
        "a": {"type": "integer"},
        "b": {"anyOf": [{"type": "number"}, {"type": "null"}]},
        "note": {"type": "string"},
        "exact": {"type": "boolean"},
        "among": {"type": "array"},
        "any": {},
        "all": True,
        "maybe": {"type": ["string", "null"]},
        "point": {"$ref": "#/$defs/Point"},
        "other": {"oneOf": [{"type": "integer"}, {"$ref": "#/$defs/Point"}, True]},
    }
}
# With text that ends calls elsewhere, and what a lenient parser would take for JSON.
ARGUMENTS: dict[str, Any] = {
    "a": -7,
    "b": 2.5,
    "note": 'é "</tool_call>"</parameter></arg_value>\n{NaN: \\u00e9}',
    "exact": True,
    "among": [1, {"x": None}],
    "all": "12",
    "maybe": "12",
    "point": {"x": 1},
    "other": 12,
}


def hermes(arguments: str, name: str = '"add"') -> str:
    return f'<tool_call>\n{{"name": {name}, "arguments": {arguments}}}\n</tool_call>'


def each(element: str, arguments: dict[str, Any]) -> str:
    shown = {key: value if isinstance(value, str) else json.dumps(value) for key, value in arguments.items()}
    return "".join(element.format(key, value) for key, value in shown.items())


def elements(arguments: dict[str, Any]) -> str:
    inner = each("<parameter={}>\n{}\n</parameter>\n", arguments)
    return f"<tool_call>\n<function=add>\n{inner}</function>\n</tool_call>"


def minimax(arguments: dict[str, Any]) -> str:
    inner = each('<parameter name="{}">{}</parameter>\n', arguments)
    return f'<minimax:tool_call>\n<invoke name="add">\n{inner}</invoke>\n</minimax:tool_call>'


def glm(arguments: dict[str, Any]) -> str:
    inner = each("<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n", arguments)
    return f"<tool_call>add\n{inner}</tool_call>"


def deepseek(arguments: str) -> str:
    call = f"<｜tool▁call▁begin｜>add<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>"
    return f"<｜tool▁calls▁begin｜>{call}<｜tool▁calls▁end｜>"


def gemma(value: Any) -> str:
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, list):
        return f"[{','.join(map(gemma, value))}]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{gemma(one)}" for key, one in value.items()) + "}"
    return "None" if value is None else json.dumps(value)


def in_python(arguments: dict[str, Any]) -> str:
    values = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
    return f"<|tool_call_start|>[add({values})]<|tool_call_end|>"


def written(form: CallFormat, arguments: dict[str, Any]) -> str:
    text = json.dumps(arguments, ensure_ascii=False)
    return {
        HARMONY: lambda: f"<|start|>assistant to=functions.add<|channel|>commentary json<|message|>{text}",
        GEMMA: lambda: f"<|tool_call>call:add{gemma(arguments)}<tool_call|>",
        PYTHON: lambda: in_python(arguments),
        ELEMENTS: lambda: elements(arguments),
        MINIMAX: lambda: minimax(arguments),
        GLM: lambda: glm(arguments),
        DEEPSEEK: lambda: deepseek(text),
        NEMOTRON: lambda: f'<TOOLCALL>[{{"name": "add", "arguments": {text}}}]</TOOLCALL>',
        HERMES: lambda: hermes(text),
        MISTRAL: lambda: f'[TOOL_CALLS][{{"name": "add", "arguments": {text}, "id": "Ab3456789"}}]',
        LLAMA: lambda: f'{{"name": "add", "parameters": {text}}}',
    }[form]()


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("arguments", [{}, {"a": 1}, ARGUMENTS])
def test_a_call_is_read_as_it_was_written(form: CallFormat, arguments: dict[str, Any]) -> None:
    found = form.parse(written(form, arguments), SCHEMAS)
    id_ = "Ab3456789" if form is MISTRAL else "call00000"
    assert (found.error, found.content, found.calls) == ("", "", (ToolCall("add", arguments, id_),))
    message = found.calls[0].message()
    assert message == {"type": "function", "id": id_, "function": {"name": "add", "arguments": arguments}}


@pytest.mark.parametrize("name", ["größe", "计算", "a.b/c:d-e_1"])
def test_names_that_python_and_servers_have(name: str) -> None:
    for text, form in ((hermes("{}", json.dumps(name)), HERMES), (elements({}).replace("=add", f"={name}"), ELEMENTS)):
        assert form.parse(text).calls == (ToolCall(name, {}, "call00000"),)


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (LLAMA, '<|python_tag|>{"name": "add", "parameters": {"a": 1}}'),
        (LLAMA, '\n{"type": "function", "name": "add", "parameters": {"a": 1}}\n'),
        (MISTRAL, '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}]'),
        (MISTRAL, '[TOOL_CALLS]add[ARGS]{"a": 1}'),
        (MISTRAL, '[TOOL_CALLS]add[CALL_ID]call00000[ARGS]{"a": 1}'),
        (HERMES, '<tool_call>{"arguments":{"a":1},"name":"add"}</tool_call>'),
        (ELEMENTS, "<function=add>\n<parameter=a>1</parameter></function>"),
        (MINIMAX, '<invoke name="add"><parameter name="a">1</parameter></invoke>'),
        (GLM, "<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>"),
        (DEEPSEEK, '<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{"a": 1}\n```<｜tool▁call▁end｜>'),
        (HARMONY, '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}'),
        (HARMONY, ' to=add<|channel|>analysis code<|message|>{"a": 1}'),
        (GEMMA, '<|tool_call>call:add{<|"|>a<|"|>: 1}<tool_call|>'),
        (PYTHON, "<|tool_call_start|>\n[add(a=1),]\n<|tool_call_end|>"),
        (DEEPSEEK, '<｜tool▁calls▁begin｜>\n<｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>'),
    ],
)
def test_other_ways_to_write_a_form(form: CallFormat, text: str) -> None:
    assert form.parse(text, SCHEMAS).calls == (ToolCall("add", {"a": 1}, "call00000"),)


@pytest.mark.parametrize(
    ("form", "text", "content"),
    [
        (HERMES, f"Let me see.{hermes('{}')} and {hermes('{}')} now", "Let me see. and  now"),
        (PYTHON, "<|tool_call_start|>[add(), add()]<|tool_call_end|>So:", "So:"),
        (
            NEMOTRON,
            'So:<TOOLCALL>[{"name": "add", "arguments": {}}, {"name": "add", "arguments": {}}]</TOOLCALL>',
            "So:",
        ),
        (MISTRAL, "So:[TOOL_CALLS]add[ARGS]{}[TOOL_CALLS]add[ARGS]{}", "So:"),
    ],
)
def test_several_calls_and_the_text_around_them(form: CallFormat, text: str, content: str) -> None:
    found = form.parse(text)
    assert (found.content, found.error) == (content, "")
    assert found.calls == (ToolCall("add", {}, "call00000"), ToolCall("add", {}, "call00001"))


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(
    "text", ["", "It is 4.\n", '{"answer": {"parameters": 3}}', 'I write "name": 3', "<tool_response>\n4\n"]
)
def test_what_is_no_call_stays_as_it_is(form: CallFormat, text: str) -> None:
    found = form.parse(text)
    assert (found.content, found.calls, found.error) == (text, (), "")


@pytest.mark.parametrize(
    ("form", "text", "why"),
    [
        (HERMES, '<tool_call>\n{"name": "add", "arguments": {"a": 1}}', "its end is missing"),
        (HERMES, f"{hermes('{}')}\n<tool_call>", "it is not JSON"),
        (HERMES, hermes('{"a": NaN}'), "NaN is not a number in JSON"),
        (HERMES, hermes('{"a": 1e999}'), "1e999 is not a number in JSON"),
        (HERMES, hermes(f'{{"a": {"9" * 5000}}}'), "it is not JSON"),
        (HERMES, hermes('{"a": 1, "a": 2}'), "a key stands in it twice"),
        (HERMES, hermes(r'"{\"a\": 1}"'), '"arguments" must be a JSON object'),
        (HERMES, hermes(r'{"a": "\ud83d"}'), "it is not JSON"),
        (HERMES, hermes('{"a": ' + "[" * 40 + "]" * 40 + "}"), "nested too deeply"),
        (HERMES, hermes("[" * 100_000), "nested too deeply"),
        (HERMES, hermes("{}", name='"<|im_start|>"'), "not the name of a function"),
        (HERMES, '<tool_call>{"arguments": {}}</tool_call>', 'it has no "name"'),
        (HERMES, "<tool_call>3</tool_call>", "it is not a JSON object"),
        (LLAMA, '{"name": "add", "parameters": {}} I hope so', "other text stands before it"),
        (LLAMA, '{"name": "add", "arguments": {}}', 'it has no "parameters"'),
        (LLAMA, "<|python_tag|>add(1, 2)", "it is not JSON"),
        (MISTRAL, "[TOOL_CALLS]add(1)", "it is not JSON"),
        (MISTRAL, "[TOOL_CALLS]add[ARGS]3", '"arguments" must be a JSON object'),
        (ELEMENTS, "<tool_call>\n{}\n</tool_call>", "its end is missing"),
        (ELEMENTS, elements({"a": 1}).replace("</parameter>", "", 1), "its end is missing"),
        (MINIMAX, "<minimax:tool_call>\nadd(1)", "its end is missing"),
        (MINIMAX, minimax({"a": 1}).replace("</invoke>", ""), "its end is missing"),
        (GLM, '<tool_call>{"name": "add", "arguments": {}}</tool_call>', "its end is missing"),
        (GLM, "<tool_call></tool_call>", "not the name of a function"),
        (GLM, glm({"a": 1}).replace("</arg_value>", ""), "its end is missing"),
        (DEEPSEEK, "<｜tool▁calls▁begin｜>add(1)", "it is not JSON"),
        (DEEPSEEK, deepseek('{"a": 1'), "it is not JSON"),
        (DEEPSEEK, deepseek("3"), '"arguments" must be a JSON object'),
        (HARMONY, ' to=functions.add<|message|>{"a": 1} then', "other text stands before it"),
        (HARMONY, " to=functions.add<|message|>add(1)", "it is not JSON"),
        (GEMMA, "<|tool_call>call:add{a:1}", "its end is missing"),
        (GEMMA, "<|tool_call>call:add{a:1} now<tool_call|>", "other text stands before its end"),
        (GEMMA, "<|tool_call>call:add{a:one}<tool_call|>", "it is not JSON"),
        (GEMMA, '<|tool_call>call:add{a:<|"|>1}<tool_call|>', "it is not JSON"),
        (GEMMA, "<|tool_call>call:add{a:1,a:2}<tool_call|>", "stands in it twice"),
        (GEMMA, "<|tool_call>add(1)<tool_call|>", "it is not JSON"),
        (PYTHON, "<|tool_call_start|>[add(a=1)]", "its end is missing"),
        (PYTHON, in_python({}).replace("[", "").replace("]", ""), "it is not a list of calls"),
        (PYTHON, in_python({}).replace("()", "(1)"), "a call is not of the form NAME(KEY=VALUE)"),
        (PYTHON, in_python({}).replace("()", "(**{'a': 1})"), "a call is not of the form NAME(KEY=VALUE)"),
        (PYTHON, in_python({}).replace("()", "(a=1, a=2)"), "stands in it twice"),
        (PYTHON, in_python({}).replace("()", "(a=open('x'))"), "it is not Python"),
        (PYTHON, in_python({}).replace("()", "(a=b'x')"), "it is not Python"),
        (PYTHON, in_python({}).replace("()", "(a=1e999)"), "is not a number in JSON"),
        (PYTHON, in_python({}).replace("()", "(a=" + "[" * 40 + "]" * 40 + ")"), "nested too deeply"),
        (PYTHON, in_python({}).replace("()", "(a=" + "(" * 100_000), "it is not Python"),
        (PYTHON, in_python({}).replace("()", "(a=" + "-" * 100_000 + "1)"), "it is not Python"),
        (PYTHON, in_python({}).replace("()", f"(a={'9' * 5000})"), "it is not Python"),
        (PYTHON, in_python({}).replace("()", r"(a='\ud83d')"), "it is not"),
        (ELEMENTS, "<function=add>\n<parameter=a>\n1\n</function>", "its end is missing"),
        (
            ELEMENTS,
            "<function=add><parameter=a>1</parameter><parameter=a>2</parameter></function>",
            "stands in it twice",
        ),
    ],
)
def test_a_call_that_cannot_be_read_says_why_and_how_to_write_one(form: CallFormat, text: str, why: str) -> None:
    found = form.parse(text)
    assert why in found.error
    assert form.shape in found.error
    assert (found.content, found.calls) == (text, ()), "no call of a turn counts, and nothing is lost"


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("run", ["a", " ", "\n", "{"])
def test_a_model_that_repeats_itself_holds_nobody_up(form: CallFormat, run: str) -> None:
    """All episodes of a rank wait while a turn is read."""
    began, shape = time.monotonic(), form.shape.replace("NAME", "f")
    for cut in range(0, len(shape), 4):
        form.parse(shape[:cut] + run * 50_000, SCHEMAS)
    assert time.monotonic() - began < 20


@pytest.mark.parametrize("form", FORMATS)
def test_what_the_model_is_told_to_write_can_be_read(form: CallFormat) -> None:
    found = form.parse(form.shape.replace("<|call|>", "").replace(",KEY:VALUE", "").replace("VALUE", "1"))
    assert [(call.name, *call.arguments) for call in found.calls] == [("NAME", "KEY")]


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("a", "12", 12),
        ("a", "twelve", "twelve"),
        ("b", "null", None),
        ("b", "NaN", "NaN"),
        ("exact", "True", True),
        ("note", "12", "12"),
        ("note", "\n  two\nlines \n", "\n  two\nlines \n"),
        ("any", "12", "12"),
    ],
)
def test_elements_are_what_their_schema_says(key: str, text: str, value: Any) -> None:
    found = ELEMENTS.parse(f"<function=add>\n<parameter={key}>\n{text}\n</parameter>\n</function>", SCHEMAS)
    assert found.calls[0].arguments == {key: value}
    assert type(found.calls[0].arguments[key]) is type(value)


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ('{{ "<tool_call>\\n{\\"name\\": \\"" + c.name + "\\", \\"arguments\\": " }}', HERMES),
        ("""{{ '<tool_call>\\n{"name": "' + c.name + '", "arguments": ' }}""", HERMES),
        ("{{ '<call>' + c.name }}{{ c.arguments }}", None),
        ("{{ m.content }}", None),
    ],
)
def test_a_template_tells_its_form(template: str, form: CallFormat | None) -> None:
    assert format_of(template) is form
