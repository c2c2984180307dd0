"""Starts Megatron-core in a rank: its process groups, and the CPU shim where there is no CUDA."""

from __future__ import annotations

import importlib.util
import os
import sys

import torch
from torch import distributed as dist

from backends.protocol import COLLECTIVE_TIMEOUT, Rank
from backends.train.role_group import join_group
from specs.errors import ModelError
from specs.schema.engines.megatron_config import LOCAL
from specs.schema.engines.megatron_table import MegatronTable
from specs.schema.role_section import DType


def import_megatron(device: str) -> None:
    """Megatron-core, as it runs on this device. Raises ModelError where it is not installed."""
    if importlib.util.find_spec("megatron") is None:
        raise ModelError(
            "the engine megatron needs Megatron-core, which this interpreter does not have",
            hint='rlctl setup-engine megatron makes one that does: set python = ".venv-megatron/bin/python"',
        )
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # the order in which it launches communication
    if not device.startswith("cuda"):
        from backends.megatron import cpu_shim

        cpu_shim.install()
    from backends.megatron import megatron_model  # noqa: F401


def start_megatron(rank: Rank, device: str, table: MegatronTable, seed: int) -> None:
    """Join the ranks' group and split it into Megatron's. Raises ModelError where it is not installed."""
    import_megatron(device)
    join_group(rank, device, even_alone=True)
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    parallel_state.destroy_model_parallel()  # of an earlier engine in this process
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=table.tensor_parallel,
        pipeline_model_parallel_size=table.pipeline_parallel,
        context_parallel_size=table.context_parallel,
        virtual_pipeline_model_parallel_size=table.virtual_pipeline if table.virtual_pipeline > 1 else None,
        expert_model_parallel_size=table.expert_parallel,
        expert_tensor_parallel_size=table.expert_tensor_parallel,
        order=table.order,
        distributed_timeout_minutes=int(COLLECTIVE_TIMEOUT.total_seconds() // 60),
        create_gloo_process_groups=False,
    )
    state = torch.get_rng_state()
    model_parallel_cuda_manual_seed(seed)  # its checkpointing of activations wants named generators, unused otherwise
    torch.set_rng_state(state)


def has_fused_norms(table: MegatronTable, dtype: DType) -> bool:
    """Whether layers are TransformerEngine's: as the spec says, else in bf16 where CUDA has it. The rank's log says
    which, where there is a choice. Raises ModelError where they are asked for and cannot be."""
    asked = table.megatron.get("transformer_impl")
    if asked == LOCAL or not (asked or torch.cuda.is_available()):
        return False
    from megatron.core.extensions import transformer_engine

    there = bool(transformer_engine.HAVE_TE)
    if asked and not there:
        raise ModelError(
            "transformer_impl asks for TransformerEngine, which this interpreter cannot import",
            hint=f"{sys.executable} -m pip install --no-build-isolation transformer_engine[pytorch], or remove the key",
        )
    chosen = there and bool(asked or dtype == "bf16")
    print(f"megatron: layers are {'TransformerEngine' if chosen else 'Megatron-core'}'s", file=sys.stderr, flush=True)
    return chosen


def stop_megatron() -> None:
    """Leave all groups: the next engine in this process makes its own."""
    if dist.is_initialized():
        from megatron.core import parallel_state

        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
