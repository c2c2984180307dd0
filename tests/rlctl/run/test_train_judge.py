"""A run whose completions a judge grades, over HTTP, beside a term of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from judge_server import Asked, JudgeServer, judge_server, says, status
from running import finish, preset, settings, trained

KEY = "sk-of-this-run"


def by_length(handler: Any, asked: Asked) -> None:
    """A tenth for each character; those with a 3 in them are refused."""
    if asked.method == "GET":
        return status(200)(handler, asked)
    text = asked.text.partition(": ")[2]
    (status(400, KEY.encode()) if "3" in text else says(f"Score: {len(text) / 10}"))(handler, asked)


def terms(server: JudgeServer) -> str:
    judge = f'{{kind="judge", base_url="{server.base_url}", model="m", prompt="rate: {{completion}}", weight=2.0, '
    judge += 'min_score=0, max_score=1, score_pattern="Score: (.+)", key_env="JUDGE_KEY", prompt_price=1.0}'
    return f'reward.terms=[{{kind="regex", pattern="7"}}, {judge}]'


def run(folder: Path, server: JudgeServer, steps: int, *more: str) -> list[dict[str, Any]]:
    spec = preset("fake", folder)
    sets = settings("algorithm.dynamic_sampling=true", terms(server), f"run.steps={steps}", "checkpoint.every=1")
    done = finish("train", spec, "--run-dir", folder / "run", *sets, *more, JUDGE_KEY=KEY)
    assert KEY not in done.stdout + done.stderr
    return trained(folder / "run")


def test_a_judge_beside_another_term(tmp_path: Path) -> None:
    with judge_server(always=by_length) as server:
        lines = run(tmp_path, server, 2, "--set", 'eval={every=1, prompts=2, name="mine"}')
        asked = len(server.asked)
        assert {request.headers["Authorization"] for request in server.asked} == {f"Bearer {KEY}"}
        lines = run(tmp_path, server, 3, "--resume", "--set", 'eval={every=1, prompts=2, name="mine"}')
        texts = [request.text for request in server.asked if request.content and "3" not in request.text]
        assert len(server.asked) > asked
        assert len(texts) == len(set(texts)), "what was answered is not asked again, in a resumed run either"
    samples = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    assert any(sample["scored"] for sample in samples)
    for sample in samples:
        text, (has_7, judged) = sample["completion"], sample["terms"]
        assert sample["scored"] == ("3" not in text)
        if sample["scored"]:
            assert judged == pytest.approx(len(text) / 10)
            assert has_7 == float("7" in text)
        assert sample["reward"] == pytest.approx(has_7 + 2 * judged)
    assert any(line["rollout/refills"] for line in lines), "completions of refills are judged too"
    for line in lines:
        assert line["reward/failed_judge_errors"] > 0
        assert line["reward/judge_cost"] == pytest.approx(line["reward/judge_prompt_tokens"] / 1e6)
        assert line["reward/judge_requests"] + line["reward/judge_cached"] > 0
        assert "eval/mine/judge_requests" in line
    failures = (tmp_path / "run" / "reward_failures.jsonl").read_text()
    assert "reward.terms[1]: HTTP 400: [the key]" in failures
    for file in (tmp_path / "run").rglob("*"):
        assert not file.is_file() or KEY.encode() not in file.read_bytes(), file
