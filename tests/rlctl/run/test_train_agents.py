"""A run whose agent is a program that knows no more than an address: what is learned from is what was sampled."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path

import agent_clients
import psutil
import pytest
from agent_clients import CLIENTS, HARNESSES
from running import preset, settings, trained, warm_rlctl

from rlctl.models.paths import BUILTIN_FOLDER

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
    assert all(any("tokens" in piece for piece in one["pieces"]) for one in samples), "shown is what is learned from"
    assert "not learned from" in (run / "report.html").read_text()
    left = [one.info["cmdline"] or [] for one in psutil.process_iter(["cmdline"])]
    assert not [words for words in left if str(tmp_path / "agent.py") in words]


# What sends few tokens or many is all the same to a model of one layer.
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 65536,
}
LONGEST = 60_000
MANY_CLIENTS = """
schema = 1
run = {{ name = "clients", steps = 1, seed = 0 }}
model = {{ path = "model", from_scratch = true }}
data = {{ train = "rows.jsonl", prompts_per_step = {prompts}, max_prompt_tokens = 96, max_response_tokens = 16 }}
algorithm = {{ kind = "reinforce++", group_size = 1 }}
actor = {{ micro_batch_tokens = {longest}, optimizer = {{ lr = 1e-3 }} }}
rollout = {{ engine = {{ kind = "torch", max_sequences = 16 }} }}
[environment]
agent = {{ command = ["python", "{program}", "{{client}}", "{{prompt}}"], reward = "reward.py:of_members" }}
max_turns = 6
max_episode_tokens = {longest}
"""
BY_CLIENT = """
def of_members(client, messages):
    with open("{folder}/seen", "a") as seen:
        print(client, messages[-1]["role"], file=seen)
    return float(len(messages[-1]["content"] or "") % 7)
"""


def test_clients_that_people_have_are_trained(tmp_path: Path) -> None:
    """Libraries and programs as they are, each on a prompt of its own, by a model that writes noise: each has asked and
    read what it got, and what is learned of it has the log-probs that it was sampled with."""
    there = [name for name in ("openai", "anthropic", *HARNESSES) if not CLIENTS[name].missing()]
    rows = [json.dumps({"prompt": "What is 6*7?", "answer": "", "client": name}) for name in there]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    (tmp_path / "reward.py").write_text(BY_CLIENT.format(folder=tmp_path))
    shutil.copytree(BUILTIN_FOLDER / "tiny-chat", tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps({**config, **SMALL}))
    spec, run = tmp_path / "spec.toml", tmp_path / "run"
    spec.write_text(MANY_CLIENTS.format(prompts=len(rows), program=agent_clients.__file__, longest=LONGEST))
    done = warm_rlctl("train", spec, "--run-dir", run)
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = trained(run)
    assert line["episode/lost"] == 0
    assert 0 <= line["rollout/logprob_gap_max"] < 1e-4
    assert line["actor/grad_norm"] > 0
    assert Counter((tmp_path / "seen").read_text().splitlines()) == {f"{name} assistant": 1 for name in there}
