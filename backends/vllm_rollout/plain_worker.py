"""`WorkerExtension` for platforms where vLLM would pack the weights of linear layers for its kernels.

Importing this module stops that. vLLM imports it in every worker process, before it builds the model there.
"""

from backends.vllm_rollout.plain import keep_weights_plain
from backends.vllm_rollout.worker import WorkerExtension

__all__ = ["WorkerExtension"]

keep_weights_plain()
