"""A role's process: entry point, serve loop, channel, one file per role."""
