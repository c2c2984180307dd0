"""Define every error a person can meet, in one tree; each class says when it is raised.

`RlctlError.exit_code` is what the command line exits with: 1 when a run failed, 2 when the input was bad, 130 when a
person interrupted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from traceback import walk_tb


class Cause(StrEnum):
    """Say why a rank failed. The driver finds the root cause, and what can be restarted, by this alone."""

    # in a rank's ERROR message
    RAISED = "raised"  # its own code raised
    PEER_GONE = "peer_gone"  # a connection to another rank broke: probably that one failed first
    PEER_LATE = "peer_late"  # another rank did not answer in time
    ENGINE_DIED = "engine_died"  # a process that belongs to its engine ended
    # seen by the driver
    ENDED = "ended"  # its process ended
    SILENT = "silent"  # no heartbeat
    OVERDUE = "overdue"  # no reply, or no join, before the deadline
    STALLED = "stalled"  # heartbeats, but no progress while others wait


class RlctlError(Exception):
    """Root of the tree: `message` names the thing, `hint` is the next action."""

    exit_code = 1
    failure_cause = Cause.RAISED

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message, hint)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n\nhint: {self.hint}" if self.hint else self.message

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.message, self.hint))


def _rebuild(cls: type[RlctlError], message: str, hint: str) -> RlctlError:
    error = cls.__new__(cls)
    RlctlError.__init__(error, message, hint=hint)
    return error


@dataclass(frozen=True)
class Problem:
    """Name one thing that is wrong with a spec by its dotted key."""

    key: str
    message: str
    hint: str = ""
    value: str = ""

    @property
    def subject(self) -> str:
        """Return the key with its value."""
        return f"{self.key} = {self.value}" if self.value else self.key

    @property
    def text(self) -> str:
        """Return subject and message, without the hint."""
        return f"{self.subject}: {self.message}" if self.subject else self.message

    def __str__(self) -> str:
        return f"{self.text}\n  hint: {self.hint}" if self.hint else self.text


@dataclass(frozen=True)
class NotHere(Problem):
    """Name something that this machine does not have or cannot reach, and another may."""


class InputError(RlctlError):
    """Something that a person gave cannot be used."""

    exit_code = 2


class SpecError(InputError):
    """The run spec is broken: TOML, schema, arithmetic, or a file that it names."""

    def __init__(self, problems: Sequence[Problem] | str, *, hint: str = "") -> None:
        listed = [Problem("", problems, hint)] if isinstance(problems, str) else list(problems)
        self.problems = listed
        super().__init__("\n".join(str(problem) for problem in listed))


class UsageError(InputError):
    """The command line was used in a way that cannot work (a file in the way, a wrong folder)."""


class DataError(InputError):
    """A data file or a row of it cannot be used; the message names file and row."""


class ModelError(InputError):
    """A model folder or its tokenizer cannot be used."""


class RewardError(InputError):
    """A reward function cannot be imported or called."""


class RunDirError(InputError):
    """A run directory is in use, is not empty, or belongs to another spec."""


class CheckpointError(InputError):
    """A checkpoint is missing, torn, or belongs to another model."""


class BatchError(RlctlError):
    """A batch lacks a column that a verb needs, or its columns differ in length."""


class ChannelError(RlctlError):
    """A peer broke the protocol: wrong secret, unknown verb, bad frame."""


class SyncError(RlctlError):
    """Weights arrived wrong, or the sampler does not behave like the trainer. Always fatal."""


class LogprobGapError(RlctlError):
    """Sampler and trainer give the sampled tokens log-probs that differ by more than the spec allows."""


class GradingError(RlctlError):
    """More of a step's completions could not be graded than the spec allows."""


class NotFiniteError(RlctlError):
    """A number that the actor learns from, or a metric of its update, is NaN or infinite."""


class SamplerDied(RlctlError):
    """A sampler's engine process ended although its rank is alive."""

    failure_cause = Cause.ENGINE_DIED


class PeerGone(RlctlError):
    """The connection to another rank, `peer`, broke; the root cause is there."""

    failure_cause = Cause.PEER_GONE

    def __init__(self, peer: str, message: str, *, hint: str = "") -> None:
        self.peer = peer
        super().__init__(f"{peer} {message}", hint=hint)


class PeerLate(PeerGone):
    """Another rank, `peer`, did not answer in time: it hangs, or is gone."""

    failure_cause = Cause.PEER_LATE


class AsBuiltError(RlctlError):
    """A rank built something other than the spec asked for. Training is refused."""


class ExportError(RlctlError):
    """An exported model folder did not pass its proof; nothing is left behind."""


class RoleFailure(RlctlError):
    """A rank died, raised, hung or missed a deadline.

    `role`, `rank`, `host` (of a role on several), `step`, `verb` (empty: none) and `cause` name it; `log_path`
    and `log_tail` show its last words; `dumps` are files of torch's flight recorder.
    """

    def __init__(
        self,
        role: str,
        rank: int,
        *,
        verb: str,
        step: int | None,
        cause: str,
        host: str = "",
        log_path: str = "",
        log_tail: str = "",
        dumps: Sequence[str] = (),
        remote_kind: str = "",
        remote_hint: str = "",
    ) -> None:
        self.role, self.rank, self.verb, self.step, self.host = role, rank, verb, step, host
        self.cause, self.log_path, self.log_tail, self.dumps = cause, log_path, log_tail, tuple(dumps)
        self.remote_kind = remote_kind
        place = f"{role} rank {rank}" + (f" on {host}" if host else "")
        where = f"{place}, verb {verb}" if verb else f"{place}, idle"
        where += "" if step is None else f", step {step}"
        lines = [f"{where}: {cause}"]
        if log_tail:
            lines += ["", "last log lines:", *(f"  | {line}" for line in log_tail.splitlines())]
        if log_path:
            lines += ["", f"log: {log_path}"]
        if dumps:
            lines += [f"last collectives of each rank (flight recorder): {', '.join(dumps)}"]
        super().__init__("\n".join(lines), hint=remote_hint)
        if remote_kind in BAD_INPUT_KINDS:
            self.exit_code = 2

    def advise(self, what_next: str) -> None:
        """Add the next action to the hint."""
        self.hint = f"{self.hint}; {what_next}" if self.hint else what_next


class Interrupted(RlctlError):
    """A person pressed Ctrl-C (or sent SIGTERM); the run was checkpointed where it could be."""

    exit_code = 130


BAD_INPUT_KINDS = frozenset(
    cls.__name__ for cls in (SpecError, UsageError, DataError, ModelError, RewardError, CheckpointError)
)


def line_in(file: str, error: BaseException) -> int | None:
    """Return the line of a file in which an error was raised, or is the call that led to it; None for no line of it."""
    if isinstance(error, SyntaxError) and error.filename == file:
        return error.lineno
    passed = [line for frame, line in walk_tb(error.__traceback__) if frame.f_code.co_filename == file]
    return passed[-1] if passed else None
