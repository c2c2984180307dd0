"""Answer HTTP requests of agents: each for the episode whose key it brings, on loopback, bounded in size and time.

An address is `/s/KEY/v1/...`, or `/v1/...` with the key as `Authorization: Bearer KEY` or `x-api-key`. A reply counts
as delivered when its last byte has left and the connection was not reset; until then the same request is the same turn,
unless its client still waits: then another wants an answer of its own.
"""

from __future__ import annotations

import asyncio
import json
import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Protocol
from urllib.parse import unquote

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from workers.environments.harness import MODEL_NAME
from workers.gateway.anthropic_messages import AnthropicMessages
from workers.gateway.chat_request import ChatReply, ChatRequest, RefusedRequest
from workers.gateway.openai_chat import OpenAIChat
from workers.gateway.openai_completions import OpenAICompletions
from workers.gateway.openai_responses import OpenAIResponses
from workers.gateway.turn_tree import TreeTurn
from workers.gateway.wire import Wire

HOST = "127.0.0.1"
BODY_BYTES = 8 << 20  # of a request
BODY_S = 30.0  # in which it must have come
KEEP_ALIVE_S = 3.0
STATUS_S = 20.0  # until a stream begins, errors can still be told by status, which clients retry
CONNECTIONS = 4096

WIRES: Mapping[str, Wire] = {
    "chat/completions": OpenAIChat(),
    "messages": AnthropicMessages(),
    "responses": OpenAIResponses(),
    "completions": OpenAICompletions(),
}


class Conversations(Protocol):
    """Stand behind a key: an episode."""

    def ask(self, request: ChatRequest) -> TreeTurn:
        """Return the turn that answers a request."""
        ...

    def count_tokens(self, request: ChatRequest) -> int:
        """Return the length of a request's prompt. Raises RefusedRequest."""
        ...

    def note_refusal(self, why: str) -> None:
        """Note that a request could not be answered."""
        ...


class Gateway:
    """A server in this thread's event loop."""

    def __init__(self) -> None:
        self.port = 0  # until it listens
        self._open: dict[str, Conversations] = {}  # by key
        self._runner: web.ServerRunner | None = None
        self._stranger: Callable[[], Conversations] | None = None

    async def start(self, host: str = HOST, port: int = 0, stranger: Callable[[], Conversations] | None = None) -> None:
        """Listen, on a free port unless one is given. `stranger`: makes the conversations of a key that is not known;
        without it none is let in."""
        self._stranger = stranger
        self._runner = web.ServerRunner(_Server(self._handle), handle_signals=False, shutdown_timeout=0.0)
        await self._runner.setup()
        await web.TCPSite(self._runner, host, port).start()
        self.port = self._runner.addresses[0][1]

    async def close(self) -> None:
        """Stop listening, and close what is open."""
        self._open.clear()
        if self._runner is not None:
            await self._runner.cleanup()

    def open(self, episode: Conversations, key: str = "") -> dict[str, str]:
        """Let requests for an episode come, with a key of its own; return the variables that tell clients where, and
        its key."""
        key = key or secrets.token_urlsafe(24)
        self._open[key] = episode
        base = f"http://{HOST}:{self.port}/s/{key}"
        return {
            "OPENAI_BASE_URL": f"{base}/v1",
            "OPENAI_API_BASE": f"{base}/v1",
            "OPENAI_API_KEY": key,
            "ANTHROPIC_BASE_URL": base,
            "ANTHROPIC_API_KEY": key,
        }

    def shut(self, episode: Conversations) -> None:
        """Refuse its key from now on."""
        self._open = {key: one for key, one in self._open.items() if one is not episode}

    # ── requests ──────────────────────────────────────────────────────────────────────────────────

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        path, key = _parts(request)
        if request.method == "HEAD" or (request.method == "GET" and path == ""):
            return web.Response(status=200 if path == "" or key else 404)
        wire = WIRES.get(path.removesuffix("/count_tokens"), WIRES["chat/completions"])
        if key and key not in self._open and self._stranger and len(self._open) < CONNECTIONS:
            self._open[key] = self._stranger()
        if (episode := self._open.get(key)) is None:
            over, none = "the key opens no episode, or one that is over", "no key: send Authorization: Bearer KEY"
            return _refusal(wire, 401, over if key else none)
        listed, _, named = path.partition("/")
        if listed == "models" and request.method == "GET":  # every name is taken
            only = {"id": named or MODEL_NAME, "object": "model", "created": 0, "owned_by": "rlctl", "type": "model"}
            return _json(only if named else {"object": "list", "data": [only], "has_more": False})
        if path not in WIRES and path != "messages/count_tokens":
            return _refusal(wire, 404, f"there is no /v1/{path}; there are {', '.join(WIRES)} and models")
        if request.method != "POST":
            return _refusal(wire, 405, f"/v1/{path} takes POST")
        try:
            body = await _body(request)
            if key not in self._open:
                raise web.HTTPUnauthorized(text="the episode is over")
            asked = replace(
                wire.read(body),
                seed=str(body.get("seed")),
                stream=bool(body.get("stream")),
                model=str(body.get("model", "")),
                wire=wire.name,
                headers=_own_headers(request),
            )
            if path == "messages/count_tokens":
                return _json({"input_tokens": episode.count_tokens(asked)})
            return await self._reply(request, wire, episode, asked)
        except RefusedRequest as error:
            episode.note_refusal(str(error))
            return _refusal(wire, error.status, str(error))
        except web.HTTPException as error:
            return _refusal(wire, error.status, error.text or error.reason)
        except ConnectionResetError:  # the client has left while it was answered: nobody reads this
            return web.Response()

    async def _reply(
        self, request: web.BaseRequest, wire: Wire, episode: Conversations, asked: ChatRequest
    ) -> web.StreamResponse:
        connection = request.protocol
        assert isinstance(connection, _Connection)
        connection.last = None
        turn = episode.ask(asked)
        turn.waiting += 1
        try:
            if asked.stream:
                response = await self._stream(request, wire, turn, asked)
            else:
                response = _json(wire.write(await _wait(turn), asked))
                await response.prepare(request)
            await response.write_eof()
            if not turn.reply.cancelled() and turn.reply.exception() is None:
                connection.deliver(turn)
        finally:
            turn.waiting -= 1
        return response

    async def _stream(
        self, request: web.BaseRequest, wire: Wire, turn: TreeTurn, asked: ChatRequest
    ) -> web.StreamResponse:
        """Write a reply as events: with signs of life until it is there, then all at once."""
        headers = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
        response = web.StreamResponse(headers=headers)
        begun, timeout = wire.begin(turn.id, asked), STATUS_S
        while not (await asyncio.wait({turn.reply}, timeout=timeout))[0]:
            await response.prepare(request)
            await response.write(begun + wire.keep_alive(turn.id, asked))
            begun, timeout = b"", KEEP_ALIVE_S
        try:
            events = b"".join(wire.events(await _wait(turn), asked))
        except RefusedRequest as error:
            if not response.prepared:
                raise
            events = wire.error_event(str(error))
        await response.prepare(request)
        # At once: clients close the connection at the last event, and what they had not read would count as lost.
        await response.write_eof(begun + events)
        return response


async def _wait(turn: TreeTurn) -> ChatReply:
    """Return a turn's reply. A client that leaves does not break it off. Raises RefusedRequest."""
    try:
        return await asyncio.shield(turn.reply)
    except asyncio.CancelledError:
        if turn.reply.cancelled():
            raise RefusedRequest("the episode is over") from None
        raise


def _parts(request: web.BaseRequest) -> tuple[str, str]:
    """Return what is asked for, without `/v1/`, and the key."""
    parts = [unquote(part) for part in request.rel_url.raw_path.split("/") if part]  # none of OPTIONS *
    header = re.sub("^bearer +", "", request.headers.get("Authorization", ""), flags=re.IGNORECASE)
    key = header or request.headers.get("x-api-key", "")
    if parts[:1] == ["s"] and len(parts) > 1:
        key, parts = parts[1], parts[2:]
    if parts[:1] == ["v1"]:
        parts = parts[1:]
    return "/".join(parts), key


_SURROGATE = re.compile(rb"\\ud[89a-f]|\xed[\xa0-\xbf]", re.IGNORECASE)  # escaped, or as bytes that are no UTF-8
_NOT_ITS_OWN = re.compile("authorization|x-api-key|cookie|host|connection|(accept|content-|transfer-|x-stainless-).*")


def _own_headers(request: web.BaseRequest) -> dict[str, str]:
    """Return the headers that say what a client is and which of its sessions asks."""
    headers = [(name.lower(), value[:200]) for name, value in request.headers.items()]
    return {name: value for name, value in headers[:40] if not _NOT_ITS_OWN.fullmatch(name)}


async def _body(request: web.BaseRequest) -> Mapping[str, Any]:
    """Return the JSON object that a request holds. Raises RefusedRequest and HTTPException."""
    try:
        async with asyncio.timeout(BODY_S):
            raw = await request.read()
    except TimeoutError:
        raise web.HTTPRequestTimeout(text=f"the body took longer than {BODY_S:g} s") from None
    try:
        body = json.loads(raw)
        if _SURROGATE.search(raw):  # no tokenizer takes half of a pair
            body = json.loads(json.dumps(body, ensure_ascii=False).encode(errors="replace"))
    except (ValueError, RecursionError):
        raise RefusedRequest("the body is no JSON") from None
    if not isinstance(body, dict):
        raise RefusedRequest("the body is no JSON object")
    return body


def _json(body: Mapping[str, Any], status: int = 200) -> web.Response:
    raw = json.dumps(body, ensure_ascii=False).encode(errors="replace")
    return web.Response(body=raw, status=status, content_type="application/json")


def _refusal(wire: Wire, status: int, message: str) -> web.Response:
    return _json(wire.error(status, message), status)


# ── delivery ──────────────────────────────────────────────────────────────────────────────────────


class _Connection(RequestHandler):
    """A connection that knows whether its last reply was read."""

    open = 0  # of all

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.last: TreeTurn | None = None  # whose reply was the last to leave
        self.lost = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        _Connection.open += 1
        if _Connection.open > CONNECTIONS:
            transport.abort()  # type: ignore[attr-defined]

    def deliver(self, turn: TreeTurn) -> None:
        """Note that the last byte of a reply has left; a reset of the connection takes that back."""
        if not self.lost:
            turn.delivered = True
            self.last = turn

    def connection_lost(self, exc: BaseException | None) -> None:
        super().connection_lost(exc)
        _Connection.open -= 1
        self.lost = True
        if exc is not None and self.last is not None:
            self.last.delivered = False


class _Server(web.Server):
    """aiohttp's server, with connections of ours."""

    def __init__(self, handler: Any) -> None:
        super().__init__(handler, request_factory=_request, handler_cancellation=True, access_log=None)

    def __call__(self) -> RequestHandler:
        return _Connection(self, loop=self._loop, **self._kwargs)


def _request(message: Any, payload: Any, protocol: Any, writer: Any, task: Any) -> web.BaseRequest:
    loop = asyncio.get_running_loop()
    return web.BaseRequest(message, payload, protocol, writer, task, loop, client_max_size=BODY_BYTES)
