"""Rewards in isolated processes: `pool.py` on this side of the pipes, `child.py` on the other."""
