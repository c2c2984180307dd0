"""Grading in isolated processes: `pool.py` runs in the reward role, `child.py` in each grading process."""
