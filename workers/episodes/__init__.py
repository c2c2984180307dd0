"""Play episodes of several turns: what the model samples, its tool calls, and the replies appended to it."""
