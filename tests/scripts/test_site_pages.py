"""The site of the docs: its navigation has every page, and links lead to pages of it or are text."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import site_pages  # noqa: E402


def test_the_navigation_has_every_page_once() -> None:
    named = re.findall(r": ([\w-]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    pages = {page.name for page in (ROOT / "docs").glob("*.md")}
    assert sorted(named) == sorted({*pages, *site_pages.PAGES.values()})
    assert len(pages) <= 15


@pytest.mark.parametrize(
    ("link", "shown"),
    [
        ("[a](docs/check-config.md#out-of-memory)", "[a](check-config.md#out-of-memory)"),
        ("[a](spec.md)", "[a](spec.md)"),
        ("[a](../CONTRIBUTING.md#rules)", "[a](contributing.md#rules)"),
        ("![a](docs/panel.svg)", "![a](panel.svg)"),
        ("[a](../backends/train)", "a"),
        ("[a](Dockerfile)", "a"),
        ("[a](https://example.org/a.md)", "[a](https://example.org/a.md)"),
        ("[a](#rows)", "[a](#rows)"),
    ],
)
def test_links_lead_to_pages_of_the_site_or_are_text(link: str, shown: str) -> None:
    assert site_pages.on_page_markdown(f"x {link} y", None, None, None) == f"x {shown} y"
