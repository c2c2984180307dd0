"""Names and layouts by hand, and both ways for all axes that fit, without Megatron."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families import FAMILIES
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from backends.megatron.layouts import (
    Experts,
    Heads,
    Slot,
    fuse,
    own_part,
    own_rows,
    padded_vocabulary,
    part_of,
    put_experts,
    source,
    unfuse,
    whole_tensor,
)
from backends.megatron.weight_map import ModelMap
from specs.errors import ModelError
from specs.schema.engines.megatron_table import FAMILIES as TABLES

ONE = Heads(1, 1, 1)
WIDE: dict[str, Any] = {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 6}


def model_of(family: str, **changes: Any) -> Any:
    values = {**FAMILIES[family].config, **WIDE, **changes}
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**values))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    return model


def local_part(whole: Tensor, slot: Slot, rank: int, ranks: int) -> Tensor:
    """As a rank reads it: no rows but its own, into memory of its own."""
    rows = own_rows(slot, len(whole), rank, ranks)
    return own_part(whole[rows.start : rows.stop].clone(), slot, rank, ranks)


def test_queries_lie_with_their_key_and_value() -> None:
    """Two groups of two query heads, one row each."""
    slot = Slot("", ("q", "k", "v"), shard_dim=0, fusion="qkv")
    q, k, v = (torch.tensor(rows)[:, None] for rows in ([0, 1, 2, 3], [10, 11], [20, 21]))
    heads = Heads(query=4, key=2, dim=1)
    assert fuse([q, k, v], slot, heads).flatten().tolist() == [0, 1, 10, 20, 2, 3, 11, 21]
    second = [local_part(each, slot, 1, 2) for each in (q, k, v)]
    assert fuse(second, slot, heads).flatten().tolist() == [2, 3, 11, 21]
    assert [part.flatten().tolist() for part in unfuse(torch.tensor([[2], [3], [11], [21]]), slot, heads)] == [
        [2, 3],
        [11],
        [21],
    ]


def test_an_expert_is_rows_of_the_tensors_of_all() -> None:
    """Two experts of a gate and an up projection of two rows each, on two ranks that cut each."""
    experts = Experts(count=2, inner=2, hidden=3)
    gate_up = torch.arange(8).view(2, 4, 1)  # expert 1: gate 4, 5 and up 6, 7
    slot = experts.fc1("", "gate_up", 1)
    held = [
        fuse([local_part(source(gate_up, r), slot, rank, 2) for _, r in slot.sources], slot, ONE) for rank in (0, 1)
    ]
    assert [each.flatten().tolist() for each in held] == [[4, 6], [5, 7]]
    down = torch.arange(12).view(2, 3, 2)
    slot = experts.fc2("", "down", 1)
    ((_, rows),) = slot.sources
    assert [local_part(source(down, rows), slot, rank, 2).flatten().tolist() for rank in (0, 1)] == [
        [6, 8, 10],
        [7, 9, 11],
    ]
    assert [list(part_of(experts.count, rank, 2)) for rank in (0, 1)] == [[0], [1]]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", TABLES)
@pytest.mark.parametrize(("tensor", "stages"), [(1, 1), (2, 2), (4, 1), (1, 4), (4, 4)])
def test_every_weight_comes_back_to_the_bit(family: str, tied: bool, tensor: int, stages: int) -> None:
    model = model_of(family, tie_word_embeddings=tied)
    ours = ModelMap.of(model, "a model")
    weights: dict[str, Tensor] = {name: p.detach() for name, p in model.named_parameters()}
    back: dict[str, Tensor] = {}
    elements, experts = 0, dict[str, list[list[Tensor]]]()
    for stage in range(stages):
        for slot in ours.slots(stage, stages, tensor):
            given = [source(weights[name], rows) for name, rows in slot.sources]
            held = [
                fuse([local_part(each, slot, rank, tensor) for each in given], slot, ours.heads)
                for rank in range(tensor)
            ]
            elements += sum(part.numel() for part in held) if slot.shard_dim is not None else held[0].numel()
            parts = [unfuse(part, slot, ours.heads) for part in held]
            for place, name in enumerate(slot.weights):
                found = whole_tensor([rank[place] for rank in parts], slot, weights[name].shape[0])
                assert torch.equal(found, given[place])
                if ours.stage_of(name, stages) == stage:
                    back[name] = found
            if slot.rows:
                experts.setdefault(slot.weights[0], []).append(held)
    for name, each in experts.items():
        back[name] = torch.full_like(weights[name], torch.nan)
        put_experts(back[name], ours.slots_of_experts(name), each, ours.heads)
        assert torch.equal(back[name], weights[name])
    assert back.keys() == weights.keys()
    copies = 2 if tied and stages > 1 else 1
    padding = (padded_vocabulary(ours.vocabulary, tensor) - ours.vocabulary) * model.config.hidden_size
    embeddings = 1 if tied else 2
    whole = sum(weight.numel() for weight in weights.values())
    again = (copies - 1) * weights["model.embed_tokens.weight"].numel()
    assert elements == whole + again + padding * embeddings * copies


def test_a_weight_without_a_place_is_named() -> None:
    with pytest.raises(ModelError, match=r"no place for model\.layers\.0\.self_attn\.o_proj\.bias"):
        ModelMap.of(model_of("llama", attention_bias=True), "a model")


@pytest.mark.parametrize(
    ("family", "changes"), [("mixtral", {"sliding_window": 4}), ("llama", {"model_type": "granite"})]
)
def test_a_model_with_the_same_names_that_computes_otherwise_is_refused(family: str, changes: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match=r"megatron computes llama, .* and a model is another model"):
        ModelMap.of(model_of(family, **changes), "a model")
