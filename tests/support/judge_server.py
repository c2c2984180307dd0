"""An OpenAI-compatible server that misbehaves as it is told, request by request, and remembers what it was sent."""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True)
class Asked:
    """A request as it came in."""

    method: str
    path: str
    headers: dict[str, str]
    content: bytes
    at: float

    @property
    def body(self) -> Any:
        return json.loads(self.content)

    @property
    def text(self) -> str:
        return str(self.body["messages"][-1]["content"])


Behaviour = Callable[[BaseHTTPRequestHandler, Asked], None]


def says(text: str, prompt_tokens: int = 10, completion_tokens: int = 2, finish: str = "stop") -> Behaviour:
    """A chat completion."""
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}
    choice = {"message": {"role": "assistant", "content": text}, "finish_reason": finish}
    body = {"choices": [choice], "usage": usage}
    return status(200, json.dumps(body).encode())


def status(code: int, body: bytes = b"", **headers: str) -> Behaviour:
    def answer(handler: BaseHTTPRequestHandler, asked: Asked) -> None:
        handler.send_response(code)
        for name, value in headers.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)

    return answer


def closes(handler: BaseHTTPRequestHandler, asked: Asked) -> None:
    """Announces a body and breaks off in it."""
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    handler.wfile.write(b'{"choices": [{"message"')
    handler.close_connection = True


def hangs_up(handler: BaseHTTPRequestHandler, asked: Asked) -> None:
    """Closes without a word."""
    handler.close_connection = True


def drips(handler: BaseHTTPRequestHandler, asked: Asked) -> None:
    """A byte of a header at a time: no read of the client's ever takes long."""
    for byte in b"HTTP/1.1 200 OK\r\nX-Slow: " + b"a" * 500:
        handler.wfile.write(bytes([byte]))
        handler.wfile.flush()
        time.sleep(0.05)


def huge(handler: BaseHTTPRequestHandler, asked: Asked) -> None:
    """A body without an end."""
    handler.send_response(200)
    handler.send_header("Connection", "close")
    handler.end_headers()
    handler.close_connection = True
    for _ in range(1000):
        handler.wfile.write(b" " * (1 << 20))


@dataclass
class JudgeServer:
    """`plan`: what each of the next requests meets; then `always`."""

    always: Behaviour = field(default_factory=lambda: says("1"))
    plan: deque[Behaviour] = field(default_factory=deque)
    asked: list[Asked] = field(default_factory=list)
    port: int = 0

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def behave(self, handler: BaseHTTPRequestHandler, content: bytes) -> None:
        asked = Asked(handler.command, handler.path, dict(handler.headers.items()), content, time.monotonic())
        self.asked.append(asked)
        behaviour = self.plan.popleft() if self.plan else self.always
        try:
            behaviour(handler, asked)
        except OSError:
            handler.close_connection = True


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def __init__(self, server: JudgeServer, *connection: Any) -> None:
        self.judge = server
        super().__init__(*connection)

    def do_POST(self) -> None:
        self.judge.behave(self, self.rfile.read(int(self.headers["Content-Length"] or 0)))

    def do_GET(self) -> None:
        self.judge.behave(self, b"")

    def log_message(self, format: str, *args: Any) -> None:
        return


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        return  # clients go away; that is the test


@contextmanager
def judge_server(**made: Any) -> Iterator[JudgeServer]:
    """Serve until the block ends."""
    judge = JudgeServer(**made)
    server = _Server(("127.0.0.1", 0), partial(_Handler, judge))
    judge.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield judge
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
