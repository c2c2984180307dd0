"""The start of a run: every role launched, its model built and compared with what was asked, the driver made."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlctl import as_built
from rlctl.build import build_bodies
from rlctl.driver import Driver
from rlctl.gap_budget import GapBudget
from rlctl.group import Group
from rlctl.groups import Groups
from rlctl.plan import Plan
from rlctl.progress import Progress
from rlctl.residency import SLEEP_LEVEL, Residency, sleep_level
from rlctl.revive import SteadySync
from rlctl.roads import Road, prepare
from rlctl.run_dir import RunDir
from rlctl.sync import WeightSync
from specs.as_built import AsBuilt
from specs.messages import Verb
from specs.model_asked import models_asked
from specs.schema import RoleName, Spec

Bodies = Mapping[RoleName, dict[str, Any]]  # what each role's `build` is told
Reports = dict[RoleName, list[AsBuilt]]  # what each rank says it has built


def start(
    spec: Spec, spec_dir: Path, run: RunDir, plan: Plan, road: Road, groups: Groups, progress: Progress
) -> Driver:
    """Start every process, build every model, and refuse to go on if one is not what was asked. `road`: that of the
    weights. Raises RoleFailure and AsBuiltError."""
    groups.start(spec.roles)
    bodies = build_bodies(spec, spec_dir, run.path)
    reports = _build(spec, plan, groups, bodies)
    as_built.check(spec, reports, models_asked(spec, spec_dir))
    as_built.check_same_start(reports, run.as_built)
    as_built.write(reports, run.as_built, road)
    progress.table(as_built.table(spec, reports))
    progress.message(_data_line(groups["reward"].call(Verb.OPEN_DATA, {})[0].body))
    prepare(road, run.path)
    progress.message(f"weight road: {road}")
    trainers = [groups[role] for role in ("actor", "ref") if role in spec.roles]
    residency = Residency(plan.colocated, trainers, groups["rollout"], sleep_level(spec))
    sync = SteadySync(
        groups,
        residency,
        _weights(spec, groups, residency, road, reports),
        body=bodies["rollout"],
        built=reports["rollout"],
        limit=spec.rollout.max_restarts,
        start_timeout_s=spec.run.start_timeout_s,
        warn=progress.warning,
    )
    roles: dict[str, Group] = {role: groups[role] for role in spec.roles}
    return Driver(spec, roles, residency, sync, _gap_budget(spec, run, bodies, progress), progress)


def _build(spec: Spec, plan: Plan, groups: Groups, bodies: Bodies) -> Reports:
    """Build all roles at once; on shared devices the rollout builds first and sleeps before the trainers come."""
    waves: list[list[RoleName]] = [list(spec.roles)]
    if plan.colocated:
        waves = [["reward", "rollout"], [role for role in spec.roles if role in ("actor", "ref")]]
    reports: Reports = {}
    for wave in waves:
        timeout_s = spec.run.start_timeout_s
        calls = {role: groups[role].post(Verb.BUILD, bodies[role], timeout_s=timeout_s) for role in wave}
        for role, call in calls.items():
            reports[role] = [AsBuilt.model_validate(answer.body) for answer in call.result()]
        if plan.colocated and "rollout" in wave:
            groups["rollout"].call(Verb.SLEEP, {"level": SLEEP_LEVEL})
    return reports


def _weights(spec: Spec, groups: Groups, residency: Residency, road: Road, reports: Reports) -> WeightSync:
    model = reports["actor"][0].model
    assert model is not None
    return WeightSync(
        groups["actor"],
        groups["rollout"],
        residency,
        road=road,
        dtype=spec.rollout_dtype,
        bucket_bytes=int(spec.sync.bucket_MiB * 2**20),
        temperature=spec.rollout.temperature,
        max_gap=spec.probe_gap,
        vocab=model.vocab_size,
    )


def _gap_budget(spec: Spec, run: RunDir, bodies: Bodies, progress: Progress) -> GapBudget:
    sampling = {key: getattr(spec.rollout, key) for key in ("temperature", "top_p", "top_k")}
    about = {**sampling, "rollout_dtype": spec.rollout_dtype, "actor": bodies["actor"]}
    return GapBudget(*spec.logprob_gaps, run.path, about, progress.warning)


def _data_line(data: Mapping[str, Any]) -> str:
    words = {"dropped_overlong": "too long", "dropped_bad": "bad"}
    dropped = [f"{data[key]} {word}" for key, word in words.items() if data[key]]
    return (
        f"data: {data['rows']:,} prompts"
        + (f", {data['eval_rows']:,} held out" if data.get("eval_rows") else "")
        + (f"; dropped: {', '.join(dropped)}" if dropped else "")
    )
