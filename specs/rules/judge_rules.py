"""Rules of terms that a judge grades: what no request could be made of, or no score be read by."""

from __future__ import annotations

import re
from collections.abc import Iterator

from specs.errors import Problem
from specs.schema.rewards import Judge
from specs.schema.spec import Spec
from specs.schema.table import no_effect
from specs.templates import template_columns
from specs.text import show

_OURS = ("model", "messages", "stream", "n")  # of a request: rlctl says these itself, or reads a reply of another shape
_JINJA = re.compile(r"\{\{\s*(\w+)\s*\}\}")


def judge_problems(spec: Spec) -> Iterator[Problem]:
    for index, term in enumerate(spec.reward.terms):
        if isinstance(term, Judge):
            key = f"reward.terms.{index}"
            yield from _request(key, term)
            yield from _score(key, term)
            yield from _keys(key, term, spec)
    if all(term.graded_by != "processes" for term in spec.reward.terms):
        for name in ("workers", "timeout_s", "nodes"):
            if name in spec.reward.model_fields_set:
                yield no_effect(f"reward.{name}", spec.reward, "no term runs in the grading processes")


def _request(key: str, term: Judge) -> Iterator[Problem]:
    address = term.base_url.rstrip("/")
    if address.endswith("/completions"):
        base = address.removesuffix("/completions").removesuffix("/chat")
        message = "rlctl adds /chat/completions itself"
        yield Problem(f"{key}.base_url", message, f"write {show(base)}", show(term.base_url))
    if "completion" not in template_columns(term.prompt):
        jinja = _JINJA.search(term.prompt)
        what = f"write {{{jinja[1]}}}, with single braces" if jinja else "write {completion} where it goes"
        message = "does not name {completion}, so that the judge would not see what it judges"
        yield Problem(f"{key}.prompt", message, what, show(term.prompt))
    for name in _OURS:
        if name in term.body:
            hint = f"use {key}.model" if name == "model" else "take it out"
            yield Problem(
                f"{key}.body.{name}", "belongs to rlctl, which makes the request", hint, show(term.body[name])
            )


def _score(key: str, term: Judge) -> Iterator[Problem]:
    if term.min_score >= term.max_score:
        message = f"not below max_score = {term.max_score:g}"
        yield Problem(f"{key}.min_score", message, "give the bounds that the prompt asks for", f"{term.min_score:g}")
    if not term.score_pattern:
        return
    if term.score_key:
        yield no_effect(f"{key}.score_key", term, "score_pattern reads the score")
    try:
        groups = re.compile(term.score_pattern).groups
    except re.error as error:
        hint = "TOML's '…' keeps backslashes"
        yield Problem(f"{key}.score_pattern", f"not a regular expression: {error}", hint, show(term.score_pattern))
        return
    if not groups:
        hint = r"put the number in parentheses: 'Score: (\d+)'"
        yield Problem(f"{key}.score_pattern", "has no group to read the score from", hint, show(term.score_pattern))


def _keys(key: str, term: Judge, spec: Spec) -> Iterator[Problem]:
    if term.cache_file and not term.cache:
        yield no_effect(f"{key}.cache_file", term, "cache is false")
    if not term.key_env:
        return
    if not re.fullmatch(r"[A-Za-z_]\w*", term.key_env, re.ASCII):
        # It may be the key itself, which must not be shown.
        message, hint = (
            "not the name of an environment variable",
            "name the variable; the key itself stays out of the spec",
        )
        yield Problem(f"{key}.key_env", message, hint)
    if term.key_env in spec.reward.env:
        message = "would be kept in the run directory, with the key that it holds"
        yield Problem(f"reward.env.{term.key_env}", message, "export it before rlctl is called, and remove it here")
