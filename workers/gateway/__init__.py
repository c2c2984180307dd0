"""The model behind the addresses that agents know: OpenAI's and Anthropic's wires in front of a run's sampler."""
