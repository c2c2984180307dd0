"""HTTP with a judge: one request with a deadline and a limit, of which nothing comes back but a body.

The key goes to the endpoint's own origin alone and never into a message; redirects are not followed.
"""

from __future__ import annotations

import asyncio
import email.utils
import os
import ssl
import time
from urllib.parse import urlsplit

MAX_REPLY_BYTES = 4 << 20  # of a body; httpx itself refuses headers of more than 100 KiB
RETRIED = (408, 425, 429)  # and every 5xx
SHOWN_CHARACTERS = 300  # of a reply that is an error
LOOPBACK = ("localhost", "127.0.0.1", "::1")


class JudgeError(Exception):
    """A request brought no score. `cause`: one of JUDGE_CAUSES; `again`: whether another try may; `wait_s`: how long
    the server asks to wait before it; `status`: of HTTP, 0 without one."""

    def __init__(self, cause: str, text: str, *, again: bool, wait_s: float = 0.0, status: int = 0) -> None:
        super().__init__(text)
        self.cause, self.again, self.wait_s, self.status = cause, again, wait_s, status


def key_problem(key_env: str) -> str:
    """Return why the variable holds no key that can be sent; "" where it does, or where none is wanted."""
    key = os.environ.get(key_env, "").strip() if key_env else "none"
    if not key:
        return f"the environment has no variable {key_env}" if key_env not in os.environ else f"{key_env} is empty"
    return "" if key.isascii() and key.isprintable() and " " not in key else f"{key_env} holds what no HTTP header can"


class JudgeClient:
    """Connections to one endpoint, for one event loop."""

    def __init__(self, base_url: str, key_env: str, concurrency: int) -> None:
        import httpx  # only where a judge is asked

        self.base_url = base_url.rstrip("/")
        self.key = os.environ.get(key_env, "").strip() if key_env else ""
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity", "User-Agent": "rlctl"}
        headers |= {"Authorization": f"Bearer {self.key}"} if self.key else {}
        self._httpx = httpx
        self._http = httpx.AsyncClient(
            headers=headers,
            timeout=None,  # the deadline is of the whole request
            limits=httpx.Limits(max_connections=concurrency),
            verify=ssl.create_default_context(),  # the system's certificates; SSL_CERT_FILE adds a company's own
            trust_env=urlsplit(base_url).hostname not in LOOPBACK,  # proxies
        )

    async def aclose(self) -> None:
        await self._http.aclose()

    def url(self, path: str) -> str:
        return f"{self.base_url}/{path}"

    def without_key(self, text: str) -> str:
        """Return other people's text without the key, of which it may be part."""
        return text.replace(self.key, "[the key]") if self.key else text

    async def request(self, method: str, path: str, content: bytes, timeout_s: float) -> bytes:
        """Return the body of a reply with status 200. Raises JudgeError."""
        body = bytearray()
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._http.stream(method, self.url(path), content=content or None) as response,
            ):
                async for chunk in response.aiter_raw():
                    body += chunk
                    if len(body) > MAX_REPLY_BYTES:
                        text = f"a reply of more than {MAX_REPLY_BYTES >> 20} MiB"
                        raise JudgeError("judge_errors", text, again=False)
        except TimeoutError:
            raise JudgeError("judge_timeouts", "no reply in time", again=True) from None
        except (self._httpx.HTTPError, self._httpx.InvalidURL) as error:
            text = self.without_key(str(error) or type(error).__name__)
            untrusted = "CERTIFICATE_VERIFY_FAILED" in text
            raise JudgeError("judge_errors", f"the connection failed: {text}", again=not untrusted) from None
        status = response.status_code
        if status == 200:
            return bytes(body)
        text = self.without_key(body.decode("utf-8", "replace")).strip()
        if response.has_redirect_location:
            there = self.without_key(response.headers["location"])
            text = f"a redirect to {there}, which is not followed: base_url must name it"
        text = f"HTTP {status}" + (f": {text[:SHOWN_CHARACTERS]}" if text else "")
        wait_s = retry_after_s(response.headers.get("retry-after", ""))
        raise JudgeError("judge_errors", text, again=status in RETRIED or status >= 500, wait_s=wait_s, status=status)


def retry_after_s(value: str) -> float:
    """Return the seconds that `Retry-After` asks for, as a number or a date; 0 where it says nothing readable."""
    try:
        if value[:1].isdigit():
            return max(0.0, float(value))
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except (ValueError, TypeError, OverflowError):
        return 0.0
