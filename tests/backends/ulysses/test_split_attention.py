"""Ranks that share packed rows compute what one rank computes, whatever the attention: outputs and gradients."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from running import warm_torchrun
from torch import Tensor, nn
from train_helpers import LLAMA, make_batch, model_config, write_model
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from ulysses_worker import CASES, DEGREES, LENGTHS, SAMPLES

from backends.hf.hf_model import build_model
from backends.ulysses.sequence_group import ALONE, SequenceGroup
from backends.ulysses.split_attention import _whole_row_kwargs, sharing
from specs.errors import ModelError
from specs.wire.heartbeat import amount

FIRST_OF_TWO = SequenceGroup(None, 2, 0)

# ── four ranks ────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of four ranks found, by case."""
    out = tmp_path_factory.mktemp("ulysses")
    warm_torchrun(4, "ulysses_worker.py", out)
    return [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(4)]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("degree", DEGREES)
def test_every_number_arrives_where_it_belongs(ranks: list[dict[str, Any]], degree: int) -> None:
    """Also from memory that is not contiguous (gloo would scatter that wrongly), and in the backward pass."""
    for rank in ranks:
        assert rank["exchange"][str(degree)] == {
            "heads of all rows": True,
            "rows of all heads": True,
            "gradient of rows": True,
            "gradient of heads": True,
            "two dtypes": True,
            "messages": 1,
        }


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("degree", DEGREES)
@pytest.mark.parametrize("case", CASES)
def test_packed_rows_give_what_each_sequence_gives_alone(ranks: list[dict[str, Any]], case: str, degree: int) -> None:
    """A mask that was lost, a head of another rank or a gradient that was not summed is far off."""
    for rank in ranks:
        found = rank[case][str(degree)]
        assert found["hidden"] < 1e-5
        assert CASES[case].learns == bool(found["gradients"])
        assert {name: gap for name, gap in found["gradients"].items() if not gap < 1e-5} == {}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", [name for name, case in CASES.items() if case.attention.startswith("flash")])
def test_flash_attention_is_told_the_ends_of_the_whole_row(ranks: list[dict[str, Any]], case: str) -> None:
    windows = [3, -1] if "gemma3" in case else [-1, -1]
    ends = [0, 7, 8, 20, 23, 28, 31, 32]
    assert ends[-2] == sum(LENGTHS)
    for rank in ranks:
        assert rank[case]["4"]["flash"] == [[ends, 12, [window, window]] for window in windows]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_an_engine_proves_its_shared_rows_when_it_is_built(ranks: list[dict[str, Any]]) -> None:
    """All ranks stop where one of them sees something wrong."""
    start = (
        "Qwen2ForCausalLM with sdpa attention (backends.packed.packed_attention.sdpa_by_layout) gives other logits on "
        "rows that 4 ranks share than on whole sequences (relative gap "
    )
    for rank in ranks:
        said = rank["refusals"]
        assert said["nothing"] == "built"
        assert said["keys of other heads"].startswith(start)
        assert said["one rank's rows"].startswith(start)
        assert said["an error"] == "Qwen2ForCausalLM does not run on rows that 4 ranks share: no such exchange"
    assert len({rank["refusals"]["one rank's rows"] for rank in ranks}) == 1


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("degree", DEGREES)
def test_a_group_has_the_samples_of_all_its_ranks(ranks: list[dict[str, Any]], degree: int) -> None:
    """And says in its heartbeats that it computes them all."""
    whole = make_batch(6)
    for first in range(0, 4, degree):
        group = range(first, first + degree)
        together = whole.select([sample for rank in group for sample in SAMPLES[rank]])
        said = f"update of {amount(len(together), 'sample')}, {together.num_tokens} tokens, shared by {degree} ranks"
        joined = [1 + token % degree for token in range(together.num_tokens)]
        for rank in group:
            found = ranks[rank]["samples"][str(degree)]
            assert found == {"tokens": together["tokens_T"].tolist(), "joined": joined, "said": said}


# ── what is in effect ─────────────────────────────────────────────────────────────────────────────


def test_the_registry_is_as_it_was_when_a_rank_is_alone_again() -> None:
    def mine() -> None: ...

    before = dict(ALL_ATTENTION_FUNCTIONS)
    with sharing(ALONE):
        assert dict(ALL_ATTENTION_FUNCTIONS) == before
    with sharing(FIRST_OF_TWO):
        assert ALL_ATTENTION_FUNCTIONS.keys() == before.keys()
        assert not set(map(id, ALL_ATTENTION_FUNCTIONS.values())) & set(map(id, before.values()))
        with sharing(ALONE):
            assert dict(ALL_ATTENTION_FUNCTIONS) == before
        with pytest.raises(ZeroDivisionError), sharing(SequenceGroup(None, 4, 1)):
            1 / 0  # noqa: B018
        ALL_ATTENTION_FUNCTIONS["mine"] = mine  # one that comes later, such as a kernel of the hub
        with sharing(FIRST_OF_TWO):
            assert ALL_ATTENTION_FUNCTIONS["mine"] is not mine
    assert dict(ALL_ATTENTION_FUNCTIONS) == before | {"mine": mine}
    del ALL_ATTENTION_FUNCTIONS["mine"]


def test_sinks_are_those_of_the_ranks_heads_with_their_gradient() -> None:
    """As kernels take them; eager attention reads them from the module (gpt_oss above)."""
    sinks = torch.arange(4.0, requires_grad=True)
    given = _whole_row_kwargs(
        nn.Identity(), 4, {"s_aux": sinks, "scaling": 0.5, "position_ids": sinks}, SequenceGroup(None, 2, 1)
    )
    assert given["s_aux"].tolist() == [2, 3]
    assert given.keys() == {"s_aux", "scaling"}  # positions are of the rank's rows alone
    given["s_aux"].sum().backward()
    assert sinks.grad is not None
    assert sinks.grad.tolist() == [0, 0, 1, 1]


# ── what is refused ───────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def model(tmp_path: Path) -> PreTrainedModel:
    return build_model(model_config(write_model(tmp_path, LLAMA)), load_weights=True)


@pytest.fixture
def mine(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A registered attention that has no function that makes its mask: transformers gives it none."""
    ALL_ATTENTION_FUNCTIONS["mine"] = sdpa_attention_forward
    yield "mine"
    del ALL_ATTENTION_FUNCTIONS["mine"]


def shared_forward(model: PreTrainedModel, group: SequenceGroup = FIRST_OF_TWO, **inputs: Any) -> Tensor:
    tokens = {"input_ids": torch.zeros(1, 4, dtype=torch.int64), "position_ids": torch.arange(4)[None]}
    with sharing(group):
        hidden: Tensor = model.base_model(**tokens, use_cache=False, **inputs)[0]
    return hidden


def test_an_attention_without_its_mask_is_refused(model: PreTrainedModel, mine: str) -> None:
    model.config._attn_implementation = mine
    with pytest.raises(ModelError, match=r"LlamaAttention .* mine attention gets neither a mask nor the ends of seq"):
        shared_forward(model)


@pytest.mark.parametrize(
    ("shape", "words"),
    [((1, 1, 4, 4), "a mask of 4 tokens, and the whole row has 8"), ((1, 4, 8, 8), "a mask for each of 4 heads")],
)
def test_a_mask_that_is_not_of_the_whole_row_is_refused(
    model: PreTrainedModel, shape: tuple[int, ...], words: str
) -> None:
    with pytest.raises(ModelError, match=words):
        shared_forward(model, attention_mask=torch.zeros(shape))


def test_heads_that_cannot_be_dealt_out_are_refused_with_numbers(model: PreTrainedModel) -> None:
    mask = torch.zeros(1, 1, 12, 12)
    with pytest.raises(ModelError, match="4 query heads and 2 key-value heads cannot be shared by 3 ranks") as refused:
        shared_forward(model, SequenceGroup(None, 3, 0), attention_mask=mask)
    assert refused.value.hint == "set sequence_parallel to 1, 2 or 4"


@pytest.mark.parametrize("shape", [(1, 4, 8, 8), (5,)])
def test_a_tensor_that_nobody_knows_how_to_share_is_refused_by_name(
    model: PreTrainedModel, shape: tuple[int, ...]
) -> None:
    """`s_aux` is known, but not of that shape."""
    name = "s_aux" if len(shape) == 1 else "position_bias"
    with pytest.raises(ModelError, match=rf"LlamaAttention .* takes {name} of the shape \[{shape[0]}"):
        shared_forward(model, attention_mask=torch.zeros(1, 1, 8, 8), **{name: torch.zeros(shape)})
