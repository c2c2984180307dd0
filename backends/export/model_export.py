"""Exports a checkpoint as a Hugging Face folder and verifies it. Neither step holds a whole model unless there is
memory for it."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from backends.export.adapter_export import (
    adapter_weights,
    compare_adapters,
    holds_adapters,
    load_adapted,
    merged_weights,
)
from backends.export.hf_folder import (
    OnBytes,
    copy_rest,
    file_dtype,
    files_of_tensors,
    folder_of,
    in_place,
    write_folder,
)
from backends.hf.language_model import class_of_folder, is_composite, language_model_config
from backends.hf.score_layer import auto_class, has_score_layer, score_layer
from backends.train.tensor_shards import ShardReader
from backends.weights.tensor_bytes import DTYPES, named_weights
from backends.weights.tensor_files import LazyTensor, TensorFile
from specs.errors import CheckpointError, ExportError
from specs.model_shapes import language_model_names
from specs.schema.roles import HeadKind

# A greedy choice counts as decided when it led by more than this many nats: rounding cannot change it.
DECIDED = {"fp32": 1e-3, "bf16": 0.25}
# How far a value may be from the trainer's, as a share of the largest, by the coarser precision of the two.
VALUE_GAP = {"fp32": 1e-3, "bf16": 0.05}

# (what is being done, bytes of it that are done, bytes of it in all)
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Source:
    """Input of an export: a role's checkpoint, its model, and the requested precision."""

    checkpoint: Path
    model_path: str
    dtype: str
    trust_remote_code: bool
    head: HeadKind = "lm"  # "value": a critic, which becomes a sequence-classification model with one output


@dataclass(frozen=True)
class Proof:
    """Result of verifying the exported folder."""

    tensors: int
    parameters: int
    greedy_tokens: int  # compared with the trainer's
    undecided_tokens: int  # skipped: the trainer's two best tokens were too close
    loaded: str  # "memory", or "disk" where it was larger than the memory allowed
    values: int = 0  # compared with the trainer's, of a critic


def trained_weights(source: Source) -> list[LazyTensor]:
    """The trained weights by the model's own names, in the requested dtype; each is read when it is loaded."""
    model, dtype = _on_meta(source), DTYPES[source.dtype]
    if holds_adapters(source.checkpoint):
        return merged_weights(source.checkpoint, model, source.model_path, source.trust_remote_code, dtype)
    reader = ShardReader(source.checkpoint, "model")

    def lazy(name: str) -> LazyTensor:
        cast = file_dtype(model, name, reader.dtypes[name], dtype)
        return LazyTensor(name, reader.shapes[name], cast, lambda: reader.tensor(name).to(cast))

    return [lazy(name) for name in reader.shapes]


# ── writing ───────────────────────────────────────────────────────────────────────────────────────


def write_model(source: Source, out: Path, shard_bytes: int, progress: Progress) -> None:
    """Write safetensors, config, tokenizer and generation config into `out`. Raises OSError where the disk is full."""
    model = _on_meta(source)
    weights = trained_weights(source)
    _check_fits(model, weights, source.model_path)
    if folder := _composite_folder(source):
        copy_rest(folder, out)
        whole = in_place(as_published(model, weights), folder)
        write_folder(out, whole, shard_bytes, _counting(whole, "writing", progress))
        return
    model.config.dtype = DTYPES[source.dtype]
    trust = {"trust_remote_code": source.trust_remote_code}
    tokenizer = AutoTokenizer.from_pretrained(source.model_path, **trust)
    if (tokenizer.pad_token_id or 0) >= model.config.get_text_config().vocab_size:  # its class adds one: Qwen2's does
        tokenizer = AutoTokenizer.from_pretrained(source.model_path, pad_token=None, **trust)
    if source.head != "lm" and model.config.pad_token_id is None and tokenizer.pad_token_id != tokenizer.eos_token_id:
        model.config.pad_token_id = tokenizer.pad_token_id  # without one, transformers scores no batch
    model.save_pretrained(out, state_dict={})  # all files except weights
    published = as_published(model, weights)
    write_folder(out, published, shard_bytes, _counting(published, "writing", progress))
    try:
        tokenizer.save_pretrained(out)
    except Exception:  # tokenizers raises no OSError: where the disk is full, the next write does
        with (out / "tokenizer.json").open("ab") as file:
            file.write(bytes(1 << 20))
        raise
    if source.head == "lm":
        _generation_config(source.model_path, model.config).save_pretrained(out)


def _on_meta(source: Source) -> PreTrainedModel:
    """The model without memory: its names, shapes and conversions."""
    trust = source.trust_remote_code
    config = AutoConfig.from_pretrained(source.model_path, trust_remote_code=trust)
    config = language_model_config(config, source.model_path)
    if source.head != "lm":
        config.num_labels = 1
    made_by = auto_class(source.head, config, source.model_path)
    with torch.device("meta"):
        model: PreTrainedModel = made_by.from_config(config, dtype=DTYPES[source.dtype], trust_remote_code=trust)
    model.tie_weights()
    return model


def _composite_folder(source: Source) -> Path | None:
    """Return the folder of which a language model was trained, where it holds weights of others too."""
    config = AutoConfig.from_pretrained(source.model_path, trust_remote_code=source.trust_remote_code)
    if source.head != "lm" or not is_composite(config):
        return None
    folder = folder_of(source.model_path)
    return folder if any(folder.glob("*.safetensors")) else None  # else it began from a seed


def _check_fits(model: PreTrainedModel, weights: Sequence[LazyTensor], path: str) -> None:
    want = {name: tuple(tensor.shape) for name, tensor in named_weights(model).items()}
    have = {weight.name: weight.shape for weight in weights}
    missing, unknown = sorted(want.keys() - have.keys()), sorted(have.keys() - want.keys())
    other = [
        f"{name} {list(have[name])}, not {list(want[name])}"
        for name in want.keys() & have.keys()
        if want[name] != have[name]
    ]
    if missing or unknown or other:
        raise CheckpointError(
            f"the checkpoint does not fit the model at {path}: "
            f"missing {missing[:3]}, unknown {unknown[:3]}, other shapes {sorted(other)[:3]}",
            hint="the model folder changed since the run; put back the one that the run was started with",
        )


def as_published(model: PreTrainedModel, weights: Sequence[LazyTensor]) -> list[LazyTensor]:
    """Weights under the names, and in the pieces, that the files of such models have.

    They differ where transformers joins tensors as it loads (a mixture's experts, say). Each tensor is then taken apart
    by itself; only where a file's tensor is made of several are they all held at once.
    """
    meta = {weight.name: torch.empty(weight.shape, dtype=weight.dtype, device="meta") for weight in weights}
    wanted = revert_weight_conversion(model, dict(meta))
    apart = {name: revert_weight_conversion(model, {name: tensor}) for name, tensor in meta.items()}
    groups = [[weight] for weight in weights]
    if {name for pieces in apart.values() for name in pieces} != wanted.keys():
        groups = [list(weights)]
    published: list[LazyTensor] = []
    for group in groups:
        pieces = apart[group[0].name] if len(group) == 1 else wanted
        if [*pieces] == [weight.name for weight in group]:
            published += group
            continue
        joined = _Joined(model, group)
        published += [
            LazyTensor(name, tuple(piece.shape), piece.dtype, joined.loader(name)) for name, piece in pieces.items()
        ]
    return published


class _Joined:
    """Tensors that the files hold in other pieces. Held from the first piece that is loaded to the last."""

    def __init__(self, model: PreTrainedModel, group: Sequence[LazyTensor]) -> None:
        self._model, self._group = model, group
        self._pieces: dict[str, Tensor] = {}

    def loader(self, name: str) -> Callable[[], Tensor]:
        return lambda: self._load(name)

    def _load(self, name: str) -> Tensor:
        if name not in self._pieces:
            loaded = {weight.name: weight.load() for weight in self._group}
            self._pieces = dict(revert_weight_conversion(self._model, loaded))
        return self._pieces.pop(name).contiguous()


def _counting(tensors: Sequence[LazyTensor], what: str, progress: Progress) -> OnBytes:
    total, done = sum(tensor.nbytes for tensor in tensors), 0

    def on_bytes(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        progress(what, done, total)

    return on_bytes


def _generation_config(model_path: str, config: Any) -> GenerationConfig:
    try:
        return GenerationConfig.from_pretrained(model_path)
    except OSError:  # the model has none
        return GenerationConfig.from_model_config(config)


# ── proving ───────────────────────────────────────────────────────────────────────────────────────


def prove(source: Source, out: Path, proof_file: Path, memory_bytes: int, progress: Progress) -> Proof:
    """Compare the files with the checkpoint, tensor by tensor, then load `out` as anybody would, from the disk where it
    needs more than `memory_bytes`, and have it repeat the trainer. Raises ExportError on any difference."""
    weights = trained_weights(source)
    meta = _on_meta(source)
    published = as_published(meta, weights)
    if folder := _composite_folder(source):
        published = in_place(published, folder)
    _compare_files(files_of_tensors(out), published, _counting(published, "comparing", progress))
    total = sum(tensor.nbytes for tensor in published)
    progress("loading it back", 0, 0)
    with tempfile.TemporaryDirectory(dir=out.parent) as scratch:
        in_memory = total * 1.2 < memory_bytes
        where: dict[str, Any] = {}
        if not in_memory:
            limit = {"cpu": memory_bytes}
            where = {"device_map": "auto", "max_memory": limit, "offload_folder": scratch}
        model = _load(source, out, where)
        if in_memory:
            _compare_loaded(model, weights)
        AutoTokenizer.from_pretrained(out, trust_remote_code=source.trust_remote_code)
        proof = json.loads(proof_file.read_text())
        compared = undecided = values = 0
        if has_score_layer(model):
            values = _values(model, proof, source.dtype)
        else:
            compared, undecided = _greedy(model, proof, DECIDED[source.dtype])
        # Of the model on meta: one that is partly on the disk shows tied parameters twice.
        parameters = sum(parameter.numel() for parameter in meta.parameters())
        return Proof(len(published), parameters, compared, undecided, "memory" if in_memory else "disk", values)


def prove_adapters(source: Source, out: Path, proof_file: Path) -> Proof:
    """Load `out` onto the base model as a user of peft does, and have them repeat the trainer. Raises ExportError."""
    weights = adapter_weights(source.checkpoint)
    model = load_adapted(source.model_path, out, DTYPES[source.dtype], source.trust_remote_code)
    compare_adapters(model, weights)
    compared, undecided = _greedy(model, json.loads(proof_file.read_text()), DECIDED[source.dtype])
    parameters = sum(math.prod(weight.shape) for weight in weights)
    return Proof(len(weights), parameters, compared, undecided, "memory")


def _compare_files(files: Mapping[str, TensorFile], wanted: Sequence[LazyTensor], on_bytes: OnBytes) -> None:
    odd = sorted(files.keys() ^ {tensor.name for tensor in wanted})
    if odd:
        raise ExportError(f"{odd[0]} is in only one of the checkpoint and the exported model")
    for tensor in wanted:
        if not _same(files[tensor.name].tensor(tensor.name), tensor.load()):
            raise ExportError(f"{tensor.name} has other values in the exported model than in the checkpoint")
        on_bytes(tensor.nbytes)


def _same(one: Tensor, other: Tensor) -> bool:
    """Whether dtype, shape and every bit are equal."""
    bits = (tensor.flatten().view(torch.uint8) for tensor in (one, other))
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(*bits)


def _load(source: Source, out: Path, where: dict[str, Any]) -> PreTrainedModel:
    config = AutoConfig.from_pretrained(out, trust_remote_code=source.trust_remote_code)
    composite = is_composite(config)
    made_by = class_of_folder(config) if composite else auto_class(source.head, config, source.model_path)
    loaded = made_by.from_pretrained(
        out,
        dtype=DTYPES[source.dtype],
        trust_remote_code=source.trust_remote_code,
        output_loading_info=True,
        **where,
    )
    model, info = cast(tuple[PreTrainedModel, dict[str, Any]], loaded)  # because of `output_loading_info`
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if info[what] and not (composite and what == "unexpected_keys"):  # they came so
            raise ExportError(f"the exported folder loads with {what.replace('_', ' ')}: {sorted(info[what])[:5]}")
    return model


def _compare_loaded(model: PreTrainedModel, weights: Sequence[LazyTensor]) -> None:
    """Raise ExportError unless transformers made of the files what was trained."""
    state = model.state_dict()
    loaded = {own: state[name] for name, own in language_model_names(state).items()}
    for weight in weights:
        if weight.name not in loaded:
            raise ExportError(f"{weight.name} is in the checkpoint but not in the loaded model")
        if not _same(loaded[weight.name], weight.load()):
            raise ExportError(f"{weight.name} has other values in the loaded model than in the checkpoint")


@torch.no_grad()
def _greedy(model: PreTrainedModel, proof: dict[str, Any], decided: float) -> tuple[int, int]:
    """The trainer's greedy tokens must be this model's too: at every place, given the same tokens before it.

    That is the same as generating greedily, place by place, and says where it first goes another way.
    """
    compared = undecided = 0
    model.eval()
    for prompt, written in zip(proof["prompts"], proof["answers"], strict=True):
        row = torch.tensor([prompt + written["tokens"]])
        choice = model(row, use_cache=False).logits[0].argmax(-1).tolist()
        for place, (token, margin) in enumerate(zip(written["tokens"], written["margins"], strict=True)):
            if margin <= decided:
                undecided += 1
                continue
            compared += 1
            got = choice[len(prompt) + place - 1]
            if got != token:
                raise ExportError(
                    f"greedy token {place} differs: the trainer chose {token} (ahead by {margin:.3g}), the export {got}"
                )
    return compared, undecided


@torch.no_grad()
def _values(model: PreTrainedModel, proof: dict[str, Any], dtype: str) -> int:
    """The trainer's value before each token of the prompts but the first must be this model's too: what its own forward
    pass gets from its head at the token before."""
    said: list[Tensor] = []
    _, layer = score_layer(model)
    handle = layer.register_forward_hook(lambda _module, _inputs, out: said.append(out[0, :, 0].float().cpu()))
    model.eval()
    for prompt in proof["prompts"]:
        model(torch.tensor([prompt]), use_cache=False)
    handle.remove()
    coarser = "bf16" if "bf16" in (dtype, proof["dtype"]) else "fp32"
    largest = max((abs(value) for values in proof["values"] for value in values), default=0.0)
    compared = 0
    for number, (values, got_T) in enumerate(zip(proof["values"], said, strict=True)):
        for place, (value, got) in enumerate(zip(values, got_T[:-1].tolist(), strict=True), start=1):
            if not abs(got - value) <= VALUE_GAP[coarser] * largest:
                raise ExportError(
                    f"the value before token {place} of proof prompt {number} differs: the trainer said {value:.6g}, "
                    f"the export {got:.6g}"
                )
            compared += 1
    return compared
