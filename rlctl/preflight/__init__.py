"""Does what a spec names exist on this machine, and can it be used? Asked by `check-config` and by `train`."""
