"""The flight recorder of torch.distributed: the last collectives of this rank, written where the run's logs are.

torch 2.13 records those of NCCL and gloo. NCCL's own watchdog writes `flight_recorder_rank<N>` (pickled) when a
collective has timed out; here it is written on request, as JSON, before that.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from specs.wire.heartbeat import FLIGHT_RECORDER

_FILE = "TORCH_FR_DUMP_TEMP_FILE"
_ENTRIES = "2000"


def environment(folder: Path) -> dict[str, str]:
    """Switches it on for the ranks of a group, whose dumps go to `folder`."""
    file = str(folder / FLIGHT_RECORDER)
    return {_FILE: file, "TORCH_FR_BUFFER_SIZE": _ENTRIES, "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}


def dump() -> Path | None:
    """Write what this rank has recorded; None where there is nothing. Call it from any thread."""
    distributed = sys.modules.get("torch.distributed")
    prefix = os.environ.get(_FILE)
    if not prefix or distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    from torch._C import _distributed_c10d as c10d

    name = "_dump_nccl_trace_json" if distributed.get_backend() == "nccl" else "_dump_fr_trace_json"
    read = getattr(c10d, name, None)
    if read is None:
        return None
    path = Path(f"{prefix}{distributed.get_rank()}.json")
    path.write_bytes(read())
    return path
