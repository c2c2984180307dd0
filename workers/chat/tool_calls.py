"""Read the tool calls that a model writes: the forms of popular chat templates, as data, and one strict parser."""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from specs.json_file import depth_of

MAX_DEPTH = 32  # of a call's arguments: templates and tools walk them recursively
_NAME = re.compile(r"[\w./:-]{1,128}")
_ID = re.compile(r"[A-Za-z0-9]{9}")  # as Mistral's templates ask for it
_BLANK = re.compile(r"\s*")
_PYTHON_WORDS = {"True": True, "False": False, "None": None}
_JSON_WORDS = {"true": True, "false": False, "null": None}
_GEMMA_QUOTE = '<|"|>'
_BARE = re.compile(r"([{,]\s*)([^\s{}\[\],:]+)\s*:|\bNone\b")  # a key, or what a template writes for null

Schemas = Mapping[str, Mapping[str, Any]]
"""The properties of each tool's parameters, by the tool's name."""


class _Malformed(ValueError):
    """The reason why a call cannot be read."""


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool."""

    name: str
    arguments: dict[str, Any]
    id: str

    def message(self) -> dict[str, Any]:
        """Return the call as chat templates are given it."""
        return {"type": "function", "id": self.id, "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(frozen=True)
class ParsedCalls:
    """The calls of a turn and the text outside of them. `error`: why one that was begun cannot be read, for the model;
    then no call counts, and all of the turn is content."""

    content: str
    calls: tuple[ToolCall, ...] = ()
    error: str = ""


@dataclass(frozen=True)
class CallFormat:
    """A form of tool calls. `sign` stands in templates that write it. JSON, elements or what `read` takes lie between
    `begin`, whose groups `name` and `id` may name a call, and `end`."""

    sign: re.Pattern[str]
    begin: re.Pattern[str]
    end: re.Pattern[str]
    shape: str  # for models to read
    key: str = "arguments"  # of the arguments in JSON
    element: re.Pattern[str] | None = None  # a parameter's name and text, where there is no JSON
    read: Callable[[str], Any] | None = None  # of all before `end`: the calls, or the arguments of one

    def parse(self, text: str, schemas: Schemas | None = None) -> ParsedCalls:
        """Read the text of a turn, special tokens included, but for the one that ended it. `schemas` says of which type
        a parameter is where the form writes all of them alike."""
        calls: list[ToolCall] = []
        outside, at = [], 0
        try:
            while begun := self.begin.search(text, at):
                outside.append(text[at : begun.start()])
                found, at = self._read(text, begun, schemas or {})
                if not (end := self.end.match(text, at)):
                    raise _Malformed("its end is missing, or other text stands before it")
                for one in found:
                    calls.append(_checked(one, self.key, call_id(len(calls))))
                at = end.end()
        except _Malformed as error:
            return ParsedCalls(text, error=f"The tool call cannot be read: {error}. Write a call as\n{self.shape}")
        return ParsedCalls("".join([*outside, text[at:]]).strip() if calls else text, tuple(calls))

    def _read(self, text: str, begun: re.Match[str], schemas: Schemas) -> tuple[list[Any], int]:
        """Return what is written from there on, one call or a list of them, and where it ends."""
        named = begun.groupdict()
        if self.element:
            arguments, at = _elements(self.element, text, begun.end(), schemas.get(named["name"], {}))
            return [named | {self.key: arguments}], at
        if self.read:
            if not (end := self.end.search(text, begun.end())):
                raise _Malformed("its end is missing")
            value, at = self.read(text[begun.end() : end.start()]), end.start()
        else:
            value, at = _json(text, begun.end())
        if named.get("name"):
            return [named | {self.key: value}], at
        return value if isinstance(value, list) else [value], at


def call_id(number: int) -> str:
    """Return the id of a call that the model gave none, of nine characters."""
    return f"call{number:05d}"


def _checked(found: Any, key: str, id_: str) -> ToolCall:
    if not isinstance(found, dict):
        raise _Malformed("it is not a JSON object")
    for needed in ("name", key):
        if needed not in found:
            raise _Malformed(f'it has no "{needed}"')
    name, arguments, own_id = found["name"], found[key], found.get("id")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise _Malformed('its "name" is not the name of a function')
    if not isinstance(arguments, dict):
        raise _Malformed(f'its "{key}" must be a JSON object, as {{"KEY": VALUE}}')
    return ToolCall(name, arguments, own_id if isinstance(own_id, str) and _ID.fullmatch(own_id) else id_)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise _Malformed("a key stands in it twice")
    return found


def _finite(digits: str) -> float:
    if not math.isfinite(float(digits)):
        raise _Malformed(f"{digits} is not a number in JSON")
    return float(digits)


_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_finite, parse_float=_finite)


def _json(text: str, at: int) -> tuple[Any, int]:
    """Return the JSON value that begins there, and where it ends. Raises _Malformed."""
    begin = _BLANK.match(text, at).end()  # type: ignore[union-attr]
    try:
        value, end = _DECODER.raw_decode(text, begin)
        json.dumps(value, ensure_ascii=False).encode()  # fails for half of a surrogate pair
        if depth_of(value) <= MAX_DEPTH:
            return value, end
    except _Malformed:
        raise
    except ValueError as error:
        raise _Malformed(f"it is not JSON ({error})") from None
    except RecursionError:
        pass
    raise _Malformed("it is nested too deeply")


def _gemma_arguments(text: str) -> Any:
    """Return the arguments of a call of Gemma 4: JSON but for bare keys, and a token of its own for quotes."""
    pieces = text.split(_GEMMA_QUOTE)
    pieces[1::2] = [json.dumps(piece, ensure_ascii=False) for piece in pieces[1::2]]
    pieces[::2] = [_BARE.sub(lambda bare: f'{bare[1]}"{bare[2]}":' if bare[2] else "null", one) for one in pieces[::2]]
    value, end = _json(text := "".join(pieces), 0)
    if text[end:].strip():
        raise _Malformed("other text stands before its end")
    return value


def _python_calls(text: str) -> list[Any]:
    """Return the calls of a list in Python's syntax, whose values are literals, of Python or JSON."""
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        if not isinstance(tree, ast.List):
            raise _Malformed("it is not a list of calls")
        found = json.dumps([_python_call(one) for one in tree.elts], ensure_ascii=False)
    except _Malformed:
        raise
    except (SyntaxError, TypeError, ValueError, RecursionError, MemoryError) as error:
        raise _Malformed(f"it is not Python ({error})") from None
    calls: list[Any] = _json(found, 0)[0]
    return calls


def _python_call(tree: ast.expr) -> dict[str, Any]:
    if not isinstance(tree, ast.Call) or tree.args or not all(one.arg for one in tree.keywords):
        raise _Malformed("a call is not of the form NAME(KEY=VALUE)")
    values = [(str(one.arg), ast.literal_eval(_JsonWords().visit(one.value))) for one in tree.keywords]
    return {"name": ast.unparse(tree.func), "arguments": _object(values)}


class _JsonWords(ast.NodeTransformer):
    """Take JSON's words for Python's."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_JSON_WORDS[node.id]) if node.id in _JSON_WORDS else node


def _elements(element: re.Pattern[str], text: str, at: int, schema: Mapping[str, Any]) -> tuple[dict[str, Any], int]:
    """Return the parameters written as elements, and where they end."""
    found: list[tuple[str, Any]] = []
    while parameter := element.match(text, at):
        found.append((parameter[1], _typed(parameter[2], schema.get(parameter[1], {}))))
        at = parameter.end()
    return _object(found), at


def _typed(text: str, schema: Any) -> Any:
    """Return a parameter's text as what its schema says it is; as text, where it cannot be that."""
    table = schema if isinstance(schema, dict) else {}  # true is a schema, too
    inner = [one for key in ("anyOf", "oneOf", "allOf") for one in table.get(key) or ()]
    types = {_type_of(one) for one in (table, *inner) if isinstance(one, dict)} - {""}
    if not types or "string" in types:
        return text
    if text in _PYTHON_WORDS:
        return _PYTHON_WORDS[text]
    try:
        value, end = _json(text, 0)
    except _Malformed:
        return text
    return text if text[end:].strip() else value


def _type_of(schema: Mapping[str, Any]) -> str:
    """Return the type that a schema says, "object" for others than text; "" where it says none."""
    kind = schema.get("type", "object" if "$ref" in schema else "")
    if isinstance(kind, list):
        return "string" if {*map(str, kind)} <= {"string", "null"} else "object"
    return str(kind)


FORMATS = (
    CallFormat(  # gpt-oss
        sign=re.compile(r"<\|start\|>assistant to="),
        begin=re.compile(
            r"(?:<\|start\|>assistant)?(?:<\|channel\|>\w+)? to=(?:functions\.)?(?P<name>[^\s<]++)"
            r"(?:<\|channel\|>\w+)?\s*+(?:<\|constrain\|>)?\w*+<\|message\|>"
        ),
        end=re.compile(r"\s*\Z"),
        shape='<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{"KEY": VALUE}<|call|>',
    ),
    CallFormat(  # Gemma 4
        sign=re.compile(r"<\|tool_call>call:"),
        begin=re.compile(r"<\|tool_call>(?:call:(?P<name>[^\s{<]+)(?=\{))?"),
        end=re.compile(r"<tool_call\|>"),
        shape=f"<|tool_call>call:NAME{{KEY:{_GEMMA_QUOTE}TEXT{_GEMMA_QUOTE},KEY:VALUE}}<tool_call|>",
        read=_gemma_arguments,
    ),
    CallFormat(  # LFM2.5
        sign=re.compile(r"<\|tool_call_start\|>\["),
        begin=re.compile(r"<\|tool_call_start\|>"),
        end=re.compile(r"<\|tool_call_end\|>"),
        shape="<|tool_call_start|>[NAME(KEY=VALUE)]<|tool_call_end|>",
        read=_python_calls,
    ),
    CallFormat(  # Qwen3-Coder, Qwen3.5, Nemotron 3
        sign=re.compile(r"<function="),
        begin=re.compile(r"(?:<tool_call>\s*)?<function=(?P<name>[^>\n]*)>|<tool_call>"),
        end=re.compile(r"\s*</function>(?:\s*</tool_call>)?"),
        shape="<tool_call>\n<function=NAME>\n<parameter=KEY>\nVALUE\n</parameter>\n</function>\n</tool_call>",
        element=re.compile(
            r"\s*<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>(?=\s*<(?:parameter=|/function>))", re.DOTALL
        ),
    ),
    CallFormat(  # MiniMax M2
        sign=re.compile(r'<invoke name="'),
        begin=re.compile(r'(?:<minimax:tool_call>\s*)?<invoke name="(?P<name>[^"\n]*)">|<minimax:tool_call>'),
        end=re.compile(r"\s*</invoke>(?:\s*</minimax:tool_call>)?"),
        shape='<minimax:tool_call>\n<invoke name="NAME">\n<parameter name="KEY">VALUE</parameter>\n</invoke>\n'
        "</minimax:tool_call>",
        element=re.compile(
            r'\s*<parameter name="([^"\n]+)">(.*?)</parameter>(?=\s*<(?:parameter name=|/invoke>))', re.DOTALL
        ),
    ),
    CallFormat(  # GLM 4.5 to 4.7
        sign=re.compile(r"<arg_key>"),
        begin=re.compile(r"<tool_call>\s*(?P<name>[^\s<]*)"),
        end=re.compile(r"\s*</tool_call>"),
        shape="<tool_call>NAME\n<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n</tool_call>",
        element=re.compile(
            r"\s*<arg_key>([^<]+)</arg_key>\s*<arg_value>(.*?)</arg_value>(?=\s*<(?:arg_key>|/tool_call>))", re.DOTALL
        ),
    ),
    CallFormat(  # DeepSeek V3, R1, V3.1
        sign=re.compile(r"<｜tool▁call▁begin｜>"),
        begin=re.compile(
            r"(?:<｜tool▁calls▁begin｜>\s*)?<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>)?"
            r"(?P<name>[^<\n]+)(?:<｜tool▁sep｜>|\n```json\n)|<｜tool▁calls?▁begin｜>"
        ),
        end=re.compile(r"\s*(?:```)?<｜tool▁call▁end｜>(?:\s*<｜tool▁calls▁end｜>)?"),
        shape="<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>NAME<｜tool▁sep｜>"
        '{"KEY": VALUE}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    ),
    CallFormat(  # Nemotron Nano 2, Super 1.5
        sign=re.compile(r"<TOOLCALL>\["),
        begin=re.compile(r"<TOOLCALL>"),
        end=re.compile(r"\s*</TOOLCALL>"),
        shape='<TOOLCALL>[{"name": "NAME", "arguments": {"KEY": VALUE}}]</TOOLCALL>',
    ),
    CallFormat(  # Hermes, Qwen2.5, Qwen3
        sign=re.compile(r"""<tool_call>(?s:.*)arguments\\?["']"""),
        begin=re.compile(r"<tool_call>"),
        end=re.compile(r"\s*</tool_call>"),
        shape='<tool_call>\n{"name": "NAME", "arguments": {"KEY": VALUE}}\n</tool_call>',
    ),
    CallFormat(  # Mistral
        sign=re.compile(r"\[TOOL_CALLS\]"),
        begin=re.compile(r"\[TOOL_CALLS\]\s*(?:(?P<name>[^\[\]{}\s]+)(?:\[CALL_ID\](?P<id>\w+))?\[ARGS\])?"),
        end=re.compile(r""),
        shape='[TOOL_CALLS][{"name": "NAME", "arguments": {"KEY": VALUE}}]',
    ),
    CallFormat(  # Llama 3.1 to 3.3
        sign=re.compile(r'"name\\?": (?s:.*)"parameters\\?": '),
        begin=re.compile(r"""<\|python_tag\|>|\A\s*(?=\{\s*"(?:name|type)"\s*:)"""),
        end=re.compile(r"\s*\Z"),
        shape='{"name": "NAME", "parameters": {"KEY": VALUE}}',
        key="parameters",
    ),
)


def format_of(template: str) -> CallFormat | None:
    """Return the form in which a chat template writes tool calls; None where it writes none that is known."""
    return next((form for form in FORMATS if form.sign.search(template)), None)
