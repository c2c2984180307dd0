"""JSON over HTTP to one SGLang server on loopback, with the standard library alone. Nothing pickled is sent or read.

Every field of a reply that rlctl uses is checked.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

import numpy as np

from backends.completions import Completion, SampleRequest
from specs.errors import RlctlError

CONTROL_S = 600.0  # weights of the largest models load, and memory moves, in less


class ServerError(RlctlError):
    """The SGLang server refused a request, sent an invalid reply, or could not be reached."""


class Unreachable(ServerError):
    """The SGLang server did not answer: it is gone, or about to be."""


class Client:
    """One connection per request: a server that went away is noticed, and threads share nothing."""

    def __init__(self, port: int, api_key: str) -> None:
        self.port = port
        self._headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}

    def healthy(self, timeout_s: float) -> bool:
        try:
            return self._send("/health", None, timeout_s)[0] == HTTPStatus.OK
        except OSError:  # not listening yet
            return False

    def request(self, path: str, body: Mapping[str, Any] | None = None, timeout_s: float | None = CONTROL_S) -> Any:
        """POST `body`, or GET without one; return the decoded reply, None where it is empty. `timeout_s` None: as long
        as it takes (the driver's verb timeout ends a role that hangs). Raises ServerError with the server's message."""
        try:
            status, data = self._send(path, body, timeout_s)
        except (OSError, http.client.HTTPException) as error:
            raise Unreachable(
                f"the SGLang server did not answer {path}: {type(error).__name__}: {error}",
                hint="its log is part of this role's log",
            ) from None
        if status != HTTPStatus.OK:
            message = data.decode("utf-8", "replace").strip()[:500]
            raise ServerError(f"the SGLang server refused {path}: {status}: {message}")
        try:
            return json.loads(data) if data.strip() else None
        except ValueError:
            raise ServerError(f"the SGLang server's reply to {path} is not JSON") from None

    def _send(self, path: str, body: Mapping[str, Any] | None, timeout_s: float | None) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        try:
            content = None if body is None else json.dumps(body, separators=(",", ":")).encode()
            connection.request("GET" if body is None else "POST", path, content, self._headers)
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()


# ── replies of /generate ──────────────────────────────────────────────────────────────────────────

# {"output_ids": […], "meta_info": {"finish_reason": {"type": "stop" | "length" | "abort", …}, "completion_tokens": n,
# "cached_tokens": n, "output_token_logprobs": [[logprob, token, null], …],
# "output_token_ids_logprobs": [[[logprob, token, null], …], …]}}


def parse_sample(reply: Mapping[str, Any], request: SampleRequest) -> tuple[Completion, int]:
    """Return a request's completion, and how many tokens of its prompt were in the prefix cache. Raises ServerError for
    one that was aborted, cut short, or does not add up."""
    meta = reply["meta_info"]
    reason, pairs = meta["finish_reason"], meta["output_token_logprobs"]
    tokens = np.array([token for _, token, *_ in pairs], dtype=np.int64)
    logprobs = np.array([logprob for logprob, *_ in pairs], dtype=np.float32)
    if reason["type"] not in ("stop", "length"):
        raise ServerError(f"the SGLang server aborted a completion: {reason.get('message', reason)}")
    finished = reason["type"] == "stop"
    if finished and reason["matched"] != (int(tokens[-1]) if len(tokens) else None):
        # Also what SGLang reports for a completion whose logits were not numbers.
        raise ServerError(
            f"a completion of the SGLang server ended at {reason['matched']!r}, which is not its last token"
        )
    if len(tokens) != meta["completion_tokens"]:
        raise ServerError(f"{len(tokens)} log-probs came with a completion of {meta['completion_tokens']} tokens")
    if not finished and len(tokens) != request.sampling.max_response_tokens:
        raise ServerError(
            f"a completion ended at {len(tokens)} tokens, though {request.sampling.max_response_tokens} were allowed",
            hint="the server's KV cache is too small for a whole sequence: raise rollout.engine.memory_fraction",
        )
    if not np.isfinite(logprobs).all():
        raise ServerError("the SGLang server returned a log-prob that is not a finite number")
    return Completion(request.id, tokens, logprobs, finished), int(meta.get("cached_tokens", 0))


def parse_scores(replies: Sequence[Mapping[str, Any]], tokens: Sequence[int]) -> list[float]:
    """Return the log-prob of each reply's token. Raises ServerError where it is another's."""
    if not isinstance(replies, list) or len(replies) != len(tokens):
        raise ServerError(f"the SGLang server did not return {len(tokens)} replies")
    found = []
    for reply, token in zip(replies, tokens, strict=True):
        logprob, named, *_ = reply["meta_info"]["output_token_ids_logprobs"][0][0]
        if named != token:
            raise ServerError(f"expected the log-prob of token {token}, the SGLang server returned that of {named}")
        found.append(float(logprob))
    return found
