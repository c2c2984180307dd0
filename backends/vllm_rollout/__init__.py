"""vLLM as a rollout engine, inside the role's own process. Not called `vllm`, which would shadow the package."""
