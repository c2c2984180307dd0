"""Which kernels a role gets: what cannot be had is refused or passed over, and either is said."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from specs.schema.engines.kernel_choice import KernelFacts, choose_kernels

HERE = KernelFacts("cuda", "actor", {"liger-kernel": "0.8.5", "triton": "3.9.0"}, "/env/bin/python")


def test_where_all_is_there() -> None:
    for asked in ("liger", "auto"):
        assert choose_kernels(asked, HERE).kernels == "liger"  # type: ignore[arg-type]
    assert choose_kernels("torch", HERE).kernels == "torch"


@pytest.mark.parametrize(
    ("changes", "problem", "hint"),
    [
        ({"device": "cpu"}, "needs a GPU, and actor runs on the CPU", "give actor devices"),
        (
            {"versions": {"triton": "3.9.0"}},
            "needs liger-kernel, which is not installed in actor's interpreter",
            '/env/bin/python -m pip install liger-kernel, or write "torch"',
        ),
        ({"versions": {}}, "needs liger-kernel and triton, which are not installed", "install liger-kernel triton"),
    ],
)
def test_what_is_in_the_way_is_said(changes: dict[str, Any], problem: str, hint: str) -> None:
    facts = replace(HERE, **changes)
    refused, passed_over = choose_kernels("liger", facts), choose_kernels("auto", facts)
    assert problem in refused.problem
    assert hint in refused.hint
    assert (passed_over.kernels, passed_over.problem) == ("torch", "")
    assert passed_over.why == f"liger {refused.problem}"


def test_what_is_not_known_is_not_refused() -> None:
    found = choose_kernels("liger", KernelFacts("cuda"))
    assert (found.kernels, found.problem) == ("liger", "")
    assert "if liger-kernel is in the role's interpreter" in found.why
