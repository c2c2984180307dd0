"""Run users' environments, tools and agents in isolated processes: `pool.py` is the parent's side."""
