"""Agents that people have, and how each is started on a task: programs, and loops of client libraries that this file
runs when it is called as `agent_clients.py CLIENT TASK`.

In an episode that is no more than an address and a key in the environment.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from shutil import which

MODEL_NAME = "rlctl"  # workers.environments.harness.MODEL_NAME; this file imports nothing of ours
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
Setup = Callable[[Path, str, str], Mapping[str, str]]


@dataclass(frozen=True)
class Client:
    """`command`: `{task}` in it stands for the task. `setup` writes what it reads in its home, and returns variables.
    `needs`: what must be on the PATH, or can be imported. `submit`: the command that ends one which takes no answer
    without a call."""

    command: tuple[str, ...]
    needs: str
    setup: Setup = lambda home, base, key: {}
    wire: str = "chat"
    submit: str = ""

    def missing(self) -> bool:
        return which(self.needs) is None and find_spec(self.needs) is None

    def started_on(self, task: str) -> list[str]:
        return [word.replace("{task}", task) for word in self.command]


def _codex(home: Path, base: str, key: str) -> Mapping[str, str]:
    (home / ".codex").mkdir()
    (home / ".codex" / "config.toml").write_text(
        f'model = "{MODEL_NAME}"\nmodel_provider = "own"\n'
        '[model_providers.own]\nname = "own"\nenv_key = "OPENAI_API_KEY"\nwire_api = "responses"\n'
        f'base_url = "{base}"\n'
    )
    return {}


def _opencode(home: Path, base: str, key: str) -> Mapping[str, str]:
    options = {"baseURL": base, "apiKey": key}
    models = {MODEL_NAME: {"name": MODEL_NAME, "limit": {"context": 200000, "output": 4096}}}
    provider = {"own": {"npm": "@ai-sdk/openai-compatible", "options": options, "models": models}}
    config = {"provider": provider, "model": f"own/{MODEL_NAME}", "autoupdate": False, "permission": {"*": "allow"}}
    return {"OPENCODE_CONFIG_CONTENT": json.dumps(config), "OPENCODE_DISABLE_MODELS_FETCH": "1"}


def _pi(home: Path, base: str, key: str) -> Mapping[str, str]:
    folder = home / ".pi" / "agent"
    folder.mkdir(parents=True)
    model = {"id": MODEL_NAME, "contextWindow": 200000, "maxTokens": 4096}
    own = {"baseUrl": base, "api": "openai-completions", "apiKey": key, "models": [model]}
    (folder / "models.json").write_text(json.dumps({"providers": {"own": own}}))
    return {"PI_OFFLINE": "1"}


def _mini(home: Path, base: str, key: str) -> Mapping[str, str]:
    cost = {"MSWEA_COST_TRACKING": "ignore_errors", "MSWEA_CONFIGURED": "true", "MSWEA_SILENT_STARTUP": "1"}
    return {"OPENAI_API_BASE": base, **cost}


def _loop(name: str) -> tuple[str, ...]:
    return (sys.executable, __file__, name, "{task}")


_MINI = ("mini", "-t", "{task}", "-m", f"openai/{MODEL_NAME}", "--yolo", "--exit-immediately")
CLIENTS: Mapping[str, Client] = {
    "claude": Client(
        ("claude", "-p", "{task}", "--allowedTools", "Bash"),
        "claude",
        lambda *_: {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "DISABLE_AUTOUPDATER": "1"},
        "messages",
    ),
    "codex": Client(
        ("codex", "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "{task}"),
        "codex",
        _codex,
        "responses",
    ),
    "qwen": Client(
        ("qwen", "-p", "{task}", "--yolo", "--auth-type", "openai"), "qwen", lambda *_: {"OPENAI_MODEL": MODEL_NAME}
    ),
    "opencode": Client(("opencode", "run", "{task}"), "opencode", _opencode),
    "pi": Client(("pi", "-p", "--provider", "own", "--model", MODEL_NAME, "{task}"), "pi", _pi),
    "mini": Client((*_MINI, "-c", "mini.yaml", "-c", "agent.step_limit=3"), "mini", _mini, submit=SUBMIT),
    "openai-agents": Client(_loop("openai-agents"), "agents", wire="responses"),
    "pydantic-ai": Client(_loop("pydantic-ai"), "pydantic_ai"),
    "openai": Client(_loop("openai"), "openai"),
    "anthropic": Client(_loop("anthropic"), "anthropic", wire="messages"),
}
HARNESSES = [name for name in CLIENTS if name not in ("openai", "anthropic")]  # the others ask twice, and call nothing


# ── in an episode ─────────────────────────────────────────────────────────────────────────────────


def bash(command: str) -> str:
    """Run a command in a shell.

    Args:
        command: What to run.
    """
    return subprocess.run(command, shell=True, capture_output=True, text=True, check=False).stdout


def openai_agents(task: str) -> None:
    from agents import Agent, Runner, function_tool, set_tracing_disabled

    set_tracing_disabled(True)
    agent = Agent(name="solver", instructions="Use the shell.", model=MODEL_NAME, tools=[function_tool(bash)])
    print(Runner.run_sync(agent, task).final_output)


def pydantic_ai(task: str) -> None:
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel

    agent = Agent(OpenAIChatModel(MODEL_NAME), instructions="Use the shell.", tools=[bash])
    print(agent.run_sync(task).output)


def openai(task: str) -> None:
    """Streamed, and once more."""
    from openai import OpenAI

    client, asked = OpenAI(), [{"role": "user", "content": task}]
    for more in ("And?", ""):
        parts = client.chat.completions.create(model=MODEL_NAME, messages=asked, stream=True)  # type: ignore[call-overload]
        said = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
        asked += [{"role": "assistant", "content": said}, {"role": "user", "content": more}]


def anthropic(task: str) -> None:
    """Streamed, and once more."""
    from anthropic import Anthropic

    client, asked = Anthropic(), [{"role": "user", "content": task}]
    for more in ("And?", ""):
        with client.messages.stream(model=MODEL_NAME, max_tokens=16, messages=asked) as stream:  # type: ignore[arg-type]
            said = stream.get_final_text()
        asked += [{"role": "assistant", "content": said}, {"role": "user", "content": more}]


def main(name: str, task: str) -> None:
    """Run a loop of a client library here; become any other program."""
    loops = {"openai-agents": openai_agents, "pydantic-ai": pydantic_ai, "openai": openai, "anthropic": anthropic}
    if name in loops:
        loops[name](task)
        return
    client, base, key = CLIENTS[name], os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
    os.environ |= client.setup(Path.home(), base, key)
    os.execvp(client.command[0], client.started_on(task))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
