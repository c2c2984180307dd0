"""A run whose agent is a program that knows no more than an address: what is learned from is what was sampled."""

from __future__ import annotations

import json
from pathlib import Path

import psutil
import pytest
from running import preset, settings, trained, warm_rlctl

pytestmark = pytest.mark.slow

AGENT = """
import json, os, sys, urllib.request

def ask(*messages):
    body = {"messages": messages, "max_tokens": 12}
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    return json.loads(urllib.request.urlopen(request).read())["choices"][0]["message"]

ask({"role": "user", "content": "A title."})
asked = {"role": "user", "content": sys.argv[1]}
first = ask(asked)
second = ask(asked, first, {"role": "user", "content": "And?"})
open("answer", "w").write(str(first["content"]) + str(second["content"]))
"""
REWARD = """
def length(cwd, answer):
    return len(open(cwd + "/answer").read()) / 24 + 0 * len(answer)
"""
ENVIRONMENT = (
    'environment={agent={command=["python", "{spec_dir}/agent.py", "{prompt}"], reward="reward.py:length"}, '
    "max_turns=4, max_episode_tokens=160}"
)


def test_a_program_is_trained(tmp_path: Path) -> None:
    """Two turns in one sample and a title beside them, which is left out; the trainer gives each token the log-prob
    that the sampler gave it; nothing is left behind."""
    spec, run = preset("agent-cpu", tmp_path), tmp_path / "run"
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "reward.py").write_text(REWARD)
    small = settings("run.steps=2", "data.prompts_per_step=4", "algorithm.group_size=2", "data.max_response_tokens=16")
    model = settings("model.path=builtin:tiny-chat", "model.from_scratch=true", "eval.every=9", "eval.prompts=2")
    done = warm_rlctl("train", spec, "--run-dir", run, *small, *model, "--set", ENVIRONMENT)
    assert done.returncode == 0, done.stdout + done.stderr
    for line in trained(run):
        assert (line["episode/turns_mean"], line["episode/lost"]) == (3, 0)
        assert 0 < line["reward/mean"] < 2
        assert 0 <= line["rollout/logprob_gap_max"] < 1e-4
        assert "actor/loss" in line
    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    title, *turns = samples[-1]["requests"]
    assert [one["learned"] for one in (title, *turns)] == [False, True, True]
    assert [one["root"] for one in (title, *turns)] == [True, True, False]
    assert {one["sample"] for one in turns} == {1}
    assert "not learned from" in (run / "report.html").read_text()
    left = [one.info["cmdline"] or [] for one in psutil.process_iter(["cmdline"])]
    assert not [words for words in left if str(tmp_path / "agent.py") in words]
