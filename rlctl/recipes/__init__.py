"""The recipes: what a run does in a step."""
