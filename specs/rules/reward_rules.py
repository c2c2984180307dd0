"""Rules of the reward: its terms, judges, reward model, and the section of its role."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from specs.builtin_tasks import GYM_PREFIX
from specs.errors import Problem
from specs.schema.recipes import RlSpec, SamplingSpec
from specs.schema.rewards import Judge, ModelScore, Overlong, ReasoningGym, Regex
from specs.schema.roles import REWARD_MODEL
from specs.schema.table import no_effect
from specs.templates import single_braces, template_columns
from specs.text import show

_OURS = ("model", "messages", "stream", "n")  # of a request: rlctl sets these, or reads a reply of another shape
_QUOTES = "TOML's '…' keeps backslashes"


def reward_problems(spec: SamplingSpec) -> Iterator[Problem]:
    """Yield weights, patterns, requests and keys that cannot work or do nothing."""
    terms = spec.reward_terms
    if terms and all(term.weight == 0 for term in terms):
        yield Problem("reward.terms", "every weight is 0, so every completion scores 0", "give a term a weight")
    for index, term in enumerate(terms):
        key = f"reward.terms.{index}"
        if isinstance(term, Regex):
            yield from _pattern(f"{key}.pattern", term.pattern)
        elif isinstance(term, Overlong) and term.buffer_tokens > (most := spec.max_response_tokens):
            message = f"longer than the longest completion ({spec.lengths}.max_response_tokens = {most})"
            yield Problem(f"{key}.buffer_tokens", message, f"use at most {most}")
        elif isinstance(term, Judge):
            yield from _request(key, term)
            yield from _judged_score(key, term)
            yield from _judge_key(key, term, spec)
        elif isinstance(term, ReasoningGym):
            yield from _gym_term(key, spec)
    yield from _model(spec)
    yield from _section(spec)


def _gym_term(key: str, spec: SamplingSpec) -> Iterator[Problem]:
    """Yield a source of completed prompts that is not of reasoning-gym."""
    sources = {f"{one.key}.data": one.data for one in spec.evaluations if one.data}
    if isinstance(spec, RlSpec) or len(sources) < len(spec.evaluations):
        sources |= spec.data.named
    for name, source in sources.items():
        if not source.startswith(GYM_PREFIX):
            message = f"scores rows of reasoning-gym, and {name} is {show(source)}"
            yield Problem(
                key, message, f'set {name} = "{GYM_PREFIX}NAME", or use another term', 'kind = "reasoning_gym"'
            )


def _section(spec: SamplingSpec) -> Iterator[Problem]:
    """Yield keys of a role that the reward has no use for."""
    section = spec.reward
    if section is None:  # another rule asks for it
        return
    given = section.model_fields_set
    for name, default, why in (
        ("processes", section.nodes, "the reward role is one process on each node; reward.workers sets how many grade"),
        ("launcher", "python", "the reward role is one process on each node"),
        ("devices", (), "grading runs on the CPU"),
    ):
        if getattr(section, name) != default:
            hint = f"write {show(default)}" if section.nodes > 1 else f"remove the key, or write {show(default)}"
            yield Problem(f"reward.{name}", why, hint)
    if all(term.graded_by != "processes" for term in section.terms):
        for name in ("workers", "timeout_s", *(() if spec.environments else ("nodes",))):  # environments are there too
            if name in given:
                yield no_effect(f"reward.{name}", "no term runs in the grading processes")


def _pattern(key: str, pattern: str, *, group: bool = False) -> Iterator[Problem]:
    try:
        groups = re.compile(pattern, re.DOTALL).groups
    except (re.error, OverflowError, RecursionError) as error:
        yield Problem(key, f"not a regular expression: {error}", _QUOTES)
        return
    if group and not groups:
        yield Problem(key, "has no group to read the score from", r"put the number in parentheses: 'Score: (\d+)'")


# ── judges ────────────────────────────────────────────────────────────────────────────────────────


def _request(key: str, term: Judge) -> Iterator[Problem]:
    address = term.base_url.rstrip("/")
    if address.endswith("/completions"):
        base = address.removesuffix("/completions").removesuffix("/chat")
        yield Problem(f"{key}.base_url", "rlctl adds /chat/completions itself", f"write {show(base)}")
    if "completion" not in template_columns(term.prompt):
        message = "does not name {completion}, so that the judge would not see what it judges"
        hint = single_braces(term.prompt) or "write {completion} where it goes"
        yield Problem(f"{key}.prompt", message, hint)
    for name, value in term.body.items():
        if name in _OURS:
            hint = f"use {key}.model" if name == "model" else "take it out"
            yield Problem(f"{key}.body.{name}", "belongs to rlctl, which makes the request", hint)
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError):
            hint = "write text, a finite number, true or false, a list or a table"
            yield Problem(f"{key}.body.{name}", "a request is JSON, which has no such value", hint, show(value))


def _judged_score(key: str, term: Judge) -> Iterator[Problem]:
    if term.min_score >= term.max_score:
        message = f"not below max_score = {term.max_score:g}"
        yield Problem(f"{key}.min_score", message, "give the bounds that the prompt asks for")
    if term.score_pattern:
        if term.score_key:
            yield no_effect(f"{key}.score_key", "score_pattern reads the score")
        yield from _pattern(f"{key}.score_pattern", term.score_pattern, group=True)


def _judge_key(key: str, term: Judge, spec: SamplingSpec) -> Iterator[Problem]:
    if term.cache_file and not term.cache:
        yield no_effect(f"{key}.cache_file", "cache is false")
    if term.key_env and not re.fullmatch(r"[A-Za-z_]\w*", term.key_env, re.ASCII):
        hint = "name the variable; the key itself stays out of the spec"
        hidden = "…"  # it may be the key itself
        yield Problem(f"{key}.key_env", "not the name of an environment variable", hint, hidden)
    if term.key_env in spec.grading.env:
        message, hint = "would be kept in the run directory", "export it before rlctl is called, and remove it here"
        yield Problem(f"reward.env.{term.key_env}", f"{message}, with the key that it holds", hint, "…")


# ── the reward model ──────────────────────────────────────────────────────────────────────────────


def _model(spec: SamplingSpec) -> Iterator[Problem]:
    asking = [index for index, term in enumerate(spec.reward_terms) if isinstance(term, ModelScore)]
    if asking and spec.reward_model is None:
        hint = f'add a section [{REWARD_MODEL}] with model = "…", a sequence-classification checkpoint'
        yield Problem(f"reward.terms.{asking[0]}", "no model is named", hint, 'kind = "model"')
    elif spec.reward_model is not None and not asking:
        hint = 'add { kind = "model" } to reward.terms, or remove the section'
        yield Problem(f"[{REWARD_MODEL}]", "has no effect: no term of reward.terms asks it", hint)
    for index in asking[1:] if spec.reward_model is not None else ():
        hint = f"change the weight of reward.terms.{asking[0]} instead"
        yield Problem(f"reward.terms.{index}", "asks the same model again", hint, 'kind = "model"')
