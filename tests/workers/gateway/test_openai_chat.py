"""Chat completions, asked by OpenAI's own client: plain and streamed, calls, thoughts, limits and refusals."""

from __future__ import annotations

import json
from typing import Any

import pytest
from agent_gateway import END, TASK, WEATHER, Served, call, serving
from optional import WhenUsed

openai = WhenUsed("openai", "OpenAI's client is not installed")


def client(served: Served) -> Any:
    return served.client(openai.AsyncOpenAI)


def asked(*more: dict[str, Any]) -> list[Any]:
    return [{"role": "system", "content": "Be short."}, {"role": "user", "content": TASK}, *more]


async def streamed(served: Served, messages: list[Any], **options: Any) -> dict[str, Any]:
    """The message that a stream's pieces make."""
    found: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    options = {"stream_options": {"include_usage": True}, **options}
    async for chunk in await client(served).chat.completions.create(
        model="any/thing", messages=messages, stream=True, **options
    ):
        for choice in chunk.choices:
            found["content"] += choice.delta.content or ""
            found["reasoning_content"] += getattr(choice.delta, "reasoning_content", None) or ""
            found["tool_calls"] += [one.model_dump() for one in choice.delta.tool_calls or ()]
            found["finish"] = choice.finish_reason
        found["usage"] = chunk.usage
    return found


@pytest.mark.parametrize("stream", [False, True])
async def test_a_loop_with_a_tool(stream: bool) -> None:
    """Two turns in one sample: what was sampled stands as it was, with spaces that the client does not send back."""
    async with serving([call(city="Rome"), f"Sunny.{END}"]) as served:
        messages = asked()
        for _ in range(2):
            if stream:
                found = await streamed(served, messages, tools=[WEATHER])
                calls, content, usage = found["tool_calls"], found["content"], found["usage"]
                finish = found["finish"]
            else:
                reply = await client(served).chat.completions.create(model="m", messages=messages, tools=[WEATHER])
                (choice,) = reply.choices
                calls = [one.model_dump() for one in choice.message.tool_calls or ()]
                content, usage, finish = choice.message.content, reply.usage, choice.finish_reason
            if not calls:
                break
            assert finish == "tool_calls"
            assert usage.completion_tokens == len(served.sampler.log[-1][1])
            arguments = json.loads(calls[0]["function"]["arguments"])
            calls[0]["function"]["arguments"] = json.dumps(arguments, indent=1)
            messages.append({"role": "assistant", "content": None, "tool_calls": calls})
            messages.append({"role": "tool", "tool_call_id": calls[0]["id"], "content": "hot"})
        assert (content, finish, arguments) == ("Sunny.", "stop", {"city": "Rome"})
        assert usage.prompt_tokens_details.cached_tokens == len(served.sampler.log[0][0] + served.sampler.log[0][1])
        (sample,) = served.samples
        served.episode.settle()
        assert served.written(sample) == call(city="Rome") + f"Sunny.{END}"
        assert served.text(sample.tokens).count("hot") == 1


async def test_thoughts_travel_apart() -> None:
    async with serving([f"<think>\nhm\n</think>\n\nYes.{END}", f"No.{END}"]) as served:
        found = await streamed(served, asked())
        assert (found["reasoning_content"], found["content"], found["finish"]) == ("hm", "Yes.", "stop")
        # The client drops the thought: it is the same turn all the same.
        more = [{"role": "assistant", "content": "Yes."}, {"role": "user", "content": "Sure?"}]
        assert (await streamed(served, asked(*more)))["content"] == "No."
        (sample,) = served.samples
        assert "<think>\nhm\n</think>\n\nYes." in served.text(sample.tokens)


async def test_limits_of_the_client() -> None:
    async with serving([f"abcdefgh{END}"]) as served:
        limits = {"max_tokens": 3, "max_completion_tokens": None}
        reply = await client(served).chat.completions.create(model="m", messages=asked(), **limits)
        assert (reply.choices[0].message.content, reply.choices[0].finish_reason) == ("abc", "length")
        models = await client(served).models.list()
        assert [model.id for model in models.data] == ["rlctl"]
        assert (await client(served).models.retrieve("org/name")).id == "org/name"


PICTURE = {"type": "image_url", "image_url": {"url": "x"}}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"messages": asked(), "n": 2}, "n > 1 is not supported: ask once for each answer, one after another"),
    ({"messages": []}, "no message for the model"),
    ({"messages": asked({"role": "assistant", "content": "It"})}, "the last message is the assistant"),
    ({"messages": [{"role": "user", "content": [PICTURE]}]}, "reads text only"),
    ({"messages": [{"role": "king", "content": "x"}]}, "role king"),
    ({"messages": asked(), "max_tokens": -1}, "max_tokens is no number of tokens"),
    ({"messages": asked(), "max_completion_tokens": 0}, "max_completion_tokens is no number of tokens"),
]


async def test_requests_that_cannot_be_answered() -> None:
    async with serving([f"x{END}"]) as served:
        for body, why in REFUSED:
            with pytest.raises(openai.BadRequestError, match=why):
                await client(served).chat.completions.create(model="m", **body)
        assert not served.samples
