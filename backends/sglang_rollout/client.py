"""JSON over HTTP to one SGLang server on loopback, with the standard library alone. Nothing pickled is sent or read."""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

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
            return self._send("GET", "/health", None, timeout_s)[0] == HTTPStatus.OK
        except OSError:  # not listening yet
            return False

    def get(self, path: str) -> Any:
        return self._request("GET", path, None, CONTROL_S)

    def post(self, path: str, body: Mapping[str, Any], timeout_s: float | None = CONTROL_S) -> Any:
        """The decoded reply; None where it is empty. `timeout_s` None: as long as it takes (the driver's verb timeout
        ends a role that hangs). Raises ServerError with what the server said."""
        return self._request("POST", path, body, timeout_s)

    def _request(self, method: str, path: str, body: Mapping[str, Any] | None, timeout_s: float | None) -> Any:
        try:
            status, data = self._send(method, path, body, timeout_s)
        except (OSError, http.client.HTTPException) as error:
            raise Unreachable(
                f"the SGLang server did not answer {path}: {type(error).__name__}: {error}",
                hint="its log is part of this role's log",
            ) from None
        if status != HTTPStatus.OK:
            raise ServerError(f"the SGLang server refused {path}: {status}: {_what_it_said(data)}")
        try:
            return json.loads(data) if data.strip() else None
        except ValueError:
            raise ServerError(f"the SGLang server's reply to {path} is not JSON") from None

    def _send(
        self, method: str, path: str, body: Mapping[str, Any] | None, timeout_s: float | None
    ) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        try:
            content = None if body is None else json.dumps(body, separators=(",", ":")).encode()
            connection.request(method, path, content, self._headers)
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()


def _what_it_said(data: bytes) -> str:
    """The message inside an error's body: `{"error": {"message": …}}`, `{"error": …}` or `{"message": …}`."""
    text = data.decode("utf-8", "replace").strip()
    try:
        found = json.loads(text)
    except ValueError:
        return text[:500]
    if isinstance(found, dict):
        found = found.get("error", found)
    if isinstance(found, dict):
        found = found.get("message", found)
    return str(found)[:500]
