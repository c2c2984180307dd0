"""Who waits for whom on a simulated CUDA device: nothing is used before it is there, the host waits seldom, and defects
that are put into the code are found at their lines."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rollout_helpers
import torch
from simulated_device.child import on_simulated_device
from simulated_device.seeds import line_of, seeded
from simulated_device.walk import walk
from train_helpers import QWEN2, grpo, learn, make_batch, scale_of, train_config, weights_of, write_model

from backends.ddp.engine import DdpTrainEngine
from backends.ddp.flat_buffers import FlatAdamW, FlatParameters
from backends.packed import staging
from backends.packed.layout import PackedLayout, _Pad
from backends.protocol import Rank
from backends.torch_rollout.engine import TorchRolloutEngine
from backends.train import activation_offload, engine, role_group
from backends.train.adamw import set_steps
from backends.weights import device_memory, host_pieces
from specs.wire.role_config import Sampling

Scenario = Callable[[Path], list[str]]


def trainer(tmp_path: Path, **changes: Any) -> Any:
    model = {**changes.pop("model", {}), "device": "cuda"}
    made = train_config(write_model(tmp_path, QWEN2), **changes, model=model)
    return DdpTrainEngine.build(made, Rank())


# ── what is done on the device, and what is found there ───────────────────────────────────────────


def a_step(tmp_path: Path, **changes: Any) -> list[str]:
    """Two micro-batches and an optimizer step. The host waits twice: for the metrics and for the gradient's norm."""
    made = trainer(tmp_path, **changes)
    if made.policy.offload is not None:
        made.policy.offload.smallest_bytes = 0
    with walk() as found:
        learn(made, 1)
        made.offload()
        made.onload()
        weights_of(made)
    more = [f"the host waits {count} times at {where}" for where, count in found.waits.items() if count > 1]
    return [*found.faults, *(wait for wait in more if "/offload.py" not in wait and "host_pieces" not in wait)]


def a_step_in_bf16(tmp_path: Path) -> list[str]:
    return a_step(tmp_path, model={"dtype": "bf16"})


def a_step_whose_activations_leave(tmp_path: Path) -> list[str]:
    return a_step(tmp_path, gradient_checkpointing=1, activation_offload=True)


def the_second_device(tmp_path: Path) -> list[str]:
    config = train_config(write_model(tmp_path, QWEN2), model={"device": "cuda"})
    with walk(device=1) as found:
        learn(DdpTrainEngine.build(config, Rank(local_rank=1)), 1)
    return list(found.faults)


def activations(tmp_path: Path) -> list[str]:
    """One branch gets no gradient: what it saved is fetched ahead, and never read."""
    with walk() as found:
        offload = activation_offload.ActivationOffload(torch.device("cuda"), smallest_bytes=0)
        leaf = torch.ones(32, 32, device="cuda", requires_grad=True)
        with offload.saving():
            aside = leaf.sin().tanh() * leaf
            out = (leaf @ leaf).tanh().exp() @ leaf
        out.sum().backward()
        del aside, out
        torch.ones(4, device="cuda")
    return list(found.faults)


def arrays_in_small_chunks(tmp_path: Path) -> list[str]:
    """Some are read before more is put."""
    arrays = [np.arange(7), np.ones((3, 5), np.float32), np.arange(12, dtype=np.int32)[::3], np.array([True, False])]
    with pytest.MonkeyPatch.context() as patch, walk() as found:
        patch.setattr(staging, "_CHUNK_BYTES", 200)
        staged = staging.Staging(torch.device("cuda"))
        put = []
        for array in [*arrays, *arrays]:
            put.append(staged.put(array))
            staged.send()
        copies = [tensor.clone() for tensor in put]
    for copy, array in zip(copies, [*arrays, *arrays], strict=True):
        np.testing.assert_array_equal(copy.cpu().numpy(), array)
    return list(found.faults)


def bytes_there_and_back(tmp_path: Path) -> list[str]:
    given_U, found_U = np.arange(256, dtype=np.uint8), []
    with pytest.MonkeyPatch.context() as patch, walk() as found:
        patch.setattr(host_pieces, "PIECE_BYTES", 64)
        tensor_U = torch.empty(256, dtype=torch.uint8, device="cuda")
        host_pieces.fill(tensor_U, [given_U[:100], given_U[100:]])
        for piece_U in host_pieces.pieces_of(tensor_U + 0):
            found_U.append(piece_U.copy())
    np.testing.assert_array_equal(np.concatenate(found_U), given_U)
    return list(found.faults)


def shared_memory(tmp_path: Path) -> list[str]:
    """A sync's windows; the rollout's process is another stream here."""
    with walk() as found:
        owner = device_memory.SharedWindows(64, 2)
        offer = owner.handles()
        owner.window(0).fill_(7)
        owner.finish_writing()
        with torch.cuda.stream(torch.cuda.Stream()):
            reader = device_memory.MappedWindows(offer)
            own_U = torch.empty(64, dtype=torch.uint8, device="cuda").copy_(reader.window(0))
            reader.close()
        owner.close()
        torch.ones(64, device="cuda")
        torch.cuda.synchronize()
        assert own_U.tolist() == [7] * 64
    return list(found.faults)


def a_resume(tmp_path: Path) -> list[str]:
    made = trainer(tmp_path / "model")
    learn(made, 2)
    made.save(tmp_path)
    then = learn(made, 2, first=2)
    made.load(tmp_path)
    assert learn(made, 2, first=2) == then
    return []


SCENARIOS: tuple[Scenario, ...] = (
    a_step,
    a_step_in_bf16,
    a_step_whose_activations_leave,
    the_second_device,
    activations,
    arrays_in_small_chunks,
    bytes_there_and_back,
    shared_memory,
    a_resume,
)


@pytest.mark.parametrize("name", [each.__name__ for each in SCENARIOS])
@on_simulated_device
def test_nothing_is_found(tmp_path: Path, name: str) -> None:
    assert globals()[name](tmp_path) == []


# ── how often the host waits ──────────────────────────────────────────────────────────────────────


@on_simulated_device
def test_micro_batches_are_sent_once_and_nobody_waits_for_them(tmp_path: Path) -> None:
    """One copy brings a micro-batch. The host waits for the metrics and for the gradient's norm, once a step."""
    made, batch = trainer(tmp_path), make_batch()
    with walk() as found:
        sums = made.forward_backward(batch, grpo(kl_coef=0.1), scale_of(batch))
        made.optim_step()
    assert sums["micro_batches"] > 1
    assert sum(found.waits.values()) <= 2, found.waits
    assert sum(found.copies.values()) <= sums["micro_batches"] + 2, found.copies


WAITS_PER_TOKEN = 2  # for the token and for its log-prob


@on_simulated_device
def test_a_decoded_step_waits_as_often_as_is_known(tmp_path: Path) -> None:
    """Completions of different lengths show the cost of a token: prompts, and sequences that end, cost the same."""
    folder = rollout_helpers.write_model(tmp_path, eos_token_id=99)
    sampler = rollout_helpers.rollout_config(folder, enforce_eager=True)
    sampler = sampler.model_copy(update={"model": sampler.model.model_copy(update={"device": "cuda"})})
    made, told, steps = TorchRolloutEngine.build(sampler, Rank()), [], []
    rollout_helpers.give_weights(made)
    for tokens in (2, 4, 12):
        before = made.counts["decode_steps"]
        with walk() as found:
            way = Sampling(seed=3, max_response_tokens=tokens, top_p=0.8)
            rollout_helpers.answer(made, rollout_helpers.make_prompts(groups=1), way)
        told.append(found.waits)
        steps.append(made.counts["decode_steps"] - before)
        assert found.faults == []
    assert steps[2] - steps[1] == 8
    assert (told[2] - told[1]).total() == WAITS_PER_TOKEN * 8, told[2] - told[1]


# ── defects ───────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Seed:
    """A defect: in a function, `new` stands for `old`. `found`: a word of what finds it. `at`: function and text of the
    line that is named, where that is not the defect's own."""

    defect: str
    scenario: Scenario
    found: str
    function: Any
    old: str
    new: str = "pass"
    at: tuple[Any, str] | None = None

    @property
    def line(self) -> str:
        return line_of(*(self.at or (self.function, self.old)))

    def findings(self, tmp_path: Path) -> str:
        """Return all that is found, failures with the lines that they went through."""
        with seeded(self.function, self.old, self.new):
            try:
                return "\n".join(self.scenario(tmp_path))
            except Exception:
                return traceback.format_exc().replace('", line ', ":")


FETCHED = (activation_offload._Held.fetch, "part.copy_(piece, non_blocking=True)")
COPIED = (host_pieces._Lane.start, "target_U.copy_(source_U, non_blocking=True)")
STEPPED = (FlatAdamW.step, "self.adamw.step()")

READ_FIRST, HANDED_OUT = "may not be done", "no record_stream"  # by the streams
SEEDS = (
    Seed(
        "indices left on the host",
        a_step,
        "same device",  # by the operator
        PackedLayout.__init__,
        "put(plan.index_P), put",
        "torch.from_numpy(plan.index_P), put",
        (_Pad.forward, "x_T.index_select(0, index_P)"),
    ),
    Seed(
        "the optimizer's counter on the host",
        a_step,
        "_fused_adamw_",  # by the operator, which on a GPU takes no number of the host
        FlatAdamW.__init__,
        "device=part.device",
        'device="cpu"',
        STEPPED,
    ),
    Seed(
        "a rank that does not take its own device",
        the_second_device,
        "this rank's is cuda:1",  # by the walk
        role_group.join_group,
        "torch.cuda.set_device(device_index(rank, torch.cuda.device_count()))",
        at=(FlatParameters.__init__, "self.source(segment).copy_(segment.parameter.data)"),
    ),
    Seed(
        "masters in bf16",
        a_step_in_bf16,
        "no masters",  # by the walk
        FlatParameters.__init__,
        "if dtype == torch.float32 else torch.empty(size, device=device)\n            self.grad_P = torch.zeros(size,",
        "if True else torch.empty(size, device=device)\n            self.grad_P = torch.zeros(size, dtype=dtype,",
        STEPPED,
    ),
    Seed(
        "steps that a resume does not count",
        a_resume,
        "AssertionError",  # by the numbers
        set_steps,
        'state["step"].fill_(steps)',
        at=(a_resume, "assert learn(made, 2, first=2) == then"),
    ),
    Seed(
        "a number read from the device in each micro-batch",
        a_step,
        "the host waits 2 times",  # by the count
        engine.LossMetrics.add,
        "+= sums",
        "+= sums.sum().item()",
    ),
    Seed(
        "a copy that the reader does not wait for",
        activations,
        READ_FIRST,
        activation_offload._Held.read,
        "torch.cuda.current_stream(self.offload.device).wait_event(self.arrived)",
        at=FETCHED,
    ),
    Seed(
        "a stream that does not wait for the one before it",
        activations,
        READ_FIRST,
        activation_offload.ActivationOffload._copy_out,
        "self.stream.wait_stream(torch.cuda.current_stream(self.device))",
        at=(activation_offload.ActivationOffload._copy_out, "piece.copy_(part, non_blocking=True)"),
    ),
    Seed(
        "a stream that nobody waits for at the end",
        bytes_there_and_back,
        READ_FIRST,
        host_pieces.fill,
        "torch.cuda.current_stream(target_U.device).wait_stream(lanes[0].stream)",
        at=COPIED,
    ),
    Seed(
        "a pinned buffer filled again while it is being sent",
        bytes_there_and_back,
        "numpy at",  # by the streams, of which the host is one
        host_pieces._Lane.wait,
        "self._done.synchronize()",
        at=COPIED,
    ),
    Seed(
        "memory given up while another stream writes it",
        activations,
        HANDED_OUT,
        activation_offload._Held.fetch,
        "self.back.record_stream(stream)",
        at=FETCHED,
    ),
    Seed(
        "a mapping given up before it has been read",
        shared_memory,
        HANDED_OUT,
        device_memory.MappedWindows.close,
        "torch.cuda.synchronize()",
        at=(shared_memory, ".copy_(reader.window(0))"),
    ),
)


@pytest.mark.parametrize("number", range(len(SEEDS)), ids=[seed.defect for seed in SEEDS])
@on_simulated_device
def test_a_defect_is_found_at_its_line(tmp_path: Path, number: int) -> None:
    found = SEEDS[number].findings(tmp_path)
    assert SEEDS[number].found in found, found
    assert SEEDS[number].line in found, found
