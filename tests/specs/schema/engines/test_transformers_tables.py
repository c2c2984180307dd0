"""What the engines of transformers' models have in common."""

from __future__ import annotations

import pytest

from specs.schema.engines.ddp_table import DdpTable


@pytest.mark.parametrize("vocabulary", [52, 8_192, 32_000, 151_936, 262_144])
def test_logits_take_as_much_for_any_vocabulary(vocabulary: int) -> None:
    for on_gpu, most in ((False, 2**24), (True, 2**26)):
        rows = DdpTable().logits_chunk(vocabulary, on_gpu=on_gpu)
        assert rows * vocabulary <= most
        assert rows == 4096 or (rows + 1) * vocabulary > most
