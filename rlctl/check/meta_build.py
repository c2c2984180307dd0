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
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlctl.models.hardware import has_nvidia_driver
from rlctl.models.hub import HubModel, hub_snapshot, look_up, offline
from rlctl.processes.launch import base_environment, python_path
from rlctl.processes.placement import Plan, RolePlan
from rlctl.processes.role_configs import build_bodies
from specs.schema.engines.engine_table import engine_of
from specs.schema.rank_groups import devices_of_a_process
from specs.schema.role_section import ModelRole
from specs.schema.roles import DATA, ROLES, RoleName
from specs.schema.spec import Spec
from specs.wire.meta_request import Level, Probed, ProbeRequest, RoleRequest, UpdateShape
from workers.watchdog import kill_marked, signal_group

MARK = "RLCTL_CHECK"  # in the environment of what a check starts, and of all that this starts in turn
MOST_ANSWERS = 4  # that a rollout writes in its trial update
_TAIL_LINES = 5
_KILL_S = 5.0


@dataclass(frozen=True)
class ProbeFindings:
    """Hold what was asked of each role, and what it answered."""

    level: Level
    requests: Mapping[RoleName, RoleRequest]
    found: Mapping[RoleName, Probed]


def probe(spec: Spec, spec_dir: Path, plan: Plan, level: Level) -> ProbeFindings:
    """Ask every role; what goes wrong with one is in its `error`. Leaves no process and no file behind."""
    requests = requests_of(spec, spec_dir, level)
    with ExitStack() as stack:
        made = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rlctl-probe-")))
        missing = {role: path for role, asked in requests.items() if (path := _missing(asked.body))}
        brought = bring_models(missing.values())
        found = {role: _not_here(role, path) for role, path in missing.items() if path not in brought}
        placed = {role: _placed(asked, brought) for role, asked in requests.items()}
        shares = _shares([plan.role(role) for role in requests if role not in found], level)
        children = [_Child(spec, plan, roles, placed, made) for roles in shares]
        if level == "run":
            for child in children:
                with child.started():
                    found |= child.answers(spec.run.start_timeout_s + spec.run.verb_timeout_s)
        else:
            for child in children:
                stack.enter_context(child.started())
            for child in children:
                found |= child.answers(spec.run.start_timeout_s)
    ids = {str(folder): path for path, folder in brought.items()}
    return ProbeFindings(level, requests, {role: _named(found[role], ids) for role in requests})


def _missing(body: Mapping[str, Any]) -> str:
    """Return the body's hub id where it is not in this machine's cache."""
    path = str(body["model"]["path"] if "model" in body else body["model_path"])
    if Path(path).is_absolute():
        return ""
    snapshot = hub_snapshot(path)
    return "" if snapshot is not None and (snapshot / "config.json").is_file() else path


def bring_models(hub_ids: Iterable[str]) -> dict[str, Path]:
    """Return hub id → the folder with its config and tokenizer; without those that the hub does not give."""
    found = {} if offline() else {hub_id: look_up(hub_id) for hub_id in hub_ids}
    return {hub_id: model.folder for hub_id, model in found.items() if isinstance(model, HubModel)}


def _placed(asked: RoleRequest, brought: Mapping[str, Path]) -> RoleRequest:
    """Return the request with the folder in place of a hub id."""
    body = dict(asked.body)
    if "model" in body:
        path = str(body["model"]["path"])
        body["model"] = {**body["model"], "path": str(brought.get(path, path))}
    else:
        body["model_path"] = str(brought.get(body["model_path"], body["model_path"]))
    return asked.model_copy(update={"body": body})


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


def can_be_probed(spec: Spec, role: RoleName) -> bool:
    """Return whether what goes wrong here says anything: a role for GPUs may be checked on a machine without one."""
    return not spec.role(role).devices or has_nvidia_driver()


def _shares(roles: Sequence[RolePlan], level: Level) -> Iterator[Sequence[RoleName]]:
    """Group roles by process."""
    if level == "run":
        yield from ([role.role] for role in roles)
        return
    shared: dict[tuple[str, ...], list[RoleName]] = {}
    for role in roles:
        own = sorted(f"{name}={value}" for name, value in role.env.items() if name not in _OF_THE_PLACE)
        shared.setdefault((role.python, *own), []).append(role.role)
    yield from shared.values()


# What differs between roles without a meaning for what they build.
_OF_THE_PLACE = (
    *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "CUDA_VISIBLE_DEVICES"),
    *("GLOO_SOCKET_IFNAME", "LOCAL_WORLD_SIZE", "RLCTL_DEVICES", "DS_ACCELERATOR"),
)


# ── what is asked ─────────────────────────────────────────────────────────────────────────────────


def requests_of(spec: Spec, spec_dir: Path, level: Level) -> dict[RoleName, RoleRequest]:
    """Return what is asked of each role, in the order of the answers; roles without a model have no trial update."""
    bodies = build_bodies(spec, spec_dir, spec_dir / "no-run")  # nothing of a run directory is read or made
    if level == "meta":
        ranks = {role: spec.role(role).processes if ROLES[role].together else 1 for role in spec.roles}
        data = {role: bodies[DATA] if ROLES[role].holds == "scorer" else {} for role in spec.roles}
        return {role: RoleRequest(body=body, ranks=ranks[role], data=data[role]) for role, body in bodies.items()}
    return {role: _one_update(spec, role, body) for role, body in bodies.items() if ROLES[role].holds_model}


def _one_update(spec: Spec, role: RoleName, body: dict[str, Any]) -> RoleRequest:
    body = {**body, "model": {**body["model"], "from_scratch": True}, "engine": _alone(spec, role)}
    if ROLES[role].is_trainer:  # one process computes what a group of the run shares
        body |= {"micro_batch_tokens": _row_tokens(spec, role), "sequence_parallel": 1}
    shape = UpdateShape(
        sequences=_sequences(spec, role),
        prompt_tokens=spec.data.max_prompt_tokens,
        response_tokens=spec.data.max_response_tokens,
    )
    sampling = {key: getattr(spec.rollout, key) for key in ("temperature", "top_p", "top_k")}
    loss = spec.loss.model_dump(mode="json")
    return RoleRequest(body=body, shape=shape, loss=loss, sampling=sampling)


def _alone(spec: Spec, role: RoleName) -> dict[str, Any]:
    """Return the engine's table for a group of one rank."""
    engine = engine_of(spec.role(role))
    assert engine is not None, f"{role} has no engine"
    return engine.alone().model_dump(mode="json")


def _sequences(spec: Spec, role: RoleName) -> int:
    """Return as many of full length as fill a micro-batch, or a few answers."""
    if ROLES[role].samples:
        return min(MOST_ANSWERS, spec.samples_per_step)
    return max(1, min(_row_tokens(spec, role) // spec.max_sequence_tokens, spec.samples_per_step))


def _row_tokens(spec: Spec, role: RoleName) -> int:
    section = spec.role(role)
    assert isinstance(section, ModelRole), "a trainer"
    return section.row_tokens


# ── who is asked ──────────────────────────────────────────────────────────────────────────────────


class _Child:
    """A process in one interpreter that answers for `roles`."""

    def __init__(
        self, spec: Spec, plan: Plan, roles: Sequence[RoleName], requests: Mapping[RoleName, RoleRequest], links: Path
    ) -> None:
        self.roles, self._plan = roles, plan.role(roles[0])
        self._request = ProbeRequest(roles={role: requests[role] for role in roles})
        self._environment = base_environment() | self._plan.env | {"PYTHONPATH": python_path(self._plan, links)}
        self._environment |= {
            "PYTHONDONTWRITEBYTECODE": "1",
            "HF_HUB_OFFLINE": "1",
            "CUDA_VISIBLE_DEVICES": _devices(spec, plan, roles),
            MARK: (mark := secrets.token_hex(8)),
        }
        self._mark = f"{MARK}={mark}"
        self._failure, self._not_here = "", False
        self._process: subprocess.Popen[str]

    @contextmanager
    def started(self) -> Iterator[None]:
        """Start it; it and all that it started are gone afterwards."""
        try:
            self._process = subprocess.Popen(
                (self._plan.python, "-m", "workers.offline.build_on_meta"),
                env=self._environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                start_new_session=True,
            )
        except OSError as error:
            self._failure, self._not_here = f"its interpreter cannot be started: {error.strerror}", True
            yield
            return
        assert self._process.stdin is not None
        try:
            with suppress(BrokenPipeError):  # it has ended already, which its exit code tells
                self._process.stdin.write(self._request.model_dump_json())
                self._process.stdin.close()
            self._process.stdin = None
            yield
        finally:
            signal_group(self._process.pid, signal.SIGKILL)
            kill_marked(self._mark, _KILL_S)
            self._process.communicate()

    def answers(self, timeout_s: float) -> dict[RoleName, Probed]:
        """Return answers by role. A role that the process did not reach has an `error`."""
        output = errors = ""
        if not self._failure:
            try:
                output, errors = self._process.communicate(timeout=timeout_s)
            except subprocess.TimeoutExpired as late:
                output, errors = _text(late.stdout), _text(late.stderr)
                self._failure = f"its probe took longer than {timeout_s:g} s (run.start_timeout_s)"
        answered = [Probed.model_validate(json.loads(line)) for line in output.splitlines() if line.startswith("{")]
        found: dict[RoleName, Probed] = {answer.role: answer for answer in answered}
        return found | {role: self._unanswered(role, errors) for role in self.roles if role not in found}

    def _unanswered(self, role: RoleName, errors: str) -> Probed:
        cause = self._failure or _describe_end(self._process.returncode)
        said = [line for line in errors.splitlines() if line.strip()][-_TAIL_LINES:]
        return Probed(role=role, error="\n  ".join([cause, *said]), not_here=self._not_here)


def _devices(spec: Spec, plan: Plan, roles: Iterable[RoleName]) -> str:
    """Return the GPUs that one process of these roles would see."""
    visible: dict[str, None] = {}
    for role in roles:
        devices = plan.role(role).env.get("CUDA_VISIBLE_DEVICES", "").split(",")
        visible |= dict.fromkeys(filter(None, devices[: devices_of_a_process(spec.role(role))]))
    return ",".join(visible)


def _describe_end(code: int | None) -> str:
    if code == -signal.SIGKILL:
        return "its process was ended by SIGKILL, which often means that memory ran out"
    return f"its process ended with exit code {code} before it answered"


def _text(output: str | bytes | None) -> str:
    return output.decode(errors="replace") if isinstance(output, bytes) else output or ""
