"""Rules of terms that a judge grades: what no request could be made of, or no score be read by."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator

from pydantic_core import Url

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


def judge_warnings(spec: Spec) -> Iterator[Problem]:
    """Keys that everybody on the way can read, and scores that are read by another scale."""
    for index, term in enumerate(spec.reward.terms):
        if isinstance(term, Judge) and term.key_env and not _is_private(term.base_url):
            message = f"the key in {term.key_env} would travel over plain http, which everybody on the way can read"
            hint = "use https, or a tunnel that ends at localhost"
            yield Problem(f"reward.terms.{index}.base_url", message, hint, show(term.base_url))
        if isinstance(term, Judge):
            yield from _scale(index, term)
            yield from _reply(f"reward.terms.{index}", term)


_SCALE = re.compile(
    r"(?:from|between|scale of|rate)\D{0,20}\d+(?:\.\d+)?\s*(?:to|and|-|–)\s*(\d+(?:\.\d+)?)|out of (\d+)",
    re.IGNORECASE,
)


def _scale(index: int, term: Judge) -> Iterator[Problem]:
    """A prompt that asks for scores of another scale than the one that they are read by."""
    asked = {float(one or other) for one, other in _SCALE.findall(term.prompt)}
    if asked and term.max_score not in asked and term.max_score != 1:
        message = f"the prompt asks for scores up to {max(asked):g}"
        yield Problem(f"reward.terms.{index}.max_score", message, f"write {max(asked):g}", show(term.max_score))


_TOKENS = ("max_tokens", "max_completion_tokens", "max_new_tokens")
_SHOWN = re.compile(r"[`\"]([^`\"\n]+)[`\"]")  # what a prompt quotes
_OF = re.compile(r"(\d+(?:\.\d+)?)\s*/\s*(\d+(?:\.\d+)?)")


def _reply(key: str, term: Judge) -> Iterator[Problem]:
    """A reply as the prompt asks for it in which no score is found, or another one; and one that has no room for it."""
    asked = f"{term.system}\n{term.prompt}".replace("{{", "{").replace("}}", "}")
    named = re.findall(r'"(\w+)"\s*:', asked)
    if term.score_key and named and term.score_key not in asked:
        message = f"the prompt asks for {', '.join(map(show, named[:3]))}"
        yield Problem(
            f"{key}.score_key", message, "name the key that the judge is asked to write", show(term.score_key)
        )
    for shown in _SHOWN.findall(asked) if term.score_pattern else ():
        read, of = [*re.finditer(term.score_pattern, shown)], _OF.search(shown)
        if read and of and read[-1][1] == of[2] != of[1] and float(of[2]) == term.max_score:
            message = f"finds {of[2]} in {show(shown)}, which the prompt shows: every score would be the highest"
            hint = r"read what stands before it: (\d+)\s*/"
            yield Problem(f"{key}.score_pattern", message, hint, show(term.score_pattern))
            break
    words = re.search(r"[A-Za-z]{2,}", re.sub(r"\\.", "", term.score_pattern))
    least = 3 if term.score_key else 2 if words else 1  # a JSON object's key and value, a word and its number
    for name in _TOKENS:
        most_tokens = term.body.get(name)
        if isinstance(most_tokens, int) and not isinstance(most_tokens, bool) and most_tokens < least:
            message = "leaves a reply no room for the score that is read from it"
            yield Problem(f"{key}.body.{name}", message, "512 is the default", show(most_tokens))


def _is_private(url: str) -> bool:
    """Whether what is sent there is encrypted, or stays on this host."""
    parts = Url(url)
    host = (parts.host or "").strip("[]")
    try:
        return parts.scheme == "https" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


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
