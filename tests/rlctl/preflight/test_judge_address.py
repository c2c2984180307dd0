"""Before a run: is there a key, and does anybody answer? Only the start of a run and a probe ask the network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from corpus import write_case
from judge_server import judge_server, status
from small_spec import raw_spec

from rlctl.check.check_command import check
from rlctl.preflight.judge_address import address_problems, key_problems
from specs.load.load import spec_from
from specs.schema.recipes import RlSpec

JUDGE = {"kind": "judge", "model": "m", "prompt": "{completion}", "min_score": 0, "max_score": 1}


def spec(url: str, **keys: Any) -> RlSpec:
    return spec_from(raw_spec(reward={"terms": [{"kind": "exact_match"}, {**JUDGE, "base_url": url, **keys}]}))


def test_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("A_KEY", raising=False)
    (problem,) = key_problems(spec("http://h/v1", key_env="A_KEY"))
    assert (problem.key, problem.message) == ("reward.terms.1.key_env", "the environment has no variable A_KEY")
    for value, words in ((" ", "A_KEY is empty"), ("a\nb", "what no HTTP header can"), ("clé", "no HTTP header")):
        monkeypatch.setenv("A_KEY", value)
        (problem,) = key_problems(spec("http://h/v1", key_env="A_KEY"))
        assert words in problem.message
        assert value.strip() == "" or value not in str(problem)
    monkeypatch.setenv("A_KEY", "sk-1\n")
    assert key_problems(spec("http://h/v1", key_env="A_KEY")) == key_problems(spec("http://h/v1")) == []


def test_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlctl.preflight.judge_address.TIMEOUT_S", 60.0)  # this machine may be busy
    monkeypatch.setenv("A_KEY", "sk-1")
    with judge_server() as server:
        gone = server.base_url
        for code in (200, 404, 405, 429, 500):
            server.always = status(code)
            assert address_problems(spec(server.base_url, key_env="A_KEY")) == []
        assert [(asked.method, asked.path) for asked in server.asked] == [("GET", "/v1/models")] * 5
        assert server.asked[0].headers["Authorization"] == "Bearer sk-1"
        server.always = status(401, b"who is sk-1?")
        (problem,) = address_problems(spec(server.base_url, key_env="A_KEY"))
        assert problem.key == "reward.terms.1.key_env"
        assert problem.message == "its key is refused: HTTP 401: who is [the key]?"
        assert address_problems(spec(server.base_url)) == [], "without a key, its model list alone may be closed"
    (problem,) = address_problems(spec(gone))
    assert (problem.key, problem.value) == ("reward.terms.1.base_url", f'"{gone}"')
    assert "nobody answers: the connection failed" in problem.message
    assert address_problems(spec_from(raw_spec())) == []


def test_the_network_is_asked_by_a_probe_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with judge_server() as server:
        url = server.base_url
        file = write_case({"set": {"reward.terms": [{**JUDGE, "base_url": url}]}}, tmp_path)
        assert check(file, [], as_json=True) == 0
        assert server.asked == []
    assert check(file, [], as_json=True) == 0
    capsys.readouterr()
    assert check(file, [], as_json=True, probed=True) == 2
    assert "nobody answers" in capsys.readouterr().out
