"""`[data]` and `[eval]` of recipes that learn from rows: where they come from, what a row holds, which tokens learn."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from specs.schema.eval_sets import GenerateSection, SetName
from specs.schema.table import NonEmpty, NonEmptyPath, PathText, Table

LearnFrom = Literal["completion", "assistant", "last_assistant", "all", "flagged"]


class RowColumns(Table):
    """How the rows of a source are read."""

    split: NonEmpty = "train"
    """Split to read; only for a hub dataset id."""
    text_column: NonEmpty = "text"
    """Column with the whole text of a row."""
    messages_column: NonEmpty = "messages"
    """Column with a conversation: a list of messages."""
    tools_column: NonEmpty = "tools"
    """Column with the tools that a conversation's template is given, where rows have it."""
    prompt_column: NonEmpty = "prompt"
    """Column with the prompt: text, or a list of messages."""
    completion_column: NonEmpty = "completion"
    """Column with what follows the prompt: text, or a list of messages."""
    chosen_column: NonEmpty = "chosen"
    """Column with the better completion; without a prompt column, with the whole conversation that ends in it."""
    rejected_column: NonEmpty = "rejected"
    """Column with the worse one."""
    label_column: NonEmpty = "label"
    """Column that says whether the completion is desirable (`kto`)."""
    margin_column: NonEmpty = "margin"
    """Column with the margin between the scores of a pair (`bradley_terry`), where rows have it."""


class RowSet(RowColumns):
    """One of several sources that are mixed."""

    path: NonEmptyPath
    """`*.jsonl` or `*.parquet`, relative to the spec file; or a hub dataset id."""
    weight: float = Field(1.0, gt=0)
    """Share of this source's rows among those drawn, by the sum of all weights. A source that is used up begins its
    next epoch, whatever the others do."""

    def reading(self, path: str, split: str) -> RowSet:
        """Return another source whose rows are read as these."""
        return self.model_copy(update={"path": path, "split": split})


class RowsSection(RowColumns):
    """Where rows come from, how they become tokens, and which of these learn. What a row holds is told by its columns:
    `prompt` and `completion`, `messages`, `text`, `prompt` with `chosen` and `rejected`, or with `label`."""

    train: PathText = ""
    """`*.jsonl` or `*.parquet`, relative to the spec file; or a hub dataset id, with `:config` where it has several;
    or `builtin:…`. Empty: `sets`."""
    sets: tuple[RowSet, ...] = ()
    """Several sources with weights in place of one. How rows are read, where a set does not say so, `[data]` says."""
    rows_per_step: int = Field(gt=0)
    """Rows, or pairs, of one optimizer step; all ranks together."""
    max_tokens: int = Field(gt=0)
    """Most tokens of a row, of a pair of each of its two sequences."""
    overlong: Literal["drop", "refuse", "truncate"] = "drop"
    """A row over `max_tokens`: `drop` and count it, `refuse` to start, or `truncate` it at its end."""
    learn_from: LearnFrom | None = None
    """Tokens that learn: those of the `completion`, of every message of the `assistant`, of the `last_assistant`
    alone, `all`, or those of messages `flagged` with `train = true`. Unset: `flagged` where a message says
    `train`, else `completion` where rows have one, `assistant` of conversations, `all` of text."""
    chat: Literal["auto", "always", "never"] = "auto"
    """Whether the model's chat template wraps prompts and completions. `auto`: messages always, and text where
    `system` is set; plain text is joined as it stands."""
    system: str = ""
    """System message put first, where a conversation has none; only with a chat template."""
    bad_rows: Literal["drop", "refuse"] = "refuse"
    """A row that does not parse, lacks a column or teaches nothing: `drop` and count it, or `refuse` to start."""
    shuffle: bool = True
    """Draw rows in a new random order each epoch (from `run.seed`)."""
    max_rows: int | None = Field(None, gt=0)
    """Read only that many rows of each source."""

    @property
    def named(self) -> dict[str, str]:
        """Key → source of what is trained on."""
        if not self.sets:
            return {"data.train": self.train}
        return {f"data.sets.{number}.path": one.path for number, one in enumerate(self.sets)}

    @property
    def sources(self) -> tuple[RowSet, ...]:
        """Every source with all that holds for it."""
        sets, common = self.sets or (RowSet(path=self.train),), RowColumns.model_fields

        def values(one: RowSet) -> dict[str, Any]:
            return {name: getattr(one if name in one.model_fields_set else self, name) for name in common}

        return tuple(one.model_copy(update=values(one)) for one in sets)


class RowsEval(Table):
    """Evaluation on rows that are not trained on: the objective's loss and metrics."""

    every: int = Field(gt=0)
    """Steps between evaluations; one runs before the first step and after the last."""
    name: SetName = "heldout"
    """Name in the metrics: `eval/<name>/loss`."""
    data: PathText = ""
    """Where the rows come from; empty: the last `rows` of `data.train`, or of the first of its sets, are held out."""
    split: NonEmpty = "test"
    """Split to read; only for a hub dataset id."""
    rows: int = Field(64, gt=0)
    """Rows, or pairs, to evaluate on."""


class TextEval(RowsEval):
    """Evaluation on rows, and where it is asked for on what the model writes."""

    generate: GenerateSection | None = None
    """Completions besides; without the section there are none. Not of a reward model, which writes nothing."""
