"""Reads a Hugging Face model's safetensors directly into the memory of an engine, which may hold only a part.

A rank reads the elements of its shards and no more, so no host ever holds a whole model for the sake of loading
it. Experts that lie one by one in the files are read into the tensors that the model makes of them. Where that cannot
be (weights drawn from a seed, other names on disk that transformers converts, no safetensors), the whole model is made
once on the host, and let go.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import chain, count, takewhile
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.hub import cached_file, get_checkpoint_shard_files

from backends.hf.hf_model import build_model, differ_on_disk
from backends.hf.score_layer import no_score_layer, wrong_score_layer
from backends.train.tensor_shards import Shard
from backends.weights.tensor_bytes import named_weights
from backends.weights.tensor_files import TensorFile
from specs.errors import ModelError
from specs.model_shapes import built_names
from specs.wire.role_config import ModelConfig

# A tensor of all experts of a layer → what the files hold of each expert, in its order of rows: usual names, Mixtral's.
_OF_EXPERT = {
    "gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")),
    "up_proj": (("up_proj",),),
    "down_proj": (("down_proj",), ("w2",)),
}


def aliases_of(model: PreTrainedModel) -> dict[str, list[str]]:
    """All names of each weight by its first (more than one where weights are tied), of parameters and saved buffers."""
    names: dict[int, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        names.setdefault(id(tensor), []).append(name)
    return {each[0]: each for each in names.values()}


@torch.no_grad()
def stream_into(
    config: ModelConfig, aliases: Mapping[str, Sequence[str]], shards: Iterable[Shard], head: Collection[str] = ()
) -> None:
    """Fill the shards, as `filler_of` does. Each rank may call this with other shards, or none."""
    fill = filler_of(config, aliases, head)
    for shard in shards:
        fill(shard)


def filler_of(
    config: ModelConfig, aliases: Mapping[str, Sequence[str]], head: Collection[str] = ()
) -> Callable[[Shard], None]:
    """Return what fills a shard's memory, cast to its dtype, with the weights that `build_model` would give the model.
    It may hold the whole model.

    `aliases`: `aliases_of` the model. `head`: names of a score layer, which the files may lack where it is to give
    values: it starts from zeros. Raises ModelError naming weights that are missing, of another shape, or tied in
    `config.json` but different on disk.
    """
    if config.from_scratch:
        return _from_whole_model(config)
    files = ModelFiles.find(config)
    if files is not None:
        files.join_experts(name for each in aliases.values() for name in each)
    given, new = aliases, set[str]()
    if files is not None:
        new = {name for name in head if name not in files.names}
        given = {name: each for name, each in aliases.items() if name not in new}
        files.check_head(set(head) - new)
    if files is None or files.are_named_otherwise(given):
        why = "its weight names are not the model's" if files else "it has no safetensors"
        print(f"{config.path}: {why}, so the whole model is loaded on the host first", file=sys.stderr, flush=True)
        return _from_whole_model(config)
    files.check_names(given)
    if new and config.head == "reward" and not config.learns:
        raise no_score_layer(config.path)

    def fill(shard: Shard) -> None:
        if shard.name in new:
            shard.flat.zero_()
        else:
            files.fill(shard, [name for name in aliases[shard.name] if name in files.names])

    return fill


def _from_whole_model(config: ModelConfig) -> Callable[[Shard], None]:
    """Drawn or read on the host in fp32, as exact as there is; the attention does not matter to weights."""
    on_host = config.model_copy(update={"device": "cpu", "dtype": "fp32", "attn_implementation": "eager"})
    weights = named_weights(build_model(on_host, load_weights=True))

    def fill(shard: Shard) -> None:
        flat = weights[shard.name].detach().reshape(-1)
        shard.flat.copy_(flat[shard.start : shard.start + shard.flat.numel()])

    return fill


class ModelFiles:
    """The safetensors files of one model, read by name and element."""

    def __init__(self, path: str, files: Sequence[Path]) -> None:
        self.path = path
        self._holder: dict[str, tuple[TensorFile, str]] = {}  # file, and the name in it
        self._pieces: dict[str, list[str]] = {}  # a tensor that no file has → those that make it up, one after another
        for file in files:
            try:
                opened = TensorFile(file)
            except (OSError, ValueError) as error:
                raise ModelError(f"model {path}: {file.name}: {error}") from None
            self._holder |= {name: (opened, name) for name in opened.header.entries}
        self._holder = {own: self._holder[name] for name, own in built_names(self._holder).items()}
        self.names = set(self._holder)

    @classmethod
    def find(cls, config: ModelConfig) -> ModelFiles | None:
        """In a folder or on the hub; None where the model is not kept as safetensors."""
        try:
            single = _cached(config.path, SAFE_WEIGHTS_NAME)
            if single is not None:
                return cls(config.path, [Path(single)])
            index = _cached(config.path, SAFE_WEIGHTS_INDEX_NAME)
            if index is None:
                return None
            files, _ = get_checkpoint_shard_files(config.path, index)
        except (OSError, ValueError, KeyError) as error:
            raise ModelError(
                f"model {config.path}: {error}",
                hint="are all the files there that model.safetensors.index.json names?",
            ) from None
        return cls(config.path, [Path(file) for file in files])

    def join_experts(self, wanted: Iterable[str]) -> None:
        """Have those of `wanted` that hold all experts of a layer, [experts, out, in], where files have each apart; of
        Nemotron-H without the prefix that its files have."""
        wanted = [*wanted]
        if "model.embeddings.weight" in wanted:
            self._holder = {re.sub(r"^backbone\.", "model.", name): where for name, where in self._holder.items()}
            self.names = set(self._holder)
        for name in wanted:
            layer, _, last = name.rpartition(".")
            apart = name not in self._holder and layer.endswith(".experts")
            for parts in _OF_EXPERT.get(last, ()) if apart else ():
                own = ([f"{layer}.{number}.{part}.weight" for part in parts] for number in count())
                if pieces := [*chain.from_iterable(takewhile(self.names.issuperset, own))]:
                    self._pieces[name] = pieces
                    self.names = self.names.difference(pieces) | {name}

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self._pieces:
            file, own = self._holder[name]
            return file.entry(own).shape
        pieces = self._pieces[name]
        shapes = {self.shape(piece) for piece in pieces}
        if len(shapes) > 1:
            raise ModelError(f"model {self.path}: {pieces[0]} and other experts of its layer differ in shape")
        ((out, into),) = shapes
        experts = len(pieces) // len(_OF_EXPERT[name.rpartition(".")[2]][0])
        return experts, out * len(pieces) // experts, into

    def are_named_otherwise(self, aliases: Mapping[str, Sequence[str]]) -> bool:
        """Whether weights that the model lacks here may be those that it does not know: transformers renames some
        (older names, a prefix, parts that it fuses)."""
        return bool(self._missing(aliases) and self.names - {name for each in aliases.values() for name in each})

    def check_names(self, aliases: Mapping[str, Sequence[str]]) -> None:
        missing = self._missing(aliases)
        if missing:
            raise ModelError(
                f"model {self.path} lacks {len(missing)} weights, first {missing[0]}",
                hint="is it a causal language model, and are all its weight files there?",
            )

    def check_head(self, names: Iterable[str]) -> None:
        for name in names:
            if (shape := self.shape(name))[0] != 1:
                raise wrong_score_layer(self.path, name, shape)

    def _missing(self, aliases: Mapping[str, Sequence[str]]) -> list[str]:
        return sorted(name for name, each in aliases.items() if self.names.isdisjoint(each))

    def fill(self, shard: Shard, names: Sequence[str]) -> None:
        """Read the elements of `shard` under the first of `names`; a tied weight saved twice must be the same twice."""
        for name in names:
            shape = self.shape(name)
            if shape != shard.shape:
                raise ModelError(
                    f"model {self.path}: {name} has shape {list(shape)} on disk, config.json makes it "
                    f"{list(shard.shape)}"
                )
        values = self.read(names[0], shard.start, shard.start + shard.flat.numel())
        for name in names[1:]:
            if not torch.equal(values, self.read(name, shard.start, shard.start + shard.flat.numel())):
                raise differ_on_disk(self.path, names[0], name)
        shard.flat.copy_(values)

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Elements start … stop-1 of the flattened tensor, in the dtype on disk."""
        if name in self._pieces:
            return self._read_pieces(self._pieces[name], start, stop)
        file, own = self._holder[name]
        flat = torch.empty(stop - start, dtype=file.dtype(own))
        file.read_into(flat, own, start)
        return flat

    def _read_pieces(self, pieces: Sequence[str], start: int, stop: int) -> Tensor:
        size = math.prod(self.shape(pieces[0]))
        read = [
            self.read(piece, max(0, start - first), min(size, stop - first))
            for first, piece in zip(range(0, size * len(pieces), size), pieces, strict=True)
            if first < stop and start < first + size
        ]
        return torch.cat(read) if read else torch.empty(0)


def _cached(path: str, name: str) -> str | None:
    return cached_file(
        path, name, _raise_exceptions_for_missing_entries=False, _raise_exceptions_for_connection_errors=False
    )
