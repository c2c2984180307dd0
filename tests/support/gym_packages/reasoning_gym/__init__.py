"""Stands in for reasoning-gym, as far as rlctl knows it: `factory` and `utils`."""
