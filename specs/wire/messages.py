"""The wire: verbs, what each needs and gives, and how a message becomes frames.

A message is two frames: a JSON header and, when there are tensors, one safetensors blob. No pickle.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from numpy.typing import NDArray

from specs.errors import ChannelError
from specs.wire.batch import Batch
from specs.wire.wire_tensors import Buffer, decode, encode

PROTOCOL_VERSION = 1


class Verb(StrEnum):
    """Everything a driver can ask of a rank."""

    BUILD = "build"  # hold the model; answer what was really built
    PING = "ping"
    CLOSE = "close"
    # data
    OPEN_DATA = "open_data"
    PROMPTS = "prompts"
    ROWS = "rows"
    # reward
    SCORE = "score"
    EPISODES = "episodes"  # run episodes: parts ask for turns, and bring the samples of those that have ended
    TURNS = "turns"  # completions that open episodes have asked for
    # rollout
    GENERATE = "generate"
    SLEEP = "sleep"
    WAKE = "wake"
    # actor, ref, critic, models that score
    LOGPROBS = "logprobs"
    VALUES = "values"  # of a critic: what it predicts before each loss token
    SCORES = "scores"  # of a reward model: of each whole sequence
    UPDATE = "update"  # loss and gradients of a mini-batch
    EVALUATE = "evaluate"  # loss of a batch, without gradients
    STEP = "step"  # the optimizer step with these gradients
    OFFLOAD = "offload"
    ONLOAD = "onload"
    SAVE = "save"
    LOAD = "load"
    # weights: actor exports, rollout imports, bucket by bucket; then both score the same tokens
    EXPORT_BEGIN = "export_begin"
    EXPORT_BUCKET = "export_bucket"
    EXPORT_END = "export_end"
    IMPORT_FORM = "import_form"  # what the rollout wants next: see `backends/protocol.py`, `weight_form`
    IMPORT_BEGIN = "import_begin"
    IMPORT_BUCKET = "import_bucket"
    IMPORT_END = "import_end"
    PROBE = "probe"


# They may continue for long without counting what is done: only their deadline judges them.
UNCOUNTED_VERBS = frozenset({Verb.BUILD, Verb.OPEN_DATA, Verb.SAVE, Verb.LOAD})


# A rank serves any number of them at once. Every other verb has its rank to itself.
CONCURRENT_VERBS = frozenset({Verb.GENERATE, Verb.SCORE, Verb.EPISODES, Verb.TURNS})
# Of a sync: they reach a rollout beside completions that it draws, with `rollout.in_flight`.
SYNC_VERBS = frozenset({Verb.IMPORT_FORM, Verb.IMPORT_BEGIN, Verb.IMPORT_BUCKET, Verb.IMPORT_END, Verb.PROBE})


@dataclass(frozen=True)
class Columns:
    """Columns of the batch that a verb always reads, and those that it adds."""

    needs: tuple[str, ...] = ()
    gives: tuple[str, ...] = ()


IDENTITY_COLUMNS = ("group_B", "rollout_B", "id_B", "row_B")  # of a sample, from its prompt to its loss
PROMPT_COLUMNS = ("tokens_T", "prefix_B", "position_B", *IDENTITY_COLUMNS)
# Of what is learned from rows, sequence by sequence. `unit_B`: the draw, which is equal for the two of a pair, the
# chosen one first. `chosen_B`: 1 for a chosen completion or one labelled true, and where there is nothing to choose.
# `row_B`: the row, by a number that stays the same from draw to draw and from attempt to attempt. `margin_B`: of the
# row, else 0.
ROW_COLUMNS = ("tokens_T", "loss_mask_T", "unit_B", "chosen_B", "row_B", "margin_B")
SAMPLE_COLUMNS = ("tokens_T", "loss_mask_T", "rollout_logprob_T", *IDENTITY_COLUMNS, "finished_B")

COLUMNS: Mapping[Verb, Columns] = {
    Verb.PROMPTS: Columns(gives=PROMPT_COLUMNS),
    Verb.ROWS: Columns(gives=ROW_COLUMNS),
    Verb.GENERATE: Columns(
        needs=PROMPT_COLUMNS, gives=(*SAMPLE_COLUMNS, "version_B", "version_T")
    ),  # and `greedy_B`, `limit_B`
    # And `term_<i>_B`; what a reward model is to read is `rendered_T`, so much of each sample as `rendered_B` says.
    Verb.SCORE: Columns(
        needs=("tokens_T", "loss_mask_T", "rollout_B", "id_B", "row_B", "finished_B"), gives=("scored_B",)
    ),
    # Parts bring prompts without `prefix_B` and with `limit_B`, or samples (`workers/episodes/trajectory.py`).
    Verb.EPISODES: Columns(needs=("tokens_T", *IDENTITY_COLUMNS)),
    Verb.TURNS: Columns(needs=("tokens_T", "loss_mask_T", "rollout_logprob_T", "version_T", "id_B", "finished_B")),
    Verb.LOGPROBS: Columns(needs=("tokens_T", "loss_mask_T"), gives=("logprob_T",)),
    Verb.VALUES: Columns(needs=("tokens_T", "loss_mask_T"), gives=("value_T",)),
    Verb.SCORES: Columns(needs=("tokens_T",), gives=("score_B",)),
    Verb.UPDATE: Columns(needs=("tokens_T", "loss_mask_T")),  # and what the loss says (`AnyLoss.columns`)
    Verb.EVALUATE: Columns(needs=("tokens_T", "loss_mask_T")),  # as `update`
    Verb.PROBE: Columns(needs=("tokens_T",), gives=("logprob_T",)),
}


class Kind(StrEnum):
    """Kinds of messages."""

    HELLO = "hello"  # rank → driver: role, rank, start, pid, host
    WELCOME = "welcome"  # driver → rank: how often to beat
    CALL = "call"  # driver → rank: verb
    PART = "part"  # rank → driver: a piece of an answer, more to come
    ANSWER = "answer"  # rank → driver: the verb is done
    ERROR = "error"  # rank → driver: the verb raised
    BEAT = "beat"  # either way: alive; of a rank that serves a verb, with an `Activity`
    PEER_LOST = "peer_lost"  # driver → rank: the verb of this number waits for a rank that is gone
    DUMP = "dump"  # driver → rank: write all stacks to the log
    DUMPED = "dumped"  # rank → driver: done, and which other files it wrote


_TO_JSON = json.JSONEncoder(separators=(",", ":")).encode  # `json.dumps` would make an encoder per message


@dataclass(frozen=True)
class Message:
    """One message. `body` is JSON; `tensors` travel as safetensors bytes.

    `call` numbers the request, so that a late answer is never taken for another's. An answer says in `busy` from when
    to when its rank worked on it (seconds of the host's monotonic clock): what is left of a step is the driver's.
    """

    kind: Kind
    body: Mapping[str, Any] = field(default_factory=dict)
    verb: Verb | None = None
    call: int = 0
    tensors: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    busy: tuple[float, float] | None = None

    def frames(self) -> list[Buffer]:
        header = {
            "v": PROTOCOL_VERSION,
            "kind": self.kind,
            "verb": self.verb,
            "call": self.call,
            "body": dict(self.body),
            "busy": self.busy,
        }
        frames: list[Buffer] = [_TO_JSON(header).encode()]
        if self.tensors:
            frames.append(encode(self.tensors))
        return frames

    @property
    def batch(self) -> Batch:
        return Batch(self.tensors)


_KINDS, _VERBS = {kind.value: kind for kind in Kind}, {verb.value: verb for verb in Verb}  # found in half the time


def parse(frames: list[Buffer]) -> Message:
    """Frames to a message, whose tensors are views of the second one. Raises ChannelError on anything else."""
    if len(frames) not in (1, 2):
        raise ChannelError(f"a message has one or two frames, not {len(frames)}")
    try:
        header = json.loads(str(frames[0], "utf-8"))  # of bytes it would first guess their encoding
        if header["v"] != PROTOCOL_VERSION:
            raise ChannelError(f"the peer speaks version {header['v']} of the wire, this side {PROTOCOL_VERSION}")
        verb = _VERBS[header["verb"]] if header["verb"] else None
        message_kind, call, body = _KINDS[header["kind"]], int(header["call"]), dict(header["body"])
        start, end = header["busy"] or (0, 0)
        busy = (float(start), float(end)) if header["busy"] else None
    except ChannelError:
        raise
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise ChannelError(f"not a message: {error}") from None
    tensors = decode(frames[1]) if len(frames) == 2 else {}
    return Message(message_kind, body, verb, call, tensors, busy)
