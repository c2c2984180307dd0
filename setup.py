"""Building a wheel: what it needs of scripts/ and docs/ goes into it, as specs/shipped/ (see `specs/packages.py`)."""

from __future__ import annotations

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

HERE = Path(__file__).parent
SHIPPED = (
    "scripts/setup-engine",
    "scripts/_steps.sh",
    "scripts/_pick_torch.py",
    "scripts/constraints*.txt",
    "docs/*.md",
)


class BuildPackages(build_py):
    def run(self) -> None:
        super().run()
        if self.editable_mode:  # the clone itself is used
            return
        for pattern in SHIPPED:
            for file in sorted(HERE.glob(pattern)):
                target = Path(self.build_lib, "specs", "shipped", file.relative_to(HERE))
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(file, target)


setup(cmdclass={"build_py": BuildPackages})
