"""Layers that carry a state: every leak that other tools had is found when a model is built, or in its samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families import FAMILIES
from stock_model import write_family
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from train_helpers import build_engine, train_config
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from backends.ddp.engine import DdpTrainEngine
from backends.packed import state_layers
from backends.packed.state_layers import LayerState, PromptPlan, SegmentPlan
from backends.protocol import Rank
from backends.torch_rollout.slot_states import SlotStates
from specs.errors import ModelError
from specs.model_facts import model_facts

put = torch.from_numpy


def sums(batch: Tensor, state: LayerState, mask: Tensor | None = None) -> Tensor:
    """A layer whose output is the sum of all so far, [n, L, E]."""
    batch = batch if mask is None else batch * mask[..., None]
    total = batch.cumsum(1) + (0.0 if state.recurrent is None else state.recurrent[:, None])
    state.update_recurrent_state(total[:, -1], 0)
    return total


def test_a_completion_begins_in_the_state_of_its_own_prompt() -> None:
    """Two prompts with completions, one of a single token, and a sequence by itself."""
    lengths, parents = [3, 2, 4, 1, 1, 5], [-1, -1, 0, 1, 0, -1]
    hidden_TE = torch.arange(16.0)[:, None] + 1
    out_TE = SegmentPlan(lengths, parents, put).run(0, sums, hidden_TE)
    ends = np.cumsum(lengths)
    want: list[float] = []
    for segment, parent in enumerate(parents):
        before = 0.0 if parent < 0 else float(hidden_TE[ends[parent] - lengths[parent] : ends[parent]].sum())
        want += (before + hidden_TE[ends[segment] - lengths[segment] : ends[segment], 0].cumsum(0)).tolist()
    assert out_TE[:, 0].tolist() == want


def test_the_states_of_prompts_are_kept_in_their_order() -> None:
    plan = PromptPlan([2, 3, 2], torch.device("cpu"))
    plan.run(7, sums, torch.arange(7.0)[:, None])
    assert plan.ended[7].recurrent is not None
    assert plan.ended[7].recurrent[:, 0].tolist() == [1, 9, 11]


def layer_of(family: str, dtype: torch.dtype, **changes: Any) -> Any:
    """The first layer with a state of a model of this family; and its config."""
    given = FAMILIES[family].config | changes
    config = CONFIG_MAPPING[given["model_type"]](**{key: given[key] for key in given if key != "model_type"})
    return state_layers.state_layers(AutoModelForCausalLM.from_config(config, dtype=dtype))[0], config


@pytest.mark.parametrize(("family", "bias"), [("falcon_h1", "mamba_proj_bias"), ("nemotron_h", "use_bias")])
def test_what_a_bias_makes_of_padding_is_not_seen(family: str, bias: str) -> None:
    layer, config = layer_of(family, torch.float32, **{bias: True})
    torch.nn.init.normal_(layer.in_proj.bias)
    hidden_TE = torch.randn(12, config.hidden_size)
    with torch.no_grad():
        alone = torch.cat([layer(x[None])[0] for x in hidden_TE.split([5, 7])])
        packed = SegmentPlan([5, 7], None, put).run(0, state_layers._with_state(layer), hidden_TE)
    torch.testing.assert_close(packed, alone)


def test_a_decoded_token_has_no_shorter_time_step_than_others() -> None:
    layer, config = layer_of("nemotron_h", torch.float32)
    torch.nn.init.constant_(layer.dt_bias, -12.0)
    torch.nn.init.zeros_(layer.D)  # nothing passes the state by
    hidden_TE, plan = torch.randn(6, config.hidden_size), PromptPlan([5], torch.device("cpu"))
    with torch.no_grad():
        whole = layer(hidden_TE[None])[0]
        state_layers._by_rows(layer)
        with state_layers.use_rows(plan):
            layer(hidden_TE[None, :5])
        slots = SlotStates(plan.ended, 1)
        slots.fill(0, torch.zeros(1, dtype=torch.int64), plan.ended)
        with state_layers.use_rows(slots):
            torch.testing.assert_close(layer(hidden_TE[None, 5:])[0], whole[5:])


def group_without_mask(count: int, length: int, mask: Tensor | None, parents: Tensor | None) -> state_layers._Group:
    return _Group(count, length, None, parents)


def whole_row(plan: SegmentPlan, number: int, layer: state_layers.Layer, hidden_TE: Tensor) -> Tensor:
    return layer(hidden_TE[None], LayerState())[0]


def fork_without(name: str) -> Any:
    def select(state: LayerState, rows: Tensor) -> LayerState:
        forked = _select(state, rows)
        if (held := getattr(forked, name)) is not None:
            setattr(forked, name, torch.zeros_like(held))
        return forked

    return select


def fork_of_another(state: LayerState, rows: Tensor) -> LayerState:
    return _select(state, rows.flip(0))


def fork_without_gradient(state: LayerState, rows: Tensor) -> LayerState:
    return LayerState(*(None if each is None else each.detach() for each in _select(state, rows).tensors))


_select, _Group = LayerState.select, state_layers._Group
LOGITS, GRADIENTS = "gives other logits on packed sequences", "gives other gradients on packed sequences"
LEAKS: dict[str, tuple[Any, str, Any, str]] = {
    "state and convolution run on into the next sample": (SegmentPlan, "run", whole_row, LOGITS),
    "the state is not forked": (LayerState, "select", fork_without("recurrent"), LOGITS),
    "the convolution is not forked": (LayerState, "select", fork_without("conv"), LOGITS),
    "the state of another prompt is forked": (LayerState, "select", fork_of_another, LOGITS),
    "padding is seen": (state_layers, "_Group", group_without_mask, LOGITS),
    "no gradient reaches the prompt": (LayerState, "select", fork_without_gradient, GRADIENTS),
}


@pytest.mark.parametrize("leak", LEAKS)
@pytest.mark.parametrize("family", ["qwen3_5_text", "falcon_h1", "lfm2"])
def test_a_leak_is_found_at_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, leak: str) -> None:
    if (family, leak) == ("lfm2", "the state is not forked"):
        pytest.skip("its layers have a convolution alone")
    where, name, sabotaged, words = LEAKS[leak]
    monkeypatch.setattr(where, name, sabotaged)
    config = train_config(write_family(tmp_path / "model", family), model={"from_scratch": False})
    with pytest.raises(ModelError, match=words):
        build_engine(config)


def test_what_was_in_memory_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kimi's layers leave values to whoever makes the model."""
    linear, sizes = {"linear_head_dim": 8, "linear_num_heads": 2}, {"hidden_size": 16, "intermediate_size": 16}
    layers = {"layer_types": ["linear_attention"], "mlp_layer_types": ["dense"], "num_hidden_layers": 1}
    config = CONFIG_MAPPING["kimi_linear"](vocab_size=16, pad_token_id=0, **linear, **sizes, **layers)
    model, empty = AutoModelForCausalLM.from_config(config), torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, **how: empty(*size, **how).fill_(torch.nan))
    state_layers.prove_gradients(model, torch.device("cpu"))


def test_ranks_do_not_share_its_rows(tmp_path: Path) -> None:
    config = train_config(write_family(tmp_path / "model", "lfm2"), sequence_parallel=2)
    with pytest.raises(ModelError, match="layers that carry a state from token to token: ranks cannot share a row"):
        DdpTrainEngine.on_meta(config, Rank(0, 2, 0))


def test_they_are_named_as_built(tmp_path: Path) -> None:
    config = train_config(write_family(tmp_path / "model", "lfm2"))
    assert build_engine(config).built().state_layers == {"Lfm2ShortConv": 2}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["qwen3_5_text", "falcon_h1", "granitemoehybrid", "nemotron_h", "lfm2"])
def test_the_plan_knows_what_a_layer_keeps(family: str, dtype: torch.dtype) -> None:
    layer, config = layer_of(family, dtype)
    own = {parameter.untyped_storage().data_ptr() for parameter in layer.parameters()}
    hidden_TE = torch.randn(2 * 256, config.hidden_size, dtype=dtype, requires_grad=True)
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        return kept.setdefault(tensor.untyped_storage().data_ptr(), tensor) if tensor.is_floating_point() else tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        SegmentPlan([256, 256], None, torch.from_numpy).run(0, state_layers._with_state(layer), hidden_TE)
    measured = sum(tensor.untyped_storage().nbytes() for place, tensor in kept.items() if place not in own)
    facts = model_facts(config.to_dict())
    assert facts is not None
    of_dtype, fp32 = facts.state.kept
    entering = facts.hidden_size  # counted with the norm before it
    planned = 512 * ((of_dtype + entering) * dtype.itemsize + fp32 * 4)
    assert planned == pytest.approx(measured, rel=0.1)
