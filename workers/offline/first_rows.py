"""The rows of a run's data, rendered and tokenised as the data role does it: what of them would be wrong. Of large
files, the first rows."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

from backends.hf.tokenizer import TextCodec
from specs.errors import DataError
from specs.schema.sections import is_hub_data
from specs.text import show
from specs.wire.meta_request import Finding, Token
from specs.wire.role_config import DataConfig
from workers.chat_renderer import ChatRenderer, ChatTemplateError
from workers.data.chat_sense import MARKUP, Message, Render, around_answer, longest_word, unwritten_header
from workers.data.prompts import PromptTable, messages_of, prompt_of, read_table, uses_chat
from workers.data.row_source import DataRow, read_rows

ROWS = 256
_CHUNK_ROWS = 1024
_LATER_S = 4.0  # for all rows behind the first
_RENDERED = 8  # whose text is compared with their messages
_LOST = 0.1  # share of a prompt's letters that a tokenizer may lose (by normalising them, say)
_TRAIN = "data.train"


def _sources(config: DataConfig) -> dict[str, str]:
    """The data sources that the spec names, by their keys."""
    return {_TRAIN: config.data.train, **{f"{one.key}.data": one.data for one in config.evals if one.data}}


def _rows(config: DataConfig, key: str) -> Iterator[DataRow]:
    """As many rows of a source as a run reads."""
    most = config.data.max_rows if key == _TRAIN else None
    return read_rows(_sources(config)[key], split="", base=Path(config.spec_dir), max_rows=most)


def first_tables(config: DataConfig, codec: TextCodec) -> Iterator[tuple[str, PromptTable, bool] | Finding]:
    """(key, table, whether it is the whole source) of each source that lies on this machine, or why there is none."""
    for key, source in _sources(config).items():
        if is_hub_data(source):
            continue
        rows = _rows(config, key)
        try:
            first = list(islice(rows, ROWS))
            table = read_table(source, first, config.data, codec, config.needs_answer, config.needs_columns)
        except DataError as error:
            yield Finding(key=key, message=error.message, hint=error.hint, value=show(source))
        else:
            yield key, table, len(first) < ROWS or next(rows, None) is None


def row_findings(config: DataConfig, codec: TextCodec) -> Iterator[Finding]:
    """What is wrong with the first rows of every source."""
    for found in first_tables(config, codec):
        if isinstance(found, Finding):
            yield found
            continue
        key, table, whole = found
        yield from _lengths(config, key, table, whole)
        yield from _lost(key, table, codec)
        yield from _ends_inside(config, key, table, codec)
        if uses_chat(config.data, codec):
            yield from _left_out(config, table)
        if not whole:
            yield from _later_rows(config, codec, key)


def _later_rows(config: DataConfig, codec: TextCodec, key: str) -> Iterator[Finding]:
    """The first row behind those of `first_tables` that a run would refuse, as far as there is time to look."""
    source, deadline = _sources(config)[key], time.monotonic() + _LATER_S
    rows = islice(_rows(config, key), ROWS, None)
    try:
        while (chunk := list(islice(rows, _CHUNK_ROWS))) and time.monotonic() < deadline:
            table = read_table(source, chunk, config.data, codec, config.needs_answer)
            if table.dropped_overlong and config.data.overlong == "refuse":
                message = f"{table.first_overlong} tokens, and data.overlong refuses longer prompts"
                value = str(config.data.max_prompt_tokens)
                yield Finding(key="data.max_prompt_tokens", message=message, hint="raise it", value=value)
                return
    except DataError as error:
        yield Finding(key=key, message=error.message, hint=error.hint, value=show(source))


# ── what the tokenizer makes of them ────────────────────────────────────────────────────────────────


def _lost(key: str, table: PromptTable, codec: TextCodec) -> Iterator[Finding]:
    """Prompts whose letters the tokenizer has no tokens for: those of another model."""
    losses = []
    for number, prompt in enumerate(table.prompts[:_RENDERED]):
        wanted = _letters(prompt)
        back = _letters(str(codec.tokenizer.decode(table.prompt_tokens(number).tolist())))
        if wanted:
            losses.append(1 - (wanted & back).total() / wanted.total())
    if losses and min(losses) > _LOST:
        message = f"the tokenizer loses {min(losses):.0%} and more of the letters of every prompt"
        hint = "use the tokenizer that the model was trained with, and a model that knows these characters"
        yield Finding(key=key, message=message, hint=hint, value=show(table.source), refuses=min(losses) > 0.5)


def _letters(text: str) -> Counter[str]:
    return Counter(one for one in text.casefold() if one.isalnum())


def _ends_inside(config: DataConfig, key: str, table: PromptTable, codec: TextCodec) -> Iterator[Finding]:
    """Rows that hold the end token's text, as data for supervised training does. In plain text it may stand between
    turns that were written by hand."""
    end, chat = codec.tokenizer.eos_token_id, uses_chat(config.data, codec)
    prompts = [prompt_of(row, config.data) for row in table.rows[:_RENDERED]]
    texts = [prompt if isinstance(prompt, str) else str(prompt[-1]["content"]) for prompt in prompts]
    encoded = codec.encode([text.rstrip() for text in texts], rendered=True)
    if end is None or not texts or not all(end in (ids if chat else ids[-1:]) for ids in encoded):
        return
    message = f"prompts hold {show(codec.tokenizer.eos_token)}, the token that ends a text"
    yield Finding(key=key, message=message, hint="leave it out", value=show(table.source), refuses=False)


# ── how many are left ───────────────────────────────────────────────────────────────────────────────


def _lengths(config: DataConfig, key: str, table: PromptTable, whole: bool) -> Iterator[Finding]:
    """Prompts that are too long, and too few that are left."""
    data, usable, long = config.data, len(table), table.dropped_overlong
    rows, left = usable + long + table.dropped_bad, usable - _held_out(config)
    longest = f"the longest has {table.longest_prompt_tokens}"

    def too_long(message: str, *, refuses: bool = False) -> Finding:
        value = str(data.max_prompt_tokens)
        return Finding(key="data.max_prompt_tokens", message=message, hint="raise it", value=value, refuses=refuses)

    def bad(message: str, *, refuses: bool = False) -> Finding:
        hint = f"fix the rows that are dropped, the first: {table.first_bad}"
        return Finding(key=key, message=message, hint=hint, value=show(table.source), refuses=refuses)

    if long and data.overlong == "refuse":
        message = f"{table.first_overlong} tokens, which is longer than data.max_prompt_tokens"
        yield too_long(f"{message} = {data.max_prompt_tokens}, and data.overlong refuses it", refuses=True)
    elif long and not usable:
        yield too_long(f"all of the first {long} prompts of {table.source} are longer; {longest}", refuses=True)
    elif not usable:
        yield bad(f"no prompt is left: all of the first {rows} rows are bad", refuses=True)
    elif whole and key == _TRAIN and left < data.prompts_per_step <= rows - _held_out(config):
        message = f"leaves {left} usable prompts, and a step draws {data.prompts_per_step}"
        yield too_long(message) if long else bad(message)
    elif 2 * long >= rows:
        yield too_long(f"{long} of the first {rows} prompts of {table.source} are longer, and dropped; {longest}")


def _held_out(config: DataConfig) -> int:
    return sum(one.prompts for one in config.evals if not one.data)


# ── what the template makes of them ─────────────────────────────────────────────────────────────────


def _left_out(config: DataConfig, table: PromptTable) -> Iterator[Finding]:
    """Text of messages that is not in the prompt, and parts of messages that are there as Python writes them."""
    given = [messages_of(prompt_of(row, config.data), config.data) for row in table.rows[:_RENDERED]]
    pairs = [(message, prompt) for messages, prompt in zip(given, table.prompts, strict=False) for message in messages]
    hint, key = "repair the chat template, or use the model's own", "model.path"
    if any(repr(message) in prompt for message, prompt in pairs):
        message = "the chat template prints messages as Python writes them"
        yield Finding(key=key, message=message, hint=hint)
    elif any(isinstance(message["content"], list) and repr(message["content"]) in prompt for message, prompt in pairs):
        message = "the chat template prints the parts of a message as Python writes a list"
        yield Finding(key=key, message=message, hint="write the content of messages as text")
    texts = [(one["role"] == "system", longest_word(one["content"]), prompt.casefold()) for one, prompt in pairs]
    seen = {system: [word in prompt for of, word, prompt in texts if of == system and word] for system in (True, False)}
    if seen[False] and not any(seen[False]):
        shown = show(table.prompts[0])
        yield Finding(
            key=key, message=f"the chat template leaves the messages' text out: a prompt is {shown}", hint=hint
        )
    elif seen[True] and not any(seen[True]):
        message = "the chat template leaves the system message out"
        yield Finding(key=key, message=message, hint="put its text into the user's message", refuses=False)


def foreign_markup(codec: TextCodec, chats: ChatRenderer) -> Finding | None:
    """A chat template that ends an answer with markup of which the tokenizer has no token: one of another model."""
    after, before = around_answer(_render(chats))
    mark = MARKUP.match(after.lstrip())
    if mark is None or mark[0] in before or len(pieces := codec.encode([mark[0]], rendered=True)[0]) == 1:
        return None
    message = f"the chat template ends an answer with {show(mark[0])}, which is no token but {len(pieces)}"
    return Finding(key="model.path", message=message, hint="use the model's own chat template", refuses=False)


def no_generation_prompt(chats: ChatRenderer) -> Finding | None:
    """A template that writes who speaks before an answer, and leaves it to the model where one is to begin."""
    if not (header := unwritten_header(_render(chats))):
        return None
    message = f"the chat template does not begin the answer: the model itself is to write {show(header)}"
    hint = "write it where add_generation_prompt is true, as templates usually do"
    return Finding(key="model.path", message=message, hint=hint, refuses=False)


def _render(chats: ChatRenderer) -> Render:
    def render(messages: Sequence[Message]) -> str | None:
        try:
            return chats.render(messages)
        except ChatTemplateError:
            return None

    return render


def turn_end(codec: TextCodec, chats: ChatRenderer) -> Token | None:
    """The special token that the chat template writes behind what the assistant says; None where it writes none, or
    does not say."""
    after, _ = around_answer(_render(chats))
    ids = codec.encode([after.lstrip()], rendered=True)[0][:1]
    special = codec.tokenizer.added_tokens_decoder
    return Token(id=ids[0], text=str(special[ids[0]])) if ids and ids[0] in special else None


def highest_token(codec: TextCodec) -> Token:
    vocabulary = codec.tokenizer.get_vocab()
    text = max(vocabulary, key=vocabulary.__getitem__)
    return Token(id=vocabulary[text], text=text)
