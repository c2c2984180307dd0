"""Responses, asked by OpenAI's own client: plain and streamed, items of every kind, and refusals."""

from __future__ import annotations

import json
from typing import Any

import pytest
from agent_gateway import END, TASK, WEATHER, Served, call, serving
from optional import WhenUsed

openai = WhenUsed("openai", "OpenAI's client is not installed")

TOOL = {"type": "function", "strict": False, **WEATHER["function"]}
SPACE = {"type": "namespace", "name": "shell", "description": "", "tools": [{**TOOL, "name": "run"}]}
SEARCH = {"type": "web_search"}


async def ask(served: Served, items: list[Any], stream: bool, **more: Any) -> Any:
    responses = served.client(openai.AsyncOpenAI).responses
    what = {"model": "any", "input": items, "tools": [TOOL, SPACE, SEARCH], "store": False, **more}
    if not stream:
        return await responses.create(**what)
    async with responses.stream(**what) as events:
        kinds = [event.type async for event in events]
        assert kinds[:2] == ["response.created", "response.in_progress"]
        return await events.get_final_response()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_loop_with_a_tool(stream: bool) -> None:
    first = f"<think>\nhm\n</think>\n\nLet me see.\n{call(city='Rome')}"
    async with serving([first, f"Sunny.{END}"]) as served:
        items: list[Any] = [
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be short."}]},
            {"role": "user", "content": TASK},
        ]
        reply = await ask(served, items, stream, instructions="You are an agent.")
        assert [item.type for item in reply.output] == ["reasoning", "message", "function_call"]
        thought, message, called = reply.output
        assert (thought.summary[0].text, message.content[0].text) == ("hm", "Let me see.")
        assert (called.name, json.loads(called.arguments)) == ("weather", {"city": "Rome"})
        items += [item.model_dump(exclude_none=True) for item in reply.output]
        items.append({"type": "function_call_output", "call_id": called.call_id, "output": "hot"})
        reply = await ask(served, items, stream, instructions="You are an agent.")
        assert (reply.status, reply.output_text) == ("completed", "Sunny.")
        assert reply.usage.output_tokens == len(served.sampler.log[-1][1])
        (sample,) = served.samples
        served.episode.settle()
        assert served.written(sample) == f"{first}Sunny.{END}"
        assert served.text(sample.tokens).index("You are an agent.\n\nBe short.") >= 0
        assert "run(city)" in served.text(sample.tokens)
        assert "web_search" not in served.text(sample.tokens)


async def test_a_turn_that_a_limit_cuts_off() -> None:
    async with serving([f"abcdefgh{END}"]) as served:
        responses = served.client(openai.AsyncOpenAI).responses
        what = {"model": "any", "input": TASK, "max_output_tokens": 3}
        events = [event async for event in await responses.create(**what, stream=True)]
        assert events[-1].type == "response.incomplete"
        for reply in (await responses.create(**what), events[-1].response):
            assert (reply.status, reply.incomplete_details.reason) == ("incomplete", "max_output_tokens")
            assert reply.output_text == "abc"


async def test_requests_that_cannot_be_answered() -> None:
    async with serving([f"x{END}"]) as served:
        with pytest.raises(openai.BadRequestError, match="keeps no conversations"):
            await ask(served, [{"role": "user", "content": TASK}], False, previous_response_id="resp_1")
        for item, why in (
            ({"type": "item_reference", "id": "x"}, "keeps no conversations.*store = false.*item_reference"),
            ({"type": "web_search_call", "id": "x"}, "type web_search_call is unknown"),
            ({"role": "king", "content": "x"}, "role king"),
        ):
            with pytest.raises(openai.BadRequestError, match=why):
                await ask(served, [item], False)
        assert not served.samples
