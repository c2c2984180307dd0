"""What pages name is there: links and their anchors, files, keys of the spec, metrics."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import unquote

import pytest
from declared_metrics import undeclared
from doc_commands import is_key
from doc_pages import PAGES, ROOT, anchors, code_spans, links

from specs.schema.spec import Spec

NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
TREES = ("rlctl", "workers", "backends", "specs", "tests", "scripts", "docs")
OTHER_TOOLS = {"docs/coming-from.md"}  # its tables have the keys of other tools; `check-config` knows ours


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_links_lead_somewhere(page: Path) -> None:
    lost = []
    for link in links(page):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = unquote(link).partition("#")
        to = page.parent / path if path else page
        if not to.exists() or (anchor and anchor not in anchors(to)):
            lost.append(link)
    assert not lost


def test_every_page_is_in_the_list_of_the_readme() -> None:
    linked = {link.partition("#")[0] for link in links(ROOT / "README.md")}
    assert [name for name in NAMES if name != "README.md" and name not in linked] == []


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_files_that_a_page_names_are_there(page: Path) -> None:
    """With their folder, from the root; `file.py::test` names a test in it."""
    missing = []
    for text in code_spans(page):
        if re.fullmatch(rf"({'|'.join(TREES)})/[\w./*-]*(::\w+)?", text):
            path, test = re.fullmatch(r"([^:]*)(.*)", text).groups()  # type: ignore[union-attr]
            found = list(ROOT.glob(path.rstrip("/")))
            if not found or (test and test.strip(":") not in found[0].read_text(encoding="utf-8")):
                missing.append(text)
    assert not missing


@pytest.mark.parametrize("page", [page for page in PAGES if str(page.relative_to(ROOT)) not in OTHER_TOOLS])
def test_keys_that_a_page_names_are_keys(page: Path) -> None:
    sections = "|".join(Spec.model_fields)
    named = [text.partition(" = ")[0] for text in code_spans(page)]
    keys = [text for text in named if re.fullmatch(rf"({sections})(\.[\w]+)+", text)]
    assert [key for key in keys if not is_key(key) and not re.search(r"\.(py|toml|jsonl?)$", key)] == []


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_metrics_that_a_page_names_are_metrics(page: Path) -> None:
    groups = "actor|critic|rollout|reward|sync|time|correction|mem|perf|eval"
    named = [text for text in code_spans(page) if re.fullmatch(rf"({groups})/[\w@<>/]+", text)]
    assert undeclared(dict.fromkeys(named)) == []
