"""Messages, asked by Anthropic's own client: plain and streamed, calls, thoughts, marks and refusals."""

from __future__ import annotations

from typing import Any

import pytest
from agent_gateway import END, TASK, WEATHER, Served, call, serving
from optional import WhenUsed

anthropic = WhenUsed("anthropic", "Anthropic's client is not installed")

TOOL = {
    "name": "weather",
    "description": WEATHER["function"]["description"],
    "input_schema": WEATHER["function"]["parameters"],
}
SEARCH = {"type": "web_search_20250305", "name": "web_search"}


async def ask(served: Served, messages: list[Any], stream: bool, **more: Any) -> Any:
    """The message, of which a stream is made one by the client itself."""
    messages_api = served.client(anthropic.AsyncAnthropic).messages
    what = {"model": "any", "max_tokens": 300, "messages": messages, "tools": [TOOL, SEARCH], **more}
    if not stream:
        return await messages_api.create(**what)
    async with messages_api.stream(**what) as events:
        return await events.get_final_message()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_loop_with_a_tool(stream: bool) -> None:
    """Marks of caches and a billing line that change from turn to turn are no other conversation."""
    async with serving([f"Let me see.\n{call(city='Rome')}", f"Sunny.{END}"]) as served:
        messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": TASK}]}]
        for number in range(2):
            mark = {"cache_control": {"type": "ephemeral"}}
            bill = {"type": "text", "text": f"x-anthropic-billing-header: cch={number}"}
            system = [bill, {"type": "text", "text": "Be short."}]
            marked = [*messages[:-1], {**messages[-1], "content": [{**messages[-1]["content"][0], **mark}]}]
            reply = await ask(served, marked, stream, system=system)
            assert reply.usage.output_tokens == len(served.sampler.log[-1][1])
            if reply.stop_reason != "tool_use":
                break
            text, tool_use = reply.content
            assert (text.text, tool_use.name, tool_use.input) == ("Let me see.", "weather", {"city": "Rome"})
            messages.append({"role": "assistant", "content": [one.model_dump() for one in reply.content]})
            result = {
                "type": "tool_result",
                "tool_use_id": tool_use.id,
                "content": [{"type": "text", "text": "hot"}],
            }
            messages.append({"role": "user", "content": [result]})
        assert (reply.stop_reason, reply.content[0].text) == ("end_turn", "Sunny.")
        (sample,) = served.samples
        assert reply.usage.cache_read_input_tokens == len(served.sampler.log[0][0] + served.sampler.log[0][1])
        served.episode.settle()
        assert served.written(sample) == f"Let me see.\n{call(city='Rome')}Sunny.{END}"
        assert "billing" not in served.text(sample.tokens)


@pytest.mark.parametrize("stream", [False, True])
async def test_thoughts_are_blocks(stream: bool) -> None:
    async with serving([f"<think>\nhm\n</think>\n\nYes.{END}", f"No.{END}"]) as served:
        messages: list[Any] = [{"role": "user", "content": TASK}]
        reply = await ask(served, messages, stream)
        thought, text = reply.content
        assert (thought.type, thought.thinking, text.text) == ("thinking", "hm", "Yes.")
        messages += [
            {"role": "assistant", "content": [one.model_dump() for one in reply.content]},
            {"role": "user", "content": "Sure?"},
        ]
        assert (await ask(served, messages, stream)).content[0].text == "No."
        assert len(served.samples) == 1
        # Another thought is another conversation: nothing proves that this was ever said.
        messages[1]["content"][0]["thinking"] = "well"
        await ask(served, messages, stream)
        assert len(served.samples) == 2


async def test_what_the_system_says_later_is_the_users() -> None:
    async with serving([f"Yes.{END}"]) as served:
        messages = [{"role": "user", "content": TASK}, {"role": "system", "content": "Hurry."}]
        await ask(served, messages, False)
        text = served.text(served.samples[0].tokens)
        assert text.index(TASK) < text.index("Hurry.")
        assert (await served.client(anthropic.AsyncAnthropic).messages.count_tokens(
            model="m", messages=messages, tools=[TOOL]
        )).input_tokens == len(served.sampler.log[0][0])  # fmt: skip
        assert len(served.samples) == 1, "a count is no turn"


async def test_requests_that_cannot_be_answered() -> None:
    async with serving([f"x{END}"]) as served:
        picture = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
        for content in ([picture], 5):
            with pytest.raises(anthropic.BadRequestError):
                await ask(served, [{"role": "user", "content": content}], False)
        served.gateway.shut(served.episode)
        with pytest.raises(anthropic.AuthenticationError, match="over"):
            await ask(served, [{"role": "user", "content": TASK}], False)
        assert not served.samples
