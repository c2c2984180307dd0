"""One attempt at a run, on disk: from a spec to its run directory, checkpoints and export."""
