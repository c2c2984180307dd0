"""Whether a model folder's weight files are complete and match its `config.json`.

Headers are read; values: `rlctl/models/weight_values.py`. Names and shapes are compared where they are known from the
config (`rlctl/models/model_tensors.py`); of another family only the number of layers is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

from rlctl.models.hub import HubFolder
from rlctl.models.model_tensors import tensors_of_config
from specs.model_facts import model_facts
from specs.model_shapes import LM_HEADS, SCORE_LAYER, ModelTensors
from specs.safetensors_header import Entry, read_header
from specs.schema.roles import HEADS_OF_FILES, HeadKind

PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json", "model.pt", "model.pth", "consolidated.00.pth")
AGAIN = "copy or download it again"
LFS, LFS_HINT = "version https://git-lfs", "fetch it: `git lfs pull` in the model folder"
OTHER_CONFIG = "the weights and config.json belong to different models: copy the whole folder again"
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.")

_FLOATS = ("F64", "F32", "F16", "BF16")

_FIRST_BYTES = 1024

Wrong = tuple[str, str]  # what is wrong, and a hint
Shapes = dict[str, tuple[int, ...]]


def weight_problems(folder: Path, config: Mapping[str, Any], head: HeadKind = "lm") -> Iterator[Wrong]:
    """Everything that is wrong with the safetensors files of a model folder. `head`: what the model is to end in."""
    files, index, wrong = weight_files(folder)
    if wrong:
        yield wrong
        return
    shapes: Shapes = {}
    owners: dict[str, tuple[Path, Entry]] = {}
    whole = True
    for file in files:
        try:
            entries = read_header(file).entries
        except (OSError, ValueError) as error:
            whole = False
            if _is_pointer(file):
                yield f"{file.name} is a pointer of Git LFS, not the file itself", LFS_HINT
            else:
                yield f"{file.name} {_words(error)}", AGAIN
            continue
        held = {name: entry.shape for name, entry in entries.items()}
        packed = [
            name
            for name, entry in entries.items()
            if name.endswith((".weight", ".bias")) and entry.dtype not in _FLOATS
        ]
        if packed and "quantization_config" not in config:
            message = f"{packed[0]} is stored as {entries[packed[0]].dtype}, not as floating point"
            yield message, "name the model that it was made from, in bf16 or fp32"
        lacking = [name for name, where in index.items() if where == file.name and name not in held]
        if lacking:
            yield f"the index puts {lacking[0]} into {file.name}, which lacks it", AGAIN
        if head == "lm" and (wrong := _untied(file, entries, config)):
            yield wrong
        if twice := [name for name in held if name in owners and _differ(owners[name], (file, entries[name]))]:
            other = owners[twice[0]][0].name
            yield f"{twice[0]} is in {other} and, with other values, in {file.name}", "copy the whole model again"
        owners |= {name: (file, entry) for name, entry in entries.items()}
        shapes |= held
    if whole and "quantization_config" not in config:  # packed weights have shapes of their own
        yield from _differences(shapes, config, head)


def hub_weight_problems(folder: HubFolder, config: Mapping[str, Any]) -> Iterator[Wrong]:
    """What is wrong with a model's weights on the hub, judged by file names alone."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.there is False and index.there is False:
        hint = "name a repository that has them as safetensors, or convert them: load once, then save_pretrained()"
        yield "no model.safetensors on the hub; weights as pickle can run code and are never read", hint
    if single.there or index.content is None:
        return
    try:
        names = [str(name) for name in json.loads(index.content)["weight_map"]]
    except (ValueError, KeyError, TypeError) as error:
        yield f"{index.name} on the hub cannot be read: {error!r}", "tell its owner, or name another model"
        return
    if wrong := _other_depth(names, config) or _other_experts(names, config):
        yield wrong


def _untied(file: Path, entries: Mapping[str, Entry], config: Mapping[str, Any]) -> Wrong | None:
    """A head that the config ties to the embedding, and the file holds beside it with other values: transformers
    builds them untied, and nothing else knows."""
    facts = model_facts(config)
    pair = [entries.get("model.embed_tokens.weight"), entries.get("lm_head.weight")]
    if facts is None or not facts.tied_embeddings or None in pair:
        return None
    with file.open("rb") as stream:
        values = [_first_bytes(stream, entry) for entry in pair if entry is not None]
    if values[0] == values[1]:
        return None
    message = f"config.json ties the head to the embedding, and {file.name} holds another lm_head.weight"
    return message, "set tie_word_embeddings to false in config.json, or remove the head from the file"


def _differ(one: tuple[Path, Entry], other: tuple[Path, Entry]) -> bool:
    """Whether two tensors of one name have other shapes, or begin with other bytes."""
    if (one[1].dtype, one[1].shape) != (other[1].dtype, other[1].shape):
        return True
    with one[0].open("rb") as mine, other[0].open("rb") as theirs:
        return _first_bytes(mine, one[1]) != _first_bytes(theirs, other[1])


def _first_bytes(stream: BinaryIO, entry: Entry) -> bytes:
    stream.seek(entry.start)
    return stream.read(min(entry.nbytes, _FIRST_BYTES))


def _is_pointer(file: Path) -> bool:
    with file.open("rb") as stream:
        return stream.read(len(LFS)) == LFS.encode()


def _words(error: Exception) -> str:
    return f"cannot be read: {error.strerror}" if isinstance(error, OSError) else str(error)


def weight_files(folder: Path) -> tuple[list[Path], dict[str, str], Wrong | None]:
    """The files, the index (tensor → file name; empty where there is none), or what is wrong."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return [single], {}, None
    if not index.is_file():
        return [], {}, _no_weights(folder)
    try:
        placed = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = sorted(set(placed.values()))
        missing = [name for name in names if not (folder / name).is_file()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return [], {}, (f"{index.name} cannot be read: not JSON with a weight_map", AGAIN)
    if missing or not names:
        wrong = f"{index.name} names {', '.join(missing) or 'no file'}, which are not in the folder"
        return [], {}, (wrong, "copy the whole model")
    return [folder / name for name in names], placed, None


def _no_weights(folder: Path) -> Wrong:
    pickles = [name for name in PICKLES if (folder / name).exists()]
    pickles += sorted(file.name for file in folder.glob("pytorch_model*.bin"))
    if pickles:
        hint = "convert it: load it once with transformers and call save_pretrained()"
        return f"weights only as pickle ({pickles[0]}), which can run code and is never read", hint
    if shards := sorted(file.name for file in folder.glob("*.safetensors")):
        return f"no model.safetensors.index.json, which says what lies in {shards[0]}", "copy the whole model"
    hint = "set model.from_scratch = true to start from random weights"
    return f"no model.safetensors in {folder}", hint


def _differences(shapes: Shapes, config: Mapping[str, Any], head: HeadKind) -> Iterator[Wrong]:
    """Where weights and config differ: in the number of layers, else in the first shape."""
    if wrong := _other_depth(shapes, config) or _other_experts(shapes, config):
        yield wrong
        return
    known = tensors_of_config(config)
    if known and head != "lm":  # its own head is kept or made anew
        known = replace(known, parameters=tuple(one for one in known.parameters if one.name not in LM_HEADS))
        if (score := shapes.get(SCORE_LAYER)) is not None and score[0] != 1:
            whose = "a reward model's" if head in HEADS_OF_FILES else "a critic's"
            hint = "name a checkpoint with one output (num_labels 1)"
            yield f"{SCORE_LAYER} has shape {list(score)}: {whose} head has one output", hint
            return
        if score is None and head in HEADS_OF_FILES:
            hint = "a reward model is a sequence-classification checkpoint with one output (num_labels 1)"
            yield f"has no head that gives scores ({SCORE_LAYER}): it would be drawn at random", hint
            return
    for parameter in known.parameters if known else ():
        stored = shapes.get(parameter.name)
        if stored is not None and stored != parameter.shape:
            message = f"{parameter.name} has shape {list(stored)}, but config.json means {list(parameter.shape)}"
            yield message, OTHER_CONFIG
            return
    if known and not config.get("text_config") and (wrong := _lacking(shapes, known) or _without_place(shapes, known)):
        yield wrong


def _lacking(shapes: Shapes, known: ModelTensors) -> Wrong | None:
    """Parameters that no file has. Names may lack their first part, as those of a model that was saved without a head;
    experts, which are stored one by one, are built as two tensors: `_other_experts` counts them."""
    names = [parameter.name for parameter in known.parameters]
    if any(".experts." in name for name in names):
        stored = [name for name in shapes if ".experts." in name]
        if stored and not any(name in names or _EXPERT.search(name) for name in stored):
            message = f"its experts have other names than the model's: {stored[0]} is there, and no .experts.0."
            return message, "what converted it left them by other names: convert it again, or take another copy"
        return None
    missing = [name for name in names if name not in shapes and name.partition(".")[2] not in shapes]
    if not missing:
        return None
    if len(missing) > len(names) // 2:
        found = next(iter(shapes), "none")
        return f"the weights have other names than the model's: {missing[0]} is missing, {found} is there", OTHER_CONFIG
    hint = "is it a causal language model, and are all its weight files there?"
    return f"lacks {len(missing)} of the model's {len(names)} weights, first {missing[0]}", hint


def _without_place(shapes: Shapes, known: ModelTensors) -> Wrong | None:
    """Weights of layers that the model of this config has no place for, and that would be left out without a word."""
    names = {parameter.name for parameter in known.parameters}
    if any(".experts." in name for name in names):
        return None
    own = {name.partition(".")[2] for name in names} | names
    linear = [name for name in shapes if _LAYER.search(name) and name.endswith(("_proj.weight", "_proj.bias"))]
    extra = [name for name in linear if name not in own]
    if not extra:
        return None
    return f"the model of config.json has no place for {len(extra)} of the weights, first {extra[0]}", OTHER_CONFIG


def _other_depth(names: Iterable[str], config: Mapping[str, Any]) -> Wrong | None:
    facts = model_facts(config)
    layers = 1 + max((int(found[1]) for name in names if (found := _LAYER.search(name))), default=-1)
    if facts is None or not layers or layers == facts.layers:
        return None
    return f"the weights have {layers} layers, and config.json says {facts.layers}", OTHER_CONFIG


def _other_experts(names: Iterable[str], config: Mapping[str, Any]) -> Wrong | None:
    facts = model_facts(config)
    layers: dict[str, set[int]] = {}
    for name in names:
        if found := _EXPERT.match(name):
            layers.setdefault(found[1], set()).add(int(found[2]))
    for layer, numbers in layers.items() if facts and facts.experts else ():
        if facts and len(numbers) != facts.experts:
            return f"{layer} holds {len(numbers)} experts, and config.json says {facts.experts}", OTHER_CONFIG
    return None
