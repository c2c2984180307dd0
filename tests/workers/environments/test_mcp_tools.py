"""MCP servers over stdio as tools, beside functions."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest
from environment_pools import make_pool, opened, run, written
from process_ends import ended

from specs.errors import RewardError
from workers.environments.environment_pool import Described, EnvironmentLost, EnvironmentPool, EnvironmentReply

pytest.importorskip("mcp", reason="the package mcp is an extra")

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


def mcp_pool(folder: Path, *, processes: int = 1) -> EnvironmentPool:
    written(folder, SERVER, "server.py")
    tools = ("mcp:python server.py", written(folder, FUNCTION) + ":double")
    return make_pool(folder, tools=tools, processes=processes, memory_MiB=512)


def test_a_server_and_a_function_in_one_list(tmp_path: Path) -> None:
    pool = mcp_pool(tmp_path)

    async def test(described: Described) -> None:
        tools = {tool["function"]["name"]: tool["function"] for tool in described.tools}
        assert list(tools) == ["double", "add", "pid", "fail", "die", "image"]
        assert tools["add"]["description"] == "Add two numbers."
        assert tools["add"]["parameters"]["required"] == ["a"]
        pids = []
        for _ in range(2):
            async with opened(pool) as environment:
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
                pids.append(int(str((await environment.call("pid", {})).text)))
        assert pids[0] == pids[1]  # the server was started once
        async with opened(pool) as environment:
            with pytest.raises(EnvironmentLost, match=r"mcp:python server\.py ended"):
                await environment.call("die", {})
        async with opened(pool) as environment:
            pids.append(int(str((await environment.call("pid", {})).text)))
            assert pids[2] != pids[0]
        assert ended(pids[0])

    run(pool, test)


def test_servers_of_processes_end_with_the_pool(tmp_path: Path) -> None:
    pool = mcp_pool(tmp_path, processes=2)
    pids: list[int] = []

    async def test(_: Described) -> None:
        async with opened(pool) as one, opened(pool) as other:
            pids.extend([int(str((await each.call("pid", {})).text)) for each in (one, other)])

    run(pool, test)
    assert len(set(pids)) == 2
    assert all(map(ended, pids))


@pytest.mark.parametrize(
    ("command", "text"),
    [
        ("no-such-command", "mcp:no-such-command does not start, or lists no tools: FileNotFoundError"),
        (f"{sys.executable} -c 'raise SystemExit(3)'", "does not start, or lists no tools: "),
    ],
)
def test_a_server_that_cannot_be_used(tmp_path: Path, command: str, text: str) -> None:
    with pytest.raises(RewardError) as caught:
        asyncio.run(make_pool(tmp_path, tools=(f"mcp:{command}",)).start())
    assert text in caught.value.message
    assert caught.value.hint
