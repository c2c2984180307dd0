"""Processes that need no run: build on meta, try code and environments, export a model."""
