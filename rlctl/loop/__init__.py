"""The RL step: sampling, grading, learning and sending weights, and who holds the device meanwhile."""
