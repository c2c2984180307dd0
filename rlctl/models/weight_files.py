"""Whether a model folder's weight files are complete and fit its `config.json`, told by their headers.

Shapes are compared where they are known from the config (`rlctl/models/model_tensors.py`); of another family only the
numbers of layers and experts are.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rlctl.models.model_tensors import built_shapes, tensors_of_config
from specs.json_file import read_object
from specs.model_facts import model_facts
from specs.model_shapes import LM_HEADS, SCORE_LAYER, Shape
from specs.safetensors_header import read_header
from specs.schema.roles import HEADS_OF_FILES, HeadKind

AGAIN = "copy or download it again"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_OTHER_CONFIG = "the weights and config.json belong to different models: copy the whole folder again"
_NUMBERED = {
    "layers": re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\."),
    "experts": re.compile(r"\.experts\.(\d+)\."),
}
_FLOATS = ("F64", "F32", "F16", "BF16")

Wrong = tuple[str, str]  # what is wrong, and a hint


def no_weights(names: Iterable[str]) -> Wrong | None:
    """Say what is wrong with a model that has these files, if it has no weights that are read."""
    names = sorted(names)
    if SINGLE in names or INDEX in names:
        return None
    if pickles := [name for name in names if name.endswith((".bin", ".pt", ".pth")) and "training_args" not in name]:
        hint = "convert it: load it once with transformers and call save_pretrained()"
        return f"weights only as pickle ({pickles[0]}), which can run code and is never read", hint
    if shards := [name for name in names if name.endswith(".safetensors")]:
        return f"no {INDEX}, which says what lies in {shards[0]}", "copy the whole model"
    return f"no {SINGLE}", "set model.from_scratch = true to start from random weights"


def weight_problems(folder: Path, config: Mapping[str, Any], head: HeadKind) -> Iterator[Wrong]:
    """Yield what is wrong with the safetensors files of a model folder. `head`: what the model is to end in."""
    placed: dict[str, str] = {}
    if not (folder / SINGLE).is_file() and (folder / INDEX).is_file():
        try:
            given = read_object(folder / INDEX)["weight_map"]
            placed = {name: str(where) for name, where in given.items()}
        except (ValueError, KeyError, AttributeError):
            yield f"{INDEX} cannot be read: not JSON with a weight_map", AGAIN
            return
    names = sorted(set(placed.values())) or [SINGLE]
    if missing := [name for name in names if placed and not (folder / name).is_file()]:
        yield f"{INDEX} names {', '.join(missing)}, which are not in the folder", "copy the whole model"
        return
    quantized, shapes, whole = "quantization_config" in config, dict[str, Shape](), True
    for name in names:
        try:
            header = read_header(folder / name)
        except (OSError, ValueError) as error:
            whole = False
            why = f"cannot be read: {error.strerror}" if isinstance(error, OSError) else error
            yield f"{name} {why}", AGAIN
            continue
        if lacking := [one for one, where in placed.items() if where == name and one not in header.entries]:
            yield f"the index puts {lacking[0]} into {name}, which lacks it", AGAIN
        packed = [one for one, entry in header.entries.items() if entry.dtype not in _FLOATS]
        if (packed := [one for one in packed if one.endswith((".weight", ".bias"))]) and not quantized:
            message = f"{packed[0]} is stored as {header.entries[packed[0]].dtype}, not as floating point"
            yield message, "name the model that it was made from, in bf16 or fp32"
        shapes |= {one: entry.shape for one, entry in header.entries.items()}
    if whole and not quantized:  # packed weights have shapes of their own
        yield from _differences(shapes, config, head)


def _differences(shapes: Mapping[str, Shape], config: Mapping[str, Any], head: HeadKind) -> Iterator[Wrong]:
    """Yield the first difference between the weights and the model of `config.json`."""
    facts, known = model_facts(config), tensors_of_config(config)
    shapes = built_shapes(shapes, config)
    for what, pattern in _NUMBERED.items() if facts else ():
        has = 1 + max((int(found[1]) for name in shapes if (found := pattern.search(name))), default=-1)
        if has and has != getattr(facts, what):
            yield f"the weights have {has} {what}, and config.json says {getattr(facts, what)}", _OTHER_CONFIG
            return
    if head in HEADS_OF_FILES and shapes.get(SCORE_LAYER, (0,))[0] != 1:
        message = f"has no {SCORE_LAYER} with one row, which gives scores: it would be drawn at random"
        yield message, "name a sequence-classification checkpoint with one output (num_labels 1)"
        return
    if known is None:
        return
    # Experts are stored one by one and built as two tensors; a head that is not logits is built from scratch.
    wanted = {one.name: one.shape for one in known.parameters if ".experts." not in one.name}
    wanted = {name: shape for name, shape in wanted.items() if head == "lm" or name not in LM_HEADS}
    # A model that was saved without its head lacks the first part of its names.
    full = {name.partition(".")[2]: name for name in wanted if name.startswith(("model.", "transformer."))}
    stored = {full.get(name, name): shape for name, shape in shapes.items()}
    wrong = [name for name, shape in wanted.items() if stored.get(name, shape) != shape]
    missing = [name for name in wanted if name not in stored]
    extra = [] if len(wanted) < len(known.parameters) - 1 else [name for name in stored if name not in wanted]
    extra = [name for name in extra if name.endswith(("_proj.weight", "_proj.bias"))]
    if wrong:
        means = f"config.json means {list(wanted[wrong[0]])}"
        yield f"{wrong[0]} has shape {list(stored[wrong[0]])}, but {means}", _OTHER_CONFIG
    elif missing:
        hint = "is it a causal language model, and are all its weight files there?"
        yield f"lacks {len(missing)} of the model's {len(wanted)} weights, first {missing[0]}", hint
    elif extra:
        yield f"the model of config.json has no place for {len(extra)} of the weights, first {extra[0]}", _OTHER_CONFIG
