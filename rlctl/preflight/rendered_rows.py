"""What the model's own chat template makes of the first rows: rendered as transformers does it, without a tokenizer."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlctl.models.end_tokens import GENERATION
from rlctl.models.paths import read_object
from rlctl.models.tokenizer_files import TokenTable, token_table
from rlctl.preflight.data_rows import Looked
from rlctl.preflight.data_sense import source_of
from specs.errors import Problem
from specs.schema.rewards import Regex
from specs.schema.spec import Spec
from specs.templates import render_template
from specs.text import show
from workers.data.chat_sense import ASKED, MARKUP, Message, around_answer, longest_word, unwritten_header
from workers.grading.pattern_example import example

_ROWS = 32
_MOST_BYTES = 1 << 22  # of a tokenizer.json: a larger one takes longer to parse than the check may
_OF_ANY_MODEL = (None, "PreTrainedTokenizerFast", "TokenizersBackend")  # which know no end token of their own
_TAG = re.compile(r"<[a-z_]+>\s*$")

Rendering = Callable[[Sequence[Message]], str]


class Refused(Exception):
    """The template raised: it refuses the messages, or cannot be rendered."""


def rendered_warnings(spec: Spec, folder: Path, template: str, looked: Mapping[str, Looked]) -> Iterator[Problem]:
    """Warnings: transformers itself has the last word, in `--probe` and the run. `folder`: the model's; `template`: its
    chat template, "" where there is none."""
    tokens = token_table(folder)
    yield from _no_end(spec, folder, tokens)
    if spec.data.chat == "never" or not template:
        return
    try:
        render = rendering(template, folder)
    except Exception:  # of a template that is no Jinja, which is said elsewhere
        return
    for key, found in looked.items():
        yield from _of_rows(spec, key, found, render)
    yield from _of_template(spec, folder, render, tokens)


def rendering(template: str, folder: Path) -> Rendering:
    """Renders messages as a prompt. Raises Refused."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> None:
        raise Refused(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda value, **how: json.dumps(value, ensure_ascii=False, indent=how.get("indent"))
    environment.globals |= {"raise_exception": refuse, "strftime_now": lambda form: "01 Jan 2026"}
    compiled = environment.from_string(re.sub(r"\{%-?\s*(end)?generation\s*-?%\}", "", template))
    given = _special_tokens(folder)

    def render(messages: Sequence[Message]) -> str:
        try:
            own = [dict(one) for one in messages]
            return compiled.render(messages=own, tools=None, documents=None, add_generation_prompt=True, **given)
        except Exception as error:  # a template may raise anything
            raise Refused(str(error) or type(error).__name__) from error

    return render


def _silent(*_: object) -> None:
    """What is wrong with the file is said elsewhere."""


def _object(file: Path) -> dict[str, Any]:
    return (read_object(file, _silent) or {}) if file.is_file() and file.stat().st_size <= _MOST_BYTES else {}


def _special_tokens(folder: Path) -> dict[str, str]:
    """Special tokens by their names (`eos_token`, …)."""
    found = {**_object(folder / "special_tokens_map.json"), **_object(folder / "tokenizer_config.json")}
    texts = {name: one.get("content") if isinstance(one, dict) else one for name, one in found.items()}
    return {name: text for name, text in texts.items() if name.endswith("_token") and isinstance(text, str)}


# ── rows ──────────────────────────────────────────────────────────────────────────────────────────


def _of_rows(spec: Spec, key: str, found: Looked, render: Rendering) -> Iterator[Problem]:
    """The first row that the template refuses, or rows whose text it leaves out."""
    conversations = [messages_of(row, spec) for row in found.rows[:_ROWS]]
    left_out = 0
    for messages in conversations:
        try:
            text = render(messages).casefold()
        except Refused as refused:
            message = f"the chat template refuses the messages of a row ({_roles(messages)}): {refused}"
            if spec.data.system and not _is_refused(render, messages[1:]):
                hint = "put its text into the user's message, with data.template"
                yield Problem("data.system", f"the chat template refuses it: {refused}", hint, show(spec.data.system))
            elif spec.data.bad_rows == "refuse":
                hint = "write the messages as the template wants them, or use another model"
                yield Problem(key, message, hint, source_of(key, spec))
            return
        word = longest_word(messages[-1].get("content"))
        left_out += bool(word) and word not in text
    if conversations and left_out == len(conversations):
        shown = show(render(conversations[0]), 60)
        message = f"the chat template leaves the messages' text out: a prompt is {shown}"
        yield Problem("model.path", message, "repair the chat template, or use the model's own", show(spec.model.path))
    elif gone := [who for messages in conversations if (who := _unseen(render, messages))]:
        yield from _not_all_seen(spec, key, gone, len(conversations))


def _not_all_seen(spec: Spec, key: str, gone: Sequence[str], rows: int) -> Iterator[Problem]:
    """Messages before the last one that a model never sees."""
    if gone[0] == "system" and spec.data.system:
        hint = "put its text into the user's message, with data.template, or use the model's own chat template"
        yield Problem("data.system", "the chat template leaves it out", hint, show(spec.data.system))
    else:
        message = f"the chat template leaves out a {gone[0]} message in {len(gone)} of the first {rows} rows"
        yield Problem(key, message, "put its text into the last message", source_of(key, spec))


def _unseen(render: Rendering, messages: Sequence[Message]) -> str:
    """Whose message, before the last one, the template leaves out; "" where it has all. Of what an assistant said, a
    template may leave out the thoughts."""
    for number, message in enumerate(messages[:-1]):
        if message.get("role") not in ("system", "user") or not isinstance(message.get("content"), str):
            continue
        try:
            text = render([*messages[:number], {**message, "content": ASKED}, *messages[number + 1 :]])
        except Refused:
            return ""
        if ASKED not in text:
            return str(message["role"])
    return ""


def _is_refused(render: Rendering, messages: Sequence[Message]) -> bool:
    try:
        render(messages)
    except Refused:
        return True
    return False


def _roles(messages: Sequence[Message]) -> str:
    return ", ".join(str(message.get("role")) for message in messages)


def messages_of(row: Mapping[str, Any], spec: Spec) -> list[Message]:
    """What the template is given of a row."""
    data = spec.data
    prompt = render_template(data.template, row) if data.template else row[data.prompt_column]
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    if data.system and messages[0].get("role") != "system":
        messages = [{"role": "system", "content": data.system}, *messages]
    return messages


# ── around an answer ──────────────────────────────────────────────────────────────────────────────


def _of_template(spec: Spec, folder: Path, render: Rendering, tokens: TokenTable | None) -> Iterator[Problem]:
    """What an answer begins and ends with."""

    def softly(messages: Sequence[Message]) -> str | None:
        try:
            return render(messages)
        except Refused:
            return None

    path = show(spec.model.path)
    asked = softly([{"role": "user", "content": ASKED}])
    if asked and "\\n" in asked:
        message = f"the chat template writes a backslash and n into every prompt: {show(asked, 60)}"
        yield Problem("model.path", message, "write line breaks into it: it is no JSON text", path)
    if header := unwritten_header(softly):
        message = f"the chat template does not begin the answer: the model itself is to write {show(header)}"
        hint = "write it where add_generation_prompt is true, as templates usually do"
        yield Problem("model.path", message, hint, path)
    after, before = around_answer(softly)
    if (mark := MARKUP.match(after.lstrip())) and mark[0].startswith("<"):
        yield from _end_of_turn(spec, folder, mark[0], before, tokens)
    prompt = softly([{"role": "user", "content": "?"}])
    if prompt and (begun := _TAG.search(prompt)):
        yield from _begun(spec, begun[0].strip())


def _end_of_turn(spec: Spec, folder: Path, mark: str, before: str, tokens: TokenTable | None) -> Iterator[Problem]:
    path = show(spec.model.path)
    if tokens is None:
        return
    if mark not in tokens:
        if mark not in before:
            message = f"the chat template ends an answer with {show(mark)}, which is no token of the tokenizer"
            yield Problem("model.path", message, "use the model's own chat template", path)
        return
    ends = {text for number in _end_ids(folder) if (text := tokens.text_of(number))}
    ends |= {*spec.rollout.stop, _special_tokens(folder).get("eos_token", "")}
    if ends - {""} and mark not in ends:
        message = f"the chat template ends an answer with {show(mark)}, which ends no completion"
        yield Problem("rollout.stop", message, "add it, unless the model was trained to end with another token", path)


def _begun(spec: Spec, tag: str) -> Iterator[Problem]:
    """Patterns that ask for the tag with which the prompt ends already."""
    for index, term in enumerate(spec.reward.terms):
        if isinstance(term, Regex) and term.weight > 0 and (text := example(term.pattern, "7")) and tag in text:
            rest = text.partition(tag)[2]
            if not re.search(term.pattern, rest, re.DOTALL):
                message = f"rewards {tag}, with which the prompt ends already: a completion goes on behind it"
                hint = "leave it out of what is asked for"
                yield Problem(f"reward.terms.{index}.pattern", message, hint, show(term.pattern))


def _end_ids(folder: Path) -> set[int]:
    found = [_object(folder / name).get("eos_token_id") for name in ("config.json", GENERATION)]
    return {one for value in found for one in (value if isinstance(value, list) else [value]) if isinstance(one, int)}


def _no_end(spec: Spec, folder: Path, tokens: TokenTable | None) -> Iterator[Problem]:
    """A model and a tokenizer that name no token that ends a completion."""
    kind = _object(folder / "tokenizer_config.json").get("tokenizer_class")
    text, ids = _special_tokens(folder).get("eos_token"), _end_ids(folder)
    hint, path = "put eos_token_id into its generation_config.json", show(spec.model.path)
    if not (ids or spec.rollout.stop or text) and kind in _OF_ANY_MODEL and (folder / "tokenizer.json").is_file():
        message = "no token ends a completion: each has data.max_response_tokens tokens"
        yield Problem("model.path", message, hint, path)
    if tokens is None:
        return
    if text and text not in tokens:
        message = f"eos_token in tokenizer_config.json is {show(text)}, which is no token of tokenizer.json"
        yield Problem("model.path", message, "use the tokenizer files that the model was trained with", path)
    special = {*tokens.added_texts, *_special_tokens(folder).values()}
    plain = {number: one for number in ids if (one := tokens.text_of(number)) is not None and one not in special}
    if ids and len(plain) == len(ids) and text and text in tokens and tokens.id_of(text) not in ids:
        number, one = next(iter(plain.items()))
        message = f"eos_token_id {number} is {show(one)} in its tokenizer, which says {show(text)} ends a text"
        yield Problem("model.path", message, "use the tokenizer and the config of one model", path)
