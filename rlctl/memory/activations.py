"""Estimate what a forward and a backward pass keep, held against measured peaks (docs/check-config.md).

T: tokens of a micro-batch, E: hidden size, I: width of the MLP, D: head size, V: vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from specs.memory_parts import DTYPE_BYTES, Moment, Part
from specs.model_facts import ModelFacts, mlp_width
from specs.schema.engines.transformers_tables import KEPT_OF_MLP
from specs.schema.role_section import DType
from specs.schema.roles import HeadKind

_FP32 = 4
_LEARN: frozenset[Moment] = frozenset({"train"})
OFFLOADED_LAYERS = 2  # whose activations are on their way to the host or back
# RMSNorms that backends/train/rms_norm.py computes on the CPU in fp32, keeping less.
_LEAN_NORMS = ("llama", "mistral", "qwen2", "qwen3")


@dataclass(frozen=True)
class Pass:
    """Everything that decides how much a micro-batch keeps. `trains_head`: its weight gets a gradient (not with
    LoRA)."""

    facts: ModelFacts
    config: Mapping[str, Any]  # config.json
    dtype: DType
    device: str
    tokens: int  # T, of a row as this rank holds it: a part, where ranks share rows
    longest: int  # sequence, however many ranks share it
    logits_chunk: int
    attention: str
    recomputed: int  # layers
    offloaded: bool = False  # what is kept waits in host memory
    sequence_parallel: int = 1  # ranks that share a row
    tensor: int = 1  # ranks that hold a part of each layer, and of the head
    row_parts: int = 1  # of these, those that hold a part of the row between the sharded layers
    stages: int = 1  # that the layers are shared out to, as many to each
    chunks: int = 1  # groups of layers of a stage
    angles: int = 0  # tensors of the head size that each layer keeps of its rotations
    mlp_tensors: int = KEPT_OF_MLP  # tensors of the MLP's width that each layer keeps
    head_norms: bool = False  # of queries and of keys
    head: HeadKind = "lm"
    trains_head: bool = True
    adds_head_gradient: bool = False  # straight into what the engine holds
    entropy: bool = False

    @property
    def size(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @property
    def row(self) -> int:
        """Tokens of a row, however many ranks share it."""
        return self.tokens * self.sequence_parallel

    @property
    def mlp_width(self) -> int:
        """I: of all experts that a token visits, on this rank."""
        return mlp_width(self.facts, self.config) // self.tensor

    @property
    def vocabulary(self) -> int:
        """V: on this rank."""
        return self.facts.vocab_size // self.tensor


def learning_parts(work: Pass) -> Iterator[Part]:
    """Estimate what a forward and a backward pass hold, on the stage that holds most."""
    stages = [list(_stage_parts(work, stage)) for stage in range(work.stages)]
    yield from max(stages, key=lambda parts: sum(part.nbytes for part in parts if not part.host))
    if mask := _mask_bytes(work):
        yield Part("attention mask", mask, _LEARN, of_tokens=True)


def chunks_under_way(stage: int, stages: int, chunks: int) -> list[int]:
    """Return the groups of layers that a stage has begun when it takes the first one back, one entry for each
    micro-batch: the most that it keeps. With one group it is 1F1B, with several the interleaved schedule (Narayanan et
    al. 2021), where as many micro-batches as there are stages go through a group before the next one's turn comes."""
    if chunks == 1:
        return [0] * (stages - stage)
    begun = 2 * (stages - stage - 1) + (chunks - 1) * stages + 1
    return [number // stages % chunks for number in range(begun)]


def _stage_parts(work: Pass, stage: int) -> Iterator[Part]:
    each = work.facts.layers // (work.stages * work.chunks)
    begun = [chunk * work.stages + stage for chunk in chunks_under_way(stage, work.stages, work.chunks)]
    again = sum(max(0, min(each, work.recomputed - group * each)) for group in begun)
    layers, first, last = len(begun) * each, stage == 0, stage == work.stages - 1
    kept, largest = _layer_bytes(work)
    row = work.tokens * work.facts.hidden_size * work.size // work.row_parts
    # Embeddings and the last norm; what came from the stage before, and what goes to the next one.
    outside = (3 if last else 0) * row + len(begun) * ((not first) + (not last)) * row
    of_layers = again * row + (layers - again) * kept
    if work.offloaded:
        yield Part("activations, offloaded", of_layers, _LEARN, host=True, of_tokens=True)
        of_layers = min(of_layers, OFFLOADED_LAYERS * (row if again == layers else largest))
    # The head runs when all that is kept is there, but for the layer that is recomputed; a layer's backward pass when
    # the layer's own activations are there too. The layers that are recomputed come last on the way back.
    all_again = again == layers
    yield Part("activations", of_layers + outside + (largest if all_again else 0), _LEARN, of_tokens=True)
    logits = _head_bytes(work) - (largest if all_again else 0) if last else 0
    # The gradients under way in a layer, on top of what it kept.
    under_way = 2 * work.mlp_width + 2 * work.facts.hidden_size
    backward = work.tokens * max(under_way * work.size, _scores(work) * _FP32)
    name = "logits and their gradient" if logits >= backward else "backward pass of a layer"
    yield Part(name, max(logits, backward), _LEARN, of_tokens=True)


def scoring_parts(work: Pass) -> Iterator[Part]:
    """Estimate what a forward pass alone holds: a layer that keeps nothing, or a chunk of logits and log-probs."""
    one_layer = (3 * work.mlp_width + 4 * work.facts.hidden_size) * work.size
    forward = work.tokens * max(one_layer, _scores(work) * (_FP32 + 2 * work.size)) + _mask_bytes(work)
    logits = min(work.logits_chunk, work.tokens) * work.vocabulary * 2 * _FP32 if work.head == "lm" else 0
    yield Part("forward pass", max(forward, logits), _LEARN, of_tokens=True)


def _layer_bytes(work: Pass) -> tuple[int, int]:
    """Count what autograd keeps of a decoder layer, in the mean and of the one that keeps most: inputs of its linear
    layers, norms, attention or a state, and activation."""
    facts, size = work.facts, work.size
    lean = facts.model_type in _LEAN_NORMS and work.device == "cpu" and work.dtype == "fp32"
    norms = 2 * facts.hidden_size * (2 * size if lean else _FP32 + 2 * size) // work.row_parts
    # Ranks that share a row hold all of it for some heads, and a key-value head each at least.
    kv_heads = max(facts.kv_heads, work.sequence_parallel * work.tensor)
    query, key = (heads * facts.head_dim // work.tensor for heads in (facts.heads, kv_heads))
    # Queries, keys, values and the output, which is kept once more in the order of the row.
    attention = (3 * query + 2 * key) * size
    if work.attention == "eager":  # softmax in fp32, and what it becomes
        attention += _scores(work) * (_FP32 if size == _FP32 else _FP32 + size)
    experts = 2 * facts.hidden_size * (facts.experts_per_token or 2) if facts.experts else 0
    attention += work.angles * facts.head_dim * size
    if work.head_norms:  # their outputs are rotated at once
        attention += (query + key) * (size if lean else _FP32 + size)
    every = norms + (work.mlp_tensors * work.mlp_width + experts // work.row_parts) * size
    state, both = _state_bytes(work), facts.state_layers + facts.cached_layers > facts.layers
    mean = (facts.cached_layers * attention + facts.state_layers * state) // facts.layers
    largest = attention + state if both else max(attention if facts.cached_layers else 0, state)
    return work.tokens * (every + mean), work.tokens * (every + largest)


def _state_bytes(work: Pass) -> int:
    """Count what a layer with a state keeps for each token: every sequence is filled up to whole chunks."""
    if not work.facts.state_layers:
        return 0
    state, sequence = work.facts.state, min(work.row, work.longest)
    own, fp32 = state.kept
    return own * work.size + fp32 * _FP32 * -(-sequence // state.chunk) * state.chunk // sequence


def _scores(work: Pass) -> int:
    """Count the scores that eager attention computes for each token: with all tokens of the longest sequence, whoever
    sees them. Ranks that share a row have fewer heads of more tokens."""
    return work.facts.heads // work.tensor * min(work.row, work.longest) if work.attention == "eager" else 0


def _mask_bytes(work: Pass) -> int:
    """Count the masks of eager attention, one for each kind of layer: made once for a micro-batch, on every rank of the
    whole sequence."""
    if work.attention != "eager":
        return 0
    kinds = len({*(work.config.get("layer_types") or ())}) or 1
    return min(work.row, work.longest) ** 2 * (kinds if work.facts.sliding_window else 1) * work.size


def _head_bytes(work: Pass) -> int:
    """Count one chunk of logits with what the loss makes of it, and gradients of hidden states and of the head."""
    rows = work.tokens * work.facts.hidden_size
    hidden = 2 * rows * work.size
    if work.head != "lm":  # what enters it, in fp32, and the gradient of that
        return hidden + (2 * rows * _FP32 if work.dtype == "bf16" else 0)
    chunk, vocabulary = min(work.logits_chunk, work.tokens), work.vocabulary
    capped = work.config.get("final_logit_softcapping") is not None
    copies = 2 + (work.entropy or capped)  # logits and log-probs, in whose memory the rest is computed
    logits = chunk * vocabulary * copies * _FP32
    weight = 0
    if work.trains_head and not work.adds_head_gradient:
        weight = vocabulary * work.facts.hidden_size * (_FP32 + (work.size if work.dtype == "bf16" else 0))
    return logits + weight + hidden
