"""Recognises errors of torch.distributed, gloo and NCCL that mean that another rank is gone or late.

Their types tell most of it. Where one type stands for everything (gloo raises RuntimeError, NCCL DistBackendError), the
library's own text is all there is: the phrases below depend on it, and nothing else does. They were read from torch
2.13.0 with the gloo that it contains, and from NCCL 2.26 in torch's messages. DeepSpeed and FSDP2 communicate through
torch.distributed and raise the same.
"""

from __future__ import annotations

import sys

from specs.errors import Cause, PeerGone, PeerLate, RlctlError

_GLOO_SOURCE = "/gloo/transport/"  # gloo's errors begin with the file and line that raised them
_STORE_SERVER = "The server socket"  # rank 0 could not open its own: the one network error that no peer explains
_GONE = (
    "ncclRemoteError",
    "remote process exited",
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection refused",
    "Socket closed",
    "Broken pipe",
)
_LATE = (
    "Application timeout caused pair closure",  # an operation before this one waited too long
    "Connect timeout",
    "Socket Timeout",
    "wait timeout after",
    "timed out",
    "Timed out",
)


def cause_of(error: BaseException) -> Cause:
    """The cause of any exception, for the driver."""
    if isinstance(error, RlctlError):
        return error.failure_cause
    if isinstance(error, ConnectionError):
        return Cause.PEER_GONE
    if isinstance(error, TimeoutError):
        return Cause.PEER_LATE
    return _cause_of_torch(error) if isinstance(error, RuntimeError) else Cause.RAISED


def as_peer_error(error: Exception, peer: str) -> PeerGone | None:
    """The error as PeerGone or PeerLate when it says that `peer` is gone or late; else None."""
    cause = cause_of(error)
    if cause is Cause.PEER_GONE:
        return PeerGone(peer, f"is gone: {error}")
    if cause is Cause.PEER_LATE:
        return PeerLate(peer, f"did not answer in time: {error}")
    return None


def _cause_of_torch(error: RuntimeError) -> Cause:
    distributed = sys.modules.get("torch.distributed")  # where torch was not imported, nothing of it was raised
    if distributed is None:
        return Cause.RAISED
    text = str(error)
    if isinstance(error, distributed.DistNetworkError):
        return Cause.RAISED if _STORE_SERVER in text else Cause.PEER_GONE
    if isinstance(error, distributed.DistStoreError):  # a key that another rank should have set
        return Cause.PEER_LATE
    of_gloo = type(error) is RuntimeError and _GLOO_SOURCE in text
    if not of_gloo and not isinstance(error, distributed.DistBackendError):
        return Cause.RAISED
    if any(phrase in text for phrase in _GONE):
        return Cause.PEER_GONE
    return Cause.PEER_LATE if any(phrase in text for phrase in _LATE) else Cause.RAISED
