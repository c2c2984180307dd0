"""`rlctl check-config`."""
