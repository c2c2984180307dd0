"""Names: which tensors of a Hugging Face model make each parameter of a Megatron pipeline stage.

A tensor that no table knows (a bias, a kind of layer) is an error when the model is built, never left out.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from backends.megatron.layouts import Experts, Heads, Slot, padded_vocabulary, part_of
from backends.weights.tensor_bytes import named_weights
from specs.errors import ModelError
from specs.schema.engines.megatron_table import FAMILIES

EMBEDDING, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
SCORE = "score.weight"
GATE_UP, DOWN = "experts.gate_up_proj", "experts.down_proj"


@dataclass(frozen=True)
class ModelMap:
    """A decoder as Llama made it, with what its family adds; some or all of its layers may have experts. `names`: of
    all weights, a tied one's first. `fused_norms`: whether a norm belongs to the multiplication that follows it, as in
    TransformerEngine's layers; what experts see is normed apart."""

    path: str
    names: Collection[str]
    layers: int
    vocabulary: int
    heads: Heads
    experts: Experts | None = None
    fused_norms: bool = False

    @classmethod
    def of(cls, model: PreTrainedModel, path: str, *, fused_norms: bool = False) -> ModelMap:
        """Raises ModelError unless every weight has its place in Megatron's model, and every place its weight."""
        text: Any = model.config.get_text_config()
        if text.model_type not in FAMILIES or getattr(text, "sliding_window", None):  # others only have the same names
            known = f"the engine megatron computes {', '.join(FAMILIES)} without sliding windows"
            raise ModelError(f"{known}, and {path} is another model")
        heads, weights = text.num_attention_heads, named_weights(model)
        shape = Heads(
            query=heads,
            key=getattr(text, "num_key_value_heads", None) or heads,
            dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
        )
        down = next((weight for name, weight in weights.items() if name.endswith(DOWN)), None)
        experts = None if down is None else Experts(down.shape[0], hidden=down.shape[1], inner=down.shape[2])
        found = cls(path, list(weights), text.num_hidden_layers, text.vocab_size, shape, experts, fused_norms)
        found._check()
        return found

    def is_sparse(self, layer: int) -> bool:
        """Whether the layer has experts in the place of its MLP."""
        return f"model.layers.{layer}.mlp.{GATE_UP}" in self.names

    @property
    def scores(self) -> bool:
        """Whether it ends in one number for each token, not in logits."""
        return SCORE in self.names

    @property
    def tied(self) -> bool:
        return not self.scores and HEAD not in self.names

    @property
    def qkv_bias(self) -> bool:
        return "model.layers.0.self_attn.q_proj.bias" in self.names

    @property
    def qk_norm(self) -> bool:
        return "model.layers.0.self_attn.q_norm.weight" in self.names

    def slots(self, stage: int, stages: int, tensor_ranks: int, experts: range | None = None) -> list[Slot]:
        """Slots of one pipeline stage, in the order of the model. A tied head is the embedding's, once more, on the
        last stage. `experts`: those of this rank; None: all."""
        if experts is None:
            experts = range(self.experts.count if self.experts else 0)
        found = []
        padded = padded_vocabulary(self.vocabulary, tensor_ranks)
        first, last = stage == 0, stage == stages - 1
        if first:
            found.append(Slot("embedding.word_embeddings.weight", (EMBEDDING,), shard_dim=0, padded=padded))
        for place, layer in enumerate(part_of(self.layers, stage, stages)):
            ours, theirs = f"decoder.layers.{place}", f"model.layers.{layer}"
            found += self._attention(ours, theirs)
            found += self._sparse(ours, theirs, experts) if self.is_sparse(layer) else self._dense(ours, theirs)
        if last:
            found.append(Slot("decoder.final_layernorm.weight", (NORM,)))
            if self.scores:
                found.append(Slot("score.weight", (SCORE,)))
            elif not self.tied:
                found.append(Slot("output_layer.weight", (HEAD,), shard_dim=0, padded=padded))
            elif not first:
                found.append(Slot("output_layer.weight", (EMBEDDING,), shard_dim=0, padded=padded))
        return found

    def _attention(self, ours: str, theirs: str) -> Iterator[Slot]:
        norm = "self_attention.linear_qkv.layer_norm_weight" if self.fused_norms else "input_layernorm.weight"
        yield Slot(f"{ours}.{norm}", (f"{theirs}.input_layernorm.weight",))
        for kind in ("weight", "bias") if self.qkv_bias else ("weight",):
            qkv = tuple(f"{theirs}.self_attn.{each}_proj.{kind}" for each in "qkv")
            yield Slot(f"{ours}.self_attention.linear_qkv.{kind}", qkv, shard_dim=0, fusion="qkv")
        for each in "qk" if self.qk_norm else "":
            norm = f"{theirs}.self_attn.{each}_norm.weight"
            yield Slot(f"{ours}.self_attention.{each}_layernorm.weight", (norm,))
        yield Slot(f"{ours}.self_attention.linear_proj.weight", (f"{theirs}.self_attn.o_proj.weight",), shard_dim=1)

    def _dense(self, ours: str, theirs: str) -> Iterator[Slot]:
        norm = "mlp.linear_fc1.layer_norm_weight" if self.fused_norms else "pre_mlp_layernorm.weight"
        yield Slot(f"{ours}.{norm}", (f"{theirs}.post_attention_layernorm.weight",))
        gate_up = (f"{theirs}.mlp.gate_proj.weight", f"{theirs}.mlp.up_proj.weight")
        yield Slot(f"{ours}.mlp.linear_fc1.weight", gate_up, shard_dim=0, fusion="gate_up")
        yield Slot(f"{ours}.mlp.linear_fc2.weight", (f"{theirs}.mlp.down_proj.weight",), shard_dim=1)

    def _sparse(self, ours: str, theirs: str, experts: range) -> Iterator[Slot]:
        assert self.experts is not None
        yield Slot(f"{ours}.pre_mlp_layernorm.weight", (f"{theirs}.post_attention_layernorm.weight",))
        for place, expert in enumerate(experts):
            held = f"{ours}.mlp.experts.local_experts.{place}"
            yield self.experts.fc1(f"{held}.linear_fc1.weight", f"{theirs}.mlp.{GATE_UP}", expert)
            yield self.experts.fc2(f"{held}.linear_fc2.weight", f"{theirs}.mlp.{DOWN}", expert)
        yield Slot(f"{ours}.mlp.router.weight", (f"{theirs}.mlp.gate.weight",))

    def slots_of_experts(self, name: str) -> list[Slot]:
        """Each expert's slot, for a tensor that holds all experts of a layer."""
        assert self.experts is not None
        make = self.experts.fc1 if name.endswith(GATE_UP) else self.experts.fc2
        return [make("", name, expert) for expert in range(self.experts.count)]

    def stage_of(self, name: str, stages: int) -> int:
        """The pipeline stage that a weight is read from; a tied embedding's is the first."""
        if name == EMBEDDING:
            return 0
        if name in (NORM, HEAD, SCORE):
            return stages - 1
        return int(name.split(".")[2]) // (self.layers // stages)

    def _check(self) -> None:
        placed = {weight for slot in self.slots(0, 1, 1) for weight in slot.weights}
        odd = sorted(placed ^ set(self.names))
        if odd:
            said = "has no place for" if odd[0] in self.names else "needs"
            raise ModelError(
                f"Megatron's GPT model {said} {odd[0]}, and {self.path} is otherwise ({len(odd)} such weights)",
                hint='train this model with engine.kind = "fsdp2" or "zero3"',
            )
