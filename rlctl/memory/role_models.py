"""A role's model as `rlctl plan` knows it: its config, the shapes of its tensors, and what its engine holds of it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import ceil
from pathlib import Path
from typing import Any

from rlctl.models.hub import Unavailable, hub_snapshot, look_up, offline
from rlctl.models.model_tensors import KNOWN_FAMILIES, tensors_of_config, tensors_on_disk
from rlctl.models.paths import BUILTIN_FOLDER, model_folder, read_config
from specs.errors import Problem, SpecError
from specs.model_facts import ModelFacts, merged_config, model_facts
from specs.model_shapes import ModelTensors
from specs.schema.engines.held_model import HeldTrainer, Replica
from specs.schema.rank_groups import ranks_of_a_row, sequence_parallel_of
from specs.schema.recipes import SamplingSpec
from specs.schema.roles import ROLES, ROLLOUT, RoleName
from specs.schema.spec import Spec
from specs.text import show

SHIPPED_FOLDER = BUILTIN_FOLDER / "hub"
"""A `config.json` of each model on the hub that a preset names, so that presets are planned without a network."""


@dataclass(frozen=True)
class Model:
    """A role's model as far as it is known before it is built."""

    config: dict[str, Any]
    facts: ModelFacts
    tensors: ModelTensors


def find_model(spec: Spec, role: RoleName, spec_dir: Path) -> Model:
    """Return the shape of a role's model, from its folder, the hub's cache, what rlctl ships, or the hub. Raises
    SpecError."""
    path = spec.model_path(role)
    key = "model.path" if path == spec.model.path else f"{role}.model"
    by_hand = f"copy that file into a folder and add `--set {key}=FOLDER`"
    shipped = SHIPPED_FOLDER / path.replace("/", "--")
    is_shipped = (shipped / "config.json").is_file() and hub_snapshot(path) is None
    folder = shipped if is_shipped else model_folder(path, spec_dir)
    if folder is None:
        asked = None if offline() else look_up(path)
        why = f": {asked.why}" if isinstance(asked, Unavailable) else ""
        hint = f"`hf download {path} config.json` brings it (a few kB) where there is a network; {by_hand}"
        raise SpecError([Problem(key, f"its config.json is not on this machine{why}", hint, show(path))])
    config, facts, tensors = _read_model(key, path, folder, by_hand)
    if facts is None or (tensors is None and facts.model_type in KNOWN_FAMILIES):
        message = "its config.json lacks hidden_size, num_hidden_layers, num_attention_heads or vocab_size"
        raise SpecError([Problem(key, message, f"sizes come from there alone: {by_hand}", show(path))])
    if tensors is None:
        kind = config.get("model_type", "?")
        message = f"parameters of the family {kind} are not known from config.json alone, and {folder} has no weights "
        message += "that can be read"
        hint = f"put the model's safetensors beside its config.json; known: {', '.join(KNOWN_FAMILIES)}"
        raise SpecError([Problem(key, message, hint, show(path))])
    if ROLES[role].head != "lm":
        tensors = tensors.with_score_layer(facts.hidden_size)
    return Model(config, facts, tensors)


@cache
def _read_model(
    key: str, path: str, folder: Path, by_hand: str
) -> tuple[dict[str, Any], ModelFacts | None, ModelTensors | None]:
    try:
        config = dict(merged_config(read_config(folder)))
    except ValueError as error:
        hint = f"sizes come from its config.json alone: {by_hand}"
        raise SpecError([Problem(key, f"config.json {error}", hint, show(path))]) from None
    facts, tensors = model_facts(config), tensors_of_config(config)
    if tensors is None:
        tensors = tensors_on_disk(folder, config)
    return config, facts, tensors


def held_trainer(spec: Spec, role: RoleName, tensors: ModelTensors) -> HeldTrainer:
    """Return what a role of this spec asks of its train engine."""
    section: Any = spec.role(role)
    return HeldTrainer(
        tensors=tensors,
        dtype=spec.dtype(role),
        ranks=section.processes,
        device="cuda" if section.devices else "cpu",
        optimizer=section.optimizer if spec.learns(role) else None,
        lora=getattr(section, "lora", None),
        several_micro_batches=longest_share(spec, role) > section.micro_batch_tokens,
    )


def longest_share(spec: Spec, role: RoleName) -> int:
    """Return the most tokens that a rank of a trainer holds at a time: of a mini-batch; of a whole step where it never
    learns. At least its part of the longest sequence."""
    section: Any = spec.role(role)
    samples = spec.samples_per_step
    if spec.learns(role):
        samples //= spec.mini_batches_per_step
    longest = int(getattr(section, "max_sequence_tokens", None) or spec.max_sequence_tokens)
    of_all, processes = samples * longest * ranks_of_a_row(section), int(section.processes)
    return max(ceil(longest / sequence_parallel_of(section)), of_all // processes)


def replica_of(spec: SamplingSpec, tensors: ModelTensors, facts: ModelFacts, *, gpu_GiB: float) -> Replica:
    """Return what a replica of this spec's rollout holds."""
    rollout = spec.rollout
    draws = [spec.drawn_at_once, *((each.prompts, each.samples_per_prompt) for each in spec.evaluations)]
    return Replica(
        parallel=rollout.engine.devices_per_process(),
        tensors=tensors,
        facts=facts,
        dtype=spec.dtype(ROLLOUT),
        sequences=max(-(-prompts // rollout.processes) * each for prompts, each in draws),  # groups stay whole
        max_sequence_tokens=spec.longest_tokens(ROLLOUT),
        max_prompt_tokens=spec.max_prompt_tokens,
        several_turns=bool(spec.environments),
        gpu_GiB=gpu_GiB if rollout.devices else 0.0,
        colocated=spec.colocated,
        lora=spec.actor.lora if spec.rollout_applies_adapters else None,
    )
