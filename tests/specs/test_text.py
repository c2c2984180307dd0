"""Values as a person reads them: as TOML writes them, cut, and with nothing invisible left."""

from __future__ import annotations

import tomli

from specs.text import show, show_default


def test_values_are_shown_as_toml_reads_them_back() -> None:
    for value in (True, 3, 0.5, 'a "quoted" \\ word', "two\nlines\tand \u200b", [1, 2], ["a", False]):
        assert tomli.loads(f"value = {show(value)}")["value"] == value


def test_tables_and_nothing_show_as_nothing_and_long_values_are_cut() -> None:
    assert show({"a": 1}) == show(None) == ""
    assert show([{"a": 1}]) == "[{…}]"
    assert show("x" * 100, limit=10) == '"xxxxxxxx…'


def test_a_default_that_says_nothing_is_not_shown() -> None:
    assert [show_default(value) for value in ("", (), None, {})] == [""] * 4
    assert [show_default(value) for value in (0, False, "cosine", (1, 2))] == ["0", "false", '"cosine"', "[1, 2]"]
