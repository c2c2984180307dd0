"""The process of a role: entry point, serve loop, connection to the driver, one file per role."""
