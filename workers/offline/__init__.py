"""Processes that need no run: build on meta, one trial update, model export."""
