"""Show samples on a report: first and last, best and worst, some at random, those that were cut off."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlctl.show.charts import drawable
from rlctl.show.metrics_file import read_samples
from rlctl.show.report_page import note
from rlctl.show.text_format import html, number
from specs.errors import RunDirError

Sample = dict[str, Any]
TEXT_SHOWN = 600  # characters of a prompt or a completion
EACH = 8  # samples of each kind
HEADINGS = ("step", "prompt", "completion", "end", "answer", "reward", "terms")
KINDS = ("first", "last", "best", "worst", "random", "truncated", "not graded")


def samples_section(path: Path) -> str:
    """Return a section for a file of samples; empty where there are none."""
    try:
        return _section(read_samples(path), "Samples", "samples")
    except RunDirError as error:
        return note(error.message)


def evaluation_sections(path: Path) -> list[str]:
    """Return a section for each set of `eval.jsonl`."""
    try:
        samples = read_samples(path)
    except RunDirError as error:
        return [note(error.message)]
    sets: dict[str, list[Sample]] = {}
    for sample in samples:
        sets.setdefault(str(sample.get("name", "")), []).append(sample)
    return [_section(own, f"Evaluation {name}", f"evaluation{i}") for i, (name, own) in enumerate(sets.items())]


def _section(samples: Sequence[Sample], title: str, name: str) -> str:
    """Return a table that can be filtered. `name`: what its filter is called, once on a page."""
    if not samples:
        return ""
    kinds = chosen(samples)
    rows = [_row(samples[index], kinds[index]) for index in sorted(kinds)]
    inputs = "".join(
        f"<input type=radio name={name} id={name}-{_css(kind)}{' checked data-all' if kind == 'all' else ''}>"
        f"<label for={name}-{_css(kind)}>{kind}</label>"
        for kind in ("all", *KINDS)
    )
    hidden = " ".join(
        f"#{name}-{_css(kind)}:checked ~ .wide tr:not(.{_css(kind)}):not(.head) {{ display: none; }}" for kind in KINDS
    )
    head = "".join(f"<th>{heading}</th>" for heading in HEADINGS)
    table = f"<div class=wide><table><tr class=head>{head}</tr>{''.join(rows)}</table></div>"
    return f"<section class=filter><style>{hidden}</style><h2>{html(title)}</h2>{inputs}{table}</section>"


def chosen(samples: Sequence[Sample]) -> dict[int, list[str]]:
    """Return why each shown sample is, by index. Best, worst and random are from the last quarter: what the policy
    does now."""
    count = len(samples)
    late = range(count - max(EACH, count // 4), count) if count > EACH else range(count)
    rewards = {index: reward for index in late if (reward := drawable(samples[index].get("reward"))) is not None}
    by_reward = sorted(rewards, key=lambda index: rewards[index])
    picked = {
        "first": range(count)[: EACH // 2],
        "last": range(count)[-EACH:],
        "best": by_reward[-EACH:],
        "worst": by_reward[:EACH],
        "random": random.Random(count).sample(list(late), min(EACH, len(late))),
        "truncated": [index for index in range(count) if samples[index].get("finished") is False][-EACH:],
        "not graded": [index for index in range(count) if samples[index].get("scored") is False][-EACH:],
    }
    kinds: dict[int, list[str]] = {}
    for kind, indices in picked.items():
        for index in indices:
            kinds.setdefault(index, []).append(kind)
    return kinds


def _row(sample: Sample, kinds: Sequence[str]) -> str:
    reward, terms = sample.get("reward"), sample.get("terms")
    score = number(drawable(reward)) if isinstance(reward, int | float | None) else html(reward)
    terms = terms if isinstance(terms, list) else []
    cells = (
        html(sample.get("step", "")),
        _text(sample.get("prompt")),
        _text(sample.get("completion_raw", sample.get("completion"))),
        ("finished" if sample["finished"] is True else "truncated") if "finished" in sample else "–",
        _text(sample.get("answer")),
        "not graded" if sample.get("scored") is False else score,
        ", ".join(number(float(term)) for term in terms if isinstance(term, int | float)) or "–",
    )
    return f'<tr class="{" ".join(map(_css, kinds))}">{"".join(f"<td>{cell}</td>" for cell in cells)}</tr>'


def _css(kind: str) -> str:
    return kind.replace(" ", "-")


def _text(text: Any) -> str:
    shown = "" if text is None else str(text)
    return f"<pre>{html(shown if len(shown) <= TEXT_SHOWN else shown[:TEXT_SHOWN] + ' …')}</pre>"
