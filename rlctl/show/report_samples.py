"""Show samples on a report, in tables of which a reader picks: the last, the best, those that were truncated."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rlctl.show.charts import drawable
from rlctl.show.metrics_file import each_sample
from rlctl.show.report_page import note
from rlctl.show.text_format import counted, html, number
from specs.errors import RunDirError

TEXT_SHOWN = 600  # characters of a prompt or a completion
FIRST, LAST = 8, 120  # samples that a page holds
HEADINGS = ("step", "prompt", "completion", "end", "answer", "reward", "terms")
CHOICES = ("last", "first", "best", "worst", "random", "truncated", "not graded", "all")  # known to report.js, too


def sample_sections(path: Path, title: str) -> str:
    """Return a section for the samples in a file, or one for each evaluation set that they name."""
    sets: dict[str, tuple[list[dict[str, Any]], deque[dict[str, Any]]]] = {}
    try:
        for sample in each_sample(path):
            first, last = sets.setdefault(f"{title} {sample.get('name', '')}".strip(), ([], deque(maxlen=LAST)))
            (first if len(first) < FIRST else last).append(sample)
    except RunDirError as error:
        return note(error.message)
    return "".join(_section(heading, [*first, *last]) for heading, (first, last) in sets.items())


def _section(title: str, samples: Sequence[dict[str, Any]]) -> str:
    inputs = "".join(
        f"<label><input type=radio name=shown value='{choice}'{' checked' * (choice == 'last')}>{choice}</label>"
        for choice in CHOICES
    )
    head = "".join(f"<th>{heading}</th>" for heading in HEADINGS)
    rows = list[str]()
    for sample in samples:
        with suppress(AttributeError, LookupError, OverflowError, TypeError, ValueError):  # not as rlctl writes it
            rows.append(_row(sample))
    odd = len(samples) - len(rows)
    left_out = note(f"left out: {counted(odd, 'line')} that rlctl did not write so") if odd else ""
    table = f"<div class=wide><table><tr>{head}</tr>{''.join(rows)}</table></div>{left_out}"
    return f"<section><h2>{html(title)}</h2><form autocomplete=off>{inputs}{table}</form></section>"


def _row(sample: dict[str, Any]) -> str:
    reward, terms = sample.get("reward"), sample.get("terms")
    graded = sample.get("scored") is not False
    end = ("finished" if sample["finished"] is True else "truncated") if "finished" in sample else "–"
    score = number(drawable(reward)) if isinstance(reward, int | float | None) else html(reward)
    terms = terms if isinstance(terms, list) else []
    values = [number(float(term)) for term in terms if isinstance(term, int | float)]
    pieces = sample.get("pieces")
    wrote = (
        _episode(pieces) if isinstance(pieces, list) else _text(sample.get("completion_raw", sample.get("completion")))
    )
    cells = (
        html(sample.get("step", "")),
        _text(sample.get("prompt")),
        wrote + _requests(sample.get("requests")),
        html(str(sample.get("stop", end)).replace("_", " ")),
        _text(sample.get("answer")),
        score if graded else "not graded",
        ", ".join(values) or "–",
    )
    rank = drawable(reward) if graded else None
    about = f'data-reward="{"" if rank is None else rank}" data-end="{end}" data-graded="{"yes" if graded else "no"}"'
    return f"<tr {about}>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"


def _episode(pieces: Sequence[Any]) -> str:
    """Show what followed the prompt: of the policy each token with its log-prob, of others plain text."""
    shown, left = [], 4 * TEXT_SHOWN
    for piece in pieces[1:]:
        spans = []
        for text, logprob in piece.get("tokens", [[piece["text"], None]]):
            cut = html(text[: max(0, left)])
            spans.append(cut if logprob is None or not cut else f"<i title='{html(number(logprob))}'>{cut}</i>")
            left -= len(text)
        shown.append(f"<span class={'wrote' if 'tokens' in piece else 'told'}>{''.join(spans)}</span>")
        if left <= 0:
            shown.append(" …")
            break
    return f"<pre>{''.join(shown)}</pre>"


def _requests(asked: object) -> str:
    """Show what an agent asked in its episode: which sample each turn is in, and what is not learned from."""
    if not isinstance(asked, list) or not asked:
        return ""
    lines = []
    for one in asked:
        marks = {
            "a new conversation": one["root"],
            "not learned from": not one["learned"],
            "nobody has read it": not one["delivered"],
            f"asked {one['asked']} times": one["asked"] > 1,
        }
        about = f"{one['wire']}: {one['tokens']} tokens of sample {one['sample']}, {one['tools']} tools"
        lines.append(", ".join([about, *(mark for mark, holds in marks.items() if holds)]))
    left = sum(not one["learned"] for one in asked)
    head = f"{len(asked)} requests" + (f", {left} not learned from" if left else "")
    return f"<details><summary>{head}</summary><pre>{html(chr(10).join(lines))}</pre></details>"


def _text(text: object) -> str:
    shown = "" if text is None else str(text)
    return f"<pre>{html(shown if len(shown) <= TEXT_SHOWN else shown[:TEXT_SHOWN] + ' …')}</pre>"
