"""A package of rollout engines that really misbehave: what `pip install` would leave of it."""

from __future__ import annotations

from pathlib import Path

LIES_FROM = 3  # the call of `generate` from which on log-probs are wrong: before the first step there is none

TABLES = '''
"""RlSpec tables: those of the engines that are spoiled, under other names."""

from typing import Literal

from specs.schema.engines.fake_tables import FakeRolloutTable
from specs.schema.engines.torch_rollout_table import TorchRolloutTable


class LyingFakeTable(FakeRolloutTable):
    kind: Literal["lying-fake"] = "lying-fake"
    nats: float = 1.0
    after: int = 1


class LyingTorchTable(TorchRolloutTable):
    kind: Literal["lying-torch"] = "lying-torch"
    nats: float = 1.0
    after: int = 1
'''

FAKE = f'''
from backends.fake.fake_rollout import FakeRolloutEngine


def lying(base):
    class Lying(base):
        """Reports log-probs of the second answer of a step that are `nats` too low after its first `after` tokens."""

        def add(self, requests):
            self.calls = getattr(self, "calls", 0) + 1
            self.second = sorted(request.id for request in requests)[1] if self.calls >= {LIES_FROM} else None
            super().add(requests)

        def step(self):
            return [self.spoil(one) if one.id == self.second else one for one in super().step()]

        def spoil(self, completion):
            logprobs = completion.logprobs.copy()
            logprobs[self.config.engine.after :] -= self.config.engine.nats
            return type(completion)(completion.id, completion.tokens, logprobs, completion.finished)

    return Lying


LyingFake = lying(FakeRolloutEngine)
'''

TORCH = """
from backends.torch_rollout.engine import TorchRolloutEngine
from faulty_engines_package.fake import lying

LyingTorch = lying(TorchRolloutEngine)
"""

ENTRY_POINTS = """[rlctl.engines]
rollout.lying-fake = faulty_engines_package.fake:LyingFake
rollout.lying-torch = faulty_engines_package.with_torch:LyingTorch
table.rollout.lying-fake = faulty_engines_package.tables:LyingFakeTable
table.rollout.lying-torch = faulty_engines_package.tables:LyingTorchTable
"""


def install(folder: Path) -> Path:
    """Write the distribution into `folder`, which belongs on PYTHONPATH."""
    package, info = folder / "faulty_engines_package", folder / "faulty_engines-1.0.dist-info"
    for made in (package, info):
        made.mkdir(parents=True)
    for name, text in {"__init__": "", "tables": TABLES, "fake": FAKE, "with_torch": TORCH}.items():
        (package / f"{name}.py").write_text(text)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: faulty-engines\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    return folder
