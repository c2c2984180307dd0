"""Make README, CONTRIBUTING and CHANGELOG pages of the site, as `mkdocs.yml` asks; links that leave it become text."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s#]*)(#[^)\s]*)?\)")


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that lie beside `docs/`."""
    from mkdocs.structure.files import File

    for name, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / name).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Point links at pages of the site; what lies elsewhere in the tree has none."""
    return LINK.sub(_link, markdown)


def _link(found: re.Match[str]) -> str:
    image, text, path, anchor = found[1], found[2], found[3].removeprefix("../"), found[4] or ""
    if re.match(r"[a-z]+:", path) or not path:
        return found[0]
    target = PAGES.get(path, path.removeprefix("docs/"))
    here = target in PAGES.values() or (ROOT / "docs" / target).is_file()
    return f"{image}[{text}]({target}{anchor})" if here else text
