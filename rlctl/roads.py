"""The weight road of a run: which one, why, and what its two ends are told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlctl.plan import LOOPBACK, Plan
from specs.road_rules import choose_road, same_host
from specs.schema import RoadKind, Spec
from workers.roads import sweep
from workers.roads.base import FOLDER_PREFIX


@dataclass(frozen=True)
class Road:
    """`options` go to both ends. `why` is for the person."""

    kind: RoadKind
    why: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.kind} ({self.why})"


def plan_road(spec: Spec, spec_dir: Path, run_dir: Path, plan: Plan) -> Road:
    """The road that a run of `spec` takes. Creates nothing."""
    kind, why = choose_road(spec)
    options: dict[str, Any] = {}
    if kind == "folder":
        own = spec_dir / Path(spec.sync.folder).expanduser() if spec.sync.folder else run_dir / "sync"
        options["folder"] = str(own.absolute())
    if kind == "group":
        apart = bool(spec.actor.devices) and not set(spec.rollout.devices) & set(spec.actor.devices)
        options["device"] = "cuda" if apart and spec.rollout.devices else "cpu"  # NCCL wants a GPU per rank
        options["address"] = LOOPBACK if same_host(spec) else plan.address
    return Road(kind, why, options)


def prepare(road: Road, run_dir: Path) -> None:
    """Have the road's folder. One inside the run directory is the run's alone: what a killed attempt left goes."""
    if road.kind != "folder":
        return
    folder = Path(road.options["folder"])
    folder.mkdir(parents=True, exist_ok=True)
    if folder.is_relative_to(run_dir.absolute()):
        sweep([{"folder": str(folder), "prefix": FOLDER_PREFIX}])
