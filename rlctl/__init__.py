"""The command line and the driver. Never imports torch.

For Python and notebooks (docs/python.md): `rlctl.train`, `rlctl.check_config`, `rlctl.load_metrics`, of
`rlctl/check/python_api.py`, which is imported when one of them is asked for: `import rlctl` costs nothing.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"
__all__ = ["__version__", "check_config", "load_metrics", "train"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module("rlctl.check.python_api"), name)
    raise AttributeError(f"module 'rlctl' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]
