"""`rlctl check-config --probe` reads on in the weight files, while the roles build their models."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rlctl.models.paths import model_folder
from rlctl.models.weight_files import weight_files
from rlctl.models.weight_values import value_findings
from specs.errors import Problem
from specs.schema.spec import Spec
from specs.text import show

SECONDS = 4.0  # for each model: some GiB


def deep_value_findings(spec: Spec, spec_dir: Path) -> tuple[list[Problem], list[Problem]]:
    """Errors and warnings about the values of every model whose weights are on this machine."""
    errors: list[Problem] = []
    warnings: list[Problem] = []
    for key, path in _models(spec):
        folder = model_folder(path, spec_dir)
        if isinstance(folder, Path):
            found = value_findings(weight_files(folder)[0], seconds=SECONDS)
            for problems, said in zip((errors, warnings), found, strict=True):
                problems += [Problem(key, *one, show(path)) for one in said]
    return errors, warnings


def _models(spec: Spec) -> Iterator[tuple[str, str]]:
    """Paths of the models whose weights are read, by their keys."""
    if not spec.model.from_scratch and spec.actor.engine.model_of != "bigram":
        yield "model.path", spec.model.path
    for role, section in spec.sections():
        if role in spec.roles and (path := getattr(section, "model", "")):
            yield f"{role}.model", path
