"""A real fault of vLLM on the CPU, for the tests: weights packed for its kernels, and new ones brought by its own
`reload_weights`. With tied embeddings the packed head is not packed again, and answers from the old weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from backends.protocol import WeightSpec
from backends.vllm_rollout.engine import VllmRolloutEngine
from backends.weights.checksum import checksum_bytes
from backends.weights.tensor_bytes import tensor_bytes, torch_dtype


class StaleHeadEngine(VllmRolloutEngine):
    """The engine without its cure, and with the way that vLLM documents for new weights."""

    PLAIN_WEIGHTS = False

    def import_weight(self, spec: WeightSpec, buffer: NDArray[np.uint8]) -> str:
        self._arrive(spec, len(buffer))
        whole = torch.from_numpy(buffer.copy()).view(torch_dtype(spec.dtype)).view(spec.shape)
        self.__dict__.setdefault("arrived", {})[spec.name] = whole
        return checksum_bytes(buffer)

    def finish_import(self) -> None:
        arrived = list(self.__dict__["arrived"].items())
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(arrived)})
        super().finish_import()

    def held(self, name: str) -> str:
        """Checksum of vLLM's own parameter of that name, without the padding of the vocabulary."""

        def read(worker: Any) -> str:
            rows = worker.model_runner.model.config.vocab_size
            return checksum_bytes(tensor_bytes(worker.get_model().get_parameter(name)[:rows]))

        return self.llm.collective_rpc(read)[0]
