"""Load what a spec names as an environment: a class, tools, or an agent."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specs.errors import RewardError
from workers.environments.harness import Harness
from workers.environments.tool_schema import schema_of, tool_parameters
from workers.grading.terms import load_module

MCP = "mcp:"
NO_TOOLS = frozenset({"reset", "get_reward"})
# What gymnasium, GEM and SkyRL-Gym call the methods of an environment that replies to text.
TEXT_METHODS = NO_TOOLS | {"step", "init", "close", "render", "seed", "spawn", "sample_random_action", "get_metrics"}


@dataclass(frozen=True)
class Tool:
    """Describe a tool for the model; `function` is None for a method, which the instance of each episode has."""

    schema: Mapping[str, Any]
    source: str
    function: Callable[..., Any] | None = None


@dataclass(frozen=True)
class Loaded:
    """Hold what the user's files define. `servers` are commands of MCP servers, whose tools only they know."""

    mode: str
    kind: type | None = None
    agent: Callable[..., Any] | None = None
    harness: Harness | None = None
    tools: Mapping[str, Tool] = field(default_factory=dict)
    servers: Sequence[str] = ()

    @property
    def gives_reward(self) -> bool:
        if self.harness is not None:
            return self.harness.reward is not None
        return callable(getattr(self.kind, "get_reward", None))


def load(path: str, tools: Sequence[str], agent: str, base: str, command: Mapping[str, Any] | None = None) -> Loaded:
    """Return what these name; relative files start at `base`. Raises RewardError."""
    if command is not None:
        reward = _named(command["reward"], base) if command["reward"] else None
        program = Harness(command["command"], command["env"], command["cwd"], reward)
        return Loaded("agent", harness=program)
    if agent:
        run = _named(agent, base)
        of_object = None if inspect.isclass(run) else getattr(run, "__call__", None)  # noqa: B004
        if not any(map(inspect.iscoroutinefunction, (run, of_object))):
            raise RewardError(f"{agent} is not async", hint="write async def run(task, client), and await client.chat")
        return Loaded("agent", agent=run)
    found: dict[str, Tool] = {}
    mode, kind = "tools", None
    if path:
        kind = _class(path, base)
        mode = _mode(path, kind)
        found = _methods(kind, path) if mode == "tools" else {}
    for each in (tool for tool in tools if not tool.startswith(MCP)):
        function = _named(each, base)
        if not callable(function) or inspect.isclass(function):
            raise RewardError(f"{each} is no function", hint="name a function; a class belongs in path")
        add_tool(found, Tool(schema_of(function, each.rpartition(":")[2]), each, function))
    servers = [tool.removeprefix(MCP) for tool in tools if tool.startswith(MCP)]
    if mode == "text" and tools:
        raise RewardError(f"{path} replies to text, and there are tools", hint="leave out step, or the tools")
    if mode == "tools" and not found and not servers:
        raise RewardError(f"{path} has no tools", hint="write public methods with type hints and a docstring, or step")
    return Loaded(mode, kind, tools=found, servers=servers)


def add_tool(found: dict[str, Tool], tool: Tool) -> None:
    """Add a tool to the others. Raises RewardError where there is one of its name."""
    name = tool.schema["function"]["name"]
    if name in found:
        raise RewardError(f"two tools are called {name}: of {found[name].source} and {tool.source}", hint="rename one")
    found[name] = tool


def keywords(function: Callable[..., Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return those values that the function's signature takes by name."""
    parameters = inspect.signature(function).parameters
    if any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        return dict(values)
    return {name: value for name, value in values.items() if name in parameters}


def _named(reference: str, base: str) -> Any:
    file, _, name = reference.rpartition(":")
    module = load_module(Path(base, Path(file).expanduser()).resolve(), "environment")
    if not hasattr(module, name):
        raise RewardError(f"{file} defines no {name}", hint=f"define {name} in it, or name what it defines")
    return getattr(module, name)


def _class(path: str, base: str) -> type:
    kind = _named(path, base)
    if not inspect.isclass(kind):
        raise RewardError(f"{path} is a {type(kind).__name__}, not a class", hint="name a class; a function is a tool")
    try:
        with suppress(ValueError):  # a dict's own constructor has no signature
            inspect.signature(kind).bind()
    except TypeError as error:
        hint = "give its parameters defaults: each episode makes an instance without arguments"
        raise RewardError(f"{path}: its constructor has a {error}", hint=hint) from None
    return kind


def _mode(path: str, kind: type) -> str:
    """Return whether a class replies to text or has tools. Raises RewardError where it does neither, or both."""
    text = callable(getattr(kind, "step", None))
    if not callable(getattr(kind, "reset", None)) and not (text and hasattr(kind, "init")):
        hint = "write def reset(self, **row): it starts an episode, and may return what the model reads first"
        raise RewardError(f"{path} has no reset", hint=hint)
    if text and (tools := [name for name in vars(kind) if _surely_tool(kind, name)]):
        hint = f"leave out step, or rename {tools[0]} to _{tools[0]}"
        raise RewardError(f"{path} replies to text, with step, and has a tool, {tools[0]}: both at once", hint=hint)
    return "text" if text else "tools"


def _public_methods(kind: type) -> dict[str, Callable[..., Any]]:
    """Return methods by name, inherited and cached ones too; a static method belongs to no episode."""
    found = {name: inspect.getattr_static(kind, name) for name in dir(kind) if not name.startswith("_")}
    return {
        name: getattr(kind, name)
        for name, one in found.items()
        if inspect.isroutine(one) and inspect.isfunction(inspect.unwrap(one)) and not isinstance(one, staticmethod)
    }


def _surely_tool(kind: type, name: str) -> bool:
    """Return whether nothing but a model can be meant to call a method: all its arguments are described."""
    method = _public_methods(kind).get(name)
    if method is None or name in TEXT_METHODS or not tool_parameters(method):
        return False
    try:
        properties = schema_of(method, name)["function"]["parameters"]["properties"]
    except RewardError:
        return False
    return all("description" in each for each in properties.values())


def _methods(kind: type, path: str) -> dict[str, Tool]:
    methods = {name: method for name, method in _public_methods(kind).items() if name not in NO_TOOLS}
    return {name: Tool(schema_of(method, name), path) for name, method in methods.items()}
