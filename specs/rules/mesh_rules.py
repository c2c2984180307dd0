"""Groups of ranks that hold a model together and lie on more than one node."""

from __future__ import annotations

from collections.abc import Iterator

from specs.errors import Problem
from specs.schema.engines.engine_table import TrainTable, engine_of
from specs.schema.mesh import mesh_of, straddling
from specs.schema.spec import Spec


def straddling_warnings(spec: Spec) -> Iterator[Problem]:
    """Groups that hold a model together across nodes."""
    for role, section in spec.sections():
        groups, mesh, engine = straddling(section), mesh_of(section), engine_of(section)
        if not groups or mesh is None:
            continue
        per_node = section.processes // section.nodes
        message = (
            f"{len(groups)} of {mesh.replicate} groups of {mesh.shard} ranks sit on more than one node "
            f"({per_node} processes each), so what is gathered for every layer crosses the network"
        )
        own = engine.node_hint(section, mesh) if isinstance(engine, TrainTable) else None
        if own is None:
            hint = "fine where the model needs the memory of all; fsdp2 can keep its groups inside a node"
            yield Problem(f"{role}.nodes", message, hint, str(section.nodes))
            continue
        key, value, hint = own
        yield Problem(f"{role}.engine.{key}", message, hint, value)
