"""The model's chat template: conversations as tokens, and what the model wrote as messages."""
