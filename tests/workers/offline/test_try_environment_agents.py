"""Agents that are programs, tried with one scripted answer: what fails in a run is said before it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from corpus import assert_problems, write_case

from rlctl.check.findings import examine

pytestmark = pytest.mark.usefixtures("warm_children")

AGENT = """
import json, os, sys, urllib.request

how, prompt = sys.argv[1:]
if how == "nothing":
    sys.exit("no configuration")
tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
body = {"messages": [{"role": "user", "content": prompt}], **({"tools": tools} if how == "tools" else {})}
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
request = urllib.request.Request(url, json.dumps(body).encode(), headers)
print(urllib.request.urlopen(request).read())
"""
# Name → program, how it behaves, `max_episode_tokens`, what else the agent's table says
AGENTS: dict[str, tuple[str, str, int, dict[str, Any]]] = {
    "sound": ("python", "tools", 200, {}),
    "no program": ("no-such-program", "asks", 200, {}),
    "ends at once": ("python", "nothing", 200, {}),
    "no folder": ("python", "asks", 200, {"cwd": "nowhere"}),
    "no room for a turn": ("python", "asks", 36, {}),
    "no room for its tools": ("python", "tools", 31, {}),
    "a reward that raises": ("python", "asks", 200, {"reward": "score.py:score"}),
}
PROBLEMS = [
    ("no program", "agent", "no-such-program cannot be run"),
    ("ends at once", "agent", "before it asked the model: no configuration"),
    ("no folder", "agent", "cannot be copied"),
    ("no room for a turn", "max_episode_tokens", "the agent's first request has"),
    ("no room for its tools", "max_episode_tokens", "the agent's first request has"),
]


def test_faults_are_said_before_the_start(tmp_path: Path) -> None:
    """A reward that raises is a warning: the program may have left nothing to grade after an answer that means nothing
    to it."""
    environments = []
    for name, (program, how, most, more) in AGENTS.items():
        command = {"command": [program, "{spec_dir}/agent.py", how, "{prompt}"], **more}
        environments.append({"name": name, "agent": command, "max_episode_tokens": most})
    sets = {
        "model.path": "builtin:tiny-chat",
        "data.train": "rows.jsonl",
        "data.max_prompt_tokens": 30,
        "data.max_response_tokens": 16,
        "data.environment_column": "kind",
        "environment": environments,
    }
    rows = [json.dumps({"prompt": "a long question", "answer": "1", "kind": name}) for name in AGENTS]
    files = {"agent.py": AGENT, "rows.jsonl": "\n".join(rows), "score.py": "def score(cwd):\n    return 1 / 0\n"}
    found = examine(write_case({"set": sets, "files": files}, tmp_path), ())
    places = {name: f"environment.{number}" for number, name in enumerate(AGENTS)}
    assert_problems({f"{places[name]}.{key}": words for name, key, words in PROBLEMS}, found.problems)
    assert_problems({f"{places['a reward that raises']}.agent": "ZeroDivisionError"}, found.warnings)
    sound = found.environments[0]
    assert (sound.mode, sound.reply) == ("program", "chat, 1 tools; exit code 0")
    assert sound.prompt_tokens is not None
    assert sound.prompt_tokens > 30
