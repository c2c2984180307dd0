"""What a trainer says of its memory, against what the process really holds."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import psutil
import pytest
from train_helpers import QWEN2, build_engine, grpo, make_batch, scale_of, train_config, write_model

from backends import memory
from backends.protocol import Rank
from specs.wire.messages import Kind, Message, Verb
from workers.roles.trainer import Trainer

MIB = 2**20


def test_resident_memory_is_what_the_system_says() -> None:
    before = memory.held_GiB("cpu")
    own = psutil.Process()  # other tests may have left it processes that they share
    processes = [own, *own.children(recursive=True)]
    assert before == pytest.approx(sum(each.memory_info().rss for each in processes) / memory.GIB, rel=0.02)
    block = np.ones(200 * MIB, dtype=np.uint8)
    assert memory.held_GiB("cpu") - before == pytest.approx(200 / 1024, abs=0.02)
    del block
    memory.hand_back("cpu")
    assert memory.held_GiB("cpu") - before < 0.02
    assert memory.peak_GiB("cpu") >= own.memory_info().rss / memory.GIB + 0.17


CHILD = """
import subprocess, sys
if len(sys.argv) > 1:
    subprocess.Popen([sys.executable, __file__], stdin=sys.stdin).wait()
else:
    held = bytearray(b"1") * (150 * 2**20)
    print("holding", flush=True)
    sys.stdin.read()
"""


def test_what_started_processes_hold_counts(tmp_path) -> None:
    """150 MiB in a grandchild: an inference server's own worker."""
    (tmp_path / "server.py").write_text(CHILD)
    before = memory.held_GiB("cpu")
    command = [sys.executable, str(tmp_path / "server.py"), "with_a_worker"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == "holding\n"
        held = memory.held_GiB("cpu")
        tree = [psutil.Process(), *psutil.Process().children(recursive=True)]
        assert held == pytest.approx(sum(each.memory_info().rss for each in tree) / memory.GIB, rel=0.02)
        assert held - before > 150 / 1024
        server.communicate("")
    assert memory.held_GiB("cpu") - before < 0.02


def test_offload_and_onload_are_measured(tmp_path) -> None:
    """On the CPU only the gradients can go: 10.6M of them, 4 bytes each, come and go with every move."""
    folder = write_model(tmp_path, {**QWEN2, "vocab_size": 40_000, "hidden_size": 256})
    trainer = Trainer(Rank())
    trainer._engine = engine = build_engine(train_config(folder))
    batch = make_batch()
    engine.forward_backward(batch, grpo(), scale_of(batch))
    engine.optim_step()
    gradients_GiB = engine.built().parameters * 4 / memory.GIB
    handlers = trainer.handlers()

    def ask(verb: Verb) -> tuple[float, float]:
        body, _ = handlers[verb](Message(Kind.CALL, verb=verb), lambda *_: None)
        return body["before_GiB"], body["after_GiB"]

    before, after = ask(Verb.OFFLOAD)
    assert before - after > 0.9 * gradients_GiB
    before, after = ask(Verb.OFFLOAD)
    assert before - after == pytest.approx(0, abs=0.1 * gradients_GiB)
    before, after = ask(Verb.ONLOAD)
    assert after - before == pytest.approx(gradients_GiB, rel=0.1)


@pytest.mark.gpu
def test_device_memory_counts_what_is_cached() -> None:
    import torch

    memory.hand_back("cuda")  # blocks that earlier tests left would be used again
    before = memory.held_GiB("cuda")
    block = torch.ones(512 * MIB, dtype=torch.uint8, device="cuda")
    del block
    assert memory.held_GiB("cuda") - before == pytest.approx(0.5, abs=0.05)
    memory.hand_back("cuda")
    assert memory.held_GiB("cuda") <= before
