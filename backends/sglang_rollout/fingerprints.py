"""Checks that the server loaded the weights: its tensors' hashes must change exactly where the weights changed.

The server's hash (/weights_checker) cannot be recomputed here: another function, over fused and sharded tensors. But it
is of the server's own memory, so it must change exactly where the bytes that were handed over changed since the last
sync: a tensor that stayed the same although its weights are new is stale, one that changed although they are not is
torn.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from specs.errors import SyncError

# Fused tensor of SGLang's models ← its parts under their Hugging Face names.
_FUSED = (
    (re.compile(r"\.(q|k|v)_proj\."), ".qkv_proj."),
    (re.compile(r"\.(gate|up)_proj\."), ".gate_up_proj."),
)
Hashes = tuple[Mapping[str, str], ...]  # per rank: tensor → hash


def rank_hashes(reply: Mapping[str, object]) -> Hashes:
    """Hashes in a reply of /weights_checker."""
    ranks = reply.get("ranks")
    assert isinstance(ranks, list), reply
    return tuple(rank["checksums"] for rank in ranks)


class Fingerprints:
    """Compares a sync with the previous one."""

    def __init__(self, before_any: Hashes) -> None:
        """`before_any`: hashes of the dummy weights that the server started with."""
        self._hashes = before_any
        self._checksums: Mapping[str, str] = {}

    def check(self, checksums: Mapping[str, str], hashes: Hashes) -> None:
        """Compare the server's tensors whose names are known here. `checksums`: of what was handed over, by Hugging
        Face name. Raises SyncError naming the first that is stale or torn."""
        for tensor, names in _parts(checksums, hashes).items():
            was, now = ([rank.get(tensor) for rank in each] for each in (self._hashes, hashes))
            changed = any(self._checksums.get(name) != checksums[name] for name in names)
            if changed and was == now:
                raise SyncError(
                    f"weight {names[0]} was handed to the SGLang server, but its tensor {tensor} is still the old one",
                    hint="the server loaded other weights than it was given; nothing was sampled with them",
                )
            if not changed and was != now:
                raise SyncError(
                    f"weight {names[0]} is the same as at the last sync, but SGLang's tensor {tensor} is another",
                    hint="something else wrote into the server's weights; nothing was sampled with them",
                )
        self._hashes, self._checksums = hashes, dict(checksums)


def _parts(checksums: Mapping[str, str], hashes: Hashes) -> dict[str, list[str]]:
    """Return the weights of which each of the server's tensors is made, where its name is known."""
    held = {tensor for rank in hashes for tensor in rank}
    found: dict[str, list[str]] = {}
    for name in checksums:
        homes = [name, *(pattern.sub(fused, name) for pattern, fused in _FUSED if pattern.search(name))]
        if tensor := next((home for home in homes if home in held), None):
            found.setdefault(tensor, []).append(name)
    return found
