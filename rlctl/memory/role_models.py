"""A role's model as `rlctl plan` knows it: its config, what follows from that, and the shapes of its tensors."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from rlctl.memory.unknown_family import built_tensors
from rlctl.models.hub import Folder, NotGiven, look_up, offline
from rlctl.models.model_tensors import KNOWN_FAMILIES, tensors_of_config, tensors_on_disk
from rlctl.models.paths import model_folder
from specs.errors import Problem, SpecError
from specs.model_facts import ModelFacts, model_facts
from specs.model_shapes import ModelTensors
from specs.schema.roles import ROLES, RoleName
from specs.schema.spec import Spec
from specs.text import show


@dataclass(frozen=True)
class Model:
    config: dict[str, Any]
    facts: ModelFacts
    tensors: ModelTensors


def find_model(spec: Spec, role: RoleName, spec_dir: Path, *, may_build: bool = False) -> Model:
    """Shape of a role's model from its folder, the hub's cache or the hub. Raises SpecError."""
    path = spec.model_path(role)
    key = "model.path" if path == spec.model.path else f"{role}.model"
    folder = model_folder(path, spec_dir)
    if folder is None:
        asked = None if offline() else look_up(path)
        why = f": {asked.why}" if isinstance(asked, NotGiven) else ""
        hint = f"`hf download {path} config.json` brings it (a few kB) where there is a network; {_by_hand(key)}"
        raise SpecError([Problem(key, f"its config.json is not on this machine{why}", hint, show(path))])
    config, facts, tensors = _read_model(key, path, folder)
    if tensors is None and facts is not None and may_build:
        tensors = built_tensors(spec, spec_dir, folder, key)
    if facts is None or tensors is None:
        kind = config.get("model_type", "?")
        message = f"parameters of the family {kind} are not known from config.json alone, and {folder} has no weights"
        hint = f"put the model's safetensors beside its config.json; known: {', '.join(KNOWN_FAMILIES)}"
        raise SpecError([Problem(key, message, hint, show(path))])
    if ROLES[role].head != "lm":
        tensors = tensors.with_score_layer(facts.hidden_size)
    return Model(config, facts, tensors)


def _by_hand(key: str) -> str:
    return f"copy that file into a folder and add `--set {key}=FOLDER`"


@cache
def _read_model(key: str, path: str, folder: Folder) -> tuple[dict[str, Any], ModelFacts | None, ModelTensors | None]:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        what = "no config.json in it" if Path(str(folder)).is_dir() else "no such folder on this machine"
        hint = f"sizes come from its config.json alone: {_by_hand(key)}"
        raise SpecError([Problem(key, what, hint, show(path))]) from None
    except (OSError, ValueError) as error:
        hint = "a model folder has a config.json"
        raise SpecError([Problem(key, f"config.json cannot be read: {error}", hint, show(path))]) from None
    facts, tensors = model_facts(config), tensors_of_config(config)
    if tensors is None and isinstance(folder, Path):
        tensors = tensors_on_disk(folder, tied=bool(facts and facts.tied_embeddings))
    return config, facts, tensors
