"""Pages of the documentation as a reader has them: blocks and what fences say, words of code, links, headings."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).resolve().parents[2]
# The guides too are read; CHANGELOG.md is history, whose words may be gone.
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


@dataclass(frozen=True)
class Block:
    """A fenced block, ```LANGUAGE WORD …: `words` are those that have no `=`, `named` those that have one."""

    page: Path
    line: int  # of its fence, from 1
    language: str
    words: tuple[str, ...]
    named: dict[str, str]
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


@cache
def tokens(page: Path) -> list[Token]:
    return MarkdownIt("commonmark").enable("table").parse(page.read_text(encoding="utf-8"))


def blocks(page: Path) -> list[Block]:
    """In the order of the page. A block that is indented instead of fenced has no language."""
    found = []
    for token in tokens(page):
        if token.type in ("fence", "code_block"):
            language, *others = token.info.split() or [""]
            named = dict(word.split("=", 1) for word in others if "=" in word)
            words = tuple(word for word in others if "=" not in word)
            assert token.map is not None
            found.append(Block(page, token.map[0] + 1, language, words, named, token.content))
    return found


def code_spans(page: Path) -> list[str]:
    """What stands between backticks in running text and tables."""
    return [child.content for child in _inline(page) if child.type == "code_inline"]


def links(page: Path) -> list[str]:
    return [str(child.attrs["href"]) for child in _inline(page) if child.type == "link_open"]


def anchors(page: Path) -> set[str]:
    """Fragments that lead into the page: of its headings, as GitHub makes them, and `<a id="…">`."""
    found: Counter[str] = Counter()
    names = set(re.findall(r'<a id="([^"]+)"></a>', page.read_text(encoding="utf-8")))
    for token, inside in zip(tokens(page), tokens(page)[1:], strict=False):
        if token.type == "heading_open":
            text = "".join(child.content for child in inside.children or () if child.type in ("text", "code_inline"))
            slug = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
            names.add(f"{slug}-{found[slug]}" if found[slug] else slug)
            found[slug] += 1
    return names


def _inline(page: Path) -> Iterator[Token]:
    for token in tokens(page):
        yield from token.children or () if token.type == "inline" else ()
