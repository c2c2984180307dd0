"""Runs a user's own advantage or loss once on a tiny batch, in a process of its own: `python -m
workers.offline.own_function_trial advantage|loss PATH`. Prints what is wrong as JSON: {}, {"error", "hint"}, or
{"warning", "hint"}."""

from __future__ import annotations

import contextlib
import json
import sys

import numpy as np

from specs.errors import RlctlError
from specs.schema.algorithms.own_function import own_advantage

_AGAINST = {
    "loss": "falls as tokens of positive advantage become rarer: a loss is minimised, and this is what is to grow",
    "advantage": "gives the worse rollout of a group the higher advantage: the policy would learn what scores least",
}


def try_advantage(path: str) -> list[float]:
    """On groups of different scores, of equal ones, and of one rollout. Raises RlctlError."""
    score_R, group_R = np.array([1.0, 0.0, 0.5, 1.0, 1.0, 0.0]), np.array([0, 0, 0, 1, 1, 2])
    return list(own_advantage(path, score_R, group_R, np.array([3, 1, 7, 2, 2, 5])).tolist())


def worse_is_better(path: str) -> bool:
    """Whether in each group the worse of two rollouts gets the higher advantage. Raises RlctlError."""
    score_R, group_R = np.array([1.0, 0.0, 3.0, 2.0]), np.array([0, 0, 1, 1])
    advantage_R = own_advantage(path, score_R, group_R, np.array([4, 4, 4, 4]))
    return bool(advantage_R[0] < advantage_R[1] and advantage_R[2] < advantage_R[3])


def main(which: str, path: str) -> dict[str, str]:
    try:
        if which == "advantage":
            trial, turned = try_advantage, worse_is_better
        else:
            from backends.train.own_loss import try_loss as trial
            from backends.train.own_loss import wrong_sign as turned
        once, again = trial(path), trial(path)
        against = once == again and turned(path)
    except RlctlError as error:
        return {"error": error.message, "hint": error.hint}
    if once != again:
        message = "called twice on the same batch, it returns different numbers: no run can be repeated"
        return {"warning": message, "hint": "draw no random numbers and keep no state in it"}
    if against:
        return {"warning": _AGAINST[which], "hint": "turn its sign round"}
    return {}


if __name__ == "__main__":
    with contextlib.redirect_stdout(sys.stderr):
        result = main(*sys.argv[1:])
    print(json.dumps(result), flush=True)
