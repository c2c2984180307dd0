"""The weight transport of a run: which one, why, and what its two ends are told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlctl.processes.placement import LOOPBACK, Plan
from specs.rules.transport_rules import choose_transport, same_host
from specs.schema.recipes import SamplingSpec
from specs.schema.spec import TransportKind
from workers.transports import checksum_of, sweep
from workers.transports.base import FOLDER_PREFIX


@dataclass(frozen=True)
class Transport:
    """`options` go to both ends. `why` is for the person."""

    kind: TransportKind
    why: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)

    def describe(self) -> dict[str, Any]:
        """Return the transport as `as_built.json` has it."""
        checksum = checksum_of(self.kind, self.options)
        return {"transport": self.kind, "why": self.why, "checksum": checksum, **self.options}

    def __str__(self) -> str:
        return f"{self.kind} ({self.why})"


def plan_transport(spec: SamplingSpec, spec_dir: Path, run_dir: Path, plan: Plan) -> Transport:
    """The transport that a run of `spec` takes. Creates nothing."""
    kind, why = choose_transport(spec)
    options: dict[str, Any] = {}
    if kind == "folder":
        own = spec_dir / Path(spec.sync.folder).expanduser() if spec.sync.folder else run_dir / "sync"
        options["folder"] = str(own.absolute())
        if spec.sync.delta:
            options["delta"] = True
    if kind == "group":
        apart = bool(spec.actor.devices) and not set(spec.rollout.devices) & set(spec.actor.devices)
        options["device"] = "cuda" if apart and spec.rollout.devices else "cpu"  # NCCL wants a GPU per rank
        options["address"] = LOOPBACK if same_host(spec) else plan.address
    return Transport(kind, why, options)


def prepare(transport: Transport, run_dir: Path) -> None:
    """Have the transport's folder. One inside the run directory is the run's alone: what a killed attempt left goes."""
    if transport.kind != "folder":
        return
    folder = Path(transport.options["folder"])
    folder.mkdir(parents=True, exist_ok=True)
    if folder.is_relative_to(run_dir.absolute()):
        sweep([{"folder": str(folder), "prefix": FOLDER_PREFIX}])
