"""One HTTP request to the hub. The token is sent to the endpoint only, and not to the host of a redirect."""

from __future__ import annotations

import queue
import time
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

if TYPE_CHECKING:
    import ssl
    from http.client import HTTPMessage
    from urllib.request import Request

CONNECT_S = 2.0  # also the longest silence of a connection
MAX_REDIRECTS = 5
TOO_LARGE = 413  # stands for a file that is there, and of which no more is known


@dataclass(frozen=True)
class HubAnswer:
    """`code`: of HTTP, or 0 where there was no answer, or `TOO_LARGE`."""

    name: str
    code: int
    content: bytes | None = None
    said: str = ""  # the hub's own name of an error, or what went wrong


@dataclass(frozen=True)
class HubRequest:
    """Run it in a thread: a hanging DNS look-up cannot be cancelled. `limit` 0: ask only whether the file exists."""

    url: str
    name: str
    limit: int
    token: str
    deadline: float

    def put_answer(self, into: queue.SimpleQueue[HubAnswer]) -> None:
        into.put(self.answer())

    @staticmethod
    def prepare() -> None:
        """What the threads of many requests would else all wait for."""
        import urllib.request  # noqa: F401

        _tls()

    def answer(self) -> HubAnswer:
        """Never raises: errors become answers."""
        from http.client import HTTPException
        from urllib.error import HTTPError, URLError

        try:
            return self._answer()
        except HTTPError as error:
            error.close()
            if error.code in (301, 302, 303, 307, 308) and not self.limit:
                return HubAnswer(self.name, TOO_LARGE)  # kept on another host
            return HubAnswer(self.name, error.code, said=str(error.headers.get("X-Error-Code", "")))
        except URLError as error:
            return HubAnswer(self.name, 0, said=_words(error.reason))
        except (OSError, HTTPException, ValueError) as error:
            return HubAnswer(self.name, 0, said=_words(error))

    def _answer(self) -> HubAnswer:
        from urllib.request import HTTPSHandler, Request, build_opener

        request = Request(self.url, headers={"User-Agent": "rlctl"}, method="GET" if self.limit else "HEAD")
        if self.token:
            request.add_unredirected_header("Authorization", f"Bearer {self.token}")
        left = self.deadline - time.monotonic()
        opener = build_opener(HTTPSHandler(context=_tls()), _redirects(self.token, leave=bool(self.limit)))
        with opener.open(request, timeout=min(CONNECT_S, max(0.1, left))) as response:
            length = response.headers.get("Content-Length")
            if not self.limit or (length is not None and int(length) > self.limit):
                return HubAnswer(self.name, TOO_LARGE)
            content = self._read(response)
        if content is None:
            return HubAnswer(self.name, TOO_LARGE)
        if length is not None and len(content) < int(length):
            return HubAnswer(self.name, 0, said="the connection was cut")
        return HubAnswer(self.name, 200, content)

    def _read(self, response: Any) -> bytes | None:
        """The body; None where it is longer than the limit. Raises TimeoutError."""
        content = bytearray()
        while piece := response.read1(2**16):
            content += piece
            if len(content) > self.limit:
                return None
            if time.monotonic() > self.deadline:
                raise TimeoutError("too slow")
        return bytes(content)


def _words(error: object) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


@cache
def _tls() -> ssl.SSLContext:
    """One for all requests: reading the certificates of this machine takes longer than a request."""
    import ssl

    context = ssl.create_default_context()
    context.set_alpn_protocols(["http/1.1"])
    return context


def _origin(url: str) -> tuple[str, str]:
    parts = urlsplit(url)
    return parts.scheme, parts.netloc


def _redirects(token: str, *, leave: bool) -> Any:
    """A redirect handler that keeps the token on its first host, and goes to another host only if `leave`."""
    from urllib.request import HTTPRedirectHandler

    class Redirects(HTTPRedirectHandler):
        max_redirections = MAX_REDIRECTS

        def redirect_request(
            self, req: Request, fp: Any, code: int, msg: str, headers: HTTPMessage, newurl: str
        ) -> Request | None:
            same = _origin(newurl) == _origin(req.full_url)
            if not (same or leave):
                return None  # the redirect is the answer
            onward = super().redirect_request(req, fp, code, msg, headers, newurl)
            if onward is not None:
                onward.method = req.get_method()
                if same and token and req.has_header("Authorization"):
                    onward.add_unredirected_header("Authorization", f"Bearer {token}")
            return onward

    return Redirects()
