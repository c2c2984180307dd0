"""The body of an ERROR message: what a rank says of the exception that its verb raised."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from specs.errors import Cause, ChannelError


@dataclass(frozen=True)
class ErrorBody:
    """`cause` is for the driver to decide by, the rest is for people."""

    cause: Cause
    kind: str  # class name of the exception
    message: str
    hint: str = ""
    known: bool = False  # an RlctlError: its message says it all, without its class name and a traceback

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> ErrorBody:
        """Raises ChannelError when it is not one."""
        try:
            cause = Cause(body["cause"])
            return cls(cause, str(body["kind"]), str(body["message"]), str(body["hint"]), bool(body["known"]))
        except (KeyError, ValueError) as error:
            raise ChannelError(f"not the body of an error: {error}") from None
