"""Keys of other tools: each row names a key that exists, and hides none of ours."""

from __future__ import annotations

import pytest

from specs.load.keys import homes, keys_of
from specs.load.unknown_keys import foreign_key, foreign_keys
from specs.schema.recipes import RECIPES, PreferenceSpec, RewardModelSpec, RlSpec, SftSpec
from specs.schema.spec import Spec

OF_ROWS = (SftSpec, PreferenceSpec, RewardModelSpec)


@pytest.mark.parametrize(("of_rows", "recipes"), [(False, (RlSpec,)), (True, OF_ROWS)])
def test_each_foreign_key_stands_once_and_names_a_key_that_exists(of_rows: bool, recipes: tuple[type[Spec]]) -> None:
    keys = [key for names in foreign_keys(of_rows) for key in names.split()]
    assert len(set(keys)) == len(keys)
    known = frozenset().union(*map(keys_of, recipes))
    assert {row.ours for row in foreign_keys(of_rows).values()} - known == {""}
    assert not {key for key in keys for recipe in recipes if key in homes(recipe)}, "hides a key of a spec"


@pytest.mark.parametrize(
    ("recipe", "key", "ours"),
    [
        ("rl", "per_device_train_batch_size", "actor.micro_batch_tokens"),
        ("sft", "per_device_train_batch_size", "data.rows_per_step"),
        ("sft", "learning_rate", "actor.optimizer.lr"),
        ("reward_model", "learning_rate", "reward_model.optimizer.lr"),
        ("sft", "num_generations", None),
        ("reward_model", "precompute_ref_log_probs", None),
        ("rl", "rollout.batch_size", "data.prompts_per_step"),  # these are OpenRLHF's
        ("rl", "train.batch_size", "data.prompts_per_step"),
        ("rl", "eval.dataset", "eval.data"),
        ("rl", "eval.n_samples_per_prompt", "eval.samples_per_prompt"),
        ("rl", "critic.model_name_or_path", "critic.model"),
        ("rl", "reward.model_name_or_path", "reward_model.model"),
        ("rl", "reward.num_nodes", "reward_model.nodes"),
        ("rl", "ds.tensor_parallel_size", "actor.engine.tensor_parallel"),
    ],
)
def test_what_a_key_is_follows_from_the_recipe(recipe: str, key: str, ours: str | None) -> None:
    path = key.split(".")
    found = foreign_key(path, RECIPES[recipe])
    assert (found and found.hint(path, RECIPES[recipe]).split("`")[1]) == ours
