"""LoRA: adapters inside the model, merged weights outside, on the engines that hold Hugging Face models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families import FAMILIES, LONGCAT
from running import warm_torchrun
from sharded_worker import CASES
from stock_model import textbook_loss, write_family
from train_helpers import (
    GPT2,
    QWEN2,
    build_engine,
    grpo,
    largest_gap,
    learn,
    make_batch,
    model_config,
    scale_of,
    train_config,
    weights_of,
    write_model,
)

from backends.ddp.engine import DdpTrainEngine
from backends.hf.adapter_names import is_adapter, layer_of, peft_name
from backends.hf.hf_model import build_model
from backends.train.engine import HfTrainEngine
from backends.train.tensor_shards import ShardReader
from rlctl.models.model_tensors import tensors_of_config, tensors_on_disk
from specs.errors import CheckpointError, ModelError
from specs.schema.role_section import Lora, Optimizer

pytestmark = pytest.mark.slow

LORA = Lora(rank=4, alpha=12.0)
MIXTURE = FAMILIES["qwen3_moe"].config  # its first layer is dense
ATTENTION = Lora(rank=2, alpha=4.0, targets=("q_proj", "self_attn.v_proj"))


def engine_of(folder: Path, lora: Lora | None = LORA, **changes: Any) -> DdpTrainEngine:
    engine = build_engine(train_config(folder, lora=lora, **changes))
    assert isinstance(engine, DdpTrainEngine)
    return engine


def adapters_of(engine: HfTrainEngine) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in engine.policy.model.named_parameters() if is_adapter(name)}


# ── what is built ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("lora", [LORA, ATTENTION], ids=["all-linear", "attention"])
def test_only_adapters_learn(qwen2: Path, lora: Lora) -> None:
    engine, plain = engine_of(qwen2, lora), engine_of(qwen2, None)
    before, start = dict(engine.policy.model.named_parameters()), weights_of(engine)
    frozen = {name: p.detach().clone() for name, p in before.items() if not is_adapter(name)}
    assert largest_gap(start, weights_of(plain)) == 0, "B starts at zero"
    learn(engine)
    after = dict(engine.policy.model.named_parameters())
    assert all(torch.equal(value, after[name]) for name, value in frozen.items())
    changed = {name for name, value in weights_of(engine).items() if not np.array_equal(value, start[name])}
    linear = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    targets = linear if lora is LORA else ("q_proj", "v_proj")
    assert changed == {name for name in start if name.endswith(".weight") and name.split(".")[-2] in targets}
    assert not engine.policy.model.lm_head.weight.requires_grad
    assert engine.policy.head.linear.weight.grad is None


def test_unknown_targets_are_named_with_what_there_is(qwen2: Path) -> None:
    with pytest.raises(ModelError, match='no linear layer "c_attn"') as caught:
        engine_of(qwen2, Lora(targets=("q_proj", "c_attn")))
    assert "down_proj, gate_proj, k_proj" in caught.value.hint
    with pytest.raises(ModelError, match="embed_tokens"):
        engine_of(qwen2, Lora(targets=("embed_tokens",)))


def test_what_peft_refuses_is_refused_with_its_key(tmp_path: Path) -> None:
    """Here a gate of attention, whose name peft takes for the experts'."""
    folder = write_model(tmp_path, {**MIXTURE, "model_type": "afmoe", "head_dim": 8, "num_dense_layers": 1})
    with pytest.raises(ModelError, match=r"lora\.targets: .*gate_proj"):
        engine_of(folder)
    engine_of(folder, ATTENTION)


def test_experts_and_dense_layers_beside_them_get_none(tmp_path: Path) -> None:
    """What the plan, check-config and the engine take for adaptable is the same."""
    folder = write_model(tmp_path, MIXTURE)
    known = tensors_of_config(MIXTURE)
    assert known is not None
    adapted = {f"{layer_of(name)}.weight" for name in adapters_of(engine_of(folder))}
    assert adapted == {parameter.name for parameter in known.adaptable}
    assert not any(".mlp." in name for name in adapted)
    with pytest.raises(ModelError, match='no linear layer "up_proj" below its head and beside its experts'):
        engine_of(folder, Lora(targets=("up_proj",)))


@pytest.mark.parametrize(("name", "none"), [("falcon_h1", "out_proj"), ("llama4_text", "router")])
def test_layers_that_take_no_adapter_are_the_same_to_plan_and_engine(tmp_path: Path, name: str, none: str) -> None:
    """Of a family whose layers the plan reads from its files; those that are asked for by name are refused."""
    folder = write_family(tmp_path / "model", name)
    known = tensors_on_disk(folder, FAMILIES[name].config)
    assert known is not None
    adapted = {f"{layer_of(name)}.weight" for name in adapters_of(engine_of(folder))}
    assert adapted == {parameter.name for parameter in known.adaptable}
    with pytest.raises(ModelError, match=f'no linear layer "{none}" below its head.* that takes adapters'):
        engine_of(folder, Lora(targets=(none,)))


# ── on, off and merged ────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "config",
    [QWEN2, GPT2, MIXTURE, LONGCAT, *(FAMILIES[name].config for name in ("falcon_h1", "nemotron_h", "llama4_text"))],
    ids=lambda config: config["model_type"],
)
def test_merged_weights_are_the_adapted_model(tmp_path: Path, config: dict[str, Any]) -> None:
    """A plain model with the exported weights gives the log-probs of the model with adapters; without them, its own
    start's. GPT-2's layers are stored transposed; a mixture has adapters in its attention alone."""
    folder, batch = write_model(tmp_path, config), make_batch(seed=9)
    engine, plain = engine_of(folder), engine_of(folder, None)
    start = plain.forward(batch)
    np.testing.assert_array_equal(engine.forward(batch), start)
    learn(engine)
    with_adapters = engine.forward(batch)
    assert np.abs(with_adapters - start).max() > 0.05
    np.testing.assert_array_equal(engine.forward(batch, adapters=False), start)
    np.testing.assert_array_equal(engine.forward(batch), with_adapters)
    merged = weights_of(engine)
    plain.policy.model.load_state_dict({name: torch.from_numpy(value) for name, value in merged.items()}, strict=False)
    atol = 3e-5 if config["model_type"] == "falcon_h1" else 1e-5  # its multipliers scale the rounding, too
    np.testing.assert_allclose(plain.forward(batch), with_adapters, atol=atol)


# ── learning ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("checkpointing", [False, True])
def test_steps_equal_plain_peft(qwen2: Path, checkpointing: bool) -> None:
    """Loss, norm and every adapter as from `peft.get_peft_model`, single sequences and torch's AdamW. With activation
    checkpointing too: the frozen embeddings must not cut the gradient off."""
    from peft import LoraConfig, get_peft_model

    optimizer = Optimizer(lr=1e-2, eps=1e-4, weight_decay=0.1, max_grad_norm=1.0)
    engine = engine_of(qwen2, optimizer=optimizer, gradient_checkpointing=checkpointing)
    base = build_model(model_config(qwen2, attn_implementation="eager"), load_weights=True)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    model = get_peft_model(base, LoraConfig(r=4, lora_alpha=12, target_modules=targets)).eval()
    start = {f"base_model.model.{name}": value for name, value in adapters_of(engine).items()}
    assert not model.load_state_dict(start, strict=False).unexpected_keys
    adamw = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), 1e-2, eps=1e-4, weight_decay=0.1)
    for step in range(3):
        batch = make_batch(seed=step)
        loss = engine.forward_backward(batch, grpo(), scale_of(batch))["loss"]
        norm = engine.optim_step().grad_norm
        expected = textbook_loss(model, batch)
        expected.backward()
        reference = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        assert loss == pytest.approx(expected.item(), rel=1e-4)
        assert norm == pytest.approx(reference.item(), rel=1e-3)
        adamw.step()
        adamw.zero_grad()
    theirs = dict(model.named_parameters())
    for name, ours in adapters_of(engine).items():
        torch.testing.assert_close(ours, theirs[f"base_model.model.{name}"], atol=2e-5, rtol=1e-4)


# ── disk ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_three_and_three_steps_are_six(tmp_path: Path, qwen2: Path, dtype: str) -> None:
    straight, half, resumed = (engine_of(qwen2, model={"dtype": dtype}) for _ in range(3))
    expected = learn(straight, 6)
    assert learn(half, 3) == expected[:6]
    folder = tmp_path / "saved"
    folder.mkdir()
    half.save(folder)
    resumed.load(folder)
    assert learn(resumed, 3, first=3) == expected[6:]
    assert all(torch.equal(value, adapters_of(straight)[name]) for name, value in adapters_of(resumed).items())
    saved = ShardReader(folder, "model")
    assert saved.shapes.keys() == adapters_of(half).keys(), "the base model is not saved"
    assert set(saved.dtypes.values()) == {torch.float32}
    assert json.loads((folder / "adapter_config.json").read_text())["peft_type"] == "LORA"


@pytest.mark.parametrize("config", [QWEN2, MIXTURE], ids=lambda config: config["model_type"])
def test_a_checkpoint_loads_as_a_peft_adapter(tmp_path: Path, config: dict[str, Any]) -> None:
    """With nothing but its tensors renamed: the configuration file is peft's own."""
    from peft import PeftModel
    from safetensors.torch import save_file

    model_folder, folder = write_model(tmp_path / "model", config), tmp_path / "saved"
    engine = engine_of(model_folder)
    learn(engine)
    folder.mkdir()
    engine.save(folder)
    saved = ShardReader(folder, "model")
    save_file({peft_name(name): saved.tensor(name) for name in saved.shapes}, folder / "adapter_model.safetensors")
    base = build_model(model_config(model_folder, attn_implementation="eager"), load_weights=True)
    model = PeftModel.from_pretrained(base, folder).eval()
    tokens = list(range(2, 12))
    (answer,) = engine.greedy([tokens], 4)
    ids = model.generate(input_ids=torch.tensor([tokens]), max_new_tokens=4, do_sample=False, eos_token_id=None)
    assert ids[0, 10:].tolist() == answer.tokens


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (Lora(rank=4, alpha=4.0), "lora_alpha 12.0, this run 4.0"),
        (Lora(rank=4, alpha=12.0, targets=("q_proj",)), "target_modules"),
        (None, "another model"),
    ],
    ids=["alpha", "targets", "none"],
)
def test_a_checkpoint_of_other_adapters_is_refused(
    tmp_path: Path, qwen2: Path, other: Lora | None, message: str
) -> None:
    engine_of(qwen2).save(tmp_path)
    with pytest.raises(CheckpointError, match=message) as error:
        engine_of(qwen2, other).load(tmp_path)
    assert other is None or error.value.hint == f"put {tmp_path.name}.lora back as it was", "the folder is the role's"


# ── a critic ──────────────────────────────────────────────────────────────────────────────────────


def critic_of(folder: Path, lora: Lora | None = LORA, **model: Any) -> DdpTrainEngine:
    return engine_of(folder, lora, role="critic", model={"head": "value", **model})


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_critic_learns_by_adapters_and_its_whole_head(tmp_path: Path, qwen2: Path, dtype: str) -> None:
    """Nothing else has a gradient, a moment or a place in the checkpoint; a resumed one goes on to the bit."""
    critic, plain, half, resumed = (critic_of(qwen2, lora, dtype=dtype) for lora in (LORA, None, LORA, LORA))
    learned = {*adapters_of(critic), "score.weight"}
    own = {name for name, p in critic.policy.model.named_parameters() if p.requires_grad}
    assert own == {segment.name for segment in critic.flat.segments} == learned
    assert critic.built().parameters == plain.built().parameters
    assert critic.built().trainable_parameters == sum(p.numel() for p in adapters_of(critic).values()) + 32
    frozen = {n: p.detach().clone() for n, p in critic.policy.model.named_parameters() if n not in learned}
    assert not critic.values(make_batch()).any(), "a new head starts at zero"
    expected = learn(critic, 6)
    after = dict(critic.policy.model.named_parameters())
    assert all(torch.equal(value, after[name]) for name, value in frozen.items())
    assert all(after[name].any() for name in learned), "the head, and with it every B"
    folder = tmp_path / "saved"
    folder.mkdir()
    assert learn(half, 3) == expected[:6]
    half.save(folder)
    assert ShardReader(folder, "model").shapes.keys() == learned
    resumed.load(folder)
    assert learn(resumed, 3, first=3) == expected[6:]
    assert largest_gap(weights_of(resumed), weights_of(critic)) == 0


# ── ranks ─────────────────────────────────────────────────────────────────────────────────────────


def test_two_ranks_of_every_engine_are_one(tmp_path: Path, qwen2: Path) -> None:
    """Norms, merged weights, log-probs without adapters and counts of parameters, over real gloo processes. Layers with
    a state learn on shards too, also the first one, below which nothing learns."""
    lfm2 = write_model(tmp_path / "lfm2", FAMILIES["lfm2"].config)
    plain, critics = ("fsdp2", "zero1", "zero3"), ("fsdp2 critic", "zero1 critic", "zero3 critic")
    models = [(qwen2, engine_of(qwen2), plain), (lfm2, engine_of(lfm2), ("zero3",)), (qwen2, critic_of(qwen2), critics)]
    jobs = [word for folder, _, cases in models for case in cases if case in CASES for word in (folder, case)]
    warm_torchrun(2, "lora_worker.py", tmp_path, *jobs)
    for folder, alone, cases in models:
        start_T = None if cases is critics else alone.forward(make_batch())
        norms, built, weights = learn(alone)[1::2], alone.built(), weights_of(alone)
        if cases is not critics:
            weights |= {f"apart {name}": value for name, value in weights_of(alone, form="apart").items()}
        for case in (case for case in cases if case in CASES):
            with np.load(tmp_path / f"{folder.name} {case}.npz") as file:
                found = dict(file)
            assert found.pop("norms") == pytest.approx(norms, rel=2e-5), case
            assert found.pop("counts").tolist() == [built.parameters, built.trainable_parameters], case
            if start_T is not None:
                np.testing.assert_allclose(found.pop("base_T"), start_T, atol=1e-5, err_msg=case)
            assert largest_gap(found, weights) < 2e-5, case
