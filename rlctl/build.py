"""What each role is told to build: its own part of the spec, with paths made absolute."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specs.model_files import resolve_model
from specs.role_config import ModelConfig, RewardConfig, RolloutConfig, TrainConfig
from specs.schema import ActorSection, RefSection, RoleName, Spec


def model_paths(spec: Spec, spec_dir: Path) -> dict[RoleName, str]:
    """The folder or hub id that each role reads."""
    return {role: str(resolve_model(spec.model_path(role), spec_dir)) for role in spec.roles}


def build_bodies(spec: Spec, spec_dir: Path, run_dir: Path) -> Mapping[RoleName, dict[str, Any]]:
    """Body of the `build` verb for every role of the run."""
    paths = model_paths(spec, spec_dir)

    def model(role: RoleName, dtype: str) -> ModelConfig:
        own_path = spec.model_path(role) != spec.model.path
        return ModelConfig(
            path=paths[role],
            from_scratch=spec.model.from_scratch and not own_path,
            seed=spec.run.seed,
            dtype=dtype,
            attn_implementation=spec.attention(role),
            trust_remote_code=spec.model.trust_remote_code,
            device="cuda" if spec.role(role).devices else "cpu",
            max_sequence_tokens=spec.max_sequence_tokens,
        )

    def trainer(role: RoleName, section: ActorSection | RefSection) -> TrainConfig:
        learner = section if isinstance(section, ActorSection) else None
        return TrainConfig(
            role=role,
            model=model(role, section.dtype),
            engine=section.engine,
            optimizer=learner.optimizer if learner else None,
            lora=learner.lora if learner else None,
            total_optimizer_steps=spec.optimizer_steps,
            micro_batch_tokens=section.micro_batch_tokens,
            gradient_checkpointing=learner is not None and learner.gradient_checkpointing,
            temperature=spec.rollout.temperature,
        )

    configs: dict[RoleName, TrainConfig | RolloutConfig | RewardConfig] = {
        "reward": RewardConfig(
            model_path=paths["reward"],
            trust_remote_code=spec.model.trust_remote_code,
            data=spec.data,
            eval=spec.eval,
            reward=spec.reward,
            seed=spec.run.seed,
            spec_dir=str(spec_dir),
            run_dir=str(run_dir),
        ),
        "rollout": RolloutConfig(
            model=model("rollout", spec.rollout_dtype),
            engine=spec.rollout.engine,
            lora=spec.actor.lora if spec.rollout_applies_adapters else None,
            max_prompt_tokens=spec.data.max_prompt_tokens,
            max_response_tokens=spec.data.max_response_tokens,
            stop=spec.rollout.stop,
        ),
        "actor": trainer("actor", spec.actor),
    }
    if spec.ref_section is not None:
        configs["ref"] = trainer("ref", spec.ref_section)
    return {role: config.model_dump(mode="json") for role, config in configs.items()}
