"""Lay out cases of the corpus of specs, broken and sound (`tests/specs/corpus/*.toml`), in folders.

A case is a table:

    base      preset to start from; default: the small sound spec `corpus/base.toml`
    set       dotted key → value; list entries by number
    remove    dotted keys to take out
    text      the whole file, instead of all the above
    override  what `--set` is given
    files     name → text, written beside the spec; a name that ends in `/` is a folder; a table is a file of another
              kind (`_write`). HERE in the spec is the folder's path
    model     changes to a sound model folder `model/` beside the spec: file → keys to set (false: the file is removed)
    like      the built-in model that this folder is made of; default: tiny-digits
    without   keys to take out: file of the model → keys
    absent    packages that are not installed
    errors    dotted key → part of its message or hint: exactly these problems are found, each with a hint
    also      keys that may have problems besides, for what need not be installed
    warnings  the same for warnings, which are looked at only where this is given
    probe     the same for problems that only `--probe` finds; probe_warnings for its warnings
    sound     true: neither the check nor the probe finds anything
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import tomli
from small_spec import raw_spec

from rlctl.models.paths import BUILTIN_FOLDER
from rlctl.presets import presets
from specs.errors import Problem
from specs.packages import version_here
from specs.safetensors_header import make_header
from specs.schema.engines.engine_registry import ROLLOUT_TABLES, TRAIN_TABLES
from specs.schema.engines.engine_table import EngineTable

ALL_TABLES: tuple[type[EngineTable], ...] = (*TRAIN_TABLES, *ROLLOUT_TABLES)
CORPUS = Path(__file__).parent.parent / "specs" / "corpus"
Case = dict[str, Any]
CHECKED, PROBED = ("errors", "warnings"), ("probe", "probe_warnings")
KEYS = {
    *("base", "set", "remove", "text", "override", "files", "model", "like", "without", "absent", "also", "sound"),
    *CHECKED,
    *PROBED,
}


def cases() -> Iterator[tuple[str, Case]]:
    """Yield (name, case) of the whole corpus; a name is file, number and keys."""
    for file in sorted(CORPUS.glob("*.toml")):
        for number, case in enumerate(tomli.loads(file.read_text()).get("case", ()), 1):
            keys = [key for kind in (*CHECKED, *PROBED) for key in case.get(kind, ())]
            about = "+".join(dict.fromkeys(keys)) or "sound"
            yield f"{file.stem}-{number}-{about[:60]}", case


def base(name: str = "") -> dict[str, Any]:
    """Return the tables of a preset, or of the small spec."""
    return tomli.loads(presets()[name].read_text()) if name else raw_spec()


def edited(raw: dict[str, Any], sets: dict[str, Any], removed: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return a copy of `raw` with dotted keys set, then taken out."""
    raw = copy.deepcopy(raw)
    for key, value in [*sets.items(), *((key, None) for key in removed)]:
        *parents, last = key.split(".")
        node: Any = raw
        for part in parents:
            node = node[int(part)] if isinstance(node, list) else node.setdefault(part, {})
        if key in removed:
            del node[last]
        else:
            node[int(last) if isinstance(node, list) else last] = value
    return raw


def assert_problems(wanted: dict[str, str], found: list[Problem]) -> None:
    """Assert that each wanted key is found with its text and a hint, and nothing else is."""
    listed = "\n".join(map(str, found))
    assert sorted(wanted) == sorted(problem.key for problem in found), listed
    for problem in found:
        assert wanted[problem.key] in str(problem), str(problem)
        assert problem.hint, str(problem)


def write_case(case: Case, folder: Path) -> Path:
    """Lay a case out in `folder` and return the spec's path."""
    for name, text in case.get("files", {}).items():
        place = folder / name
        place.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(text, dict):
            _write(place, **text)
        else:
            place.mkdir() if name.endswith("/") else place.write_text(text)
    if "model" in case:
        write_model(folder / "model", case["model"], case.get("like", "tiny-digits"), case.get("without", {}))
    spec = folder / "spec.toml"
    raw = edited(base(case.get("base", "")), case.get("set", {}), tuple(case.get("remove", ())))
    spec.write_text(case["text"] if "text" in case else as_toml(raw).replace("HERE/", f"{folder}/"))
    return spec


def _write(place: Path, **what: Any) -> None:
    """Write a file that is more than text: bytes, a link, numbered lines, or rows."""
    match what:
        case {"hex": str(digits)}:
            place.write_bytes(bytes.fromhex(digits))
        case {"link": str(target)}:
            place.symlink_to(target)
        case {"lines": str(line), "count": int(count)}:
            text = "".join(line.replace("{n}", str(number)) + "\n" for number in range(count))
            place.write_text(text + what.get("then", ""))
        case {"parquet": list(rows)}:
            import pyarrow
            from pyarrow import parquet

            parquet.write_table(pyarrow.Table.from_pylist(rows), place)
        case _:
            raise ValueError(f"a file of an unknown kind: {what}")


class _StandIn(metadata.Distribution):
    """Stand for an installed package."""

    def __init__(self, name: str) -> None:
        self.text = f"Metadata-Version: 2.1\nName: {name}\nVersion: 0\n"

    def read_text(self, filename: str) -> str | None:
        return self.text if filename == "METADATA" else None

    def locate_file(self, path: Any) -> Any:
        return Path(path)


@contextmanager
def packages(absent: Sequence[str] = ()) -> Iterator[None]:
    """Pretend that engines' packages for our interpreter are installed, except those that are absent."""
    find = metadata.Distribution.from_name
    shared = {name for table in ALL_TABLES if not table.own_environment for name in table.packages or ()}

    def from_name(name: str) -> metadata.Distribution:
        if name in absent:
            raise metadata.PackageNotFoundError(name)
        try:
            return find(name)
        except metadata.PackageNotFoundError:
            if name in shared:
                return _StandIn(name)
            raise

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metadata.Distribution, "from_name", from_name)
        version_here.cache_clear()
        yield
    version_here.cache_clear()


def as_toml(raw: dict[str, Any]) -> str:
    """Return tables as TOML, a line per top-level key."""
    return "".join(f"{json.dumps(key)} = {_value(value)}\n" for key, value in raw.items())


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {_value(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_value, value)) + "]"
    if isinstance(value, str | bool):
        return json.dumps(value)
    return str(value)


# ── a sound model folder ──────────────────────────────────────────────────────────────────────────


def write_model(folder: Path, changes: dict[str, Any], like: str, without: dict[str, list[str]]) -> None:
    """Write a built-in model with equal weights of its config's shapes; then the changes."""
    shutil.copytree(BUILTIN_FOLDER / like, folder)
    write_weights(folder / "model.safetensors", qwen2_shapes(json.loads((folder / "config.json").read_text())))
    for name, change in changes.items():
        file = folder / name
        if change is False:
            file.unlink()
        elif isinstance(change, str):
            file.write_text(change)
        else:
            content = edited(json.loads(file.read_text()) if file.exists() else {}, change)
            file.write_text(json.dumps(content))
    for name, keys in without.items():
        kept = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({key: value for key, value in kept.items() if key not in keys}))


def write_weights(file: Path, shapes: dict[str, tuple[int, ...]], dtype: str = "F32") -> None:
    header, _ = make_header([(name, dtype, shape) for name, shape in shapes.items()], {})
    length = int.from_bytes(header[:8], "little")
    last = max(entry["data_offsets"][1] for entry in json.loads(header[8 : 8 + length]).values())
    with file.open("wb") as stream:
        stream.write(header)
        stream.write(b"\x80\x3c" * (last // 2) + b"\x3c" * (last % 2))  # small numbers in every floating-point type


def qwen2_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return name → shape of the tensors of a Qwen2 as transformers stores them."""
    hidden, heads, kv_heads = (config[k] for k in ("hidden_size", "num_attention_heads", "num_key_value_heads"))
    head, wide = config.get("head_dim") or hidden // heads, config["intermediate_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        for name, rows in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            shapes[f"{at}self_attn.{name}_proj.weight"] = (rows * head, hidden)
            shapes[f"{at}self_attn.{name}_proj.bias"] = (rows * head,)
        shapes[f"{at}self_attn.o_proj.weight"] = (hidden, heads * head)
        shapes[f"{at}mlp.gate_proj.weight"] = shapes[f"{at}mlp.up_proj.weight"] = (wide, hidden)
        shapes[f"{at}mlp.down_proj.weight"] = (hidden, wide)
        shapes[f"{at}input_layernorm.weight"] = shapes[f"{at}post_attention_layernorm.weight"] = (hidden,)
    return shapes
