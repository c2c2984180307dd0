"""Read the settings of another tool from its file: YAML, JSON, TOML, a shell script with `key=value` overrides, or a
Python script, which is parsed and never run."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from contextlib import suppress
from fnmatch import fnmatch
from operator import add, floordiv, mul, sub, truediv
from pathlib import Path
from typing import Any

import tomli

from specs.errors import UsageError
from specs.load.unknown_keys import translation_table

_READS = "it reads a TRL script or YAML, a verl YAML or shell script, and a prime-rl TOML"
# Calls of a script whose keywords are settings, and what of a trainer's is none.
_CALLS = re.compile(r"\w*(Config|Arguments|Trainer)")
_LORA = {"r": 8, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}  # peft's own, of most models
_NO_SETTINGS = {"args", "train_dataset", "processing_class", "tokenizer", "callbacks", "peft_config"}
_OVERRIDE = re.compile(r"(?:\w+=)?\(?\+{0,2}([A-Za-z_]\w*(?:\.\w+)+)=(.*)", re.DOTALL)  # also `ARRAY=(key=value`
_VARIABLE = re.compile(r"\$\{(\w+)(?::?-([^${}]*))?\}|\$(\w+)")  # one that holds no other
_REFERENCE = re.compile(r"\$\{(?:oc\.select: *)?([\w.]+)(?:, *([^${}]*))?\}")  # in YAML, to another key
_CASE = re.compile(r"\s*case\s+[\"']?(.*?)[\"']?\s+in\s*(?:#.*)?")
_BRANCH = re.compile(r"\s*\(?([\w.*\"'-]+(?:\s*\|\s*[\w.*\"'-]+)*)\)\s*(.*)")
_OPERATORS = {ast.Add: add, ast.Sub: sub, ast.Mult: mul, ast.Div: truediv, ast.FloorDiv: floordiv}
_DEPTH = 4  # of variables in the defaults of others


class Code(str):
    """The text of what a script computes."""


def read_foreign(path: Path) -> tuple[str, dict[str, Any]]:
    """Return which source of `foreign_keys.toml` a file is, and its settings by dotted key. Raises UsageError where it
    is none, or not what its suffix says."""
    try:
        calls, given = _parsed(path.suffix.lower(), path.read_text(encoding="utf-8-sig"))
    except (OSError, SyntaxError, ValueError, RecursionError) as error:
        raise UsageError(f"--from {path}: cannot be read: {error}", hint=_READS) from None
    if "schema" in given:
        hint = f"rlctl check-config {shlex.quote(str(path))}"
        raise UsageError(f"--from {path}: it is a spec of rlctl already", hint=hint)
    for name, source in translation_table("sources").items():
        marked = [key for key in given for mark in source.get("marks", "").split() if f"{key}.".startswith(f"{mark}.")]
        if any(not key.startswith("**") for key in given) and (name in calls or (marked and not calls)):
            return name, given
    raise UsageError(f"--from {path}: no settings of TRL, verl or prime-rl in it", hint=_READS)


def _parsed(suffix: str, text: str) -> tuple[set[str], dict[str, Any]]:
    """Return what a script calls, and the settings."""
    if suffix == ".py":
        return _of_script(ast.parse(text))
    if suffix == ".sh":
        return set(), dict(_overrides(text))
    values = tomli.loads(text) if suffix == ".toml" else _yaml(text)  # JSON is YAML
    if not isinstance(values, dict):
        raise ValueError("it holds no keys")
    leaves = dict(_leaves(values))
    return set(), {key: _referred(value, leaves) for key, value in leaves.items()}


def _referred(value: Any, leaves: dict[str, Any]) -> Any:
    """Return what a value that is a reference to another key stands for."""
    for _ in range(_DEPTH):
        if not isinstance(value, str) or not (found := _REFERENCE.fullmatch(value)):
            break
        value = leaves.get(found[1], _yaml(found[2] or ""))
    return value


def _leaves(values: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield dotted key and value; a list is one value."""
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from ((f"{key}.{inner}", one) for inner, one in _leaves(value))
        else:
            yield str(key), value


def _yaml(text: str) -> Any:
    """Return the value of a YAML text; 1e-6 is a number in it, as its writers mean."""
    import yaml  # comes with huggingface_hub

    loader = type("Loader", (yaml.SafeLoader,), {})
    number = re.compile(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+\Z")
    loader.add_implicit_resolver("tag:yaml.org,2002:float", number, list("+-0123456789"))  # type: ignore[attr-defined]
    try:
        return yaml.load(text, loader)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None


# ── Python ────────────────────────────────────────────────────────────────────────────────────────


def _of_script(tree: ast.Module) -> tuple[set[str], dict[str, Any]]:
    known: dict[str, Any] = {}
    calls: set[str] = set()
    given: dict[str, Any] = {}
    assigned: dict[str, ast.expr] = {}
    sources: dict[str, ast.expr] = {}  # what a trainer is given as data
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            known.setdefault(node.targets[0].id, _value(node.value, known))
            assigned.setdefault(node.targets[0].id, node.value)
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        name = ast.unparse(call.func).rpartition(".")[2]
        named = _keywords(call, known)
        placed = [_value(one, known) for one in call.args]
        if name == "map" and (placed or named):
            given["dataset_map"] = Code(ast.unparse(call))
        elif name == "train_test_split":
            given["train_test_split"] = Code(ast.unparse(call))
        elif _CALLS.fullmatch(name):
            calls.add(name if "args" in named else name.replace("Trainer", "Config"))  # all of theirs are defaults
            given |= dict(_LORA) if name == "LoraConfig" else {}
            sources |= {key.arg: key.value for key in call.keywords if key.arg in ("train_dataset", "eval_dataset")}
            model = named.pop("model", placed[0] if placed and name.endswith("Trainer") else None)
            named |= {"reward_funcs": placed[1]} if name in ("GRPOTrainer", "RLOOTrainer") and placed[1:] else {}
            given |= {key: value for key, value in named.items() if key not in _NO_SETTINGS}
            given |= {"model_name_or_path": model} if model is not None else {}
    for node in ast.walk(tree):
        match node:  # `args.beta = 0.1` after `args = GRPOConfig(…)`
            case ast.Assign([ast.Attribute(ast.Name(name), key)], value) if name in assigned:
                made = ast.unparse(assigned[name]).partition("(")[0].rpartition(".")[2]
                given |= {key: _value(value, known)} if re.fullmatch(r"\w*(Config|Arguments)", made) else {}
    by_name = "train_dataset" in sources
    train = _loaded(sources["train_dataset"], assigned, known) if by_name else _loaded(tree, {}, known)
    given |= dict(zip(("dataset_name", "dataset_config", "dataset_train_split"), train, strict=False))
    if "train_test_split" in given:
        given.pop("eval_dataset", None)
    elif held_out := _loaded(sources["eval_dataset"], assigned, known) if "eval_dataset" in sources else ():
        given |= dict(zip(("eval_dataset", "eval_config", "dataset_test_split"), held_out, strict=True))
    return calls, dict(_leaves(given))


def _loaded(node: ast.AST, assigned: dict[str, ast.expr], known: dict[str, Any], split: Any = None) -> tuple[Any, ...]:
    """Return name, configuration and split of the data set that an expression is made from, the first of a script; of
    a file its path alone. () where there is none."""
    for inner in ast.walk(node):
        match inner:
            case ast.Call(func=function) if ast.unparse(function).rpartition(".")[2] == "load_dataset":
                named = _keywords(inner, known)
                placed = [_value(one, known) for one in inner.args]
                split = split or named.get("split", "train")
                if "data_files" in named:
                    files = named["data_files"]  # of each split, or of the only one
                    one = files.get(str(split).partition("[")[0], Code(files)) if isinstance(files, dict) else files
                    return one, None, None
                name, config = [*placed, named.get("path"), named.get("name")][:2] if len(placed) < 2 else placed[:2]
                return name, config, split
            case ast.Subscript(value=ast.Call() as call, slice=ast.Constant(value=str() as part)):
                if found := _loaded(call, assigned, known, part):
                    return found
                continue
            case ast.Subscript(value=ast.Name(id=name), slice=ast.Constant(value=part)) if name in assigned:
                pass
            case ast.Name(id=name) if name in assigned:
                part = split
            case _:
                continue
        others = {other: value for other, value in assigned.items() if other != name}  # `x = x.map(…)` ends
        if found := _loaded(assigned[name], others, known, part):
            return found
    return ()


def _keywords(call: ast.Call, known: dict[str, Any]) -> dict[str, Any]:
    """Return what a call gives by name, also in a `**` of a dict that the script writes out; of others the code."""
    named: dict[str, Any] = {}
    for key in call.keywords:
        value = _value(key.value, known)
        named |= {key.arg: value} if key.arg else value if isinstance(value, dict) else {f"**{value}": value}
    return named


def _value(node: ast.expr, known: dict[str, Any]) -> Any:
    """Return a literal, a sum or product of them, or what a name was given; else the code."""
    match node:
        case ast.Constant(value=None | str() | int() | float()):
            return node.value
        case ast.Call(func=ast.Attribute(attr="from_pretrained"), args=[name, *_]):
            return _value(name, known)
        case ast.Name() if node.id in known:
            return known[node.id]
        case ast.List() | ast.Tuple():
            return [_value(one, known) for one in node.elts]
        case ast.Dict() if all(isinstance(key, ast.Constant) for key in node.keys):
            return {str(key.value): _value(one, known) for key, one in zip(node.keys, node.values, strict=True)}  # type: ignore[union-attr]
        case ast.Call(func=ast.Name("dict"), args=[]):
            return _keywords(node, known)
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return -number
        case ast.BinOp() if operator := _OPERATORS.get(type(node.op)):
            left, right = _value(node.left, known), _value(node.right, known)
            if isinstance(left, int | float) and isinstance(right, int | float):
                with suppress(ArithmeticError):
                    return operator(left, right)
    return Code(ast.unparse(node))


# ── shell ─────────────────────────────────────────────────────────────────────────────────────────


def _overrides(text: str) -> Iterator[tuple[str, Any]]:
    """Yield the words `key=value` with dots in the key. A variable has the first value that the script gives it, unless
    that is empty."""
    known: dict[str, str] = {"HOME": "~", "PWD": "."}

    def variable(found: re.Match[str]) -> str:
        value = known.get(found[1] or found[3], found[0])
        unset = value in ("", found[0])  # an empty one has the default too
        return found[2] if unset and found[2] is not None else value

    def computed(found: re.Match[str]) -> str:
        numbers = {name: int(value) for name, value in known.items() if value.isdigit()}
        value = _value(ast.parse(found[1].strip().replace("/", "//"), mode="eval").body, numbers)
        return found[0] if isinstance(value, Code) else str(value)

    cases: list[tuple[str, bool | None]] = []
    for line in text.replace("\\\n", " ").splitlines():
        for _ in range(_DEPTH):
            line = _VARIABLE.sub(variable, line)
        try:
            words = shlex.split(re.sub(r"\$\(\((.*?)\)\)(?!\))", computed, _executed(line, cases)), comments=True)
        except (ValueError, SyntaxError):  # such as a quote that another line closes
            continue
        for word in (word.rstrip(";") for word in words):
            if word.startswith("--config-name"):
                yield "config_name", word.partition("=")[2]
            elif found := _OVERRIDE.fullmatch(word.removesuffix(")")):
                try:
                    yield found[1], _yaml(found[2])
                except ValueError:  # Hydra takes more than YAML does, such as {*}
                    yield found[1], Code(found[2])
            elif assigned := re.fullmatch(r"(\w+)=(.*)", word, re.DOTALL):
                known[assigned[1]] = known.get(assigned[1]) or assigned[2]


def _executed(line: str, cases: list[tuple[str, bool | None]]) -> str:
    """Return what is executed of a line, nothing in a branch of `case` that is not taken. `cases`: of those around it,
    which it changes, the word, and whether this branch is taken (None: none so far)."""
    if case := _CASE.fullmatch(line):
        cases.append((case[1], None))
    elif cases and re.match(r"\s*esac\b", line):
        cases.pop()
    elif cases and (branch := _BRANCH.fullmatch(line)):
        word, taken = cases[-1]
        fits = "$" in word or any(fnmatch(word, one) for one in re.findall(r"[^\s|\"']+", branch[1]))
        cases[-1] = word, (fits or None) if taken is None else False
        line = branch[2]
    return line if all(taken for _, taken in cases) else ""
