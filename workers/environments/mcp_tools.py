"""Tools of MCP servers over stdio: a client of each server lives on the event loop of the environment's process."""

from __future__ import annotations

import asyncio
import os
import shlex
import sys
from typing import Any

from specs.errors import RewardError
from workers.environments.loaded import MCP, Tool
from workers.environments.replies import Lost, as_text
from workers.grading.child import one_line


async def server_tools(command: str, base: str, held: set[asyncio.Task[None]]) -> list[Tool]:
    """Start a server and return its tools; its client is in a task that joins `held`. Raises RewardError."""
    ready: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    held.add(asyncio.create_task(_hold(command, base, ready)))
    try:
        client = await ready
        listed, cursor = [], None
        while True:
            page = await client.list_tools(cursor=cursor)
            listed += page.tools
            if not (cursor := page.next_cursor):
                break
        if listed:
            return [_tool(command, client, each) for each in listed]
    except Exception as error:  # a server may fail in any way
        while isinstance(error, ExceptionGroup):
            error = error.exceptions[0]
        hint = "run the command by hand in the spec file's folder"
        raise RewardError(f"{MCP}{command} does not start, or lists no tools: {one_line(error)}", hint=hint) from None
    raise RewardError(f"{MCP}{command} has no tools", hint="leave it out, or give it what it needs to offer some")


async def _hold(command: str, base: str, ready: asyncio.Future[Any]) -> None:
    try:
        from mcp import Client, StdioServerParameters, stdio_client

        program, *arguments = shlex.split(command)
        program = sys.executable if program in ("python", "python3") else program
        how = {"command": program, "args": arguments, "env": dict(os.environ), "cwd": base}
        server = StdioServerParameters(**how, encoding_error_handler="replace")
        async with Client(stdio_client(server, errlog=sys.stderr), cache=None) as client:
            ready.set_result(client)
            await asyncio.Event().wait()
    except Exception as error:
        if ready.done():
            raise
        ready.set_exception(error)


def _tool(command: str, client: Any, listed: Any) -> Tool:
    from mcp import MCPError

    async def call(**arguments: Any) -> str:
        try:
            result = await client.call_tool(listed.name, arguments)
        except MCPError as error:
            try:
                await client.list_tools()
            except MCPError:
                raise Lost(f"{MCP}{command} ended: {error}") from None
            raise
        text = "\n".join(map(_text_of, result.content)) or as_text(result.structured_content or "")
        if result.is_error:
            raise RuntimeError(text)
        return text

    parameters = {"properties": {}} | {key: one for key, one in listed.input_schema.items() if one is not None}
    function = {"name": listed.name, "description": listed.description or "", "parameters": parameters}
    return Tool({"type": "function", "function": function}, f"{MCP}{command}", call)


def _text_of(part: Any) -> str:
    """Return a part of a result that is text, or a resource of text; the kind of another."""
    return str(getattr(getattr(part, "resource", part), "text", f"[{part.type}]"))
