"""LoRA adapters in vLLM's worker: one set of them, in the first slot of every adapted layer, written in place.

vLLM takes adapters from folders. Here they come by sync, weight by weight, so they go straight to where vLLM computes
with them: `lora_a_stacked` and `lora_b_stacked` of the layers that it has wrapped. vLLM is told of a set of zeros under
`ADAPTER_ID`; that it counts as loaded keeps vLLM from looking for a folder.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from backends.hf.adapter_names import place_of
from specs.errors import ModelError

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

ADAPTER_ID, SLOT = 1, 0


def adapter_request() -> LoRARequest:
    """Return the adapter request that every request carries. The path is never opened: were the adapters gone, vLLM
    would fail there."""
    from vllm.lora.request import LoRARequest

    return LoRARequest("actor", ADAPTER_ID, "/adapters-come-by-sync")


class AdapterSlot:
    """The places of one set of adapters in one worker."""

    def __init__(self, model_runner: Any, rank: int) -> None:
        self.model_runner = model_runner
        self.manager = model_runner.lora_manager._adapter_manager
        self.embeddings = model_runner.get_model().embedding_modules
        self.rank = rank
        self.packed = {
            part: (whole, index)
            for whole, parts in self.manager.packed_modules.items()
            for index, part in enumerate(parts)
        }

    def clear(self) -> None:
        """Zeros in every place, padding of the rank included, and vLLM's note that the adapters are there. Anew after
        each sleep that dropped memory: vLLM keeps tables of which token has which adapter there too, and would not
        write them again for the same batch; a head sharded for tensor parallelism keeps one of its tokens."""
        self.model_runner.reset_lora_state()
        self.manager.add_adapter(self.manager.create_dummy_lora(ADAPTER_ID, self.rank, self.embeddings))
        self.manager.activate_adapter(ADAPTER_ID)
        assert self.manager.lora_index_to_id == [ADAPTER_ID], self.manager.lora_index_to_id

    def check(self, layer: str) -> None:
        """Raises ModelError for a layer that vLLM computes without adapters."""
        module, index = self._wrapped(layer)
        stacked = getattr(module, "lora_a_stacked", ())
        if index >= len(stacked) or stacked[index].dim() != 4:
            raise ModelError(
                f"vLLM has no place for adapters of {layer}",
                hint='leave it out of actor.lora.targets, or set rollout.engine.lora = "merged"',
            )

    def write(self, name: str, weight: Tensor) -> None:
        """Copy this worker's part of an adapter's weight into its place."""
        layer, is_down = place_of(name)
        module, index = self._wrapped(layer)
        stacked = module.lora_a_stacked if is_down else module.lora_b_stacked
        part = self._part(module, index, weight, is_down)
        stacked[index][SLOT, 0, : part.shape[0], : part.shape[1]].copy_(part)

    def _part(self, module: Any, index: int, weight: Tensor, is_down: bool) -> Tensor:
        """vLLM's own sharding for tensor parallelism, which wants all parts of a fused layer at once."""
        if module.tp_size == 1:
            return weight
        shard = module.slice_lora_a if is_down else module.slice_lora_b
        if module.n_slices == 1:
            part: Tensor = shard(weight)
            return part
        parts: list[Tensor | None] = [None] * module.n_slices
        parts[index] = weight
        part = shard(parts)[index]
        return part

    def _wrapped(self, layer: str) -> tuple[Any, int]:
        """vLLM's module for a Hugging Face layer, and which part of it the layer is."""
        name, index = self.packed.get(layer, (layer, 0))
        return self.manager.modules.get(name), index
