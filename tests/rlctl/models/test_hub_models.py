"""`check-config --probe` and `plan` of a model that only the hub has: real processes, and a server like the hub."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hub_server import CONFIG, serve
from running import preset

from rlctl.cli import main

PARAMETERS = 299_904


@pytest.mark.usefixtures("warm_children")
def test_a_model_that_only_the_hub_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server, hub = serve()
    (tmp_path / "temporary").mkdir()
    for name, value in {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "no_proxy": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("rlctl.models.hub.TOTAL_S", 60.0)  # this machine may be busy
    monkeypatch.setattr("rlctl.models.hub_http.CONNECT_S", 60.0)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    spec = preset("quickstart", tmp_path)
    sets = ("--set", "model.path=org/good", "--set", "model.from_scratch=false")
    capsys.readouterr()
    assert main(["plan", str(spec), "--json", *sets]) == 0
    planned = json.loads(capsys.readouterr().out)
    weights = next(part for part in planned["roles"]["actor"]["parts"] if part["name"] == "weights")
    assert weights["bytes"] == pytest.approx(4 * PARAMETERS, rel=0.01)

    assert main(["check-config", str(spec), "--json", "--probe", *sets]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["problems"], found["warnings"]) == ([], [])
    for role in ("actor", "rollout"):
        about = found["roles"][role]
        assert about["got"]["path"] == about["asked"]["path"] == about["model"] == "org/good"
        assert (about["parameters"], about["hidden_size"]) == (PARAMETERS, CONFIG["hidden_size"])
    assert found["roles"]["reward"]["tokenizer_tokens"] == 15
    server.shutdown()
    server.server_close()
    assert list((tmp_path / "temporary").iterdir()) == [], "what was brought for the probe is gone"
    assert not (tmp_path / "home").exists(), "the cache is as it was"
