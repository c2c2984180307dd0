"""Groups of ranks that hold a model together or share samples, and lie on more than one node."""

from __future__ import annotations

from collections.abc import Iterator

from specs.errors import Problem
from specs.schema.engines.engine_table import TrainTable, engine_of
from specs.schema.mesh import EXPERT, divisors
from specs.schema.rank_groups import axis_of, expert_groups, layer_groups, mesh_of, sequence_groups, straddling
from specs.schema.spec import Spec
from specs.text import listed


def straddling_warnings(spec: Spec) -> Iterator[Problem]:
    """Groups across nodes."""
    for role, section in spec.sections():
        groups, mesh, engine = straddling(layer_groups(section)), mesh_of(section), engine_of(section)
        if mesh is not None and (sharing := straddling(sequence_groups(section))):
            message = (
                f"{len(sharing)} of {len(sequence_groups(section))} groups that share samples sit on more than one "
                "node, so what attention exchanges in every layer crosses the network"
            )
            hint = f"use a divisor of {section.processes // section.nodes}, the processes of a node"
            yield Problem(f"{role}.sequence_parallel", message, hint, str(mesh.sequence))
        if mesh is not None and (apart := straddling(expert_groups(section))):
            every = expert_groups(section)
            message = (
                f"{len(apart)} of {len(every)} groups of {len(every[0].ranks)} ranks that share out experts sit on "
                "more than one node, so tokens cross the network to experts and back, in every layer of them"
            )
            inside = listed(divisors(section.processes // section.nodes))
            hint = f"expert_parallel × ranks of each expert = {inside} stays inside a node, if the experts fit"
            yield Problem(f"{role}.engine.expert_parallel", message, hint, str(axis_of(section, EXPERT)))
        if not groups or mesh is None:
            continue
        every, per_node = layer_groups(section), section.processes // section.nodes
        message = (
            f"{len(groups)} of {len(every)} groups of {len(every[0].ranks)} ranks sit on more than one node "
            f"({per_node} processes each), so what is gathered for every layer crosses the network"
        )
        own = engine.node_hint(section, mesh) if isinstance(engine, TrainTable) else None
        if own is None:
            hint = "fine where the model needs the memory of all; fsdp2 can keep its groups inside a node"
            yield Problem(f"{role}.nodes", message, hint, str(section.nodes))
            continue
        key, value, hint = own
        yield Problem(f"{role}.engine.{key}", message, hint, value)
