"""The corpus of broken specs says what `check-config --probe` says: what only tokenizers, templates, rows and rewards
show, by the code of the probe's process, called here."""

from __future__ import annotations

from pathlib import Path

import pytest
from corpus import PROBED, Case, assert_problems, cases, write_case

from rlctl.check.meta_build import ProbeFindings, requests_of
from rlctl.check.meta_report import probe_problems
from rlctl.preflight.expected import models_expected
from specs.load.load import load_spec
from specs.schema.roles import DATA, REWARD, ROLLOUT
from workers.offline.build_on_meta import reply

pytestmark = pytest.mark.usefixtures("warm_children")

CASES = {name: case for name, case in cases() if any(kind in case for kind in PROBED)}


@pytest.mark.parametrize("name", CASES)
def test_a_probe_gives_its_message(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case: Case = CASES[name]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    spec = load_spec(write_case(case, tmp_path), case.get("override", []))
    asked = requests_of(spec, tmp_path)
    replies = {role: reply(role, asked[role]) for role in (DATA, REWARD, ROLLOUT)}
    probe = ProbeFindings(replies, models_expected(spec, tmp_path))
    problems, warnings = probe_problems(spec, probe)
    assert_problems(case.get("probe", {}), problems)
    assert_problems(case.get("probe_warnings", {}), warnings)
