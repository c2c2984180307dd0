"""Make the body of each role's `build`: its own part of the spec, with paths made absolute."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlctl.models.paths import resolve_model
from rlctl.preflight.reward_files import scorer_code
from specs.schema.recipes import RlSpec, SamplingSpec, sampling_of
from specs.schema.roles import DATA, HEADS_OF_FILES, REWARD, REWARD_MODEL, ROLES, ROLLOUT, RoleName
from specs.schema.spec import Spec
from specs.wire.role_config import (
    TEXT_CONFIGS,
    DataConfig,
    ModelConfig,
    RewardConfig,
    RolloutConfig,
    ScoreText,
    TrainConfig,
)
from workers.grading.reward_sources import read_sources


def model_paths(spec: Spec, spec_dir: Path) -> dict[RoleName, str]:
    """Return the folder or hub id that each role reads."""
    return {role: str(resolve_model(spec.model_path(role), spec_dir)) for role in spec.roles}


def build_bodies(spec: Spec, spec_dir: Path, run_dir: Path, today: str = "") -> Mapping[RoleName, dict[str, Any]]:
    """Return the body of the `build` verb for every role of the run. `today`: as chat templates write it."""
    paths = model_paths(spec, spec_dir)
    configs: dict[RoleName, TrainConfig | RolloutConfig | DataConfig | RewardConfig] = {
        DATA: DataConfig.of(spec, paths[DATA], spec_dir)
    }
    if (sampling := sampling_of(spec)) is not None:
        configs |= {REWARD: _reward(sampling, paths, spec_dir, run_dir), ROLLOUT: _rollout(sampling, paths[ROLLOUT])}
    configs |= {role: _trainer(spec, role, paths[role]) for role in spec.roles if ROLES[role].is_trainer}
    bodies = {role: config.model_dump(mode="json") for role, config in configs.items()}
    return {role: body | {"today": today} if role in TEXT_CONFIGS else body for role, body in bodies.items()}


def _reward(spec: SamplingSpec, paths: Mapping[RoleName, str], spec_dir: Path, run_dir: Path) -> RewardConfig:
    return RewardConfig(
        model_path=paths[REWARD],
        trust_remote_code=spec.model.trust_remote_code,
        spec_dir=str(spec_dir),
        reward=spec.grading,
        answer_column=spec.answer_column,
        max_response_tokens=spec.max_response_tokens,
        run_dir=str(run_dir),
        score_text=_score_text(spec, paths),
        environments=spec.environments,
        environment_column=getattr(spec.data, "environment_column", ""),
        seed=spec.run.seed,
        sources=read_sources(scorer_code(spec).values(), str(spec_dir)),
    )


def _rollout(spec: SamplingSpec, path: str) -> RolloutConfig:
    return RolloutConfig(
        model=_model(spec, ROLLOUT, path),
        engine=spec.rollout.engine,
        lora=spec.actor.lora if spec.rollout_applies_adapters else None,
        max_prompt_tokens=spec.max_prompt_tokens,
        max_response_tokens=spec.max_response_tokens,
        stop=spec.rollout.stop,
    )


def _trainer(spec: Spec, role: RoleName, path: str) -> TrainConfig:
    section: Any = spec.role(role)
    return TrainConfig(
        role=role,
        model=_model(spec, role, path),
        engine=section.engine,
        optimizer=section.optimizer if spec.learns(role) else None,
        lora=getattr(section, "lora", None),
        total_optimizer_steps=spec.optimizer_steps(role),
        micro_batch_tokens=section.micro_batch_tokens,
        sequence_parallel=section.sequence_parallel,
        gradient_checkpointing=getattr(section, "gradient_checkpointing", False),
        activation_offload=getattr(section, "activation_offload", False),
        temperature=spec.rollout.temperature if isinstance(spec, RlSpec) else 1.0,
    )


def _model(spec: Spec, role: RoleName, path: str) -> ModelConfig:
    own_path, head = spec.model_path(role) != spec.model.path, ROLES[role].head
    return ModelConfig(
        path=path,
        from_scratch=spec.model.from_scratch and not own_path and (head not in HEADS_OF_FILES or spec.learns(role)),
        seed=spec.run.seed,
        dtype=spec.dtype(role),
        attn_implementation=spec.attention(role),
        trust_remote_code=spec.model.trust_remote_code,
        device="cuda" if spec.role(role).devices else "cpu",
        max_sequence_tokens=spec.longest_tokens(role),
        head=head,
    )


def _score_text(spec: SamplingSpec, paths: Mapping[RoleName, str]) -> ScoreText | None:
    """Return how samples become tokens of the run's reward model."""
    if not spec.needs_reward_model:
        return None
    return ScoreText(
        path=paths[REWARD_MODEL],
        trust_remote_code=spec.model.trust_remote_code,
        max_sequence_tokens=spec.longest_tokens(REWARD_MODEL),
        chat=spec.data.chat,
    )
