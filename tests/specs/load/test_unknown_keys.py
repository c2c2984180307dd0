"""Keys of other tools: each row names a key that exists, and hides none of ours."""

from __future__ import annotations

from specs.load.keys import all_keys, homes
from specs.load.unknown_keys import foreign_keys
from specs.schema.recipes import RlSpec


def test_each_foreign_key_stands_once_and_names_a_key_that_exists() -> None:
    keys = [key for names in foreign_keys() for key in names.split()]
    assert len(set(keys)) == len(keys)
    assert {row.ours for row in foreign_keys().values()} - all_keys() == {""}
    assert not {key for key in keys if key in homes(RlSpec)}, "hides a key of a spec"
