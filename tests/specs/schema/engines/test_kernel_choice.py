"""Which kernels a role gets: what cannot be had is refused by `liger` and passed over by `auto`."""

from __future__ import annotations

from typing import Any

import pytest

from specs.schema.engines.kernel_choice import choose_kernels

VERSIONS = {"liger-kernel": "0.8.5", "triton": "3.9.0"}
HERE: dict[str, Any] = {"on_gpu": True, "versions": VERSIONS, "role": "actor", "interpreter": "/env/bin/python"}


def test_what_can_be_had() -> None:
    for kernels in ("liger", "auto"):
        assert choose_kernels(kernels, **HERE).implementation == "liger"  # type: ignore[arg-type]
    assert choose_kernels("torch", **HERE).implementation == "torch"
    found = choose_kernels("liger", on_gpu=True, versions=None)
    assert (found.implementation, found.problem) == ("liger", "")
    assert "if liger-kernel is in the role's interpreter" in found.why


@pytest.mark.parametrize(
    ("changes", "problem", "hint"),
    [
        ({"on_gpu": False}, "needs a GPU, and actor runs on the CPU", "give actor devices"),
        (
            {"versions": {"triton": "3.9.0"}},
            "needs liger-kernel, which is not installed in actor's interpreter",
            '/env/bin/python -m pip install liger-kernel, or write "torch"',
        ),
        ({"versions": {}}, "needs liger-kernel and triton, which are not installed", "install liger-kernel triton"),
    ],
)
def test_what_cannot(changes: dict[str, Any], problem: str, hint: str) -> None:
    refused, passed_over = (choose_kernels(kernels, **(HERE | changes)) for kernels in ("liger", "auto"))  # type: ignore[arg-type]
    assert problem in refused.problem
    assert hint in refused.hint
    assert (passed_over.implementation, passed_over.problem) == ("torch", "")
    assert passed_over.why == f"liger {refused.problem}"
