"""Translate another tool's settings into a spec, by the one table of foreign keys (`specs/load/foreign_keys.toml`)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from math import isfinite
from operator import mul, sub, truediv
from typing import Any, get_args

import tomli
from pydantic.fields import FieldInfo

from rlctl.translate.foreign_files import Code
from specs.errors import Problem
from specs.load.keys import is_list, keys_of, walk
from specs.load.load import parse
from specs.load.toml_file import written
from specs.load.unknown_keys import ForeignKey, foreign_key, foreign_keys, translation_table
from specs.schema.recipes import RECIPES
from specs.schema.spec import Spec
from specs.terminal import visible

_FIRST = ("run", "model", "data", "reward", "environment", "algorithm", "objective", "actor", "ref", "critic")
_SHARED = ("processes", "nodes", "launcher", "devices", "dtype", "engine.kind")  # what a role has from the actor
_ROUNDS = 60  # of taking out what a spec refuses; each takes out a key

Given = Mapping[str, Any]


@dataclass
class Translation:
    """Collect a spec by dotted key, what a person must look at, and what became of each key of the source."""

    recipe: type[Spec]
    name: str  # of the source
    values: dict[str, Any]
    placed: set[str] = field(default_factory=set)  # our keys that theirs have set
    notes: dict[str, list[str]] = field(default_factory=dict)  # dotted key → comments above its line
    translated: dict[str, tuple[str, str]] = field(default_factory=dict)  # their key → as it stands, our lines
    dropped: dict[str, tuple[str, str]] = field(default_factory=dict)  # their key → as it stands, why

    def note(self, key: str, text: str) -> None:
        self.notes.setdefault(key, []).append(text)


def translate(kind: str, given: Given, name: str, *, cluster: str = "ray") -> Translation:
    """Return the spec that the settings of a file called `name` mean; `kind` is its row among the sources. `cluster`:
    where several nodes come from."""
    source = translation_table("sources")[kind]
    recipe = RECIPES[source["recipe"]]
    made = Translation(recipe, name, {"run.recipe": source["recipe"], **source["set"]})
    for table, brought in source.get("with", {}).items():
        made.values |= brought if any(f".{table}." in f".{key}." for key in given) else {}
    defaults = {key: value for key, value in source["defaults"].items() if not _ending(key, dict.fromkeys(given, True))}
    unlimited = {key: None for key in given if given[key] is None and _last(key) in source["defaults"]}
    given = {key: _plain(value) for key, value in {**defaults, **given}.items() if value not in (None, {})}
    for key in [key for key, value in given.items() if (_last(key), value) == ("max_steps", -1)]:
        made.dropped[key] = (f"{key} = {given.pop(key)}", "epochs are counted")
    others = source.get("others", "").split()
    for key in [key for key in given if any(f".{table}." in f".{key}." for table in others)]:
        made.dropped[key] = (f"{key} = {_shown(given.pop(key))}", "rlctl has no such key")
    used: set[str] = set()  # their keys in formulas
    steps = _named("max_steps", given, set())
    for key, value in given.items():
        if key.endswith("_steps") and isinstance(value, float) and 0 < value < 1:  # a share of all
            given[key] = value * steps if isinstance(steps, int) else Code(f"{value} of all steps")
    derived = {key: _computed(formula, given, used) for key, formula in source.get("derived", {}).items()}
    given |= {key: value for key, value in derived.items() if value is not None and not _ending(key, given)}
    short, whole = _ending("steps_per_generation", given), _named("gradient_accumulation_steps|1", given, set())
    if short and isinstance(whole, int) and given[short] in range(whole):
        made.dropped[short] = (f"{short} = {given.pop(short)}", "no weights change before the optimizer step")
    by_hand = []
    for key, row in _in_order(given, recipe):
        shown = f"{key} = {_shown(given[key])}" + (" (default)" if key in defaults else "")
        if row is None or not row.ours:
            made.dropped[key] = (shown, row.remark.partition(": remove the ")[0] if row else "rlctl has no such key")
            continue
        own = row.of_roles([recipe.lead, *key.split(".")], recipe)[-1]
        found = _converted(row, own, given[key], {key: given[key], **given}, used)
        if lines := [line for target, value in found or () if (line := _put(made, target, value))]:
            made.translated[key] = (shown, ", ".join(lines))
        elif found is None:
            by_hand.append((key, own, shown, row.remark or "could not be translated"))
        else:
            same = isinstance(row.how, dict) and _spelled(given[key]) in row.how and not row.only
            ruled = row.only or isinstance(row.how, list) or "*" in (row.how or ())
            reason = row.remark if ruled and not same else ""
            off = not same and isinstance(given[key], int | float) and given[key] < 0
            made.dropped[key] = (shown, reason or ("it cannot be off" if off else "as rlctl does without a key"))
    for key, own, shown, remark in by_hand:
        if own not in made.placed or key not in defaults:
            made.note(own, f"{shown}: {remark}")
    for key, row in _in_order(unlimited, recipe):
        if row is not None and row.ours:
            made.note(row.of_roles([recipe.lead, *key.split(".")], recipe)[-1], f"{key} is null: no limit there")
    for key in used & made.dropped.keys():
        made.translated[key] = (made.dropped.pop(key)[0], "part of another line")
    off = [key for key, value in made.values.items() if key.endswith((".lora.rank", "eval.every")) and value == 0]
    for key in off + [f"{recipe.lead}.lora.rank"] * (_named("use_peft", given, used) is False):
        why = "nothing is evaluated" if key == "eval.every" else "the whole model learns"
        _take_out(made, Problem(key.rpartition(".")[0], why), given.keys())
    if _named("logger|report_to", given, set()) is not None and "tracking.N.kind" not in made.values:
        _take_out(made, Problem("tracking.N", "no tracker is named"), set())
    sections = {key.partition(".")[0] for key in made.values} | {"checkpoint"}
    missing = {key: note for key, note in source.get("unset", {}).items() if key not in made.values}
    unset = {key: f"{key.rpartition('.')[2]} is unset: {note}" for key, note in missing.items()}
    for key, note in (source.get("notes", {}) | unset).items():
        if key not in unset or key.partition(".")[0] in sections:
            made.note(key, note)
    _complete(made, cluster)
    of_person = given.keys() - defaults.keys()
    for _ in range(_ROUNDS):
        lines = [f"{key} = {written(value)}" for key, value in made.values.items()]
        problems = parse(tomli.loads("\n".join(["schema = 1", *lines]))).problems
        if not any([_take_out(made, problem, of_person) for problem in problems]):
            break
    for problem in problems:
        made.note("run.name", f"to repair: {problem.text}")
    made.dropped = {key: row for key, row in made.dropped.items() if key not in defaults}
    return made


def _in_order(given: Given, recipe: type[Spec]) -> list[tuple[str, ForeignKey | None]]:
    """Return the keys with their rows, in the table's order: of two that set the same key of ours, the later counts."""
    order = {row: place for place, row in enumerate([*foreign_keys(False).values(), *foreign_keys(True).values()])}
    rows: list[tuple[str, ForeignKey | None]] = []
    for key in given:
        path = key.split(".")
        around = (foreign_key(path[:end], recipe) for end in range(len(path) - 1, 0, -1))
        rows.append((key, foreign_key(path, recipe, same=True) or next((row for row in around if row), None)))
    return sorted(rows, key=lambda one: order.get(one[1], -1) if one[1] else -1)


# ── values ────────────────────────────────────────────────────────────────────────────────────────


def _plain(value: Any) -> Any:
    """Return the number that stands in quotes; an infinite one and what is none of TOML's are left to a person."""
    if not (isfinite(value) if isinstance(value, float) else isinstance(value, str | int | list | dict)):
        return Code(value)
    return int(value) if isinstance(value, str) and value.isdecimal() else value


def _converted(row: ForeignKey, own: str, value: Any, given: Given, used: set[str]) -> list[tuple[str, Any]] | None:
    """Return our keys and values for a value, none where rlctl needs no line; None where a person must decide."""
    values = value if isinstance(value, list) else [value]
    if not _holds(row.only, given, used):
        return []
    if isinstance(row.how, list):
        rules = (assignment.partition(" if ") for assignment in row.how)
        held = [rule.split("=", 1) for rule, _, condition in rules if _holds(condition, given, used)]
        named = ((own if target == row.ours else target, formula) for target, formula in held)
        computed = [(target, _computed(formula, given, used)) for target, formula in named]
        if any(map(_is_code, values)) and dict(computed).get(own) is None:
            return None
        return [pair for pair in computed if pair[1] is not None] or (None if held else [])
    if any(_is_code(one) and not (isinstance(row.how, dict) and one in row.how) for one in values):
        return None
    if not isinstance(row.how, dict):
        return [(own, value)] if row.how == "keep" or not row.remark else None
    found = [row.how.get(_spelled(one), row.how.get("*")) for one in values]
    if ".N." in own:  # a value for each entry
        return [(own, kept)] if (kept := [one for one in found if one]) else []
    if len(found) != 1 or found[0] is None:
        return None
    pairs = []
    for result in found[0] if isinstance(found[0], list) else found:
        if elsewhere := re.fullmatch(r"(\w+\.[\w.]+)=(.*)", str(result)):
            pairs.append((elsewhere[1], _named(elsewhere[2], {}, used) or elsewhere[2]))
        elif result is not False:
            pairs.append((own, value if result == "keep" else result))
    return pairs


def _is_code(value: Any) -> bool:
    return isinstance(value, Code) or (isinstance(value, str) and "$" in value)


def _spelled(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _holds(conditions: str, given: Given, used: set[str]) -> bool:
    """Tell whether each key has the value that its condition `key:word` asks for, or with `key:!word` another."""
    for name, _, word in (condition.partition(":") for condition in conditions.split()):
        if (str(_named(name, given, used)).lower() == word.removeprefix("!")) == ("!" in word):
            return False
    return True


def _computed(formula: str, given: Given, used: set[str]) -> Any:
    """Return what a formula of the table gives; None where a key that it needs is not given, or is code."""
    verb, *names = formula.split() if re.match("range|list|text|functions", formula) else ("", *formula.split())
    values: list[Any] = [name if name in ("*", "/", "-", ":") else _named(name, given, used) for name in names]
    if any(value is None or (_is_code(value) and verb != "functions") for value in values):
        return None
    match verb:
        case "range":
            return list(range(values[0], values[0] + values[1]))
        case "list":
            return values
        case "text":
            return "".join(map(str, values))
        case "functions":
            names = [re.sub(r"\W+", "_", str(one)) for one in (values[0] if isinstance(values[0], list) else values)]
            return [{"kind": "function", "path": f"rewards.py:{name}"} for name in names]
    result = values[0]
    for operator, other in zip(values[1::2], values[2::2], strict=True):
        if not isinstance(result, int | float) or not isinstance(other, int | float) or (operator, other) == ("/", 0):
            return None
        result = {"*": mul, "/": truediv, "-": sub}[operator](result, other)
    return result


def _named(names: str, given: Given, used: set[str]) -> Any:
    """Return the value of the first of `a|b|1` that is given, or the number or word in quotes at the end."""
    for name in names.split("|"):
        if path := _ending(name, given):
            used.add(path)
            return given[path]
        if re.match(r"[\d']", name):
            return tomli.loads(f"x = {name}")["x"]
    return None


def _last(key: str) -> str:
    return key.rpartition(".")[2]


def _ending(name: str, given: Given) -> str:
    return next((key for key in given if f".{key}".endswith(f".{name}") and given[key] is not None), "")


def _put(made: Translation, key: str, value: Any) -> str:
    """Set a key of ours as its type in the schema takes the value; return its line, "" where it says nothing."""
    field = _field(made.recipe, key)
    annotation = field.annotation if field is not None else None
    kinds = {annotation, *get_args(annotation)}
    if isinstance(value, str) and is_list(annotation):
        value = [value]
    elif isinstance(value, list) and value and not is_list(annotation) and ".N." not in key:
        if len(value) > 1:
            made.note(key, f"the first of {_shown(value)}")
        value = value[0]
    if isinstance(value, float) and int in kinds and float not in kinds:
        if value != round(value):
            made.note(key, f"rounded from {value:.6g}")
        value = max(1, round(value)) if value > 0 else round(value)
    if key == "run.name":
        value = _name(str(value))
    off = isinstance(value, int | float) and not isinstance(value, bool) and value < 0  # never, none
    if field is None or off or (key in made.placed and not value):
        return ""
    made.values[key] = value
    made.placed.add(key)
    return f"{key} = {_shown(value)}"


def _name(text: str) -> str:
    return re.sub(r"[^\w.-]+", "-", text, flags=re.ASCII).strip("-._") or "run"


# ── the spec ──────────────────────────────────────────────────────────────────────────────────────


def _complete(made: Translation, cluster: str) -> None:
    """Set what follows from other keys."""
    values = made.values
    for key in [key for key in values if ".N." in key]:
        table, _, inner = key.partition(".N.")
        entries = values.setdefault(table, [dict(one) for one in translation_table("needed").get(table, [])])
        value = values.pop(key)
        for place, one in enumerate(value if isinstance(value, list) else [value]):
            entries += [{}] * (place == len(entries))
            entries[place] = {**entries[place], inner: one}
    values.setdefault("run.name", _name(made.name.rpartition(".")[0]))
    kinds = {"kind": "wandb", "project": values["run.name"]}
    trackers = [{**kinds, **one} for one in values.get("tracking", [])]
    values["tracking"] = [one if one["kind"] in ("wandb", "trackio") else {"kind": one["kind"]} for one in trackers]
    own = [one.get("path", "") for one in values.get("reward.terms", ())]
    if any(path.startswith("rewards.py:") for path in own):
        line = "with the line that check-config gives each"
        made.note("reward.terms", f"write these into rewards.py, {line}: {made.name} is not run")
        if "rewards.py:accuracy_reward" in own:
            made.note("reward.terms", 'TRL\'s own accuracy_reward is { kind = "math_verify" }')
    if any(key.startswith("environment.") for key in values):  # their limit of a response is one of all turns
        limits = [values.get(f"data.max_{part}_tokens", 1024) for part in ("prompt", "response")]
        values.setdefault("environment.max_episode_tokens", sum(limits))
        if not values.keys() & {"environment.path", "environment.tools", "environment.agent"}:
            values["environment.tools"] = ["tools.py:tool"]
            made.note("environment.tools", "fill in")
    if "rollout.first_node" in values or any(int(values[key]) > 1 for key in values if key.endswith(".nodes")):
        values["cluster.kind"] = cluster
    if values["run.recipe"] == "rl":
        del values["run.recipe"]
    for key in [key for key, value in values.items() if value == [] or (key.endswith(".nodes") and value == 1)]:
        del values[key]
    if values.get("actor.processes", 1) > 1:
        values |= {"actor.launcher": "torchrun", "actor.engine.kind": values.get("actor.engine.kind", "fsdp2")}
    learners = {"ref": values.get("algorithm.kl_coef"), "critic": values.get("algorithm.kind") == "ppo"}
    given = {key.partition(".")[0] for key in values}
    for role in (role for role, needed in learners.items() if needed or role in given):
        values |= {f"{role}.{key}": values[f"actor.{key}"] for key in _SHARED if f"actor.{key}" in values}
    for choice, brought in translation_table("implied").items():
        key, _, kind = choice.partition("=")
        values |= brought if values.get(key) == kind else {}
    sections = {key.partition(".")[0] for key in values}
    graded = made.recipe is RECIPES["rl"] and "environment" not in sections
    without = {"eval"} - sections | (set() if graded else {"reward"})
    for key, value in translation_table("needed").items():
        if key in keys_of(made.recipe) - values.keys() and key.partition(".")[0] not in without:
            values[key] = value
            why = "" if key in made.notes else f": {made.name} does not say it"
            made.notes.setdefault(key, []).insert(0, f"fill in{why}")


def _take_out(made: Translation, problem: Problem, of_person: Set[str]) -> bool:
    """Take out what a spec refuses: the key, the keys of its table, or those beside one that is required; return False
    where there is none. `of_person`: keys of theirs that are not a default."""
    key = problem.key.strip("[]")
    if key not in made.values and key in (needed := translation_table("needed")):
        made.values[key] = needed[key]  # what they gave was refused
        made.note(key, "fill in")
        return True
    if key not in made.values and key.endswith(".micro_batch_tokens"):
        parts = [made.values.get(f"data.max_{part}tokens", 0) for part in ("prompt_", "response_", "")]
        made.values[key] = made.values.get("environment.max_episode_tokens", sum(parts))  # the longest sequence
        return True
    field = _field(made.recipe, key)
    around = key.rpartition(".")[0] if field is not None and field.is_required() else key
    named = [one for one in made.values if key == one or key.startswith(f"{one}.")]
    named = named or [one for one in made.values if one.startswith(f"{around}.")]
    for one in named:
        value = _shown(made.values.pop(one))
        of = [theirs for theirs, (_, lines) in made.translated.items() if f"{one} = {value}" in lines.split(", ")]
        made.dropped |= {theirs: (made.translated.pop(theirs)[0], f"{one}: {problem.message}") for theirs in of}
        if of_person & {*of}:
            made.note(one, f"left out: {one.rpartition('.')[2]} = {value}: {problem.message}")
    return bool(named)


def _field(recipe: type[Spec], key: str) -> FieldInfo | None:
    """Return the field of one of our keys; None where the recipe does not have it."""
    table = next((table for known, table in walk(recipe) if known == key), None)
    return table.model_fields.get(key.rpartition(".")[2]) if table is not None else None


def as_toml(made: Translation) -> str:
    """Return the spec as a file, with a comment above each line that a person must look at."""
    known = list(dict.fromkeys(key for key, _ in walk(made.recipe)))
    sections: dict[str, list[str]] = {"": ["schema = 1"]}
    for key in sorted({*made.values, *made.notes}, key=lambda key: (_place(key), known.index(key))):
        table, _, last = key.partition(".N")[0].rpartition(".")
        lines = sections.setdefault(table, [])
        lines += ["# " + " ".join(visible(note).split()) for note in made.notes.get(key, [])]
        lines += [f"{last} = {written(made.values[key])}"] if key in made.values else []
    blocks = [f"# Translated from {visible(made.name)} by `rlctl init --from`. Look at each comment."]
    for table, lines in sections.items():
        head = "# " * all(line.startswith("#") for line in lines) + f"[{table}]"
        blocks.append("\n".join([head, *lines] if table else lines))
    return "\n\n".join(blocks) + "\n"


def _place(key: str) -> int:
    section = key.split(".")[0]
    return _FIRST.index(section) if section in _FIRST else len(_FIRST)


def _shown(value: Any) -> str:
    """Return a value of their file or ours as TOML writes it, in few letters."""
    try:
        text = value if isinstance(value, Code) else written(value)
    except TypeError:
        text = str(value)
    text = visible(" ".join(text.split()))
    return text if len(text) <= 60 else f"{text[:57]}…"
