"""What a trainer says of its memory, against what the process really holds."""

from __future__ import annotations

import mmap
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest
from train_helpers import QWEN2, build_engine, grpo, make_batch, scale_of, train_config, write_model

from backends import memory
from backends.protocol import Rank
from specs.wire.messages import Kind, Message, Verb
from workers.roles import handlers_of
from workers.roles.trainer import Trainer

MIB = 2**20
ROOT = Path(__file__).parents[2]


def test_pages_of_files_are_not_held(tmp_path: Path) -> None:
    """100 MiB of a file, read through a mapping as weights are: the kernel takes such pages back."""
    path = tmp_path / "weights"
    path.write_bytes(bytes(100 * MIB))
    before, own = memory.held_GiB("cpu"), psutil.Process()
    memory.forget_peak("cpu")
    alone = memory.peak_GiB("cpu")
    with memory.sampled_peak("cpu") as most_GiB, path.open("rb") as file:
        resident = own.memory_info().rss
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            assert np.frombuffer(mapped, dtype=np.uint8).sum() == 0
            assert own.memory_info().rss - resident > 90 * MIB
            assert memory.held_GiB("cpu") - before < 0.02
            assert memory.peak_GiB("cpu") - alone < 0.02
            copy = np.frombuffer(mapped, dtype=np.uint8).copy()
        del copy
    assert most_GiB() - before == pytest.approx(100 / 1024, abs=0.02), "the copy alone"


def test_freed_memory_stays_until_it_is_handed_back() -> None:
    """In a process of its own, since the choice holds to its end."""
    program = (
        "import resource, sys\n"
        "import numpy as np\n"
        "from backends import memory\n"
        "if sys.argv[1] == 'keep': memory.keep_freed('cpu')\n"
        "def new_pages():\n"
        "    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "    held = [np.ones(2**17) for _ in range(200)]\n"
        "    del held\n"
        "    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before\n"
        "print(*[new_pages() for _ in range(4)][2:], memory.held_GiB('cpu'))\n"
        "memory.hand_back('cpu')\n"
        "print(memory.held_GiB('cpu'))\n"
    )
    found = {}
    for choice in ("keep", "stock"):
        command = [sys.executable, "-c", program, choice]
        found[choice] = [float(word) for word in subprocess.check_output(command, cwd=ROOT).split()]
    third, fourth, before_GiB, after_GiB = found["keep"]
    assert max(third, fourth) < min(found["stock"][:2]) / 5  # few of them where pages are huge
    assert before_GiB - after_GiB > 0.15


def test_offload_and_onload_are_measured(tmp_path) -> None:
    """On the CPU only the gradients can go: 10.6M of them, 4 bytes each, come and go with every move."""
    folder = write_model(tmp_path, {**QWEN2, "vocab_size": 40_000, "hidden_size": 256})
    trainer = Trainer(Rank())
    trainer._engine = engine = build_engine(train_config(folder))
    batch = make_batch()
    engine.forward_backward(batch, grpo(), scale_of(batch))
    engine.optim_step()
    gradients_GiB = engine.built().parameters * 4 / memory.GIB
    handlers = handlers_of(trainer)

    def ask(verb: Verb) -> tuple[float, float]:
        body, _ = handlers[verb](Message(Kind.CALL, verb=verb), lambda *_: None)
        return body["before_GiB"], body["after_GiB"]

    before, after = ask(Verb.OFFLOAD)
    assert before - after > 0.9 * gradients_GiB
    before, after = ask(Verb.OFFLOAD)
    assert before - after == pytest.approx(0, abs=0.1 * gradients_GiB)
    before, after = ask(Verb.ONLOAD)
    assert after - before == pytest.approx(gradients_GiB, rel=0.1)
