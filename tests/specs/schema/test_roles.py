"""The table of roles answers every question about a role, and no other file says a role's name as a word."""

from __future__ import annotations

import ast
from importlib.util import find_spec
from pathlib import Path

import pytest

from rlctl.loop.residency import MOVES, TABLE
from specs.load.load import spec_from
from specs.schema.roles import ROLES, build_waves
from specs.schema.spec import Spec

ROOT = Path(__file__).parents[3]
WINGS = ("specs", "rlctl", "workers", "backends")
# Where a role is meant by its name, and files in which the same word means something else.
MAY_SAY = {
    "specs/schema/roles.py": "the table",
    "workers/roles/": "the roles' own files",
    "rlctl/loop/": "the algorithm: what is asked of whom in a step",
    "specs/phases.py": "phases",
    "specs/memory_parts.py": "phases",
    "rlctl/memory/": "phases",
    "specs/load/keys.py": "families of engines",
    "specs/schema/algorithms/": "places of a KL",
    "specs/rules/algorithm_rules.py": "places of a KL",
    "specs/schema/engines/": "families of engines",
    "backends/registry.py": "families of engines",
    "backends/fake/bigram.py": "heads of models",
    "backends/hf/score_layer.py": "heads of models",
    "backends/train/hf_weights.py": "heads of models",
    "backends/vllm_rollout/vllm_adapters.py": "the name that vLLM gives adapters",
    "rlctl/models/paths.py": "words that folders are called",
    "rlctl/run/publish/model_card.py": "sections of a spec that perhaps this version did not write",
    "rlctl/show/": "keys of metrics and of samples",
}


def names_said(source: str) -> list[int]:
    """Lines on which a role's name stands as a text of its own."""
    found = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant) and node.value in ROLES)
    return [node.lineno for node in found]


@pytest.mark.parametrize("wing", WINGS)
def test_role_names_stand_only_in_the_table(wing: str) -> None:
    said = {
        f"{name}:{line}"
        for path in sorted((ROOT / wing).rglob("*.py"))
        for line in names_said(path.read_text(encoding="utf-8"))
        if not (name := str(path.relative_to(ROOT))).startswith(tuple(MAY_SAY))
    }
    assert not said, "ask a property of the role (specs/schema/roles.py), or take its constant from there"


def test_a_name_that_is_said_is_found() -> None:
    assert names_said('if role == "ref":\n    pass\nsection = spec["actor"]\nlabel = "actor/loss"') == [1, 3]


def test_places_that_may_say_a_name_exist() -> None:
    assert all((ROOT / place).exists() for place in MAY_SAY)


@pytest.mark.parametrize("role", ROLES.values(), ids=str)
def test_every_role_is_whole(role) -> None:
    assert role.name in Spec.model_fields
    assert find_spec(f"workers.roles.{role.name}")
    assert not role.inherits or role.inherits in ROLES
    assert not role.needed_if or isinstance(getattr(Spec, role.needed_if), property)
    assert bool(role.checkpoint) == role.learns, "what learns has a state, and nothing else does"
    assert ("engine" in Spec.section_class(role.name).model_fields) == role.holds_model
    assert (role.holds in TABLE) == (role.holds in MOVES) == role.holds_model


def small(**sections: object) -> Spec:
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


def test_what_holds_no_device_is_built_with_the_first_wave() -> None:
    assert build_waves(small().roles) == [["data", "reward", "rollout"], ["actor", "ref"]]
