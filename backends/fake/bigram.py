"""A bigram language model in numpy: logits of the next token = bigram.weight[previous] + bias.weight.

Small enough that the whole frame runs on it in milliseconds, real enough to learn. V: vocabulary, N: rows.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file

from backends.protocol import Weight, WeightSpec
from backends.weights.checksum import checksum_bytes, checksum_weights
from specs.errors import ModelError
from specs.memory_parts import DTYPE_BYTES
from specs.schema.roles import HeadKind
from specs.wire.as_built import ModelBuilt
from specs.wire.role_config import ModelConfig

Parameters = dict[str, NDArray[np.float32]]
SCORE = "score.weight"


def shapes(vocab_size: int, head: HeadKind = "lm") -> dict[str, tuple[int, ...]]:
    """Names and shapes of the weights, in the order of the stream. A model that gives one number for each token has a
    table of them."""
    if head != "lm":
        return {SCORE: (1, vocab_size)}
    return {"bigram.weight": (vocab_size, vocab_size), "bias.weight": (vocab_size,)}


def read_vocab_size(config: ModelConfig) -> int:
    """`vocab_size` in the model's `config.json`. Raises ModelError."""
    path = Path(config.path) / "config.json"
    try:
        return int(json.loads(path.read_text(encoding="utf-8"))["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(
            f"model {config.path}: {error}", hint="the fake engine needs a folder with config.json"
        ) from None


def read_parameters(config: ModelConfig, *, learns: bool = False) -> Parameters:
    """Weights drawn from the seed, or read from the folder's `model.safetensors`; a new table of values, or of a reward
    model that learns, is of zeros. Raises ModelError."""
    vocab_size = read_vocab_size(config)
    wanted = shapes(vocab_size, config.head)
    new_table = config.head == "value" or (config.head == "reward" and learns)
    if config.from_scratch:
        if new_table:
            return {name: np.zeros(shape, np.float32) for name, shape in wanted.items()}
        if config.head == "reward":
            raise ModelError(f"model {config.path}: a reward model drawn at random says nothing")
        rng = np.random.default_rng(config.seed)
        return {name: rng.normal(0.0, 0.02, shape).astype(np.float32) for name, shape in wanted.items()}
    path = Path(config.path) / "model.safetensors"
    try:
        found = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{path}: {error}", hint="set model.from_scratch = true for random weights") from None
    shapes_found = {name: value.shape for name, value in found.items()}
    if new_table and shapes_found == shapes(vocab_size):  # what samples has no values yet
        return {name: np.zeros(shape, np.float32) for name, shape in wanted.items()}
    if shapes_found != wanted:
        what = "bigram model" if config.head == "lm" else "table of values"
        raise ModelError(f"{path} does not hold a {what} of this vocabulary")
    return {name: found[name].astype(np.float32) for name in wanted}


def log_softmax(parameters: Parameters, previous_N: NDArray[np.int64], temperature: float) -> NDArray[np.float64]:
    """log softmax(logits / temperature) of the token after each of `previous_N`, [N, V]."""
    return normalised(logits(parameters, previous_N) / temperature)


def logits(parameters: Parameters, previous_N: NDArray[np.int64]) -> NDArray[np.float64]:
    """Logits of the token after each of `previous_N`, [N, V]."""
    return np.asarray(parameters["bigram.weight"][previous_N].astype(np.float64) + parameters["bias.weight"])


def normalised(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    """log softmax of logits […, V]."""
    shifted = logits - logits.max(-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(-1, keepdims=True)))


def vocab_size_of(parameters: Parameters) -> int:
    return int(next(iter(parameters.values())).shape[-1])


def describe(parameters: Parameters, config: ModelConfig, *, learns: bool, checksum: bool) -> ModelBuilt:
    """Description of the model; it has no attention."""
    size = sum(value.size for value in parameters.values())
    digests = ((name, checksum_bytes(wire_bytes(value, "fp32"))) for name, value in parameters.items())
    vocab_size = vocab_size_of(parameters)
    return ModelBuilt(
        model_class="Bigram" if SCORE not in parameters else "BigramForSequenceClassification",
        path=config.path,
        parameters=size,
        trainable_parameters=size if learns else 0,
        hidden_size=vocab_size,
        layers=1,
        vocab_size=vocab_size,
        dtype="fp32",
        attn_implementation="none",
        attn_function="none",
        tied_embeddings=False,
        head="score" if SCORE in parameters else "lm",
        new_head=checksum and SCORE in parameters and not parameters[SCORE].any(),
        weights_checksum=checksum_weights(digests) if checksum else "",
    )


# ── the wire ──────────────────────────────────────────────────────────────────────────────────────


def wire_bytes(value: NDArray[np.float32], dtype: str) -> NDArray[np.uint8]:
    """Bytes of a weight in wire dtype. bf16 is the upper half of fp32, rounded to nearest even."""
    flat = np.ascontiguousarray(value, dtype=np.float32).reshape(-1)
    if dtype == "fp32":
        return flat.view(np.uint8)
    bits = flat.view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return rounded.astype(np.uint16).view(np.uint8)


class BigramWeight(Weight):
    """A weight of the bigram model in the export stream."""

    def __init__(self, spec: WeightSpec, value: NDArray[np.float32]) -> None:
        self.spec = spec
        self._value = value

    def copy_to(self, buffer: NDArray[np.uint8]) -> str:
        assert buffer.nbytes == self.spec.nbytes, (self.spec.name, buffer.nbytes, self.spec.nbytes)
        own_U = wire_bytes(self._value, self.spec.dtype)
        buffer.view(np.uint8).reshape(-1)[:] = own_U
        return checksum_bytes(own_U)


def weight_specs(vocab_size: int, dtype: str, head: HeadKind = "lm") -> list[WeightSpec]:
    """The stream's specs, in order."""
    return [
        WeightSpec(name, dtype, shape, int(np.prod(shape)) * DTYPE_BYTES[dtype])
        for name, shape in shapes(vocab_size, head).items()
    ]
