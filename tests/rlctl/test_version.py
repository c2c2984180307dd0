"""`rlctl --version` names the extras that are installed (the rest is in `test_cli.py`)."""

from __future__ import annotations

from rlctl.version import extras


def test_an_extra_is_there_with_all_its_packages() -> None:
    of_extras = ('mcp>=2; extra == "mcp"', 'aio-http; extra == "agents"', "wandb; extra == 'tracking'")
    required = ["numpy", *of_extras, 'b; extra == "tracking"', 'mcp; extra == "dev"']
    assert list(extras(required, ["numpy", "mcp", "aio_http", "wandb"])) == ["mcp", "agents"]
