"""Code that rollout engines share."""
