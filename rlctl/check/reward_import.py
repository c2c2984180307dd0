"""Reward functions, imported and called as a run would do it: in a process of their own, by the very code that grades.
Each is called for the first row of the data, with the row's own answer and with an empty completion, and, if that was
quick, with completions such as a policy writes.
"""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rlctl.check.answer_places import only_at_the_start, within_numbers
from rlctl.check.growth import said_of, slowest_growth
from rlctl.check.reward_trial import OfColumns, Try, a_try, better_than_others, trial_findings
from rlctl.check.trial_process import NoGrade, TrialProcess, job_of
from rlctl.models.chat_template import chat_template_of
from rlctl.models.hub import Folder
from rlctl.models.paths import model_folder
from rlctl.models.tokenizer_files import special_texts
from rlctl.preflight.data_relations import ask_to_think
from rlctl.preflight.first_row import row_columns, trial_rows
from rlctl.preflight.rendered_rows import messages_of, rendering
from rlctl.preflight.small_tokens import small_tokenizer
from specs.errors import Problem
from specs.schema.rewards import Function, compares_answer
from specs.schema.row_values import gold_answer
from specs.schema.spec import Spec
from specs.templates import render_template, template_columns
from specs.text import show
from workers.data.row_source import DataRow
from workers.grading.reward_failures import is_of_code, last_line
from workers.grading.signatures import ALL_COLUMNS, DEFAULT, OF_A_SAMPLE, REFERENCE
from workers.grading.terms import Setting
from workers.grading.trial_completions import OWN, Said, likely_completions

TIMEOUT_S = 20.0
CALL_S = 5.0  # for a call: it may be slow, and then a probe says so
_QUICK_S, _MORE_S = 0.3, 1.0  # two calls that cost nothing, and all those that follow them
_AGAIN = 3  # more chances to be quick: the machine may be busy
_SLOW_S = 3.0  # two first calls that may have loaded something
_GROWTH_S, _LONG_S = 0.25, 2.0  # longer and longer completions together, and one of them
_ROOM_TOKENS, _SHORT = 128, 40  # tokens that leave room for thoughts, and characters of an answer that they lead to
_AT_ONCE = re.compile(
    r"\b(?:only|just|nothing else|directly|immediately|no (?:explanation|reasoning|words)"
    r"|without (?:explanation|\w+ing))\b",
    re.IGNORECASE,
)
_OTHER_SHARE = 0.1  # of rows whose right answer scores no more than a wrong one


@dataclass(frozen=True)
class Tried:
    """A reward function as it was called. `given`: parameter → what it gets. `own_answer`, `empty`: what it gave for
    the first row's own answer and for an empty completion, None where there was no row, or no number in time; the first
    also where the row has no `data.answer_column`, which `without_answer` names."""

    key: str
    path: str
    given: Mapping[str, str]
    own_answer: float | None = None
    empty: float | None = None
    without_answer: str = ""


def try_functions(
    spec: Spec, spec_dir: Path, known: Collection[str] = ()
) -> tuple[list[Problem], list[Problem], list[Tried]]:
    """(errors, warnings, calls) of importing the reward functions and calling them; keys in `known` have been found
    wrong already."""
    started: list[_Importing] = []
    judging: list[_Judging] = []
    errors, warnings, tried = [], [], []
    rows = trial_rows(spec, spec_dir)
    row = rows[0] if rows else None
    folder: Folder | None = None
    try:
        for index, term in enumerate(spec.reward.terms):
            key = f"reward.terms.{index}.path"
            if isinstance(term, Function) and not {key, "reward.python"} & set(known):
                folder = folder or model_folder(spec.model.path, spec_dir)
                started.append(_start(spec, spec_dir, index, term, rows, folder))
        for one in started:
            try:
                said = one.process.given(TIMEOUT_S)
            except NoGrade:
                hint = "a run gives it longer; load what is large when score is first called"
                warnings.append(Problem(one.key, f"still being imported after {TIMEOUT_S:g} s", hint, show(one.path)))
                continue
            if isinstance(said, tuple):
                errors.append(Problem(one.key, *said, show(one.path)))
                continue
            call, problem, tries = _called(one, said, row)
            answered = row is None or spec.data.answer_column in row.values
            tried.append(call if answered else replace(call, without_answer=spec.data.answer_column))
            (errors if problem and problem.of_code else warnings).extend([problem.said] if problem else [])
            if not said or {OF_A_SAMPLE["completion"], ALL_COLUMNS} & set(said.values()):
                of_tries = [*_of_tries(spec, one, tries, said)]
                warnings += of_tries or _of_prompt(spec, one, tries, said)
                warnings += _of_growth(spec, one) if _all_given(one, tries) else ()
                warnings += _kept_defaults(one, said, row)
                if isinstance(folder, Path):
                    liked = _liked(spec, one, tries)
                    warnings += _only_with_special(one, liked, folder)
                    warnings += _only_too_long(spec, one, liked, folder)
                warnings += _of_other_rows(spec, one, tries, None if of_tries else said)
                judging += [] if of_tries else [(one, said, tries)]
            elif not problem:
                message = f"{one.path.rpartition(':')[2]} is not given the completion: its score does not depend on it"
                hint = "let it take completion, or leave the term out"
                warnings.append(Problem(one.key, message, hint, show(one.path)))
        warnings += _of_places(spec, folder, judging, [one.key for one in warnings])
    finally:
        for one in started:
            one.process.end()
    return errors, warnings, tried


def _called(
    one: _Importing, given: Mapping[str, str], row: DataRow | None
) -> tuple[Tried, _Failed | None, Sequence[Try]]:
    """What its two calls gave; a problem where both fail; and where both gave a number, all calls."""
    call = Tried(one.key, one.path, given)
    if row is None:
        return call, None, ()
    lines: list[dict[str, Any]] = []
    began, slow = time.monotonic(), False
    try:
        for line in one.process.grades(CALL_S):
            lines.append(line)
    except NoGrade as no_grade:
        slow = no_grade.slow
    failed = [line for line in lines if "t" not in line]
    if len(failed) == 2:
        name = one.path.rpartition(":")[2]
        last = last_line(str(failed[0]["text"]))
        hint = f"call it with the row of {row.where}"
        message = f"{name}, called with the first row, gives no score: {last}"
        of_code = all(is_of_code(str(line["cause"]), str(line["text"])) for line in failed)
        return call, _Failed(Problem(one.key, message, hint, show(one.path)), of_code), ()
    numbers = [line["t"][0] if "t" in line else None for line in lines] + [None] * (2 - len(lines))
    call = replace(call, own_answer=numbers[0] if one.completions[0].right else None, empty=numbers[1])
    if slow:
        message = f"{one.path.rpartition(':')[2]}, called with the first row, gives no score within {CALL_S:g} s"
        hint = "a run grades every completion of a step: make it quicker, or raise reward.workers and reward.timeout_s"
        return call, _Failed(Problem(one.key, message, hint, show(one.path)), of_code=False), ()
    if failed and len(lines) == 2:
        what = "an empty completion" if "t" not in lines[1] else "the row's own answer"
        message = (
            f"{one.path.rpartition(':')[2]}, called with {what}, gives no score: {last_line(str(failed[0]['text']))}"
        )
        hint = "return a number whatever the model writes, 0.0 for what cannot be read"
        return call, _Failed(Problem(one.key, message, hint, show(one.path)), of_code=False), ()
    taken_s = time.monotonic() - began
    if None in numbers or (
        taken_s > _QUICK_S and (taken_s > _SLOW_S or not any(_quick_again(one) for _ in range(_AGAIN)))
    ):
        return call, None, ()
    first = [a_try(said, line) for said, line in zip(one.completions, lines, strict=False)]
    return call, None, [*first, *_more(one)]


def _quick_again(one: _Importing) -> bool:
    """Whether a call costs nothing once the first has loaded what it needs."""
    began = time.monotonic()
    with suppress(NoGrade):
        next(one.graded(one.completions[:1], CALL_S))
        return time.monotonic() - began < _QUICK_S / 2
    return False


def _more(one: _Importing) -> Sequence[Try]:
    """Calls with likely completions, as many as begin within a second. The last one may end the process, or hang."""
    completions, tries = one.completions[2:], list[Try]()
    try:
        for line in one.graded(completions, CALL_S, _MORE_S):
            tries.append(a_try(completions[len(tries)], line))
    except NoGrade as why:
        tries.append(Try(completions[len(tries)], None, str(why)))
    return tries


def _all_given(one: _Importing, tries: Sequence[Try]) -> bool:
    """Whether it gave a score for each completion."""
    return len(tries) == len(one.completions) and not any(each.failure for each in tries)


def _of_tries(spec: Spec, one: _Importing, tries: Sequence[Try], given: Mapping[str, str]) -> Iterator[Problem]:
    """Warnings about what a function gave."""
    if len(tries) < len(one.completions) and not (tries and tries[-1].failure):
        return
    term, columns = spec.reward.terms[one.index], _columns(spec, one, given)
    alone = sum(other.weight != 0 for other in spec.reward.terms) == 1
    for message, hint in trial_findings(one.path.rpartition(":")[2], tries, columns, weight=term.weight, alone=alone):
        yield Problem(one.key, message, hint, show(one.path))


def _of_prompt(spec: Spec, one: _Importing, tries: Sequence[Try], given: Mapping[str, str]) -> Iterator[Problem]:
    """A score that the prompt decides, whatever a completion says."""
    values = {each.value for each in tries}
    takes = {OF_A_SAMPLE["prompt"], ALL_COLUMNS} & set(given.values()) or not given
    if one.sample is None or not _all_given(one, tries) or not takes or len(values) > 1 or values == {0.0}:
        return
    texts, lines = [said.text for said in one.completions], list[dict[str, Any]]()
    with suppress(NoGrade):
        lines += one.process.graded(job_of([(("", one.sample[1]), texts)]), CALL_S, _MORE_S)
    without = [line["t"][0] for line in lines if "t" in line]
    if len(without) == len(texts) and set(without) != values:
        name = one.path.rpartition(":")[2]
        message = f"{name} gives {values.pop():g} to each of {len(tries)} completions, and {min(without):g} without"
        message += " the prompt"
        yield Problem(one.key, f"{message}, where it finds what it looks for", "look at the completion", show(one.path))


def _columns(spec: Spec, one: _Importing, given: Mapping[str, str]) -> OfColumns:
    data, row = spec.data, one.sample[1] if one.sample else {}
    asked = {*template_columns(data.template)} if data.template else {data.prompt_column}
    return OfColumns(
        data.answer_column,
        frozenset(row) - asked,
        frozenset(name for name in row if f'column "{name}"' in given.values()),
        ALL_COLUMNS in given.values(),
    )


def _of_other_rows(
    spec: Spec, one: _Importing, tries: Sequence[Try], given: Mapping[str, str] | None
) -> Iterator[Problem]:
    """Rows whose own answer, written as the first row's is where it scores best, gives no score, or scores no more
    than the first row's. `given` is None where the scores have been found wrong already."""
    own = one.completions[0].text
    better = better_than_others(tries, own)
    if len(tries) < len(one.completions) or not better or spec.reward.terms[one.index].weight <= 0:
        return
    form = better[0].completion.text
    rows = [(row, gold) for row in one.rows[1:] if (gold := _gold(row, spec)) and gold != own]
    scores = _scores_of_rows(spec, one, [(row, form.replace(own, gold), form) for row, gold in rows])
    name, path = one.path.rpartition(":")[2], show(one.path)
    pairs = list(zip(rows, scores, strict=False))
    for (row, _), lines in pairs:
        failed = [last_line(str(line["text"])) for line in lines if "t" not in line]
        if failed and failed[0] not in {each.failure for each in tries}:
            message = f"{name}, called with the answer of {_place(row)}, gives no score: {failed[0]}"
            yield Problem(one.key, message, "let it read every row's answer as it stands in the data", path)
        if failed:
            return
    if given is None:
        return
    low = [(row, gold, right) for (row, gold), (right, other) in pairs if right["t"][0] <= other["t"][0]]
    if len(low) >= max(2.0, _OTHER_SHARE * len(pairs)) and _columns(spec, one, given).only_answer(tries):
        row, gold, right = low[0]
        message = f"{name} gives the right answer of {len(low)} of {len(pairs)} rows no more than a wrong one"
        message += f", such as {show(gold, 40)} in {_place(row)}: {right['t'][0]:g}"
        yield Problem(one.key, message, "let it read every row's answer as it stands in the data", path)


def _of_places(
    spec: Spec, folder: Folder | None, judging: Sequence[_Judging], known: Collection[str]
) -> Iterator[Problem]:
    """Where the only term that knows what is right looks for the answer. Of keys in `known` something was said."""
    terms = spec.reward.terms
    reading = [(*one, better) for one in judging if (better := _by_answer(spec, *one))]
    judged = any(term.weight > 0 and (term.graded_by != "processes" or compares_answer([term])) for term in terms)
    if len(reading) != 1 or judged or reading[0][0].key in known:
        return
    one, _, tries, better = reading[0]
    own = one.completions[0].text
    others = [each.completion.text for each in tries if not each.right and each.completion.form == OWN]

    def scores(texts: Sequence[str]) -> Sequence[float] | None:
        lines: list[dict[str, Any]] = []
        with suppress(NoGrade):
            lines += one.graded([Said(text) for text in texts], _LONG_S, _MORE_S)
        values = [line["t"][0] for line in lines if "t" in line]
        return values if len(values) == len(texts) else None

    name, golds = one.path.rpartition(":")[2], [gold for row in one.rows if (gold := _gold(row, spec))]
    found = [*within_numbers(name, better, golds, scores)]
    prompts = [_plain_prompt(row, spec) for row in one.rows]
    asked, at_once = ask_to_think(prompts, spec), [_AT_ONCE.search(f"{spec.data.system}\n{text}") for text in prompts]
    room = spec.data.max_response_tokens >= _ROOM_TOKENS and not all(at_once)
    chat = spec.data.chat != "never" and folder is not None and bool(chat_template_of(folder).text)
    if not found and others and len(own) <= _SHORT and (asked or (room and chat)):
        stops = spec.rollout.stop
        found = [*only_at_the_start(name, better, own, others[0], scores, asked=asked, stops=stops)]
    yield from (Problem(one.key, message, hint, show(one.path)) for message, hint in found)


def _by_answer(spec: Spec, one: _Importing, given: Mapping[str, str], tries: Sequence[Try]) -> list[Try]:
    """Right completions that it likes better than the same with another row's answer, which nothing else tells."""
    if not _all_given(one, tries) or spec.reward.terms[one.index].weight <= 0:
        return []
    reads = _columns(spec, one, given).only_answer(tries)
    return better_than_others(tries, one.completions[0].text) if reads else []


def _place(row: DataRow) -> str:
    return row.where.rpartition(os.sep)[2]


def _scores_of_rows(
    spec: Spec, one: _Importing, asked: Sequence[tuple[DataRow, str, str]]
) -> Sequence[tuple[dict[str, Any], dict[str, Any]]]:
    """What a row's two completions get, of as many rows as are graded within a second."""
    job = job_of([((_plain_prompt(row, spec), row.values), texts) for row, *texts in asked])
    lines: list[dict[str, Any]] = []
    with suppress(NoGrade):
        for line in one.process.graded(job, _MORE_S, _MORE_S):
            lines.append(line)
    return list(zip(lines[::2], lines[1::2], strict=False))


def _liked(spec: Spec, one: _Importing, tries: Sequence[Try]) -> list[str]:
    """Right completions that a term of a reward scores above every wrong one."""
    if spec.reward.terms[one.index].weight <= 0:
        return []
    wrong = max((each.value or 0.0 for each in tries if not each.right), default=0.0)
    return [each.completion.text for each in tries if each.right and (each.value or 0.0) > wrong]


def _only_too_long(spec: Spec, one: _Importing, liked: Sequence[str], folder: Path) -> Iterator[Problem]:
    """A function that likes right completions only where they are longer than a completion can be. `folder`: the
    model's."""
    if not liked or (tokenizer := small_tokenizer(folder)) is None:
        return
    most = spec.data.max_response_tokens
    fewest, text = min((len(tokenizer.encode(text, add_special_tokens=False).ids), text) for text in liked)
    if fewest > most:
        message = f"likes nothing shorter than {fewest} tokens, such as {show(text, 40)}, and a completion has {most}"
        yield Problem(one.key, message, "raise data.max_response_tokens, or ask for less", show(one.path))


def _only_with_special(one: _Importing, liked: Sequence[str], folder: Path) -> Iterator[Problem]:
    """A function that likes right completions only where they hold special tokens, which it is never given. `folder`:
    the model's."""
    texts = special_texts(folder) if liked else set()
    held = [[text for text in texts if text in completion] for completion in liked]
    if liked and all(held):
        message = f"rewards {', '.join(sorted(held[0]))}, special tokens of this tokenizer"
        hint = "mark the parts with text that is no special token, or make the tokens plain ones"
        yield Problem(one.key, f"{message}, and completions are read without them", hint, show(one.path))


def _kept_defaults(one: _Importing, given: Mapping[str, str], row: DataRow | None) -> Iterator[Problem]:
    """A parameter that is called like the row's answer, and no column is."""
    for name, what in given.items():
        if what == DEFAULT and name in REFERENCE and row is not None:
            message = f"{name} keeps its default: the rows have no column of that name ({', '.join(row.values)})"
            yield Problem(one.key, message, "call it as the column is called, or read it from row", show(one.path))


def _of_growth(spec: Spec, one: _Importing) -> Iterator[Problem]:
    """A warning about a function that takes too long for long completions."""
    limit_s = spec.reward.timeout_s

    def seconds(text: str) -> float | None:
        with suppress(NoGrade):
            return float(next(one.graded([Said(text)], _LONG_S))["seconds"])
        return None

    longest = spec.data.max_response_tokens
    if slow := slowest_growth(seconds, max_tokens=longest, limit_s=limit_s, until_s=_GROWTH_S):
        yield Problem(one.key, *said_of(one.path.rpartition(":")[2], slow, limit_s), show(one.path))


@dataclass(frozen=True)
class _Importing:
    """A process that imports the reward function of a term."""

    index: int  # of the term
    key: str
    path: str
    process: TrialProcess
    sample: tuple[str, Mapping[str, Any]] | None  # prompt and row that it is called with
    completions: Sequence[Said]
    rows: Sequence[DataRow] = ()  # of which the sample's is the first

    def graded(
        self, completions: Sequence[Said], each_s: float, within_s: float = math.inf
    ) -> Iterator[dict[str, Any]]:
        """The grades of completions of the sample (`TrialProcess.grades`)."""
        assert self.sample is not None
        return self.process.graded(job_of([(self.sample, [one.text for one in completions])]), each_s, within_s)


_Judging = tuple[_Importing, Mapping[str, str], Sequence[Try]]  # what its parameters get, and all calls


@dataclass(frozen=True)
class _Failed:
    """Two calls that gave no score. `of_code`: because of the code itself."""

    said: Problem
    of_code: bool


def _start(
    spec: Spec, spec_dir: Path, index: int, term: Function, rows: Sequence[DataRow], folder: Folder | None
) -> _Importing:
    process = TrialProcess(spec, spec_dir)
    row = rows[0] if rows else None
    sample = None if row is None else (_seen_prompt(row, spec, folder), row.values)
    own, *others = [_gold(one, spec) for one in rows] or [None]
    other = next((text for text in others if own and text and text not in own and own not in text), None)
    source = _source_of(spec_dir / Path(term.path.rpartition(":")[0]).expanduser())
    asked = f"{spec.data.system}\n{_plain_prompt(row, spec) if row else ''}"
    likely = likely_completions(own, other=other, source=source, prompt=asked)
    completions = [Said(own or "", own is not None, OWN), Said(""), *likely]
    one = _Importing(index, f"reward.terms.{index}.path", term.path, process, sample, completions, rows)
    _send(one, spec, spec_dir, term)
    return one


def _gold(row: DataRow, spec: Spec) -> str | None:
    answer = row.values.get(spec.data.answer_column)
    return None if answer is None else gold_answer(answer)


def _source_of(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _send(one: _Importing, spec: Spec, spec_dir: Path, term: Function) -> None:
    """The first lines of the grader's protocol, so that all of them import at the same time."""
    columns = row_columns(spec, spec_dir)
    setting = Setting(spec.data.answer_column, spec.data.max_response_tokens, str(spec_dir), columns)
    hello = {"terms": [term.model_dump(mode="json")], "setting": asdict(setting), "trial": True}
    first = None if one.sample is None else job_of([(one.sample, [said.text for said in one.completions[:2]])])
    one.process.begin(hello, first)


def _seen_prompt(row: DataRow, spec: Spec, folder: Folder | None) -> str:
    """The row's prompt as the model sees it, as far as its chat template can be read."""
    template = chat_template_of(folder).text if folder is not None and spec.data.chat != "never" else ""
    if template and isinstance(folder, Path):
        with suppress(Exception):  # of a template that is broken, or refuses the row, which is said elsewhere
            return rendering(template, folder)(messages_of(row.values, spec))
    return _plain_prompt(row, spec)


def _plain_prompt(row: DataRow, spec: Spec) -> str:
    """The row's prompt before any chat template; of messages, their texts."""
    try:
        data = spec.data
        prompt = render_template(data.template, row.values) if data.template else row.values[data.prompt_column]
    except (LookupError, ValueError):
        return ""
    if isinstance(prompt, str):
        return prompt
    messages = prompt if isinstance(prompt, list) else []
    return "\n".join(str(one.get("content", "")) for one in messages if isinstance(one, dict))
