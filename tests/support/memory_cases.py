"""What `memory_worker.py` builds and measures, by name."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from specs.schema.engines.ddp_table import DdpTable
from specs.schema.engines.fsdp2_table import Fsdp2Table
from specs.schema.engines.zero_table import ZeroTable
from specs.schema.role_section import Lora

BF16: dict[str, Any] = {"model": {"dtype": "bf16"}}
VALUES: dict[str, Any] = {"role": "critic", "model": {"head": "value", "dtype": "bf16"}}
CASES: dict[str, dict[str, Any]] = {
    "ddp bf16": {"engine": DdpTable(), **BF16},
    "ddp that never learns": {"engine": DdpTable(), "optimizer": None},
    "ddp lora bf16": {"engine": DdpTable(), "lora": Lora(rank=4), **BF16},
    "ddp critic bf16": {"engine": DdpTable(), **VALUES},
    "fsdp2 critic bf16": {"engine": Fsdp2Table(), **VALUES},
    "fsdp2 bf16": {"engine": Fsdp2Table(), **BF16},
    "fsdp2 lora bf16": {"engine": Fsdp2Table(), "lora": Lora(rank=4, targets=("q_proj", "down_proj")), **BF16},
}
if find_spec("deepspeed") is not None:
    SMALL = {"reduce_bucket_size": 1000}
    CUT: dict[str, Any] = {"stage3_param_persistence_threshold": 200, "stage3_prefetch_bucket_size": 1000, **SMALL}
    CASES |= {
        "zero1": {"engine": ZeroTable(stage=1, deepspeed={"zero_optimization": SMALL})},
        "zero3 critic bf16": {"engine": ZeroTable(stage=3, deepspeed={"zero_optimization": CUT}), **VALUES},
        "zero2 bf16": {"engine": ZeroTable(stage=2, deepspeed={"zero_optimization": SMALL}), **BF16},
        "zero3": {"engine": ZeroTable(stage=3, deepspeed={"zero_optimization": CUT})},
        "zero3 lora bf16": {
            "engine": ZeroTable(stage=3, deepspeed={"zero_optimization": CUT}),
            "lora": Lora(rank=4),
            **BF16,
        },
    }
