"""Parameters of a model whose family `rlctl/models/model_tensors.py` does not know: built without memory, in the
actor's interpreter, by a process that has torch."""

from __future__ import annotations

import json
import subprocess
import tempfile
from pathlib import Path

from rlctl.models.hub import Folder
from rlctl.models.model_tensors import tensors_of_shapes
from rlctl.processes.launch import base_environment, python_path
from rlctl.processes.placement import make_plan
from rlctl.processes.role_configs import build_bodies
from specs.errors import Problem, SpecError
from specs.model_shapes import ModelTensors
from specs.schema.roles import ACTOR
from specs.schema.spec import Spec
from specs.text import show

TIMEOUT_S = 120.0


_built: dict[Folder, ModelTensors] = {}  # a plan is made many times over, for variants of a spec


def built_tensors(spec: Spec, spec_dir: Path, folder: Folder, key: str) -> ModelTensors:
    """Built once in a process. Raises SpecError, about `key`, where the model cannot be built."""
    if folder not in _built:
        _built[folder] = _build(spec, spec_dir, folder, key)
    return _built[folder]


def _build(spec: Spec, spec_dir: Path, folder: Folder, key: str) -> ModelTensors:
    body = build_bodies(spec, spec_dir, spec_dir / "no-run")[ACTOR]["model"]
    with tempfile.TemporaryDirectory(prefix="rlctl-plan-") as made:
        place = folder
        if not isinstance(place, Path):
            place = Path(made) / "model"
            place.mkdir()
            (place / "config.json").write_bytes((folder / "config.json").read_bytes())
        answer = _ask(spec, spec_dir, json.dumps({**body, "path": str(place)}), Path(made))
    if isinstance(answer, str):
        hint = "its safetensors beside config.json would tell too; if it has code of its own, model.trust_remote_code"
        raise SpecError([Problem(key, f"the model cannot be built without memory: {answer}", hint, show(str(folder)))])
    return tensors_of_shapes(answer, "a build of the model without memory")


def _ask(spec: Spec, spec_dir: Path, request: str, made: Path) -> dict[str, tuple[int, ...]] | str:
    """Name → shape, or what went wrong."""
    plan = make_plan(spec, spec_dir, cores=1, elsewhere=True).role(ACTOR)
    environment = base_environment() | plan.env | {"PYTHONPATH": python_path(plan, made)}
    environment |= {"PYTHONDONTWRITEBYTECODE": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = (plan.python, "-m", "workers.offline.shapes")
    try:
        ended = subprocess.run(
            command, env=environment, input=request, capture_output=True, text=True, errors="replace", timeout=TIMEOUT_S
        )
    except OSError as error:
        return f"the actor's interpreter cannot be started: {error.strerror}"
    except subprocess.TimeoutExpired:
        return f"it took longer than {TIMEOUT_S:g} s"
    if ended.returncode:
        said = [line for line in ended.stderr.splitlines() if line.strip()]
        return said[-1] if said else f"its process ended with exit code {ended.returncode}"
    return {name: tuple(shape) for name, shape in json.loads(ended.stdout.splitlines()[-1]).items()}
