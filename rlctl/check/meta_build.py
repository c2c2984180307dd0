"""`rlctl check-config --probe`: what every role would build, asked in its own interpreter, before a run is started.

Roles that share an interpreter share a process, for importing torch takes longer than everything after it. At the
level `run` each has a process of its own, one after another, as it would run: their times and peaks are their own.
"""

from __future__ import annotations

import json
import secrets
import signal
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlctl.models.expected import Expected, models_expected
from rlctl.models.paths import model_folder
from rlctl.preflight.role_choices import role_attention
from rlctl.processes.launch import base_environment, python_path
from rlctl.processes.placement import Plan, RolePlan
from rlctl.processes.role_configs import build_bodies
from specs.schema.engines.engine_table import engine_of
from specs.schema.rank_groups import devices_of_a_process
from specs.schema.recipes import RowsSpec, sampling_of
from specs.schema.role_section import ModelRole
from specs.schema.roles import DATA, ROLES, RoleName
from specs.schema.spec import Spec
from specs.wire.meta_request import Level, Probed, ProbeRequest, RoleRequest, UpdateShape
from workers.watchdog import kill_marked, signal_group

MARK = "RLCTL_CHECK"  # in the environment of what a check starts, and of all that this starts in turn
MOST_ANSWERS = 4  # that a rollout writes in its trial update
_TAIL_LINES = 5
_KILL_S = 5.0
# Variables that differ between roles without a meaning for what they build.
_OF_THE_PLACE = (
    *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "CUDA_VISIBLE_DEVICES"),
    *("GLOO_SOCKET_IFNAME", "LOCAL_WORLD_SIZE", "RLCTL_DEVICES", "DS_ACCELERATOR"),
)


@dataclass(frozen=True)
class ProbeFindings:
    """Hold the request to each role, its reply, and what its model must be."""

    level: Level
    requests: Mapping[RoleName, RoleRequest]
    found: Mapping[RoleName, Probed]
    asked: Mapping[RoleName, Expected]


def probe(spec: Spec, spec_dir: Path, plan: Plan, level: Level) -> ProbeFindings:
    """Ask every role; what goes wrong with one is in its `error`. Leaves no process and no file behind."""
    requests = requests_of(spec, spec_dir, level)
    # A hub id's small files may be in a folder that is gone afterwards: it stands in for the id, and is named by it.
    bodies = {role: asked.body for role, asked in requests.items()}
    paths = {role: body["model"]["path"] if "model" in body else body["model_path"] for role, body in bodies.items()}
    folders = {path: model_folder(path, spec_dir) for path in paths.values()}
    ids = {str(folder): path for path, folder in folders.items()}
    found = {role: _not_here(role, path) for role, path in paths.items() if folders[path] is None}
    placed = {role: _placed(requests[role], folders[path]) for role, path in paths.items()}
    shares = list(_shares([plan.role(role) for role in requests if role not in found], level))
    timeout_s = spec.run.start_timeout_s + (spec.run.verb_timeout_s if level == "run" else 0)
    for at_a_time in [[share] for share in shares] if level == "run" else [shares]:
        with ExitStack() as stack:
            children = []
            for roles in at_a_time:
                devices = _devices(spec, plan, roles)
                children.append(_start(plan.role(roles[0]), {role: placed[role] for role in roles}, devices, stack))
            for roles, child in zip(at_a_time, children, strict=True):
                found |= _answers(child, roles, timeout_s)
    replies = {role: _named(found[role], ids) for role in requests}
    return ProbeFindings(level, requests, replies, models_expected(spec, spec_dir, role_attention))


def _placed(asked: RoleRequest, folder: Path | None) -> RoleRequest:
    """Return the request with the folder in place of a hub id."""
    model = asked.body.get("model")
    own = {"model": {**model, "path": str(folder)}} if model else {"model_path": str(folder)}
    return asked.model_copy(update={"body": {**asked.body, **own}})


def _named(found: Probed, ids: Mapping[str, str]) -> Probed:
    """Return it with the hub id again where the folder stood in for it."""
    if found.model is None or found.model.path not in ids:
        return found
    return found.model_copy(update={"model": found.model.model_copy(update={"path": ids[found.model.path]})})


def _not_here(role: RoleName, path: str) -> Probed:
    error = (
        f"the probe needs the model's config.json, and neither the Hugging Face cache nor the hub gives that of {path}"
    )
    hint = f'download it first: hf download {path} --include "*.json", which leaves the weights where they are'
    return Probed(role=role, error=error, hint=hint, not_here=True)


def _shares(roles: Sequence[RolePlan], level: Level) -> Iterator[Sequence[RoleName]]:
    """Group roles by process."""
    shared: dict[tuple[str, ...], list[RoleName]] = {}
    for role in roles:
        own = sorted(f"{name}={value}" for name, value in role.env.items() if name not in _OF_THE_PLACE)
        shared.setdefault((role.role,) if level == "run" else (role.python, *own), []).append(role.role)
    yield from shared.values()


# ── requests ──────────────────────────────────────────────────────────────────────────────────────


def requests_of(spec: Spec, spec_dir: Path, level: Level) -> dict[RoleName, RoleRequest]:
    """Return the request to each role, in the order of the replies; roles without a model have no trial update."""
    bodies = build_bodies(spec, spec_dir, spec_dir / "no-run")  # nothing of a run directory is read or made
    if level == "meta":
        ranks = {role: spec.role(role).processes if ROLES[role].together else 1 for role in spec.roles}
        data = {role: bodies[DATA] if ROLES[role].holds == "scorer" else {} for role in spec.roles}
        return {role: RoleRequest(body=body, ranks=ranks[role], data=data[role]) for role, body in bodies.items()}
    return {role: _one_update(spec, role, body) for role, body in bodies.items() if ROLES[role].holds_model}


def _one_update(spec: Spec, role: RoleName, body: dict[str, Any]) -> RoleRequest:
    """Return the request for an update of full sequences: as many as fill a micro-batch, or a few completions."""
    section = spec.role(role)
    engine = engine_of(section)
    assert engine is not None, f"{role} has no engine"
    body = {**body, "model": {**body["model"], "from_scratch": True}, "engine": engine.alone().model_dump(mode="json")}
    sequences = MOST_ANSWERS
    if isinstance(section, ModelRole):  # one process computes what a group of the run shares
        body |= {"micro_batch_tokens": section.row_tokens, "sequence_parallel": 1}
        sequences = max(1, section.row_tokens // spec.max_sequence_tokens)
    prompt, longest = spec.max_prompt_tokens, spec.max_sequence_tokens
    if ROLES[role].samples:
        longest = spec.longest_tokens(role)
    elif isinstance(spec, RowsSpec):
        prompt = 1  # of a row, all but one token may learn
    if isinstance(spec, RowsSpec) and spec.objective.unit == "pair" and isinstance(section, ModelRole):
        longest = min(longest, section.row_tokens // 2)
        sequences = section.row_tokens // longest // 2 * 2
    sequences = min(sequences, spec.samples_per_step)
    shape = UpdateShape(sequences=sequences, prompt_tokens=prompt, response_tokens=longest - prompt)
    sampling: dict[str, Any] = {}
    if (samples := sampling_of(spec)) is not None:
        sampling = {key: getattr(samples.rollout, key) for key in ("temperature", "top_p", "top_k")}
    loss = spec.losses.get(role, spec.losses[spec.lead])
    return RoleRequest(body=body, shape=shape, loss=loss.model_dump(mode="json"), sampling=sampling)


# ── processes ─────────────────────────────────────────────────────────────────────────────────────


def _start(
    plan: RolePlan, requests: Mapping[RoleName, RoleRequest], devices: str, stack: ExitStack
) -> subprocess.Popen[str] | OSError:
    """Start a process that answers for the roles; with `stack` it ends, and all that it started."""
    mark = secrets.token_hex(8)
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rlctl-probe-")))
    environment = base_environment() | plan.env | {"PYTHONPATH": python_path(plan, folder), MARK: mark}
    environment |= {"PYTHONDONTWRITEBYTECODE": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": devices}
    request = folder / "request.json"
    request.write_text(ProbeRequest(roles=dict(requests)).model_dump_json())
    try:
        process = subprocess.Popen(
            (plan.python, "-m", "workers.offline.build_on_meta"),
            env=environment,
            stdin=stack.enter_context(request.open()),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        return error

    def end() -> None:
        signal_group(process.pid, signal.SIGKILL)
        kill_marked(f"{MARK}={mark}", _KILL_S)
        process.communicate()

    stack.callback(end)
    return process


def _answers(
    process: subprocess.Popen[str] | OSError, roles: Sequence[RoleName], timeout_s: float
) -> dict[str, Probed]:
    """Return the replies by role. A role that the process did not reach has an `error`."""
    if isinstance(process, OSError):
        why = f"its interpreter cannot be started: {process.strerror}"
        return {role: Probed(role=role, error=why, not_here=True) for role in roles}
    try:
        output, errors = process.communicate(timeout=timeout_s)
        cause = f"its process ended with exit code {process.returncode} before it answered"
        if process.returncode == -signal.SIGKILL:
            cause = "its process was ended by SIGKILL, which often means that memory ran out"
    except subprocess.TimeoutExpired as late:
        output, errors = _text(late.stdout), _text(late.stderr)
        cause = f"its probe took longer than {timeout_s:g} s (run.start_timeout_s)"
    tail = [line for line in errors.splitlines() if line.strip()][-_TAIL_LINES:]
    unanswered = {role: Probed(role=role, error="\n  ".join([cause, *tail])) for role in roles}
    answered = [Probed.model_validate(json.loads(line)) for line in output.splitlines() if line.startswith("{")]
    return unanswered | {reply.role: reply for reply in answered}


def _devices(spec: Spec, plan: Plan, roles: Iterable[RoleName]) -> str:
    """Return the GPUs that one process of these roles would see."""
    visible: dict[str, None] = {}
    for role in roles:
        devices = plan.role(role).env.get("CUDA_VISIBLE_DEVICES", "").split(",")
        visible |= dict.fromkeys(filter(None, devices[: devices_of_a_process(spec.role(role))]))
    return ",".join(visible)


def _text(output: str | bytes | None) -> str:
    return output.decode(errors="replace") if isinstance(output, bytes) else output or ""
