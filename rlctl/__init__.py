"""The command line and the driver. Never imports torch."""

__version__ = "0.1.0"
