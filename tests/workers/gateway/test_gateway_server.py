"""Requests as they reach the gateway: retries and cut streams, keys, strangers, and what is too big or too slow."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import numpy as np
import pytest
from agent_gateway import END, TASK, Served, serving
from aiohttp import web
from optional import WhenUsed

from backends.completions import SampleRequest
from specs.wire.role_config import Sampling
from workers.episodes.served_model import SamplerThread
from workers.gateway import gateway_server as server

openai = WhenUsed("openai", "OpenAI's client is not installed")

ASKED = {"model": "m", "messages": [{"role": "user", "content": TASK}]}


async def post(served: Served, body: Any, path: str = "chat/completions", **options: Any) -> tuple[int, Any]:
    options = {"headers": {"Authorization": f"Bearer {served.key}"}, **options}
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    url = options.pop("url", f"http://127.0.0.1:{served.gateway.port}/v1/{path}")
    async with aiohttp.ClientSession() as session, session.post(url, data=raw, **options) as response:
        return response.status, await response.text()


def content(reply: tuple[int, str]) -> str:
    status, text = reply
    assert status == 200, text
    return str(json.loads(text)["choices"][0]["message"]["content"])


async def cut(
    served: Served, body: Any, *, after: int = 0, gate: asyncio.Event | None = None, until: bytes = b""
) -> None:
    """Ask, read so many bytes of the reply, or up to some, and reset the connection."""
    raw = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nx-api-key: {served.key}\r\n"
    head += f"Content-Length: {len(raw)}\r\n\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", served.gateway.port, limit=16)
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.write(head.encode() + raw)
    while not served.sampler.log:
        await asyncio.sleep(0.01)
    if after:
        await reader.readexactly(after)
    read = b""
    while until not in read:
        read += await reader.read(1)
    writer.transport.abort()
    await asyncio.sleep(0.05)
    if gate is not None:
        gate.set()


# ── retries ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("how", ["before there is anything", "in the middle"])
async def test_a_reply_that_did_not_arrive_is_the_same_turn(how: str) -> None:
    """A client that lost the stream asks again, without one: it gets what was sampled, and nothing is drawn."""
    async with serving([f"{'one ' * 200}{END}", f"two{END}"], turn_tokens=2000) as served:
        if how == "in the middle":
            await cut(served, {**ASKED, "stream": True}, after=300)
        else:
            gate = served.sampler.gate = asyncio.Event()
            await cut(served, {**ASKED, "stream": True}, gate=gate)
        assert content(await post(served, ASKED)).startswith("one one")
        assert len(served.sampler.log) == len(served.samples) == 1
        assert [turn.asked for turn in served.episode.tree.turns] == [2]
        assert content(await post(served, ASKED)) == "two", "it arrived: who asks again wants another"
        assert len(served.samples) == 2


@pytest.mark.parametrize("stream", [False, True])
async def test_equal_requests_side_by_side_are_turns_of_their_own(stream: bool) -> None:
    """An agent that wants the best of several answers asks so; whoever has gone asks for his own again."""
    async with serving([f"one{END}", f"two{END}", f"three{END}"]) as served:
        gate = served.sampler.gate = asyncio.Event()
        asking = [asyncio.create_task(post(served, {**ASKED, "stream": stream})) for _ in range(2)]
        await asyncio.sleep(0.5)
        await cut(served, ASKED, gate=gate)
        texts = [text for _, text in await asyncio.gather(*asking, post(served, ASKED))]
        assert [sum(word in text for text in texts) for word in ("one", "two", "three")] == [1, 1, 1]
        served.episode.settle()
        assert [turn.asked for turn in served.episode.tree.turns] == [1, 1, 2]
        assert all(turn.learned for turn in served.episode.tree.turns)


@pytest.mark.parametrize("other", [{"seed": 2}, {"max_tokens": 300}])
async def test_another_seed_or_limit_of_tokens_asks_for_another_turn(other: dict[str, int]) -> None:
    """The first answer, which that client has not waited for, was drawn with its own limit."""
    async with serving([f"{'one ' * 200}{END}", f"two{END}"], turn_tokens=2000) as served:
        first = {**ASKED, "seed": 1, "max_tokens": 20}
        gate = served.sampler.gate = asyncio.Event()
        await cut(served, first, gate=gate)
        assert content(await post(served, {**first, **other})) == "two"
        assert content(await post(served, first)).startswith("one"), "that one is there still"
        assert [turn.asked for turn in served.episode.tree.turns] == [2, 1]


async def test_a_turn_that_nobody_has_read_is_not_learned_from() -> None:
    async with serving([f"{'one ' * 200}{END}"], turn_tokens=2000) as served:
        await cut(served, {**ASKED, "stream": True}, after=300)
        served.episode.settle()
        assert served.written(served.samples[0]) == ""
        await post(served, {**ASKED, "temperature": 0.1})
        served.samples[0].mask[-801:] = [1] * 801
        served.episode.settle()
        assert served.written(served.samples[0]) == f"{'one ' * 200}{END}"


async def test_a_stream_that_is_closed_at_its_last_event_has_been_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenAI's SDK does so, whether or not the server has said meanwhile that the body ends there."""

    async def slow_write(self: web.StreamResponse, data: bytes) -> None:
        await write(self, data)
        await asyncio.sleep(0.2)

    write = web.StreamResponse.write
    monkeypatch.setattr(web.StreamResponse, "write", slow_write)
    async with serving([f"one{END}"]) as served:
        stream = await served.client(openai.AsyncOpenAI).chat.completions.create(**ASKED, stream=True)
        assert "".join([part.choices[0].delta.content or "" async for part in stream]) == "one"
        await asyncio.sleep(0.1)
        served.episode.settle()
        assert served.written(served.samples[0]) == f"one{END}"


async def test_a_turn_that_was_continued_has_been_read() -> None:
    """The connection may have been reset after the last byte."""
    async with serving([f"one{END}", f"two{END}"]) as served:
        await cut(served, {**ASKED, "stream": True}, until=b"[DONE]\n\n")
        assert not served.episode.tree.turns[0].delivered
        more = [{"role": "assistant", "content": "one"}, {"role": "user", "content": "more"}]
        await post(served, {"messages": [*ASKED["messages"], *more]})
        served.episode.settle()
        assert served.written(served.samples[0]) == f"one{END}two{END}"


async def test_a_stream_shows_signs_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each wire in its own way, while the sampler is at work."""
    monkeypatch.setattr(server, "STATUS_S", 0.05)
    monkeypatch.setattr(server, "KEEP_ALIVE_S", 0.05)
    wires = {
        "chat/completions": (ASKED, ": at work"),
        "messages": (ASKED, "event: ping"),
        "responses": ({"input": TASK}, "response.in_progress"),
        "completions": ({"prompt": TASK}, ": at work"),
    }
    async with serving([f"one{END}"], wait_s=0.4) as served:
        for path, (body, sign) in wires.items():
            _, text = await post(served, {**body, "stream": True}, path)
            assert text.count(sign) >= 3, path
            assert "one" in text.partition(sign)[2]


# ── plain text ────────────────────────────────────────────────────────────────────────────────────


async def test_plain_text_is_continued_without_a_template() -> None:
    async with serving([f" 42{END}"]) as served:
        status, text = await post(served, {"prompt": "6*7 ="}, "completions")
        assert (status, json.loads(text)["choices"][0]["text"]) == (200, " 42")
        assert served.text(served.sampler.log[0][0]) == "6*7 ="
        assert (await post(served, {"prompt": ["a", "b"]}, "completions"))[0] == 400


# ── the end ───────────────────────────────────────────────────────────────────────────────────────


async def test_the_end_is_told_in_words_and_is_not_learned_from() -> None:
    async with serving([f"one{END}"], max_turns=1) as served:
        assert content(await post(served, ASKED)) == "one"
        for path, body in (("chat/completions", ASKED), ("messages", ASKED), ("responses", {"input": "more"})):
            for stream in (False, True):
                status, text = await post(served, {**body, "stream": stream}, path)
                assert (status, "all of its turns are used" in text) == (200, True)
        assert (len(served.sampler.log), len(served.samples), served.episode.trajectory.turns) == (1, 1, 1)


async def test_headers_of_a_client_are_kept_but_not_its_key() -> None:
    async with serving([f"one{END}"]) as served:
        own = {"User-Agent": "solver/1", "X-Session-Id": "7" * 300, "X-Stainless-Arch": "x64"}
        await post(served, ASKED, headers={"Authorization": f"Bearer {served.key}", **own})
        served.episode.settle()
        (asked,) = served.episode.trajectory.notes["requests"]
        assert asked["headers"] == {"user-agent": "solver/1", "x-session-id": "7" * 200}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_while_it_is_answered_is_no_error(
    stream: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its turn waits for the next request."""

    async def closing(*_: Any) -> None:
        raise aiohttp.ClientConnectionResetError("Cannot write to closing transport")

    async with serving([f"one{END}", f"two{END}"]) as served:
        with monkeypatch.context() as patched:
            patched.setattr(web.StreamResponse, "write_eof", closing)
            with pytest.raises(aiohttp.ClientError):
                await post(served, {**ASKED, "stream": stream})
        assert not caplog.records
        assert content(await post(served, ASKED)) == "one"


# ── strangers ─────────────────────────────────────────────────────────────────────────────────────


async def test_keys_and_paths() -> None:
    async with serving([f"one{END}"]) as served:
        base = f"http://127.0.0.1:{served.gateway.port}"
        guesses = (served.key[:-1], f"{served.key}x", "x", "x/v1", "..", "%2e%2e", "")
        for path in ("", *(f"/s/{guess}" for guess in guesses)):
            url = f"{base}{path}/v1/chat/completions"
            assert (await post(served, ASKED, url=url, headers={}))[0] == 401, path
        for header in ("x" * 32, served.key[:-1], "é"):
            status, text = await post(served, ASKED, headers={"x-api-key": header})
            assert (status, served.key in text) == (401, False)
        assert "send Authorization: Bearer" in (await post(served, ASKED, headers={}, url=f"{base}/v1/models"))[1]
        for path in ("x", "chat", "chat/completions/x", "../s", "models/../../etc"):
            assert (await post(served, ASKED, url=f"{served.openai}/{path}"))[0] == 404, path
        assert content(await post(served, ASKED, url=f"{served.openai}/chat/completions", headers={})) == "one"
        assert content(await post(served, {**ASKED, "seed": 1}, url=f"{base}//v1/chat/completions")) == "one"
        as_typed = {"Authorization": f"BEARER {served.key}"}  # RFC 9110: schemes in any case
        assert (await post(served, ASKED, "models", headers=as_typed))[0] != 401
        served.gateway.shut(served.episode)
        assert (await post(served, ASKED))[0] == 401
        assert len(served.sampler.log) == 2


@pytest.mark.parametrize("line", ["OPTIONS *", "CONNECT x:1"])
async def test_a_request_without_a_path(line: str) -> None:
    async with serving([f"one{END}"]) as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.gateway.port)
        writer.write(f"{line} HTTP/1.1\r\nHost: x\r\nx-api-key: {served.key}\r\n\r\n".encode())
        assert b" 404 " in await reader.readline()
        writer.close()


async def test_other_episodes_are_not_seen() -> None:
    """Two at once ask the same; each has what its own sampler drew."""
    async with serving([f"mine{END}"], wait_s=0.1) as mine, serving([f"yours{END}"], wait_s=0.1) as yours:
        variables = mine.gateway.open(yours.episode)
        headers = {"Authorization": f"Bearer {variables['OPENAI_API_KEY']}"}
        replies = await asyncio.gather(*(post(mine, ASKED, **more) for more in ({}, {"headers": headers})))
        assert [content(reply) for reply in replies] == ["mine", "yours"]


LISTED = {"name": "f", "parameters": {"type": "object", "properties": [{"name": "a"}]}}
DEEP: dict[str, Any] = json.loads('{"a":' * 900 + "1" + "}" * 900)
BODIES: dict[str, Any] = {
    "no JSON": b"{",
    "deep": b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "deep arguments": {
        "messages": [
            {
                "role": "assistant",
                "tool_calls": [{"id": "x", "function": {"name": "f", "arguments": '{"a":' * 60 + "1" + "}" * 60}}],
            },
            {"role": "user", "content": "x"},
        ]
    },
    "no text": {"messages": [{"role": "user", "content": {"a": 1}}]},
    "no role": {"messages": [{"content": "x"}]},
    "tools": {**ASKED, "tools": [{"type": "function", "function": {"name": 5}}]},
    "deep object of arguments": {
        "messages": [
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": DEEP}}]},
            {"role": "user", "content": "x"},
        ]
    },
    "functions": {**ASKED, "functions": [{"name": "f", "parameters": {}}]},
    "listed properties": {**ASKED, "tools": [{"type": "function", "function": LISTED}]},
    "deep tools": {**ASKED, "tools": [{"type": "function", "function": {"name": "f", "parameters": DEEP}}]},
}


async def test_bodies_that_are_no_requests() -> None:
    async with serving([f"one{END}"]) as served:
        for name, body in BODIES.items():
            status, text = await post(served, body)
            assert (status, json.loads(text)["error"]["type"]) == (400, "invalid_request_error"), name
        assert not served.samples
        assert content(await post(served, ASKED)) == "one"


async def test_a_sampler_that_has_failed_is_not_the_requests_fault() -> None:
    """Clients take 400 for what they wrote, and never ask again."""

    class Broken:
        open_requests = 0

        def add(self, requests: Any) -> None:
            raise RuntimeError("out of memory")

    request = SampleRequest(1, np.ones(1, np.int64), Sampling(seed=0, max_response_tokens=1))
    over = asyncio.Event()  # the server then ends
    sampler = SamplerThread(Broken(), asyncio.get_running_loop(), over.set)  # type: ignore[arg-type]
    async with serving([""]) as served:
        served.episode.draw = lambda *_: sampler.draw(request)
        for path, kind in (("chat/completions", "server_error"), ("messages", "api_error")):
            for stream in (False, True):
                status, text = await post(served, {**ASKED, "stream": stream}, path)
                error = json.loads(text)["error"]
                assert (status, error["type"], error["message"]) == (500, kind, "the sampler failed: out of memory")
        assert not served.episode.tree.turns
    assert over.is_set()


async def test_a_defect_is_not_the_requests_fault(capfd: pytest.CaptureFixture[str]) -> None:
    async with serving([f"one{END}"]) as served:

        async def draw(*_: object) -> Any:
            raise KeyError("a defect")

        drawn, served.episode.draw = served.episode.draw, draw
        status, text = await post(served, ASKED)
        assert (status, json.loads(text)["error"]["message"]) == (500, "a request failed: KeyError: 'a defect'")
        assert capfd.readouterr().err.count("Traceback") == 1
        served.episode.draw = drawn
        assert content(await post(served, ASKED)) == "one"


async def test_half_of_a_surrogate_pair_becomes_a_question_mark() -> None:
    """Clients that truncate in the middle of an emoji send one, anywhere."""
    half = "a\ud83d"
    system, answer = ({"role": role, "content": half} for role in ("system", "assistant"))
    function = {"name": half, "description": half, "parameters": {"type": "object", "properties": {half: {}}}}
    asked = {"messages": [system, *ASKED["messages"], answer, {"role": "user", "content": half}]}
    async with serving([f"one{END}"]) as served:
        tool = {"name": half, "input_schema": function["parameters"]}
        assert content(await post(served, {**asked, "tools": [{"type": "function", "function": function}]})) == "one"
        assert (await post(served, {"prompt": half}, "completions"))[0] == 200
        assert (await post(served, {**ASKED, "system": half, "tools": [tool]}, "messages/count_tokens"))[0] == 200
        first, prompt = (served.text(tokens) for tokens, _ in served.sampler.log)
        assert (first.count("a?") >= 5, prompt) == (True, "a?")


async def test_what_is_too_big_or_too_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving([f"one{END}"]) as served:
        assert (await post(served, b"x" * (server.BODY_BYTES + 1)))[0] == 413
        monkeypatch.setattr(server, "BODY_S", 0.2)
        head = f"POST /v1/messages HTTP/1.1\r\nHost: x\r\nx-api-key: {served.key}\r\nContent-Length: 100\r\n\r\n{{"
        reader, writer = await asyncio.open_connection("127.0.0.1", served.gateway.port)
        writer.write(head.encode())
        async with asyncio.timeout(5):
            assert b" 408 " in await reader.readline()
        writer.close()
        half = [await asyncio.open_connection("127.0.0.1", served.gateway.port) for _ in range(50)]
        assert content(await post(served, ASKED)) == "one"
        for _, writer in half:
            writer.close()


async def test_a_body_that_comes_after_the_episode_asks_for_nothing() -> None:
    async with serving([f"one{END}"]) as served:

        async def slow() -> AsyncIterator[bytes]:
            yield b'{"messages": '
            await asyncio.sleep(0.2)
            served.gateway.shut(served.episode)
            yield json.dumps(ASKED["messages"]).encode() + b"}"

        url = f"{served.openai}/chat/completions"
        async with aiohttp.ClientSession() as session, session.post(url, data=slow()) as response:
            assert (response.status, "is over" in await response.text()) == (401, True)
        assert not served.samples


async def test_more_connections_than_there_may_be_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "CONNECTIONS", 3)
    async with serving([f"one{END}"]) as served:
        open_ = [await asyncio.open_connection("127.0.0.1", served.gateway.port) for _ in range(3)]
        with pytest.raises(aiohttp.ClientError):
            await post(served, ASKED)
        open_[0][1].close()
        await asyncio.sleep(0.1)
        assert content(await post(served, ASKED)) == "one"
        for _, writer in open_:
            writer.close()
