"""Write `specs/schema/engines/megatron_options.py`: the options of the Megatron-core that is installed.

.venv-megatron/bin/python scripts/make_megatron_options.py
"""

from __future__ import annotations

import dataclasses
import json
import sys
import types
import typing
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

TARGET = Path(__file__).parents[1] / "specs" / "schema" / "engines" / "megatron_options.py"
HEAD = '''"""Options of Megatron-core {version}'s configurations and what each takes; None: what a TOML file cannot say.

Made by scripts/make_megatron_options.py from the classes themselves.
"""

from collections.abc import Mapping

from specs.schema.engines.library_keys import Flag, Kind, Number, Text, Texts

Options = Mapping[str, Kind | None]
'''
KINDS = {bool: "Flag()", int: "Number()", float: "Number(whole=False)", str: "Text()", list[str]: "Texts()"}


def kind(annotation: Any) -> str:
    """Source of what a field of this type takes."""
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        some = [one for one in inner if one is not type(None)]
        return kind(some[0]) if len(some) == 1 else "None"
    if origin is typing.Literal:
        choices = ", ".join(json.dumps(one) for one in inner)
        return f"Text(({choices}{',' * (len(inner) == 1)}))"
    return KINDS.get(list[inner[0]] if origin is list and inner else annotation, "None")


def source() -> str:
    """What the file must hold."""
    import torch

    if not torch.cuda.is_available():
        from backends.megatron import cpu_shim

        cpu_shim.install()
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer.transformer_config import TransformerConfig

    lines = [HEAD.format(version=version("megatron-core"))]
    classes = {"TRANSFORMER": TransformerConfig, "OPTIMIZER": OptimizerConfig, "DDP": DistributedDataParallelConfig}
    for name, of in classes.items():
        public = [field for field in dataclasses.fields(of) if not field.name.startswith("_")]
        lines += ["", f"{name}: Options = {{", *(f'    "{f.name}": {kind(f.type)},' for f in public), "}"]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    TARGET.write_text(source())
