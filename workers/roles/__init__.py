"""One file per role: the handlers of its verbs."""
