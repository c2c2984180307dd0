"""`rlctl check-config --probe`: what every role would build, asked in its own interpreter, before a run is started.

Roles that share an interpreter share a process, for importing torch takes longer than everything after it.
"""

from __future__ import annotations

import json
import secrets
import signal
import subprocess
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from rlctl.models.as_built_check import Expected
from rlctl.models.paths import model_folder
from rlctl.preflight.expected import models_expected
from rlctl.processes.launch import base_environment
from rlctl.processes.placement import Plan, RolePlan
from rlctl.processes.role_configs import build_bodies
from specs.packages import path_for
from specs.schema.rank_groups import devices_of_a_process
from specs.schema.roles import ROLES, RoleName
from specs.schema.spec import Spec
from specs.wire.meta_request import Probed, ProbeRequest, RoleRequest
from workers.watchdog import kill_marked, signal_group

MARK = "RLCTL_CHECK"  # in the environment of what a check starts, and of all that this starts in turn
_TAIL_LINES = 5
_KILL_S = 5.0
# Variables that differ between roles without a meaning for what they build.
_OF_THE_PLACE = (
    *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "CUDA_VISIBLE_DEVICES"),
    *("GLOO_SOCKET_IFNAME", "LOCAL_WORLD_SIZE", "RLCTL_DEVICES", "DS_ACCELERATOR"),
)


@dataclass(frozen=True)
class ProbeFindings:
    """Hold each role's reply, and what its model must be."""

    found: Mapping[RoleName, Probed]
    asked: Mapping[RoleName, Expected]


def probe(spec: Spec, spec_dir: Path, plan: Plan) -> ProbeFindings:
    """Ask every role; what goes wrong with one is in its `error`. Leaves no process and no file behind."""
    requests = requests_of(spec, spec_dir)
    # A hub id's small files may be in a folder that is gone afterwards: it stands in for the id, and is named by it.
    bodies = {role: asked.body for role, asked in requests.items()}
    paths = {role: body["model"]["path"] if "model" in body else body["model_path"] for role, body in bodies.items()}
    folders = {path: model_folder(path, spec_dir) for path in paths.values()}
    ids = {str(folder): path for path, folder in folders.items()}
    found = {role: _not_here(role, path) for role, path in paths.items() if folders[path] is None}
    placed = {role: _placed(requests[role], folders[path]) for role, path in paths.items()}
    shares = _shares([plan.role(role) for role in requests if role not in found])
    with ExitStack() as stack:
        children = []
        for roles in shares:
            devices = _devices(spec, plan, roles)
            children.append(_start(plan.role(roles[0]), {role: placed[role] for role in roles}, devices, stack))
        for roles, child in zip(shares, children, strict=True):
            found |= _answers(child, roles, spec.run.start_timeout_s)
    replies = {role: _named(found[role], ids) for role in requests}
    return ProbeFindings(replies, models_expected(spec, spec_dir))


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


def _shares(roles: Iterable[RolePlan]) -> list[list[RoleName]]:
    """Group roles by process."""
    shared: dict[tuple[str, ...], list[RoleName]] = {}
    for role in roles:
        own = sorted(f"{name}={value}" for name, value in role.env.items() if name not in _OF_THE_PLACE)
        shared.setdefault((role.python, *own), []).append(role.role)
    return list(shared.values())


# ── requests ──────────────────────────────────────────────────────────────────────────────────────


def requests_of(spec: Spec, spec_dir: Path) -> dict[RoleName, RoleRequest]:
    """Return the request to each role, in the order of the replies."""
    bodies = build_bodies(spec, spec_dir, spec_dir / "no-run")  # nothing of a run directory is read or made
    ranks = {role: spec.role(role).processes if ROLES[role].together else 1 for role in spec.roles}
    return {role: RoleRequest(body=body, ranks=ranks[role]) for role, body in bodies.items()}


# ── processes ─────────────────────────────────────────────────────────────────────────────────────


def _start(
    plan: RolePlan, requests: Mapping[RoleName, RoleRequest], devices: str, stack: ExitStack
) -> subprocess.Popen[bytes] | OSError:
    """Start a process that answers for the roles; with `stack` it ends, and all that it started."""
    mark = secrets.token_hex(8)
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rlctl-probe-")))
    path = path_for(plan.python, plan.env["PYTHONPATH"], folder)
    environment = base_environment() | plan.env | {"PYTHONPATH": path, MARK: mark}
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
    process: subprocess.Popen[bytes] | OSError, roles: Sequence[RoleName], timeout_s: float
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
        output, errors = late.stdout or b"", late.stderr or b""
        cause = f"its probe took longer than {timeout_s:g} s (run.start_timeout_s)"
    tail = [line for line in errors.decode(errors="replace").splitlines() if line.strip()][-_TAIL_LINES:]
    unanswered = {role: Probed(role=role, error="\n  ".join([cause, *tail])) for role in roles}
    answered = [Probed.model_validate(json.loads(line)) for line in output.splitlines() if line.startswith(b"{")]
    return unanswered | {reply.role: reply for reply in answered}


def _devices(spec: Spec, plan: Plan, roles: Iterable[RoleName]) -> str:
    """Return the GPUs that one process of these roles would see."""
    visible: dict[str, None] = {}
    for role in roles:
        devices = plan.role(role).env.get("CUDA_VISIBLE_DEVICES", "").split(",")
        visible |= dict.fromkeys(filter(None, devices[: devices_of_a_process(spec.role(role))]))
    return ",".join(visible)
