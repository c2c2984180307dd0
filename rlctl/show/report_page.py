"""Make the frame of a report's page: its look, its one script, and the tables and links on it.

The script draws charts, shows values under the pointer, zooms, picks samples, and loads the page again during
its run. The page's policy names the script's hash, so that no other runs there.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

from rlctl.show.text_format import html

STYLE = Path(__file__).with_name("report.css").read_text(encoding="utf-8")
SCRIPT = Path(__file__).with_name("report.js").read_text(encoding="utf-8")
HASH = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
# A second lock behind `html`: should markup ever get through, the browser runs none of it and fetches nothing.
POLICY = (
    '<meta http-equiv="Content-Security-Policy" '
    f"content=\"default-src 'none'; script-src 'sha256-{HASH}'; style-src 'unsafe-inline'; base-uri 'none'; "
    "form-action 'none'\">"
)
SIGNATURE = " · rlctl</title>"  # of every page, soon after its beginning


def page(title: str, body: str, *, refresh_s: int = 0) -> str:
    """Return a whole page; `body` is markup. `refresh_s`: how often a browser loads it again, 0 for never. The script
    does so while no chart is zoomed, no samples are picked and no text is selected."""
    head = f'<meta charset="utf-8">{POLICY}<meta name="viewport" content="width=device-width">'
    head += f'<noscript><meta http-equiv="refresh" content="{refresh_s}"></noscript>' if refresh_s else ""
    head += f"<title>{html(title)}{SIGNATURE}<style>{STYLE}</style>"
    about = f' data-refresh="{refresh_s}"' if refresh_s else ""
    inside = f"{body}<script>{SCRIPT}</script>"
    return f"<!doctype html><html lang=en><head>{head}</head><body{about}>{inside}</body></html>\n"


def header(title: str, files: dict[str, Path], folder: Path) -> str:
    """Return the page's title with links to those of the files that exist. `folder`: where the page will be."""
    links = [
        f'<a href="{html(quote(os.path.relpath(file, folder)))}">{html(name)}</a>'
        for name, file in files.items()
        if file.exists()
    ]
    return f"<header><h1>{html(title)}</h1><nav>{' · '.join(links)}</nav></header>"


def section(title: str, body: str) -> str:
    return f"<section><h2>{html(title)}</h2>{body}</section>"


def table(headings: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    head = "".join(f"<th>{html(heading)}</th>" for heading in headings)
    body = "".join(f"<tr>{''.join(f'<td>{html(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<div class=wide><table><tr>{head}</tr>{body}</table></div>"


def note(text: str) -> str:
    return f'<p class="note">{html(text)}</p>'


def replaceable(file: Path) -> bool:
    """Tell whether nothing but a page is lost with a file: it is one, or empty."""
    with contextlib.suppress(OSError), file.open("rb") as held:
        return SIGNATURE.encode() in (head := held.read(1 << 16)) or not head
    return False


def write_page(target: Path, text: str) -> OSError | None:
    """Write a page atomically, beside others that write it too; return the error where the disk refuses."""
    partial = target.parent / f"{target.name}.{os.getpid()}.partial"
    into = target if target.exists() and not target.is_file() else partial  # a device is written to, not replaced
    try:
        into.write_text(text, encoding="utf-8", errors="replace")  # JSON may hold half a surrogate pair
        if into is partial:
            os.replace(partial, target)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        return error
    return None
