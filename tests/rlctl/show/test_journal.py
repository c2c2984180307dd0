"""The journal of a run after a kill, a full disk or a person have touched it."""

from __future__ import annotations

from pathlib import Path

from rlctl.show.journal import FILE, Journal, last_attempt, read_journal


def test_what_was_torn_or_is_no_event_takes_no_other_line_along(tmp_path: Path) -> None:
    Journal(tmp_path, 1).add("start", spec="é.toml")
    with (tmp_path / FILE).open("a") as file:
        file.write('123\n[]\n{"time": 1, "att')
    Journal(tmp_path, 2).add("start", spec="b.toml")
    journal = read_journal(tmp_path)
    assert [line["spec"] for line in journal] == ["é.toml", "b.toml"]
    assert last_attempt(journal)["attempt"] == 2, "a resume begins with the spec of the last attempt"
