"""Start a run: launch every role, build its model, compare it with the spec, and make the driver."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from typing import Any

from rlctl.loop.driver import Driver, UpdateWindow
from rlctl.loop.logprob_gap import GapLimits, gap_limits
from rlctl.loop.recovery import FailureWarnings, RankRecovery, SteadyGrading, SteadySync, TimeSpent, begin_with_fewer
from rlctl.loop.residency import SLEEP_LEVEL, Residency, sleep_level
from rlctl.loop.sync import PROBE_TOKENS, WeightSync, probe_tolerance
from rlctl.loop.weight_transport import Transport, plan_transport, prepare
from rlctl.models import as_built_check
from rlctl.preflight.data_files import check_rows_fit
from rlctl.preflight.expected import models_expected
from rlctl.processes.calls import answers_of
from rlctl.processes.group import Group
from rlctl.processes.groups import Groups
from rlctl.processes.placement import Plan
from rlctl.processes.rank_states import RestartPolicy
from rlctl.processes.role_configs import build_bodies
from rlctl.recipes.rl import Rl
from rlctl.recipes.rows_recipe import RowsRecipe
from rlctl.run.lineage import Fork
from rlctl.run.run_dir import RunDir
from rlctl.show.progress import Progress
from specs.schema.recipes import RlSpec, RowsSpec, SamplingSpec, sampling_of
from specs.schema.role_section import Restartable
from specs.schema.roles import ACTOR, DATA, REWARD, ROLES, ROLLOUT, RoleName, build_waves
from specs.schema.spec import Spec
from specs.wire.as_built import AsBuilt
from specs.wire.bodies import DataOpened
from specs.wire.messages import CONCURRENT_VERBS, SYNC_VERBS, Verb

Bodies = Mapping[RoleName, dict[str, Any]]  # the request of each role's `build`
Reports = dict[RoleName, list[AsBuilt]]  # what each rank says it has built


def start(run: RunDir, plan: Plan, groups: Groups, window: UpdateWindow, progress: Progress, today: str = "") -> Driver:
    """Start every process, build every model, and refuse to continue if one is not what the spec says. `today`: as chat
    templates write it; empty: the day it is. Raises RoleFailure and AsBuiltError."""
    spec, spec_dir = run.spec, run.spec_dir
    sampling = sampling_of(spec)
    transport = plan_transport(sampling, spec_dir, run.path, plan) if sampling is not None else None
    way = transport.describe() if transport else {}
    policies = {
        role: RestartPolicy(role, table.max_restarts, FailureWarnings(groups, progress.warning), table.min_processes)
        for role in spec.roles
        if isinstance(table := spec.role(role), Restartable)
    }
    for policy in policies.values():
        begin_with_fewer(groups, policy)
    groups.start()
    bodies = build_bodies(spec, spec_dir, run.path, today)
    holders = [groups[role] for role in spec.roles if ROLES[role].holds_model]
    devices = {role: spec.gpus(role) for role in spec.roles}
    level = sleep_level(sampling) if sampling is not None else SLEEP_LEVEL
    residency = Residency(plan.colocated, holders, level, devices)
    reports = _build(spec, groups, residency, bodies, progress)
    expected = models_expected(spec, spec_dir)
    as_built_check.check(spec, reports, expected)
    as_built_check.check_same_start(reports, run.starting_weights)
    as_built_check.write(reports, run.as_built, way)
    progress.message(as_built_check.table(spec, reports))
    progress.phase("build", DATA)
    opened = DataOpened.of(groups[DATA].call(Verb.OPEN_DATA)[0])
    progress.message(_data_line(opened, spec))
    check_rows_fit(opened.largest_row, spec)

    def admit(late: AsBuilt) -> None:
        now = {**reports, late.role: [*(one for one in reports[late.role] if one.rank != late.rank), late]}
        as_built_check.check(spec, now, expected)
        reports[late.role] = now[late.role]
        as_built_check.write(reports, run.as_built, way)

    def recovery(role: RoleName) -> RankRecovery:
        recovery = RankRecovery(
            groups,
            policies[role],
            body=bodies[role],
            built=reports[role],
            start_timeout_s=spec.run.start_timeout_s,
            notify=progress.message,
            admit=admit,
        )
        recovery.begin()
        return recovery

    roles: dict[str, Group] = {role: groups[role] for role in spec.roles}
    built = {role: ranks[0].model for role, ranks in reports.items() if ranks[0].model is not None}
    sync: SteadySync | None = None
    grading: SteadyGrading | None = None
    if sampling is not None and transport is not None:
        prepare(transport, run.path)
        progress.message(f"weight transport: {transport}")
        if sampling.rollout.in_flight:
            groups[ROLLOUT].concurrent = CONCURRENT_VERBS | SYNC_VERBS
        weights, spent = _weights(sampling, groups, residency, transport, reports), TimeSpent()
        sync = SteadySync(residency, weights, recovery(ROLLOUT), spent)
        grading = SteadyGrading(recovery(REWARD), spent)
    driver: Driver
    if isinstance(spec, RowsSpec):
        draws = spec.run.steps * spec.data.rows_per_step
        few = draws if draws < opened.rows and Fork.of(run.path) is None else None  # a fork begins elsewhere
        driver = RowsRecipe(spec, roles, residency, window, progress, built, run.ref_logprobs, few, sync, grading)
    else:
        assert isinstance(spec, RlSpec)
        assert sync is not None
        limits = _gap_limits(spec, run, bodies, progress)
        driver = Rl(spec, roles, residency, sync, limits, window, progress, spec_dir, built, grading)
    driver.prepare()
    gc.collect()
    gc.freeze()  # what a run needs to its end: every full collection would look at all of it again
    return driver


def _build(spec: Spec, groups: Groups, residency: Residency, bodies: Bodies, progress: Progress) -> Reports:
    """Build all roles at once; on shared devices wave by wave, each leaving the device before the next one comes."""
    waves = build_waves(spec.roles) if residency.shared else [list(spec.roles)]
    reports: Reports = {}
    for wave in waves:
        timeout_s = spec.run.start_timeout_s
        calls = {role: groups[role].post(Verb.BUILD, bodies[role], timeout_s=timeout_s) for role in wave}
        for role, call in calls.items():
            waited_for = [name for name, other in calls.items() if len(other.answers) < len(other.ranks)]
            progress.phase("build", ", ".join(waited_for))
            reports[role] = [AsBuilt.model_validate(answer.body) for answer in answers_of(call)]
        residency.leave_after_build([groups[role] for role in wave])
    return reports


def _weights(
    spec: SamplingSpec, groups: Groups, residency: Residency, transport: Transport, reports: Reports
) -> WeightSync:
    model = reports[ACTOR][0].model
    assert model is not None
    return WeightSync(
        groups[ACTOR],
        groups[ROLLOUT],
        residency,
        transport=transport,
        dtype=spec.dtype(ROLLOUT),
        bucket_bytes=int(spec.sync.bucket_MiB * 2**20),
        temperature=spec.rollout.temperature,
        tolerance=probe_tolerance(spec),
        vocab=model.vocab_size,
        probe_tokens=min(PROBE_TOKENS, spec.max_sequence_tokens),
    )


def _gap_limits(spec: RlSpec, run: RunDir, bodies: Bodies, progress: Progress) -> GapLimits:
    sampling = {key: getattr(spec.rollout, key) for key in ("temperature", "top_p", "top_k")}
    about = {**sampling, "rollout_dtype": spec.dtype(ROLLOUT), ACTOR: bodies[ACTOR]}
    return GapLimits(*gap_limits(spec), run.path, about, progress.warning)


def _data_line(data: DataOpened, spec: Spec) -> str:
    """Write `data: 4,000 prompts, 128 (heldout) and 30 (aime) for evaluation; dropped: 3 too long`."""
    counts = {"too long": data.dropped_overlong, "bad": data.dropped_bad}
    dropped = ", ".join(f"{count} {why}" for why, count in counts.items() if count)
    summary = f"; {data.summary}" if data.summary else ""
    summary += f"; {data.truncated} truncated" if data.truncated else ""
    several = len(data.eval_rows) > 1
    held = " and ".join(f"{count:,}" + f" ({name})" * several for name, count in data.eval_rows.items())
    kept = "for evaluation" if any(evaluation.data for evaluation in spec.evaluations) else "held out"
    what = "prompts" if isinstance(spec, RlSpec) else "rows"
    return (
        f"data: {data.rows:,} {what}"
        + f", {held} {kept}" * bool(held)
        + f"; dropped: {dropped}" * bool(dropped)
        + summary
    )
