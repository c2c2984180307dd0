"""Does what a spec names exist on this machine, and can it be used? Expected by `check-config` and by `train`."""
