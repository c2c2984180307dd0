"""The `megatron` train engine: Megatron-core's GPT model, with tensor, pipeline and data parallel ranks."""
