"""Rules of sequence parallelism: what ranks that share samples need of processes and engine. What they need of the
model stands in `rlctl/models/shapes_fit.py`."""

from __future__ import annotations

from collections.abc import Iterator

from specs.errors import Problem
from specs.schema.engines.engine_table import TrainTable, engine_of
from specs.schema.mesh import divisors
from specs.schema.role_section import ModelRole
from specs.schema.roles import REWARD_MODEL, RoleName
from specs.schema.spec import RewardModelSection, Spec
from specs.text import listed

_OTHERWISE = "context_parallel"  # the key of an engine that cuts rows itself


def sharing_problems(spec: Spec) -> Iterator[Problem]:
    for role, section in spec.sections():
        if not isinstance(section, ModelRole):
            continue
        yield from _degree(role, section)
        if role in spec.roles:
            yield from _longest(spec, role, section)


def _degree(role: RoleName, section: ModelRole) -> Iterator[Problem]:
    degree, engine = section.sequence_parallel, engine_of(section)
    key = f"{role}.sequence_parallel"
    if degree == 1:
        return
    if isinstance(engine, TrainTable) and engine.cuts_sequences is False:
        message = f"the ranks of the engine {engine.kind} cannot share samples"
        hint = "remove the key: each rank has its own"
        if _OTHERWISE in type(engine).model_fields:
            hint = f"remove the key; {role}.engine.{_OTHERWISE} = {degree} cuts every row across so many ranks"
        yield Problem(key, message, hint, str(degree))
    elif isinstance(engine, TrainTable) and engine.cuts_sequences is None:
        message = f"not known: the engine {engine.kind} does not say whether its ranks can share samples"
        hint = f"remove the key, or take a version of {engine.kind} whose table sets cuts_sequences = True"
        yield Problem(key, message, hint, str(degree))
    elif section.processes % degree:
        message = f"{section.processes} processes of {role} cannot be shared out to groups of {degree}"
        fitting = f"{listed(divisors(section.processes))} would fit"
        more = -(-section.processes // degree) * degree
        yield Problem(key, message, f"{fitting}, or {role}.processes = {more}", str(degree))


def _longest(spec: Spec, role: RoleName, section: ModelRole) -> Iterator[Problem]:
    """A sample is never cut: a row of the ranks that share it has room for the longest."""
    longest = spec.longest_tokens(role)
    if section.row_tokens >= longest:
        return
    tokens, degree = section.micro_batch_tokens, section.sequence_parallel
    if isinstance(section, RewardModelSection):
        named = f"{REWARD_MODEL}.max_sequence_tokens = {longest}"
    else:
        named = f"data.max_prompt_tokens + data.max_response_tokens = {longest} tokens"
    times = f"times {role}.sequence_parallel = {degree} it is {section.row_tokens}, " if degree > 1 else ""
    hint = f"use at least {-(-longest // degree)}"
    engine = engine_of(section)
    enough = [n for n in divisors(section.processes) if n * tokens >= longest]
    if enough and isinstance(engine, TrainTable) and engine.cuts_sequences:
        hint += f", or share each sample out to {enough[0]} ranks: {role}.sequence_parallel = {enough[0]}"
    elif isinstance(section, RewardModelSection):
        hint += ", or lower max_sequence_tokens"
    message = f"{times}less than the longest sequence ({named})"
    yield Problem(f"{role}.micro_batch_tokens", message, hint, str(tokens))
