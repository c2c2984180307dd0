"""Rules about deadlines: each must leave the others something to do."""

from __future__ import annotations

from collections.abc import Iterator

from specs.errors import Problem
from specs.schema.spec import Spec
from specs.schema.table import no_effect
from specs.text import show


def deadline_problems(spec: Spec) -> Iterator[Problem]:
    """`run.stall_timeout_s` comes after the silence of a rank and the time of one grade, and before a verb's deadline.
    A default that is out of that order does nothing worse than nothing."""
    run, stall_s = spec.run, spec.run.stall_timeout_s
    if "stall_timeout_s" in run.model_fields_set and stall_s >= run.verb_timeout_s:
        yield no_effect("run.stall_timeout_s", run, f"run.verb_timeout_s = {run.verb_timeout_s:g} comes first")
    elif stall_s < run.heartbeat_timeout_s:
        message = f"less than run.heartbeat_timeout_s = {run.heartbeat_timeout_s:g}, after which a rank counts as gone"
        yield Problem("run.stall_timeout_s", message, f"use more than {run.heartbeat_timeout_s:g}", show(stall_s))
    elif stall_s <= spec.reward.timeout_s:
        message = f"one completion may take reward.timeout_s = {spec.reward.timeout_s:g} s to grade, and nothing moves"
        yield Problem("run.stall_timeout_s", message, f"use more than {spec.reward.timeout_s:g}", show(stall_s))
