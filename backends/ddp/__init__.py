"""Data parallel training: every rank holds the whole model."""
