"""Agents that are programs, tried with one scripted answer: what fails in a run is said before it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from corpus import write_case

from rlctl.check.findings import Findings, examine

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
ROW = json.dumps({"prompt": "a long question", "answer": "1"})


def found(folder: Path, *, program: str = "python", how: str = "asks", agent: Any = None, **sets: Any) -> Findings:
    command = {"command": [program, "{spec_dir}/agent.py", how, "{prompt}"], **(agent or {})}
    environment = {"agent": command, "max_episode_tokens": sets.pop("max_episode_tokens", 200)}
    base = {
        "model.path": "builtin:tiny-chat",
        "data.train": "rows.jsonl",
        "data.max_prompt_tokens": 30,
        "data.max_response_tokens": 16,
        "environment": environment,
    }
    files = {"agent.py": AGENT, "rows.jsonl": f"{ROW}\n", "score.py": "def score(cwd):\n    return 1 / 0\n"}
    return examine(write_case({"set": {**base, **sets}, "files": files}, folder), ())


def test_its_first_request_is_shown(tmp_path: Path) -> None:
    findings = found(tmp_path, how="tools")
    assert not findings.problems
    (one,) = findings.environments
    assert (one.mode, one.reply) == ("program", "chat, 1 tools; exit code 0")
    assert one.prompt_tokens is not None
    assert one.prompt_tokens > 30


@pytest.mark.parametrize(
    ("options", "key", "message"),
    [
        ({"program": "no-such-program"}, "environment.agent", "no-such-program cannot be run"),
        ({"how": "nothing"}, "environment.agent", "before it asked the model: no configuration"),
        ({"agent": {"cwd": "nowhere"}}, "environment.agent", "cannot be copied"),
        ({"max_episode_tokens": 36}, "environment.max_episode_tokens", "the agent's first request has"),
        ({"max_episode_tokens": 31, "how": "tools"}, "environment.max_episode_tokens", "the agent's first request has"),
    ],
)
def test_faults_are_said_before_the_start(tmp_path: Path, options: Any, key: str, message: str) -> None:
    problems = [problem for problem in found(tmp_path, **options).problems if problem.key == key]
    assert any(message in problem.message for problem in problems), problems


def test_a_reward_that_raises_is_a_warning(tmp_path: Path) -> None:
    """The program may have left nothing to grade, after an answer that means nothing to it."""
    findings = found(tmp_path, agent={"reward": "score.py:score"})
    assert not findings.problems
    assert any("ZeroDivisionError" in warning.message for warning in findings.warnings)
