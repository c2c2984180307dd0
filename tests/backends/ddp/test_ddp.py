"""The ddp engine: precision, memory, and models it must refuse."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from families import FAMILIES
from stock_model import logprobs, textbook_loss
from train_helpers import (
    GEMMA3,
    GPT2,
    LLAMA,
    MISTRAL_WINDOW,
    QWEN2,
    build_engine,
    grpo,
    largest_gap,
    learn,
    make_batch,
    make_grouped_batch,
    scale_of,
    train_config,
    weights_of,
    write_model,
)

from backends.ddp.engine import DdpTrainEngine
from backends.packed.row_ops import RowCopies, copy_rows
from backends.train.activation_offload import ActivationOffload
from backends.train.lm_head import Head, LogprobTask, LossTask, target_logprob
from backends.train.losses import TokenColumns, policy_loss
from backends.train.verify_packing import verify_packing
from specs.errors import ModelError
from specs.schema.role_section import Optimizer
from specs.wire.batch import Batch

pytestmark = pytest.mark.slow

STEPS = 3


def engine_of(folder: Path, **changes: Any) -> DdpTrainEngine:
    engine = build_engine(train_config(folder, **changes))
    assert isinstance(engine, DdpTrainEngine)
    return engine


def gradients(engine: DdpTrainEngine) -> dict[str, np.ndarray]:
    assert engine.flat.grad_P is not None
    return {s.name: s.view(engine.flat.grad_P).clone().numpy() for s in engine.flat.segments}


# ── against plain transformers ────────────────────────────────────────────────────────────────────


def test_steps_equal_plain_transformers(tmp_path: Path) -> None:
    """Weights are those of a loop over single sequences with the textbook loss and torch's AdamW."""
    from transformers import AutoConfig, AutoModelForCausalLM

    optimizer = Optimizer(lr=1e-2, eps=1e-4, max_grad_norm=1.0)
    engine = engine_of(write_model(tmp_path, MISTRAL_WINDOW), optimizer=optimizer)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path), dtype=torch.float32)
    model.load_state_dict(engine.policy.model.state_dict())
    model.eval()
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4, weight_decay=0.0)
    for step in range(STEPS):
        batch = make_batch(seed=step)
        engine.forward_backward(batch, grpo(clip_high=0.28), scale_of(batch))
        norm = engine.optim_step().grad_norm
        textbook_loss(model, batch, clip_high=0.28).backward()
        reference = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        assert norm == pytest.approx(reference.item(), rel=1e-3)
        adamw.step()
        adamw.zero_grad()
    expected = {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}
    assert largest_gap(weights_of(engine), expected) < 5e-5


# ── shared prompts ────────────────────────────────────────────────────────────────────────────────


def one_by_one(engine: DdpTrainEngine, batch: Batch) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Log-probs [T] and gradients by stock transformers, one sequence at a time."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(engine.config.model.path)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    model.load_state_dict(engine.policy.model.state_dict())
    textbook_loss(model, batch).backward()
    logprob_T = logprobs(model, batch).detach().numpy()
    return logprob_T, {name: parameter.grad.numpy() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("limit", [40, 21])
@pytest.mark.parametrize(
    ("config", "changes"),
    [
        (QWEN2, {}),
        (QWEN2, {"gradient_checkpointing": True}),
        (FAMILIES["llama4_text"].config, {"gradient_checkpointing": True}),
        (GPT2, {}),
        (GEMMA3, {"model": {"attn_implementation": "eager"}}),
    ],
    ids=lambda x: x.get("model_type", "-".join(map(str, x))),
)
def test_shared_prompts_equal_one_by_one(
    tmp_path: Path, config: dict[str, Any], changes: dict[str, Any], limit: int
) -> None:
    """At 21 tokens groups are cut in pieces, at 40 they are moved between micro-batches."""
    engine, batch = engine_of(write_model(tmp_path, config), micro_batch_tokens=limit, **changes), make_grouped_batch()
    expected_T, expected = one_by_one(engine, batch)
    np.testing.assert_allclose(engine.forward(batch), expected_T, atol=1e-5)
    sums = engine.forward_backward(batch, grpo(), scale_of(batch))
    assert sums["micro_batch_tokens_max"] <= limit
    for name, ours in gradients(engine).items():
        scale = np.abs(expected[name]).max()
        np.testing.assert_allclose(ours, expected[name], atol=1e-5 * max(1.0, float(scale)), err_msg=name)


# ── memory and precision ──────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize(("chosen", "layers"), [(1, 1), (True, 2)])
def test_where_activations_wait_changes_nothing(qwen2: Path, chosen: bool | int, layers: int, offload: bool) -> None:
    """Recomputed or in host memory: gradients are the same to the bit."""
    plain, engine = engine_of(qwen2), engine_of(qwen2, gradient_checkpointing=chosen, activation_offload=offload)
    built, batch = engine.built(), make_batch()
    assert (built.recomputed_layers, built.activation_offload) == (layers, offload)
    if offload:
        engine.policy.offload = ActivationOffload(engine.device, smallest_bytes=0)
    for each in (plain, engine):
        each.forward_backward(batch, grpo(), scale_of(batch))
    assert largest_gap(gradients(plain), gradients(engine)) == 0
    if offload:
        assert engine.policy.offload.offloaded_bytes > 0


def test_bf16_follows_fp32_and_keeps_fp32_masters(qwen2: Path) -> None:
    gentle = Optimizer(lr=1e-3, eps=1e-4)
    engines = [engine_of(qwen2, model={"dtype": dtype}, optimizer=gentle) for dtype in ("fp32", "bf16")]
    losses = [learn(engine, STEPS, loss=grpo())[::2] for engine in engines]
    assert losses[0] == pytest.approx(losses[1], abs=3e-2)
    half = engines[1]
    assert half.built().dtype == "bf16"
    master = weights_of(half)
    rounded = {name: torch.from_numpy(value).to(torch.bfloat16).float().numpy() for name, value in master.items()}
    assert largest_gap(master, rounded) > 0  # finer than bf16 can hold
    for name, parameter in half.policy.model.named_parameters():
        assert parameter.dtype == torch.bfloat16
        assert np.array_equal(parameter.detach().float().numpy(), rounded[name])


def test_weight_decay_is_on_matrices_only(qwen2: Path) -> None:
    engine = engine_of(qwen2, optimizer=Optimizer(lr=0.1, weight_decay=0.5))
    before = weights_of(engine)
    engine.optim_step()  # zero gradients: only the decay acts
    for name, value in weights_of(engine).items():
        np.testing.assert_allclose(value, before[name] * (0.95 if value.ndim > 1 else 1.0), rtol=1e-6)


# ── the head ──────────────────────────────────────────────────────────────────────────────────────


class TinyLm:
    """Just enough of a model for a head: an output layer and a config."""

    def __init__(self, **config: float) -> None:
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(6, 11)
        self.config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(vocab_size=11, **config))

    def get_output_embeddings(self) -> torch.nn.Linear:
        return self.linear


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("chunk", [3, 100])
@pytest.mark.parametrize(
    ("temperature", "config"), [(1.0, {}), (0.6, {}), (0.6, {"logit_scale": 0.5, "final_logit_softcapping": 2.0})]
)
def test_the_heads_loss_against_autograd(chunk: int, temperature: float, config: dict[str, float], adds: bool) -> None:
    """`adds`: the weight's gradient goes straight into a sum that holds something already."""
    model, rng = TinyLm(**config), np.random.default_rng(0)
    hidden = torch.randn(7, 6, generator=torch.Generator().manual_seed(1))
    target = torch.from_numpy(rng.integers(0, 11, 7))
    columns = TokenColumns(*(torch.from_numpy(rng.normal(-1, 1, 7).astype(np.float32)) for _ in range(5)))
    algorithm = grpo(kl_coef=0.3, entropy_coef=0.2, clip_low=0.5, clip_high=3.0)
    head, results = Head(model, chunk), []
    for ours in (True, False):
        leaf = hidden.clone().requires_grad_()
        model.linear.zero_grad()
        model.linear.weight.grad = torch.ones(11, 6)
        head.adds_gradient = adds
        if ours:
            loss, sums, maxima = head.answer(leaf, LossTask(target, temperature, columns, algorithm))
        else:
            logits = torch.nn.functional.linear(leaf, model.linear.weight, model.linear.bias)
            logp = torch.log_softmax(head.logits(logits) / temperature, -1)
            logprob, entropy = logp[torch.arange(7), target], -(logp.exp() * logp).sum(-1)
            loss, sums, maxima = policy_loss(logprob, entropy, columns, algorithm)
        (loss if adds else 2 * loss).backward()
        grads = (leaf.grad, model.linear.weight.grad, model.linear.bias.grad)
        results.append((loss.detach(), sums.double(), maxima, *(grad.clone() for grad in grads)))
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
    logprob = head.answer(hidden, LogprobTask(target, temperature))
    torch.testing.assert_close(logprob, target_logprob(head.answer(hidden, None), target, temperature))


def test_no_row_at_all_has_gradients_of_zero() -> None:
    """A rank's part of a row may predict no loss token. Its gradients take part in sums over ranks, so there must be
    some; a maximum over nothing is below every other."""
    model, nothing = TinyLm(), torch.zeros(0)
    hidden_TE = torch.randn(5, 6, generator=torch.Generator().manual_seed(1)).requires_grad_()
    columns = TokenColumns(*(nothing,) * 5)
    task = LossTask(torch.zeros(0, dtype=torch.int64), 1.0, columns, grpo(kl_coef=0.3))
    rows = RowCopies(np.zeros(0, dtype=np.int64), 5)
    loss, sums, maxima = Head(model, 3).answer(copy_rows(hidden_TE, rows), task)
    loss.backward()
    assert (loss.item(), sums.abs().max().item(), maxima.tolist()) == (0.0, 0.0, [-float("inf")] * len(maxima))
    for grad in (hidden_TE.grad, model.linear.weight.grad, model.linear.bias.grad):
        assert grad is not None
        assert not grad.any()


MAMBA = {"model_type": "mamba", "vocab_size": 23, "hidden_size": 16, "num_hidden_layers": 1, "state_size": 4}
MAMBA |= {"intermediate_size": 32}
# One attention, which has no number, is shared by several layers.
ZAMBA = {"model_type": "zamba", "vocab_size": 23, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4}
ZAMBA |= {"num_attention_heads": 4, "num_key_value_heads": 4, "mamba_d_state": 4, "mamba_dt_rank": 4}
ZAMBA |= {"layers_block_type": ["mamba", "hybrid"] * 2, "use_mamba_kernels": False}


@pytest.mark.parametrize("config", [MAMBA, ZAMBA], ids=lambda config: config["model_type"])
def test_a_model_that_mixes_sequences_is_refused(tmp_path: Path, config: dict[str, Any]) -> None:
    """Mamba's layers do not hand their state's gradient on from a prompt to its answers."""
    with pytest.raises(ModelError, match="MambaMixer gives other gradients on packed sequences"):
        engine_of(write_model(tmp_path, config))


def test_a_model_that_ignores_the_layout_is_refused(tmp_path: Path) -> None:
    """Falcon calls its own attention, not the registry's: in a packed row its sequences would see each other."""
    config = {**LLAMA, "model_type": "falcon"}
    with pytest.raises(ModelError, match="other logits on packed sequences"):
        engine_of(write_model(tmp_path, config))


def test_a_head_that_is_not_the_models_is_refused(qwen2: Path) -> None:
    engine = engine_of(qwen2)

    def check() -> None:
        verify_packing(engine._run, engine.policy.model, engine.device, torch.float32)

    check()
    engine.policy.head.scale = 1.1
    with pytest.raises(ModelError, match="other logits"):
        check()
