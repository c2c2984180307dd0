"""`WorkerExtension` for platforms where vLLM would pack the weights of linear layers for its kernels.

Importing this module stops that. vLLM imports it in every worker process, before it builds the model there.
"""

from __future__ import annotations

from backends.vllm_rollout.vllm_start import vllm_version
from backends.vllm_rollout.worker import WorkerExtension
from specs.errors import ModelError

__all__ = ["WorkerExtension"]


def keep_weights_plain() -> None:
    """Stop vLLM from packing linear layers for its CPU kernels. Call it before the model is built.

    Packed, the parameters are emptied or, worse, kept beside a copy that computes: the head of a model with tied
    embeddings then computes with old weights, although each parameter holds the new bytes.
    """
    from vllm import _custom_ops
    from vllm.model_executor.layers import utils

    for module, name in ((_custom_ops, "_supports_onednn"), (utils, "check_cpu_sgl_kernel")):
        if not hasattr(module, name):
            raise ModelError(
                f"vLLM {vllm_version()} has no {module.__name__}.{name}: its packing of weights cannot be switched off",
                hint="use the version that rlctl setup-engine vllm installs",
            )
    _custom_ops._supports_onednn = False
    utils.check_cpu_sgl_kernel = lambda *args, **kwargs: False


keep_weights_plain()
