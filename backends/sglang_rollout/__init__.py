"""The `sglang` rollout engine: an SGLang server as a child process, spoken to over its documented HTTP interface."""
