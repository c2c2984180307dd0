"""How a model is held and run: the engine protocol and one file or folder per engine."""
