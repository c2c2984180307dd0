"""Mutual proof of the run's secret: HMAC-SHA256 over both sides' nonces. The secret itself never travels.

rank → driver   HELLO      role, rank, pid, nonce
driver → rank   CHALLENGE  nonce, proof of the driver
rank → driver   PROOF      proof of the rank
driver → rank   WELCOME    heartbeat interval, and how much silence counts as death
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from typing import Literal

Side = Literal["driver", "rank"]


def make_nonce() -> str:
    return secrets.token_hex(32)


def make_proof(secret: str, side: Side, *, role: str, rank: int, rank_nonce: str, driver_nonce: str) -> str:
    """Hex proof that `side` knows `secret`; bound to this connection's nonces and to one role and rank."""
    fields = (side, role, str(rank), rank_nonce, driver_nonce)
    text = "|".join(f"{len(field)}:{field}" for field in fields)  # length prefixes separate the fields
    return hmac.new(secret.encode(), text.encode(), hashlib.sha256).hexdigest()


def same_proof(one: object, other: str) -> bool:
    """Compare in constant time; anything but an ASCII string is wrong."""
    return isinstance(one, str) and one.isascii() and hmac.compare_digest(one, other)
