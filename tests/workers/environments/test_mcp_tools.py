"""MCP servers over stdio as tools, beside functions."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest
from environment_pools import make_pool, opened, started, written
from optional import skip_without
from process_ends import ended

from specs.errors import RewardError
from workers.environments.environment_pool import Environment, EnvironmentLost, EnvironmentReply

skip_without("mcp", "the package mcp is an extra")

SERVER = '''
    import os
    from mcp.server.mcpserver import MCPServer

    server = MCPServer("numbers")

    @server.tool()
    def add(a: int, b: int = 1) -> int:
        """Add two numbers."""
        return a + b

    @server.tool()
    def pid() -> int:
        """Return the server's process."""
        return os.getpid()

    @server.tool()
    def fail() -> str:
        """Raise."""
        raise ValueError("not today")

    @server.tool()
    def die() -> str:
        """End the server."""
        os._exit(3)

    @server.tool()
    def image() -> list:
        """Return something that is no text."""
        from mcp.types import ImageContent, TextContent
        return [TextContent(type="text", text="see"), ImageContent(type="image", data="", mimeType="image/png")]

    server.run()
'''
FUNCTION = '''
    def double(x: int) -> int:
        """Double a number."""
        return 2 * x
'''


# A server that is written by hand, with schemas and results that one of the package has not.
BY_HAND = """
    import json, sys

    def say(message):
        print(json.dumps({"jsonrpc": "2.0", **message}), flush=True)

    POINT = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
    SCHEMAS = {
        "either": {"type": "object", "anyOf": [POINT, {"properties": {"y": {"type": "integer"}}}]},
        "pointed": {"type": "object", "$ref": "#/$defs/P", "$defs": {"P": POINT}},
        "empty": {"type": "object", "properties": None, "required": None},
    }
    RESULTS = {
        "structured": {"content": [], "structuredContent": {"n": 5}},
        "both": {"content": [{"type": "text", "text": "five"}], "structuredContent": {"n": 5}},
        "resource": {"content": [{"type": "resource", "resource": {"uri": "file:///x", "text": "inside"}}]},
        "binary": {"content": [{"type": "resource", "resource": {"uri": "file:///x", "blob": "AA=="}}]},
        "nothing": {"content": []},
    }
    SCHEMAS |= {name: {"type": "object"} for name in RESULTS}
    SCHEMAS["printing"] = {"type": "object"}
    print("starting…")
    sys.stdout.buffer.write(b"caf\\xe9\\n")
    for line in sys.stdin:
        asked = json.loads(line)
        match asked["method"]:
            case "initialize":
                version = asked["params"]["protocolVersion"]
                info = {"serverInfo": {"name": "s", "version": "1"}, "capabilities": {"tools": {}}}
                result = {"protocolVersion": version, **info}
            case "tools/list":
                result = {"tools": [{"name": name, "inputSchema": schema} for name, schema in SCHEMAS.items()]}
            case "tools/call":
                text = json.dumps(asked["params"].get("arguments"))
                result = RESULTS.get(asked["params"]["name"], {"content": [{"type": "text", "text": text}]})
            case _:
                result = None
        if result and asked.get("params", {}).get("name") == "printing":
            sys.stdout.buffer.write(b"{a line that is no JSON-RPC: \\xff\\n")
        if "id" in asked:
            unknown = {"code": -32601, "message": "unknown"}
            say({"id": asked["id"], **({"error": unknown} if result is None else {"result": result})})
"""


async def pids_of(*environments: Environment) -> set[int]:
    return {int(str((await each.call("pid", {})).text)) for each in environments}


async def test_a_server_and_a_function_in_one_list(tmp_path: Path) -> None:
    """A server of each process, started once, which ends with the pool."""
    written(tmp_path, SERVER, "server.py")
    tools = ("mcp:python server.py", written(tmp_path, FUNCTION) + ":double")
    pool = make_pool(tmp_path, tools=tools, memory_MiB=512)
    seen: set[int] = set()
    async with started(pool) as described:
        tools = {tool["function"]["name"]: tool["function"] for tool in described.tools}
        assert list(tools) == ["double", "add", "pid", "fail", "die", "image"]
        assert tools["add"]["description"] == "Add two numbers."
        assert tools["add"]["parameters"]["required"] == ["a"]
        async with opened(pool) as environment, opened(pool) as other:
            assert await environment.call("add", {"a": 2}) == EnvironmentReply("3", None, done=False)
            assert await environment.call("double", {"x": 2}) == EnvironmentReply("4", None, done=False)
            reply = await environment.call("fail", {})
            assert reply.error
            assert "Error executing tool fail" in str(reply.text)
            wrong = await environment.call("add", {"b": 1})
            assert wrong == EnvironmentReply("add: missing a; its arguments are a, b", None, done=False, error=True)
            bad_type = await environment.call("add", {"a": "x"})
            assert bad_type.error
            assert "valid integer" in str(bad_type.text)
            assert (await environment.call("image", {})).text == "see\n[image]"
            first = await pids_of(environment, other)
        async with opened(pool) as environment, opened(pool) as other:
            assert await pids_of(environment, other) == first
            with pytest.raises(EnvironmentLost, match=r"mcp:python server\.py ended"):
                await environment.call("die", {})
        async with opened(pool) as environment, opened(pool) as other:
            again = await pids_of(environment, other)
        assert len(first & again) == 1
        seen.update(first | again)
    assert len(seen) == 3
    assert all(map(ended, seen))


async def test_what_a_schema_lets_in_and_what_the_model_reads_of_a_result(tmp_path: Path) -> None:
    """A schema lets in more than its properties; a result becomes text."""
    written(tmp_path, BY_HAND, "server.py")
    pool = make_pool(tmp_path, tools=("mcp:python server.py",), memory_MiB=512)
    texts = {"structured": '{"n": 5}', "both": "five", "resource": "inside", "binary": "[resource]", "nothing": ""}
    texts["printing"] = "{}"
    async with started(pool), opened(pool) as environment:
        for name, arguments in {"either": {"y": 1}, "pointed": {"x": 1}, "empty": {}}.items():
            reply = await environment.call(name, arguments)
            assert reply == EnvironmentReply(json.dumps(arguments), None, done=False)
        wrong = await environment.call("empty", {"x": 1})
        assert wrong.text == "empty: unknown x; its arguments are none"
        assert {name: (await environment.call(name, {})).text for name in texts} == texts


def test_a_server_that_does_not_start(tmp_path: Path) -> None:
    command = f"{sys.executable} -c 'raise SystemExit(3)'"
    with pytest.raises(RewardError) as caught:
        asyncio.run(make_pool(tmp_path, tools=(f"mcp:{command}",)).start())
    assert f"mcp:{command} does not start, or lists no tools: " in caught.value.message
    assert caught.value.hint

    async def start_one_that_is_silent() -> None:
        pool = make_pool(tmp_path, tools=("mcp:sleep 600",))
        await pool._ready_zygote()  # its imports may take longer
        pool.start_timeout_s = 0.5
        await pool.start()

    with pytest.raises(RewardError, match=r"not ready after 0\.5 s: mcp:sleep 600") as caught:
        asyncio.run(start_one_that_is_silent())
    assert "by hand" in caught.value.hint
    written(tmp_path, BY_HAND.replace("in SCHEMAS.items()", "in ()"), "none.py")
    with pytest.raises(RewardError, match=r"mcp:python none\.py has no tools"):
        asyncio.run(make_pool(tmp_path, tools=("mcp:python none.py",), memory_MiB=512).start())
