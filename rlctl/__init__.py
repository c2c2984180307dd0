"""The command line and the driver. Never imports torch.

For Python and notebooks (docs/watching.md#from-python): the functions of `rlctl/api.py`, which is imported when one of
them is asked for: `import rlctl` costs nothing.
"""

import os
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

__version__ = "0.1.0"


def _check_packages() -> None:
    """Ours are four top-level packages: another file of such a name that Python finds first would stand in for one."""
    for name in ("specs", "workers", "backends"):
        found = find_spec(name)
        origin = found.origin if found is not None else None
        if origin is None or Path(origin).parent.parent != Path(__file__).parent.parent:
            where = origin or (list(found.submodule_search_locations or ()) if found is not None else "nothing")
            raise ImportError(
                f"rlctl needs its own package `{name}`, and Python finds {where}: rename that, or call rlctl where "
                f"neither the current folder nor PYTHONPATH ({os.environ.get('PYTHONPATH', '')!r}) leads to it"
            )


_check_packages()
__all__ = ["__version__", "check_config", "evaluate", "export", "load_metrics", "load_samples", "report", "train"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module("rlctl.api"), name)
    raise AttributeError(f"module 'rlctl' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]
