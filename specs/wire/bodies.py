"""The body of every verb: a frozen class for the request, and one for the answer where the driver reads keys of it.

A request is checked when it arrives (`workers/serve.py`, `typed`), by the class that its handler takes: an unknown or
missing key, or a value of another type, is refused with an error that names the verb and the key. What a rank answers
is checked when the driver reads it (`Body.of`). Tensors travel beside the body (`specs/wire/messages.py`, `COLUMNS`).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, PlainValidator, SerializeAsAny, Strict, ValidationError

from specs.errors import Cause, ChannelError, RlctlError
from specs.schema.algorithms.algorithm import AnyLoss
from specs.schema.algorithms.algorithm_tables import read_loss
from specs.schema.role_section import DType
from specs.schema.spec import TransportKind, WeightForm
from specs.wire.messages import Message
from specs.wire.role_config import Sampling

B = TypeVar("B", bound=BaseModel)
Lax = Strict(False)  # a table of the spec checks itself; JSON has no enums


class Body(BaseModel):
    """A body: frozen, and without room for a mistyped key. JSON's own types, never converted, and NaN of rows."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, protected_namespaces=(), defer_build=True)
    model_config |= {"ser_json_inf_nan": "constants"}

    @classmethod
    def of(cls, answer: Message) -> Self:
        """The typed body of an answer. Raises ChannelError naming verb and key."""
        return read(cls, answer)


class Answer(Body):
    """Body of an answer. Counters of an engine that the driver does not read may stand beside what it reads."""

    model_config = ConfigDict(extra="ignore")


class Nothing(Body):
    """A verb that says it all by itself."""


class ErrorBody(Body):
    """Body of an ERROR message, of the exception that a verb raised. `cause` is for the driver to decide by, the rest
    is for people."""

    cause: Annotated[Cause, Lax]
    kind: str  # class name of the exception
    message: str
    hint: str = ""
    known: bool = False  # an RlctlError: its message says it all, without its class name and a traceback


# ── data and grading ──────────────────────────────────────────────────────────────────────────────


What = Literal["train", "eval"]


class Prompts(Body):
    """`count` prompts from the cursor's `position` on, each repeated `group_size` times."""

    what: What
    name: str = ""  # of the evaluation
    position: int
    count: int
    group_size: int


class DrawRows(Body):
    """`count` rows from the cursor's `position` on, each with all of its sequences."""

    what: Literal["train", "eval", "all"]  # of "all": each row of the training data once, in its order
    position: int
    count: int


class RowsDrawn(Answer):
    position: int  # of the cursor after them
    epoch: float  # epochs that are behind it, of the source that is furthest


class Row(Body):
    """Facts for a scorer about the row that a prompt was made from."""

    where: str  # file and line, for a person
    prompt: str
    values: dict[str, Any]
    messages: list[dict[str, Any]] | None = None  # that the prompt was made from; None: not asked for, or plain text
    tools: list[Any] | None = None  # that its chat template was given


class PromptsDrawn(Answer):
    position: int  # of the cursor after them
    rows: dict[str, Row]  # by their number in `row_B`


class Score(Body):
    """Grade completions of the prompts of `what`, made from `rows`; return `samples`, by their ids, as text."""

    what: What
    samples: list[int]
    rows: dict[str, Row]
    episodes: dict[str, dict[str, Any]] = {}  # by first sample: the conversation that it is part of, and how that ended


class Scores(Answer):
    """Stand beside the values of the terms: `term_<i>_B`, 0 where `scored_B` is."""

    failures: dict[str, int]  # cause → how many completions were lost to it
    first_failure: str = ""  # what the first of them died of, its row and its id; empty: there is none
    samples: list[dict[str, Any]] = []
    counts: dict[str, float] = {}  # of the judges' work since the last time


class Episodes(Body):
    """Run an episode for each sample, of the rows that their prompts were made from."""

    rows: dict[str, Row]


class EpisodePart(Answer):
    """A part of the answer: the tensors are turns to draw, if there are any, or samples of groups that are complete."""

    kind: Literal["turns", "samples"]
    rank: int
    ended: list[int] = []  # rollouts that will ask no more
    episodes: dict[str, dict[str, Any]] = {}  # as in `Score`


class DataOpened(Answer):
    rows: int
    eval_rows: dict[str, int]  # by evaluation
    dropped_overlong: int
    dropped_bad: int
    truncated: int = 0  # rows that are learned from up to `data.max_tokens` alone
    summary: str = ""  # of rows, for a person: how many tokens, and which of them learn
    largest_row: int = 0  # tokens of a row, or a pair, that one micro-batch computes


# ── sampling ──────────────────────────────────────────────────────────────────────────────────────


class Generate(Body):
    """Complete prompts. `keep`: later turns of the same ids will follow, so what is computed is worth keeping;
    `forget`: ids of which nothing more will come."""

    sampling: Annotated[Sampling, Lax]
    keep: bool = False
    forget: list[int] = []


Level = Literal[1, 2]  # of sleep: the weights wait in host memory, or are dropped
Tag = Literal["weights", "kv_cache"]  # what a rollout holds of its device


class Sleep(Body):
    level: Level


class Wake(Body):
    tags: list[Tag]


class Moved(Answer):
    """A rank has left its device, or come back to it: GiB that it held of it before and after."""

    before_GiB: float
    after_GiB: float


# ── training ──────────────────────────────────────────────────────────────────────────────────────


class Logprobs(Body):
    adapters: bool  # False: of the model below its adapters


class LossScale(Body):
    """Global counts of the optimizer step's mini-batch over *all* ranks; losses divide by them, not by local ones."""

    num_loss_tokens: int
    num_sequences: int  # sequences with at least one loss token
    max_response_tokens: int  # the constant of "token-sum-constant"
    num_units: int = 0  # of an objective whose unit is a pair or a sequence
    num_chosen_tokens: int = 0  # loss tokens of chosen completions


def _loss(raw: Any) -> AnyLoss:
    try:
        return raw if isinstance(raw, AnyLoss) else read_loss(raw)
    except RlctlError as error:
        raise ValueError(error.message) from None


class Update(Body):
    loss: Annotated[SerializeAsAny[AnyLoss], PlainValidator(_loss)]
    scale: LossScale


class Updated(Answer):
    sums: dict[str, float]  # of the rank's share, or maxima (`specs/schema/algorithms`)


class Stepped(Answer):
    grad_norm: float
    lr: float
    skipped: bool
    peak_GiB: float


class Save(Body):
    """Save the state into a folder; with prompts instead the proof that an export of that state must repeat."""

    folder: str
    proof_prompts: list[list[int]] = []
    proof_tokens: int = 0


class Saved(Answer):
    files: dict[str, Any]  # path in the folder → size and checksum
    unproven: str = ""  # why the proof could not be made


class Load(Body):
    folder: str
    schedule_steps: int | None = None  # of a fork: optimizer steps of its own schedule that are behind it


# ── weights ───────────────────────────────────────────────────────────────────────────────────────


class WireWeight(Body):
    """A weight as it is announced."""

    name: str
    dtype: str
    shape: list[int]
    nbytes: int


class SentWeight(WireWeight):
    """A weight that was sent: the checksum of the actor's own tensor, and, in buckets, where it lies in its window."""

    checksum: str
    offset: int | None = None

    def is_as(self, announced: WireWeight) -> bool:
        """Return whether it is the weight that was announced."""
        return all(getattr(self, name) == value for name, value in announced)


class ExportBegin(Body):
    transport: TransportKind
    options: dict[str, Any]  # of the transport
    dtype: DType
    form: WeightForm
    bucket_bytes: int
    hosts: list[list[int]]  # the readers by the host that each says it is on
    renew: bool  # some reader is new: nothing is known to it
    held: list[str]  # what the readers hold of earlier passes, as each says (`WantedForm`)


class Exporting(Answer):
    """Answer of the actor's rank 0 to `export_begin`. `specs` None: the weights are those of the last pass."""

    specs: list[WireWeight] | None
    buckets: int
    in_blocks: bool
    offer: dict[str, Any]  # of the transport, for its readers


class ExportBucket(Body):
    bucket: int


class Exported(Answer):
    entries: list[SentWeight]
    sent_bytes: int  # that the actor's rank 0 put on the transport
    checksum_s: float


class ExportEnd(Body):
    broken_off: bool = False  # a reader is lost: what is left of the pass is dropped


class WantedForm(Answer):
    form: WeightForm
    replica: int = 0
    host: str = ""  # equal where replicas can hand each other memory; "": of no other (`host_readers.py`)
    holds: str = ""  # the pass that a later one can build on (`workers/transports/base.py`, `Reader.holds`)


class ImportBegin(Body):
    transport: TransportKind
    options: dict[str, Any]
    form: WeightForm
    specs: list[WireWeight] | None
    offer: dict[str, Any]


class ImportBucket(Body):
    bucket: int
    entries: list[SentWeight]


class Imported(Answer):
    checksums: dict[str, str]  # read back from the rollout's own weights, by name
    checksum_s: float


class ImportEnd(Body):
    version: int  # steps that the actor had finished


class ImportEnded(Answer):
    checksum_s: float


class Probe(Body):
    temperature: float


def read(shape: type[B], message: Message) -> B:
    """The body of a message as its class. Raises ChannelError naming verb, or kind of message, and key."""
    try:
        return shape.model_validate(message.body)
    except ValidationError as error:
        found = error.errors(include_url=False)[0]
        key = ".".join(map(str, found["loc"])) or "the body"
        problem = {"missing": "missing", "extra_forbidden": "unknown key"}.get(found["type"], found["msg"])
        raise ChannelError(
            f"{message.verb or message.kind}: {key}: {problem}",
            hint=f"driver and rank must be of one version of rlctl; specs/wire/bodies.py has {shape.__name__}",
        ) from None
