"""`rlctl plan`: how much memory each role takes, and whether it fits."""
