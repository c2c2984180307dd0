"""Turns rows into examples: the tokens of a sequence, or of two, and which of these are learned."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol

from specs.errors import DataError
from specs.schema.rows import LearnFrom, RowSet
from specs.text import show
from specs.wire.role_config import DataConfig, RowsConfig
from workers.chat.chat_renderer import ChatRenderer
from workers.data.conversations import (
    ASSISTANT,
    Message,
    TurnEnds,
    checked_messages,
    chosen_messages,
    learned_text,
    mask_of,
    no_template,
    plain,
    rendered,
    tools_of,
)
from workers.data.row_source import BadRow, DataRow, DroppedRows, in_order, lacking, without_nulls
from workers.joined_text import TextTokens, begun, ended, joined, without_padding

if TYPE_CHECKING:  # a check of the first rows needs no arrays
    from specs.wire.batch import Column


MAX_MARGIN = 3e38  # of a float32
_SHAPES = ("messages_column", "completion_column", "text_column")


class RowCodec(TextTokens, Protocol):
    """The part of a tokenizer that rows need; `TextCodec` says more of each."""

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]: ...

    @property
    def stop_ids(self) -> frozenset[int]: ...


@dataclass(frozen=True)
class Learned:
    """Tokens of a sequence, and 1 for each that is learned. `text`: what they were made of, where a row is read."""

    tokens: list[int]
    mask: list[int]
    text: str = ""


@dataclass(frozen=True)
class Example:
    """Hold what a row teaches: one sequence, or a chosen one and then a rejected one."""

    sequences: Sequence[Learned]
    chosen: Sequence[int]  # of each sequence, 1 or 0
    margin: float = 0.0


@dataclass
class ExampleTable(DroppedRows):
    """Examples that can be drawn, sequence after sequence; example `i` has those from `first[i]` to `first[i + 1]`."""

    of_scores: bool = False  # the objective's, which computes the last token too
    first: array[int] = field(default_factory=lambda: array("q", [0]))
    offsets: array[int] = field(default_factory=lambda: array("q", [0]))
    tokens: array[int] = field(default_factory=lambda: array("i"))
    masks: array[int] = field(default_factory=lambda: array("B"))
    chosen: array[int] = field(default_factory=lambda: array("B"))
    margins: array[float] = field(default_factory=lambda: array("f"))
    largest: int = 0  # tokens of an example that are computed in one row, with a prompt that is shared once
    ends: int = 0  # sequences of which the end is learned
    learns_from: set[str] = field(default_factory=set)
    rendered: bool = False  # whether rows went through the chat template
    seen: set[str] = field(default_factory=set)  # columns that its rows have
    truncated: int = 0

    def __len__(self) -> int:
        return len(self.first) - 1

    def add(self, example: Example) -> None:
        for sequence, chosen in zip(example.sequences, example.chosen, strict=True):
            self.tokens.extend(sequence.tokens)
            self.masks.extend(sequence.mask)
            self.offsets.append(len(self.tokens))
            self.chosen.append(chosen)
            self.margins.append(example.margin)
        self.first.append(len(self.chosen))
        prompts = [each.tokens[: each.mask.index(1)] for each in example.sequences]
        shared = len(prompts[0]) if prompts[1:] == prompts[:1] and len(prompts[0]) > 1 else 0
        masks = (each.mask for each in example.sequences)
        computed = (len(mask) - (0 if self.of_scores else 1 + mask[::-1].index(1)) for mask in masks)
        self.largest = max(self.largest, sum(computed) - shared)

    def example(self, row: int) -> list[Learned]:
        """Return the sequences of an example."""
        bounds = list(pairwise(self.offsets[self.first[row] : self.first[row + 1] + 1]))
        return [Learned(list(self.tokens[a:b]), list(self.masks[a:b])) for a, b in bounds]

    def columns(self, rows: Sequence[int], draws: Sequence[int], first_row: int) -> dict[str, Column]:
        """Return ROW_COLUMNS with `length_B` of some examples. `draws`: the number of each; `first_row`: what the
        table's first row is called."""
        import numpy as np

        spans = [(self.first[row], self.first[row + 1]) for row in rows]
        members = [sequence for begin, end in spans for sequence in range(begin, end)]
        sizes = [end - begin for begin, end in spans]
        pieces = [(self.offsets[sequence], self.offsets[sequence + 1]) for sequence in members]
        tokens, masks = np.frombuffer(self.tokens, np.int32), np.frombuffer(self.masks, np.uint8)
        chosen, margins = np.frombuffer(self.chosen, np.uint8), np.frombuffer(self.margins, np.float32)
        return {
            "tokens_T": np.concatenate([tokens[:0], *(tokens[begin:end] for begin, end in pieces)]),
            "loss_mask_T": np.concatenate([masks[:0], *(masks[begin:end] for begin, end in pieces)]),
            "length_B": np.array([end - begin for begin, end in pieces], dtype=np.int64),
            "unit_B": np.repeat(np.array(draws, dtype=np.int64), sizes),
            "chosen_B": chosen[members],
            "row_B": np.repeat(np.array(rows, dtype=np.int64) + first_row, sizes),
            "margin_B": margins[members],
        }


def build_examples(
    rows: Iterable[DataRow],
    reader: ExampleReader,
    keep: Callable[[DataRow, Example], object] = lambda row, whole: None,
    threads: int = 1,
) -> ExampleTable:
    """Read and tokenise rows; the table may be empty. `keep` is given each row that is in it, and what it was before it
    was truncated. Raises DataError on a bad or overlong row where the spec refuses them, and ModelError when a chat
    template cannot be used at all."""
    table, data = ExampleTable(reader.source.path, reader.config.of_scores), reader.config.rows
    for row, example_of_row in in_order(reader.example, rows, threads):
        try:
            example = whole = example_of_row()
            longest = max(len(sequence.tokens) for sequence in example.sequences)
            if longest > data.max_tokens and data.overlong == "truncate":
                example, table.truncated = _truncated(example, data.max_tokens), table.truncated + 1
            if len({tuple(sequence.tokens) for sequence in example.sequences}) < len(example.sequences):
                raise BadRow(f"chosen and rejected are the same {len(example.sequences[0].tokens)} tokens")
        except BadRow as error:
            table.drop_bad(row, error, data.bad_rows)
            continue
        if longest > data.max_tokens and data.overlong != "truncate":
            if data.overlong == "refuse":
                hint = 'raise data.max_tokens, or set data.overlong = "drop" or "truncate"'
                limit = f"data.max_tokens = {data.max_tokens}"
                raise DataError(f"{row.where}: the row has {longest} tokens, more than {limit}", hint=hint)
            table.drop_overlong(row, longest)
            continue
        table.add(example)
        keep(row, whole)
        table.ends += sum(reader.ends(sequence) for sequence in example.sequences)
    table.learns_from, table.rendered, table.seen = reader.learns_from, reader.rendered, reader.seen
    return table


def summary(tables: Sequence[ExampleTable]) -> str:
    """Write `9,120 tokens, 2,048 learned (completion, with the end of each), longest 40`."""
    tokens, learned = sum(len(table.tokens) for table in tables), sum(sum(table.masks) for table in tables)
    longest = max((end - begin for table in tables for begin, end in pairwise(table.offsets)), default=0)
    ends, count = sum(table.ends for table in tables), sum(len(table.chosen) for table in tables)
    share = "the end of each" if ends == count else f"the end of {ends:,} of {count:,}" if ends else "no end"
    learns_from = " or ".join(sorted({one for table in tables for one in table.learns_from}))
    return f"{tokens:,} tokens, {learned:,} learned ({learns_from}, with {share}), longest {longest:,}"


def refuse_nothing(table: ExampleTable, config: RowsConfig, rows: str = "row") -> None:
    """Raises DataError where no row is left; `rows` says of which."""
    if not len(table):
        limit = f"data.max_tokens = {config.rows.max_tokens}"
        raise table.none_left(rows, limit, "check the file, its columns and data.max_tokens")


def refuse_one_label(tables: Sequence[ExampleTable], config: RowsConfig) -> None:
    """Raises DataError where all completions that are trained on have the same label."""
    held = config.held_out
    labels = {*tables[0].chosen[: max(len(tables[0]) - held, 0)]}.union(*(table.chosen for table in tables[1:]))
    if config.unit == "sequence" and len(labels) == 1:
        label, sources = "true" if labels == {1} else "false", ", ".join(table.source for table in tables)
        hint = "kto learns from the difference of completions labelled true and false: add some of the other kind"
        hint += f", not as the last {held}, which are held out" if held else ""
        raise DataError(f"{sources}: every row is labelled {label}", hint=hint)


def absent(column: str, key: str, has: Iterable[str]) -> DataError:
    """Return the error of a column that the spec names and none of the rows has; `has`: those that are there."""
    hint = f"name one of {', '.join(has)}, or remove the key"
    return DataError(f"no row has the column {column!r}, which data.{key} names", hint=hint)


def refuse_absent(tables: Sequence[ExampleTable], config: DataConfig) -> None:
    """Raises DataError for a column that the spec names and no row has, where rows can be read without it. Prompts of
    evaluations may be rows of their own."""
    assert config.rows is not None, "there are no rows"
    if config.evals:
        return
    there = set[str]().union(*(table.seen for table in tables))
    for source in config.rows.rows.sources:
        for name in (*_SHAPES, "tools_column", "margin_column"):
            column = getattr(source, name)
            if column not in there and column != RowSet.model_fields[name].default:
                raise absent(column, name, sorted(there))


def _truncated(example: Example, most: int) -> Example:
    sequences = [Learned(each.tokens[:most], each.mask[:most]) for each in example.sequences]
    if not all(any(each.mask) for each in sequences):
        raise BadRow(f"nothing to learn is left of it within data.max_tokens = {most}")
    return Example(sequences, example.chosen, example.margin)


class ExampleReader:
    """Makes examples of the rows of a source. `chats`: the model's chat template, None where it has none. `pad`: the
    padding token, which ends no sequence that is scored; None: they are not, or there is none."""

    def __init__(
        self,
        source: RowSet,
        config: RowsConfig,
        codec: RowCodec,
        chats: ChatRenderer | None,
        pad: int | None = None,
    ) -> None:
        self.pad = pad
        self.source, self.config, self.codec, self.chats = source, config, codec, chats
        self.data = config.rows
        self.learns_from: set[str] = set()  # in the rows so far
        self.rendered = False  # whether one of them went through the chat template
        self.seen: set[str] = set()  # columns
        self._keeps_blanks = bool(codec.encode([" "], rendered=True)[0])

    def example(self, row: DataRow) -> Example:
        """Raises BadRow."""
        if row.problem:
            raise BadRow(row.problem)
        values, source = row.values, self.source
        self.seen.update(values)
        if self.config.unit == "pair":
            example = self._pair(values)
        elif self.config.unit == "sequence":
            label = values.get(source.label_column)
            if not isinstance(label, bool):
                why = f"column {source.label_column!r} must be true or false"
                raise lacking(why, values) if label is None else BadRow(f"{why}; it is {show(label)}")
            example = Example([self._completed(values, source.completion_column)], (int(label),))
        elif (shape := self._shape(values)) == "messages_column":
            messages = checked_messages(values[source.messages_column], source.messages_column)
            learn_from = self._learn_from("assistant", messages)
            example = Example([self._conversation(messages, learn_from, values=values)], (1,))
        elif shape == "completion_column":
            example = Example([self._completed(values, source.completion_column)], (1,))
        elif shape:
            example = Example([self._text(_text(values, source.text_column))], (1,))
        else:
            columns = f"{source.messages_column!r}, {source.completion_column!r} or {source.text_column!r}"
            has = {name: value for name, value in values.items() if value is not None}
            raise lacking(f"no column {columns}", has)
        if self.pad is not None:
            example = replace(example, sequences=[self._as_scored(sequence) for sequence in example.sequences])
        for sequence in example.sequences:
            self._check(sequence)
        return example

    def prompt(self, row: DataRow, *, chat: bool) -> tuple[str, list[int]]:
        """Return what the row's answer continues (`asked`) as text and as tokens, written as it is where the answer is
        learned. Raises BadRow."""
        if row.problem:
            raise BadRow(row.problem)
        asked = self.asked(row.values, chat=chat)
        if isinstance(asked, str):
            (tokens,) = begun(self.codec, [asked])
            if not tokens:
                raise BadRow("the prompt has no tokens: the tokenizer drops all of its characters")
            return asked, tokens
        text = rendered(self._template(), asked, self._tools(row.values))
        return text, self._located(text)[0]

    def asked(self, values: Mapping[str, Any], *, chat: bool) -> str | list[Message]:
        """Return what comes before the answer that a row ends in: text, or messages for the chat template. `chat`:
        whether a row that is a prompt of text alone goes through that. Raises BadRow."""
        source, answered = self.source, self._answers(values)
        if len(answered) == 2:
            values = self._with_prompt(values)
        if self.config.unit == "token" and self._shape(values) == "messages_column":
            messages = checked_messages(values[source.messages_column], source.messages_column)
            numbers = [number for number, message in enumerate(messages) if message["role"] == ASSISTANT]
            messages = messages[: numbers[-1]] if numbers else messages
            if not messages:
                raise BadRow("the conversation begins with its only answer: nothing comes before it")
        else:
            prompt = values.get(source.prompt_column)
            if prompt is None:
                raise lacking(f"no column {source.prompt_column!r} to complete", values)
            if not (self._is_chat(prompt, *answered) or (chat and not answered)):
                return _text(values, source.prompt_column)
            messages = _messages(prompt, source.prompt_column, "user")
        return [plain(message) for message in self._with_system(messages)]

    def _shape(self, values: Mapping[str, Any]) -> str:
        """Return which key names the column that a row is read from, of those that it has: one that was given a name of
        its own before the others. Empty: none."""
        there = [name for name in _SHAPES if values.get(getattr(self.source, name)) is not None]
        own = (name for name in there if getattr(self.source, name) != RowSet.model_fields[name].default)
        return next(own, (*there, "")[0])

    def _answers(self, values: Mapping[str, Any]) -> list[Any]:
        """Return the completions that a row has, of a pair both."""
        pair = (self.source.chosen_column, self.source.rejected_column)
        names = pair if self.config.unit == "pair" else (self.source.completion_column,)
        return [values[name] for name in names if values.get(name) is not None]

    def _is_chat(self, *parts: Any) -> bool:
        """Return whether a prompt and its completions go through the chat template."""
        return self.data.chat == "always" or bool(self.data.system) or any(isinstance(part, list) for part in parts)

    @cached_property
    def _turn_ends(self) -> TurnEnds:
        # A score is read behind an answer as the template leaves it.
        stops = () if self.config.of_scores else self.codec.stop_ids & self.codec.special_ids
        return TurnEnds(self._texts(self.codec.special_ids), self._texts(stops))

    def _texts(self, ids: Iterable[int]) -> tuple[str, ...]:
        return tuple(filter(None, self.codec.decode([[id_] for id_ in ids], special_tokens=True)))

    def ends(self, sequence: Learned) -> bool:
        """Return whether the token that ends the sequence, or its last turn, is learned."""
        last = len(sequence.mask) - 1 - sequence.mask[::-1].index(1)
        return sequence.tokens[last] in self.codec.special_ids

    def _as_scored(self, sequence: Learned) -> Learned:
        tokens = without_padding(sequence.tokens, self.pad)
        return replace(sequence, tokens=tokens, mask=sequence.mask[: len(tokens)])

    def _learn_from(self, usual: LearnFrom, messages: Sequence[Message] = ()) -> LearnFrom:
        flags = [message for message in messages if isinstance(message.get("train"), bool)]
        found = self.data.learn_from or ("flagged" if flags and self.config.unit == "token" else usual)
        self.learns_from.add(found)
        return found

    def _pair(self, values: Mapping[str, Any]) -> Example:
        source = self.source
        columns = (source.chosen_column, source.rejected_column)
        margin = values.get(source.margin_column) if self.config.of_scores else None  # nothing else reads it
        for column in columns:
            if values.get(column) in (None, "", []):
                raise lacking(f"column {column!r} is empty or missing", values)
        if values[columns[0]] == values[columns[1]]:
            raise BadRow(f"columns {columns[0]!r} and {columns[1]!r} are equal")
        if margin is not None and (isinstance(margin, bool) or not isinstance(margin, int | float)):
            raise BadRow(f"column {source.margin_column!r} is no number")
        if margin is not None and not abs(margin) <= MAX_MARGIN:
            raise BadRow(f"column {source.margin_column!r} is not finite")
        values = self._with_prompt(values)
        return Example([self._completed(values, column) for column in columns], (1, 0), float(margin or 0.0))

    def _with_prompt(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a pair's columns with a prompt apart from both completions: their common beginning where they hold
        it."""
        columns = (self.source.chosen_column, self.source.rejected_column)
        prompt = values.get(self.source.prompt_column)
        if prompt is None or _whole_conversations(prompt, *(values.get(column) for column in columns)):
            return {**values, **self._implicit(values, columns)}
        return values

    def _implicit(self, values: Mapping[str, Any], columns: tuple[str, str]) -> dict[str, Any]:
        """Take the common beginning of both completions for the prompt."""
        both = [values[column] for column in columns]
        if all(isinstance(each, str) for each in both):
            differ = (at for at, (one, other) in enumerate(zip(*both, strict=False)) if one != other)
            common = next(differ, min(map(len, both)))
            # where a word begins, with the blank before it
            common = max(both[0].rfind(" ", 0, common), both[0].rfind("\n", 0, common) + 1)
        else:
            lists = [checked_messages(each, column) for each, column in zip(both, columns, strict=True)]
            pairs = zip(*lists, strict=False)
            common = next((at for at, (one, other) in enumerate(pairs) if one != other), min(map(len, lists)))
        if not common or any(len(each) <= common for each in both):
            hint = f"add a column {self.source.prompt_column!r}"
            raise BadRow(f"columns {columns[0]!r} and {columns[1]!r} have no common beginning as a prompt: {hint}")
        found = {column: each[common:] for column, each in zip(columns, both, strict=True)}
        return {**found, self.source.prompt_column: both[0][:common]}

    def _completed(self, values: Mapping[str, Any], column: str) -> Learned:
        """Return a prompt with the completion in `column`."""
        prompt, completion = values.get(self.source.prompt_column), values.get(column)
        if not self._is_chat(prompt, *self._answers(values)):
            return self._joined(_text(values, self.source.prompt_column), _text(values, column))
        before = _messages(prompt, self.source.prompt_column, "user")
        after = _messages(completion, column, ASSISTANT)
        if after[0]["role"] != ASSISTANT:
            raise BadRow(f"column {column!r} does not begin with a message of the assistant")
        learn_from = self._learn_from("completion", after)
        return self._conversation([*before, *after], learn_from, first=len(before), values=values)

    def _joined(self, prompt: str, completion: str) -> Learned:
        """Join texts as they stand; the end of sequence follows once, and is learned."""
        ((before, after),) = joined(self.codec, [prompt], [completion])
        learn_from = self._learn_from("completion")
        if learn_from not in ("completion", "all"):
            raise BadRow(f'data.learn_from = "{learn_from}" is about messages, and the row holds text')
        if not before or not after:
            raise BadRow("the prompt or the completion has no tokens: the tokenizer drops all of its characters")
        mask = [int(learn_from == "all")] * len(before) + [1] * len(after)
        return Learned([*before, *after], mask, prompt + completion)

    def _text(self, text: str) -> Learned:
        if self._learn_from("all") != "all":
            raise BadRow(f'data.learn_from = "{self.data.learn_from}" is not about rows of one text')
        tokens = ended(self.codec, *begun(self.codec, [text]))
        return Learned(tokens, [1] * len(tokens), text)

    def _conversation(
        self, messages: Sequence[Message], learn_from: LearnFrom, first: int = 0, *, values: Mapping[str, Any]
    ) -> Learned:
        chats = self._template()
        if learn_from == "completion" and not first:
            raise BadRow('data.learn_from = "completion", and the row is one conversation: write "assistant"')
        count, messages = len(messages), self._with_system(messages)
        first += (len(messages) - count) * bool(first)
        learned = None if learn_from == "all" else chosen_messages(messages, learn_from, first)
        tools = self._tools(values)
        found = learned_text(messages, learned, chats, self._turn_ends, tools)
        tokens, offsets = self._located(found.text)
        mask = mask_of(offsets, found)
        if all(mask) and learned is not None:
            raise BadRow(f'all of its tokens are learned, with data.learn_from = "{learn_from}"')
        return Learned(tokens, mask, found.text)

    def _template(self) -> ChatRenderer:
        if self.chats is None or self.data.chat == "never":
            raise no_template("the row goes through a chat template", self.data.chat)
        self.rendered = True
        return self.chats

    def _with_system(self, messages: Sequence[Message]) -> Sequence[Message]:
        if self.data.system and messages[0]["role"] != "system":
            return [{"role": "system", "content": self.data.system}, *messages]
        return messages

    def _tools(self, values: Mapping[str, Any]) -> list[Any] | None:
        return tools_of(values, self.source.tools_column)

    def _located(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the tokens of a text and the characters of each, with the blanks that some tokenizers leave out; a
        special token is without those around it, which some take in."""
        tokens, offsets = self.codec.encode_with_offsets(text)
        found, last = list[tuple[int, int]](), 0
        for token, (begin, end) in zip(tokens, offsets, strict=True):
            if self._keeps_blanks and last < begin and text[last:begin].isspace():
                begin = last
            last = end
            if token in self.codec.special_ids and (core := text[begin:end].strip()):
                begin = text.index(core, begin)
                end = begin + len(core)
            found.append((begin, end))
        return tokens, found

    def _check(self, sequence: Learned) -> None:
        """Raise BadRow where nothing is learned; the first token never is."""
        if len(sequence.tokens) < 2:
            raise BadRow("the row has fewer than two tokens: nothing predicts the first")
        sequence.mask[0] = 0
        if not any(sequence.mask):
            raise BadRow("none of its tokens is learned")


def _messages(value: Any, column: str, role: str) -> list[Message]:
    """Return a column's messages; of text one message of `role`."""
    return [{"role": role, "content": value}] if isinstance(value, str) and value else checked_messages(value, column)


def _whole_conversations(prompt: Any, chosen: Any, rejected: Any) -> bool:
    """Tell whether both are lists of messages that hold the prompt: they begin with the same one of the user or the
    system, and a prompt that is a list of messages is in them."""
    lists = [without_nulls(each) for each in (chosen, rejected) if isinstance(each, list) and each]
    asked = without_nulls(prompt) if isinstance(prompt, list) else []
    first = lists[0][0] if len(lists) == 2 and lists[0][0] == lists[1][0] else None
    begun = isinstance(first, dict) and first.get("role") != ASSISTANT
    return begun and all(message in each for each in lists for message in asked)


def _text(values: Mapping[str, Any], column: str) -> str:
    value = values.get(column)
    if not isinstance(value, str):
        raise lacking(f"no text in column {column!r}", values)
    if not value:
        raise BadRow(f"column {column!r} is empty")
    return value


def pieces(sequence: Learned, codec: RowCodec) -> list[tuple[str, str]]:
    """Return a sequence as text in pieces: "seen", "learned", "special" or, as the end of a turn, "learned special"."""
    names = {(0, False): "seen", (1, False): "learned", (0, True): "special", (1, True): "learned special"}
    marked = zip(sequence.mask, (token in codec.special_ids for token in sequence.tokens), strict=True)
    kinds = [names[each] for each in marked]
    starts = [at for at, kind in enumerate(kinds) if at == 0 or kind != kinds[at - 1]]
    runs = [(sequence.tokens[a:b], kinds[a]) for a, b in pairwise([*starts, len(kinds)])]
    texts = codec.decode([tokens for tokens, _ in runs], special_tokens=True)
    return [(text, kind) for text, (_, kind) in zip(texts, runs, strict=True)]
