"""Files that are no specs say where and what to do; what is written reads back."""

from __future__ import annotations

from pathlib import Path

import pytest
import tomli
from hypothesis import given, settings
from hypothesis import strategies as st

from specs.errors import SpecError
from specs.load.toml_file import dumped, read_toml, written


@pytest.mark.parametrize(
    ("text", "place", "words"),
    [
        ("schema = 1\n[run\n", ":2:5: not TOML", "write a section as [section]"),
        ("schema = 1\nname = hello\n", ":2:8: not TOML", "text needs quotes"),
        ("schema = 1\nlr = .5\n", ":2:6: not TOML", "a number has digits on both sides of its point"),
        ("schema = 1\nlr = 1.\n", ":2:7: not TOML", "a number has digits on both sides of its point"),
        ("schema = 1\nflag = True\n", ":2:8: not TOML", "lower case"),
        ("schema = 1\nschema = 1\n", ":2:11: not TOML", "a key may stand only once"),
        ('schema = 1\nname = "a\n', ":2:10: not TOML", "the quote is not closed"),
        (
            "schema = 1\na = [1, 2\n\n[run]\nb = 1\n",
            ":4:1: not TOML: Unclosed array",
            "one above it opens",
        ),
    ],
)
def test_broken_toml_names_the_line(tmp_path: Path, text: str, place: str, words: str) -> None:
    file = tmp_path / "spec.toml"
    file.write_text(text)
    with pytest.raises(SpecError) as caught:
        read_toml(file)
    assert f"{file}{place}" in str(caught.value)
    assert words in str(caught.value)


def test_files_that_are_no_specs(tmp_path: Path) -> None:
    (tmp_path / "latin.toml").write_bytes(b'name = "\xe9"\n')
    (tmp_path / "grpo.yaml").write_text("beta: 0.04\n")
    for name, words in (
        ("none.toml", "no such file"),
        (".", "a folder"),
        ("latin.toml", "not UTF-8"),
        ("grpo.yaml", "YAML, and a spec is TOML"),
    ):
        with pytest.raises(SpecError, match=words):
            read_toml(tmp_path / name)


LEAVES = st.one_of(st.booleans(), st.integers(-(2**40), 2**40), st.floats(allow_nan=False), st.text(max_size=12))
VALUES = st.recursive(
    LEAVES, lambda of: st.lists(of, max_size=3) | st.dictionaries(st.text(max_size=5), of, max_size=3), max_leaves=8
)


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.text(max_size=6), VALUES, max_size=4))
def test_what_is_written_reads_back(tables: dict) -> None:
    assert tomli.loads(dumped(tables)) == tables
    assert tomli.loads(f"x = {written(tables)}") == {"x": tables}
