"""The algorithms: tables of advantages and of losses, and the named settings of both that a spec chooses from."""
