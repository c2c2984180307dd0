"""Tolerances of bf16 at the size that a large model's logits have (20 to 40): right code passes, mistakes do not.

The model is random, of 8 layers. Its head is scaled, so that logits spread as widely as a trained model's.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from backends.packed import packed_attention
from backends.packed.layout import PackedLayout
from backends.packed.packed_attention import Layout
from backends.torch_rollout.decode_check import Comparison, check_decoding, compare_forwards
from backends.torch_rollout.fused import FusedForward, choose_forward
from backends.torch_rollout.runner import GenericForward, packed_positions
from rlctl.loop.residency import Residency
from rlctl.loop.sync import PROBE_TOLERANCE, WeightSync, probe_batch
from specs.errors import ModelError, SyncError
from specs.rounding import Tolerance
from specs.wire.messages import Kind, Message

Mistake = Callable[[PreTrainedModel], AbstractContextManager[None]]
CPU = torch.device("cpu")
VOCAB, LAYERS, TEMPERATURE = 2048, 8, 0.7


@pytest.fixture(params=["qwen2", "llama"])
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    packed_attention.install()
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        request.param,
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=128**-0.5,
        tie_word_embeddings=False,
        attn_implementation="sdpa",
    )
    made = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        made.lm_head.weight.normal_(0, 0.7)
    return made.to(torch.bfloat16)


@contextmanager
def stale_layer(model: PreTrainedModel) -> Iterator[None]:
    """One layer computes with other weights than it should."""
    layer = model.model.layers[LAYERS // 2]
    own = {name: value.clone() for name, value in layer.state_dict().items()}
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(
                parameter.flatten()[torch.randperm(parameter.numel(), generator=generator)].view_as(parameter)
            )
    yield
    layer.load_state_dict(own)


@contextmanager
def wrong_rope(model: PreTrainedModel) -> Iterator[None]:
    """Rotations of another base frequency."""
    frequencies = model.model.rotary_emb.inv_freq
    own = frequencies.clone()
    frequencies.copy_(frequencies**1.5)
    yield
    frequencies.copy_(own)


class Late(GenericForward):
    """Positions are shifted, but only while decoding."""

    def __call__(
        self, tokens_T: torch.Tensor, position_T: torch.Tensor, layout: Layout, keep: torch.Tensor | None = None
    ) -> torch.Tensor:
        return super().__call__(tokens_T, position_T + int(len(tokens_T) == 2), layout, keep)


@torch.no_grad()
def test_decoding_a_model_with_large_logits(model: PreTrainedModel) -> None:
    fused = choose_forward(model, CPU, 64)
    assert isinstance(fused, FusedForward)
    for forward in (fused, GenericForward(model)):
        check_decoding(model, forward, CPU)
    found = compare_forwards(GenericForward(model), fused, VOCAB, CPU, model.dtype)
    assert found.allowed > 0.6, "logits of 20 and more"
    assert found.gap > 0.05, "rounding shows"
    with pytest.raises(ModelError, match=r"off by .* \(allowed "):
        check_decoding(model, Late(model), CPU)


@torch.no_grad()
@pytest.mark.parametrize("mistake", [stale_layer, wrong_rope])
def test_a_fused_path_with_a_mistake_is_given_up_and_that_is_said(
    model: PreTrainedModel, mistake: Mistake, capfd: pytest.CaptureFixture[str]
) -> None:
    inputs = torch.arange(13), packed_positions([13], CPU), PackedLayout([13])
    expected = GenericForward(model)(*inputs)
    with mistake(model):
        wrong = FusedForward(model, CPU, 64)(*inputs)
    assert not Comparison.of(expected, wrong, model.dtype).same
    model.model.layers[0].mlp.act_fn = torch.nn.ReLU()  # which the fused path does not know
    assert isinstance(choose_forward(model, CPU, 64), GenericForward)
    assert "sampling by the slower path" in capfd.readouterr().err


# ── the behaviour probe ───────────────────────────────────────────────────────────────────────────


@torch.no_grad()
def probed(model: PreTrainedModel, temperature: float = TEMPERATURE) -> NDArray[np.float32]:
    batch = probe_batch(VOCAB)
    logprob_T = np.zeros(batch.num_tokens, dtype=np.float32)
    for index, tokens in enumerate(batch.sequences("tokens_T")):
        length, tokens_T = len(tokens), torch.from_numpy(tokens.astype(np.int64))
        logits = GenericForward(model)(tokens_T, packed_positions([length], CPU), PackedLayout([length]))
        scores = (logits[:-1].float() / temperature).log_softmax(-1).gather(-1, tokens_T[1:, None])[:, 0]
        logprob_T[batch.offsets[index] + 1 : batch.offsets[index] + length] = scores.numpy()
    return logprob_T


def probe(expected_T: NDArray[np.float32], actual_T: NDArray[np.float32], tolerance: Tolerance) -> float:
    sync = WeightSync(
        None, None, Residency(False, []), dtype="bf16", bucket_bytes=1, temperature=TEMPERATURE,
        tolerance=tolerance, vocab=VOCAB,
    )  # fmt: skip
    return sync._worst_gap(expected_T, {0: Message(Kind.ANSWER, {}, tensors={"logprob_T": actual_T})})


def test_the_probe_tells_rounding_from_mistakes(model: PreTrainedModel) -> None:
    tolerance = PROBE_TOLERANCE["bf16"]
    right_T = probed(model)
    expected_T = probed(copy.deepcopy(model).float())
    gap = probe(expected_T, right_T, tolerance)
    assert gap > 0.15, "as many plain nats would refuse it"
    mistakes = {"temperature": probed(model, 0.8), "nan": right_T * np.float32("nan")}
    for name, mistake in (("stale", stale_layer), ("rope", wrong_rope)):
        with mistake(model):
            mistakes[name] = probed(model)
    for actual_T in mistakes.values():
        with pytest.raises(SyncError, match="does not behave"):
            probe(expected_T, actual_T, tolerance)
