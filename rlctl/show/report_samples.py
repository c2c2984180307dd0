"""The samples on a report: first and last, best and worst, some at random, those that were cut off."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlctl.show.metrics_file import read_samples
from rlctl.show.text_format import html, number
from specs.errors import RunDirError

Sample = dict[str, Any]
TEXT_SHOWN = 600  # characters of a prompt or a completion
EACH = 8  # samples of each kind
LARGEST = 1e300
ENDS = {True: "finished", False: "truncated"}
KINDS = ("first", "last", "best", "worst", "random", "truncated", "not graded")


def samples_section(path: Path, title: str = "Samples", name: str = "samples") -> str:
    """Section for a file of samples; empty where there are none. `name`: of its filter, once on a page."""
    try:
        samples = read_samples(path)
    except RunDirError as error:
        return f'<p class="note">{html(error.message)}</p>'
    return _section(samples, title, name)


def evaluation_sections(path: Path) -> list[str]:
    """A section for each set of `eval.jsonl`."""
    try:
        samples = read_samples(path)
    except RunDirError as error:
        return [f'<p class="note">{html(error.message)}</p>']
    sets: dict[str, list[Sample]] = {}
    for sample in samples:
        sets.setdefault(str(sample.get("name", "")), []).append(sample)
    return [_section(own, f"Evaluation {name}", f"evaluation{i}") for i, (name, own) in enumerate(sets.items())]


def _section(samples: Sequence[Sample], title: str, name: str) -> str:
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
    heads = ("step", "prompt", "completion", "end", "answer", "reward", "terms")
    head = "".join(f"<th>{head}</th>" for head in heads)
    table = f"<div class=wide><table><tr class=head>{head}</tr>{''.join(rows)}</table></div>"
    return f"<section class=filter><style>{hidden}</style><h2>{html(title)}</h2>{inputs}{table}</section>"


def chosen(samples: Sequence[Sample]) -> dict[int, list[str]]:
    """Index → why it is shown. Best, worst and random are of the last quarter: what the policy does now."""
    count = len(samples)
    late = range(count - max(EACH, count // 4), count) if count > EACH else range(count)
    graded = [index for index in late if reward_of(samples[index]) is not None]
    by_reward = sorted(graded, key=lambda index: reward_of(samples[index]) or 0.0)
    cut = [index for index in range(count) if samples[index].get("finished") is False]
    lost = [index for index in range(count) if samples[index].get("scored") is False]
    picked = {
        "first": range(count)[: EACH // 2],
        "last": range(count)[-EACH:],
        "best": by_reward[-EACH:],
        "worst": by_reward[:EACH],
        "random": random.Random(count).sample(list(late), min(EACH, len(late))),
        "truncated": cut[-EACH:],
        "not graded": lost[-EACH:],
    }
    kinds: dict[int, list[str]] = {}
    for kind, indices in picked.items():
        for index in indices:
            kinds.setdefault(index, []).append(kind)
    return kinds


def reward_of(sample: Sample) -> float | None:
    value = sample.get("reward")
    return float(value) if isinstance(value, int | float) and -LARGEST < value < LARGEST else None


def _row(sample: Sample, kinds: Sequence[str]) -> str:
    written = sample.get("completion_raw", sample.get("completion"))
    texts = "".join(f"<td><pre>{html(_cut(text))}</pre></td>" for text in (sample.get("prompt"), written))
    texts += f"<td>{ENDS[sample['finished'] is True] if 'finished' in sample else '–'}</td>"
    texts += f"<td><pre>{html(_cut(sample.get('answer')))}</pre></td>"
    reward = sample.get("reward")
    score = number(reward_of(sample)) if isinstance(reward, int | float | None) else html(reward)
    score = "not graded" if sample.get("scored") is False else score
    terms = sample.get("terms")
    listed = [number(float(one)) for one in terms if isinstance(one, int | float)] if isinstance(terms, list) else []
    classes = " ".join(_css(kind) for kind in kinds)
    return (
        f'<tr class="{classes}"><td>{html(sample.get("step", ""))}</td>{texts}<td>{score}</td>'
        f"<td>{', '.join(listed) or '–'}</td></tr>"
    )


def _css(kind: str) -> str:
    return kind.replace(" ", "-")


def _cut(text: Any) -> str:
    shown = "" if text is None else str(text)
    return shown if len(shown) <= TEXT_SHOWN else shown[:TEXT_SHOWN] + " …"
