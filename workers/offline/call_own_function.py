"""Call a user's own advantage or loss once, on a tiny batch: `python -m workers.offline.call_own_function
advantage|loss PATH`. Prints `{}`, or what is wrong: `{"error", "hint"}`."""

from __future__ import annotations

import contextlib
import json
import sys

import numpy as np

from specs.errors import RlctlError
from specs.own_function import own_advantage


def main(which: str, path: str) -> dict[str, str]:
    try:
        if which == "advantage":
            # Groups of different scores, of equal ones, and of one rollout.
            score_R, group_R = np.array([1.0, 0.0, 0.5, 1.0, 1.0, 0.0]), np.array([0, 0, 0, 1, 1, 2])
            own_advantage(path, score_R, group_R, np.array([3, 1, 7, 2, 2, 5]))
        else:
            from backends.train.own_loss import try_loss

            try_loss(path)
    except RlctlError as error:
        return {"error": error.message, "hint": error.hint}
    return {}


if __name__ == "__main__":
    with contextlib.redirect_stdout(sys.stderr):
        result = main(*sys.argv[1:])
    print(json.dumps(result), flush=True)
