"""The table of roles answers every question about a role."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from rlctl.loop.residency import MOVES, TABLE
from specs.load.load import spec_from
from specs.schema.recipes import RlSpec
from specs.schema.roles import ROLES, build_waves


@pytest.mark.parametrize("role", ROLES.values(), ids=str)
def test_every_role_is_whole(role) -> None:
    assert role.name in RlSpec.model_fields
    assert find_spec((role.worker or f"workers.roles.{role.name}").partition(":")[0])
    assert not role.inherits or role.inherits in ROLES
    assert not role.needed_if or isinstance(getattr(RlSpec, role.needed_if), property)
    assert ("engine" in RlSpec.section_class(role.name).model_fields) == role.holds_model
    assert (role.holds in TABLE) == (role.holds in MOVES) == role.holds_model


def small(**sections: object) -> RlSpec:
    return spec_from(
        {
            "schema": 1,
            "run": {"name": "small", "steps": 1},
            "model": {"path": "builtin:tiny-digits", "from_scratch": True},
            "data": {
                "train": "builtin:sort-digits",
                "prompts_per_step": 2,
                "max_prompt_tokens": 8,
                "max_response_tokens": 8,
            },
            "reward": {"terms": [{"kind": "exact_match"}], "env": {"HF_HOME": "/cache"}, "threads": 3},
            "algorithm": {"kind": "grpo", "group_size": 2, "kl_coef": 0.1},
            **sections,
        }
    )


def test_sections_are_what_was_written_and_roles_what_runs() -> None:
    spec = small()
    assert [role for role, _ in spec.sections()] == ["actor", "rollout", "reward"]
    assert spec.roles == ("data", "reward", "rollout", "actor", "ref")
    assert [role for role, _ in small(ref={}).sections()] == ["actor", "ref", "rollout", "reward"]
    without = small(algorithm={"kind": "grpo", "group_size": 2})
    assert without.roles == ("data", "reward", "rollout", "actor")
    with pytest.raises(AssertionError, match="ref is not part of this run"):
        without.role("ref")


def test_a_role_without_a_section_is_shaped_like_the_one_it_inherits_from() -> None:
    spec = small(actor={"dtype": "bf16", "micro_batch_tokens": 99, "engine": {"kind": "fsdp2"}})
    assert (spec.role("ref").dtype, spec.role("ref").micro_batch_tokens) == ("bf16", 99)
    assert spec.role("ref").engine == spec.actor.engine
    assert (spec.role("data").env, spec.role("data").threads) == ({"HF_HOME": "/cache"}, 3), "it runs as reward does"


def test_auto_is_bf16_on_gpus_and_fp32_on_the_cpu() -> None:
    spec = small(actor={"devices": [0]}, ref={}, rollout={"devices": [1]})
    assert [spec.dtype(role) for role in ("actor", "ref", "rollout")] == ["bf16", "fp32", "bf16"]
    spec = small(actor={"devices": [0], "dtype": "fp32"}, rollout={"devices": [1], "dtype": "bf16"})
    assert [spec.dtype(role) for role in ("actor", "ref", "rollout")] == ["fp32", "fp32", "bf16"]


def test_what_holds_no_device_is_built_with_the_first_wave() -> None:
    assert build_waves(small().roles) == [["data", "reward", "rollout"], ["actor", "ref"]]
