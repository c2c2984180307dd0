"""One connection to a judge: an HTTP request with a deadline, of which nothing comes back but a status and a body.

The key goes to the endpoint's own origin alone and never into a message. Certificates are verified, and replies have
a limit.
"""

from __future__ import annotations

import base64
import email.utils
import http.client
import os
import ssl
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from urllib.parse import unquote, urljoin, urlsplit
from urllib.request import getproxies, proxy_bypass

MAX_REPLY_BYTES = 4 << 20
MAX_REDIRECTS = 3
RETRIED = (408, 425, 429)  # and every 5xx
SAID_CHARACTERS = 300  # of a reply that is an error
LOOPBACK = ("localhost", "127.0.0.1", "::1")


class JudgeError(Exception):
    """A request brought no score. `cause`: one of the judge's; `again`: whether another try may; `wait_s`: how long the
    server asks to wait before it; `status`: of HTTP, 0 without one."""

    def __init__(self, cause: str, text: str, *, again: bool, wait_s: float = 0.0, status: int = 0) -> None:
        super().__init__(text)
        self.cause, self.again, self.wait_s, self.status = cause, again, wait_s, status


@dataclass(frozen=True)
class Address:
    """Where requests go, and the key that they carry."""

    base_url: str
    key_env: str

    @property
    def key(self) -> str:
        """From the environment, each time; "" where none is wanted."""
        return os.environ.get(self.key_env, "").strip() if self.key_env else ""

    def url(self, path: str) -> str:
        return f"{self.base_url.rstrip('/')}/{path}"

    def without_key(self, text: str) -> str:
        """Other people's text, of which the key may be part."""
        return text.replace(self.key, "[the key]") if self.key else text


def key_problem(key_env: str) -> str:
    """Why the variable holds no key that can be sent; "" where it does, or where none is wanted."""
    key = os.environ.get(key_env, "").strip() if key_env else "none"
    if not key:
        return f"the environment has no variable {key_env}" if key_env not in os.environ else f"{key_env} is empty"
    return "" if key.isascii() and key.isprintable() and " " not in key else f"{key_env} holds what no HTTP header can"


class Line:
    """A connection that is kept between requests; for one thread."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self._open: http.client.HTTPConnection | None = None
        self._origin: tuple[str, str, int] | None = None
        self._late = False
        self.busy = False

    def request(self, method: str, path: str, content: bytes, timeout_s: float) -> bytes:
        """The body of a reply with status 200. Raises JudgeError."""
        self.busy = True
        try:
            return self._request(method, path, content, timeout_s)
        finally:
            self.busy = False

    def _request(self, method: str, path: str, content: bytes, timeout_s: float) -> bytes:
        deadline, url = time.monotonic() + timeout_s, self.address.url(path)
        for _ in range(MAX_REDIRECTS + 1):
            status, headers, body = self._within(deadline, method, url, content)
            if status not in (301, 302, 303, 307, 308):
                return self._judged(status, headers, body)
            url = self._redirected(url, status, headers.get("location", ""))
        raise JudgeError("judge_errors", f"more than {MAX_REDIRECTS} redirects", again=False, status=status)

    def close(self) -> None:
        if self._open is not None:
            self._open.close()
            self._open = None

    def _within(self, deadline: float, method: str, url: str, content: bytes) -> tuple[int, Mapping[str, str], bytes]:
        """Send and read; at the deadline the socket is shut, whatever the server is doing with it."""
        self._late = False
        left = max(0.01, deadline - time.monotonic())
        timer = threading.Timer(left, self.cut)
        timer.daemon = True
        timer.start()
        try:
            return self._exchange(method, url, content, left)
        except JudgeError:
            self.close()
            raise
        except ssl.SSLCertVerificationError as error:
            self.close()
            text = f"its certificate is not trusted: {error.verify_message}"
            raise JudgeError("judge_errors", text, again=False) from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            self.close()
            if self._late or isinstance(error, TimeoutError):
                raise JudgeError("judge_timeouts", "no reply in time", again=True) from None
            said = self.address.without_key(str(error) or type(error).__name__)
            raise JudgeError("judge_errors", f"the connection failed: {said}", again=True) from None
        finally:
            timer.cancel()

    def cut(self) -> None:
        """End the request that is under way, from another thread."""
        self._late = True
        connection = self._open
        if connection is not None and connection.sock is not None:
            with suppress(OSError):
                connection.sock.shutdown(2)

    def _exchange(
        self, method: str, url: str, content: bytes, timeout_s: float
    ) -> tuple[int, Mapping[str, str], bytes]:
        kept = self._open is not None and self._origin == _origin(url)
        try:
            return self._once(method, url, content, timeout_s)
        except (http.client.RemoteDisconnected, ConnectionError):
            self.close()
            if not kept or self._late:
                raise
            return self._once(method, url, content, timeout_s)  # it was idle, and the server had closed it

    def _once(self, method: str, url: str, content: bytes, timeout_s: float) -> tuple[int, Mapping[str, str], bytes]:
        connection, target = self._connected(url, timeout_s)
        headers = {"Content-Type": "application/json", "Accept": "application/json", "User-Agent": "rlctl"}
        if self.address.key:
            headers["Authorization"] = f"Bearer {self.address.key}"
        connection.request(method, target, body=content or None, headers=headers)
        response = connection.getresponse()
        body = _body(response)
        if response.will_close:
            self.close()
        return response.status, {name.lower(): value for name, value in response.getheaders()}, body

    def _connected(self, url: str, timeout_s: float) -> tuple[http.client.HTTPConnection, str]:
        """A connection to the origin of `url`, through a proxy where the environment names one; and its target."""
        parts, origin = urlsplit(url), _origin(url)
        proxy = _proxy(parts.scheme, parts.hostname or "")
        target = url if proxy and parts.scheme == "http" else parts.path or "/"
        if self._open is None or self._origin != origin:
            self.close()
            self._open, self._origin = _connection(origin, proxy, timeout_s), origin
        self._open.timeout = timeout_s
        if self._open.sock is not None:
            self._open.sock.settimeout(timeout_s)
        return self._open, target

    def _redirected(self, url: str, status: int, to: str) -> str:
        """Where a redirect leads: a POST is sent again within its own origin alone, so the key stays there."""
        there = urljoin(url, to)
        try:
            same = status in (307, 308) and _origin(there) == _origin(url)
        except ValueError:
            same = False
        if same and to:
            return there
        text = f"HTTP {status}, a redirect to {self.address.without_key(there)[:SAID_CHARACTERS]}"
        raise JudgeError("judge_errors", f"{text}: not followed; base_url must name it", again=False, status=status)

    def _judged(self, status: int, headers: Mapping[str, str], body: bytes) -> bytes:
        if status == 200:
            return body
        again = status in RETRIED or status >= 500
        said = self.address.without_key(body.decode("utf-8", "replace")).strip()[:SAID_CHARACTERS]
        text = f"HTTP {status}" + (f": {said}" if said else "")
        raise JudgeError("judge_errors", text, again=again, wait_s=asked_wait_s(headers), status=status)


def asked_wait_s(headers: Mapping[str, str]) -> float:
    """What `Retry-After` asks for: seconds, or a date; 0 where it says nothing that can be read."""
    value = headers.get("retry-after", "").strip()
    try:
        return max(0.0, float(value)) if value[:1].isdigit() else _until(value)
    except (ValueError, TypeError, OverflowError):
        return 0.0


def _until(date: str) -> float:
    return max(0.0, email.utils.parsedate_to_datetime(date).timestamp() - time.time())


def _body(response: http.client.HTTPResponse) -> bytes:
    """All of it. Raises JudgeError of one that is too large, HTTPException of one that breaks off."""
    parts, size = [], 0
    while chunk := response.read(1 << 16):
        parts.append(chunk)
        size += len(chunk)
        if size > MAX_REPLY_BYTES:
            response.close()
            raise JudgeError("judge_errors", f"a reply of more than {MAX_REPLY_BYTES >> 20} MiB", again=False)
    if response.length:  # what Content-Length announced and did not come
        raise http.client.IncompleteRead(b"", response.length)
    return b"".join(parts)


def _origin(url: str) -> tuple[str, str, int]:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname or "", parts.port or {"http": 80, "https": 443}.get(parts.scheme, 0)


def _proxy(scheme: str, host: str) -> str:
    """The proxy that the environment names for a host; "" for none."""
    if host in LOOPBACK or proxy_bypass(host):
        return ""
    return str(getproxies().get(scheme, ""))


def _connection(origin: tuple[str, str, int], proxy: str, timeout_s: float) -> http.client.HTTPConnection:
    scheme, host, port = origin
    through = urlsplit(proxy if "://" in proxy else f"http://{proxy}") if proxy else None
    first = (through.hostname or "", through.port or 80) if through else (host, port)
    if scheme == "http":
        return http.client.HTTPConnection(*first, timeout=timeout_s)
    connection = http.client.HTTPSConnection(*first, timeout=timeout_s, context=_tls())
    if through is not None:
        user = f"{unquote(through.username or '')}:{unquote(through.password or '')}"
        known = {"Proxy-Authorization": f"Basic {base64.b64encode(user.encode()).decode()}"} if through.username else {}
        connection.set_tunnel(host, port, headers=known)
    return connection


@cache
def _tls() -> ssl.SSLContext:
    """Verifies certificates and names; SSL_CERT_FILE adds a company's own."""
    return ssl.create_default_context()
