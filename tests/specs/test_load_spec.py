"""Broken specs: each names its key, says what is wrong, and says what to do. Nothing is coerced."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from specs.errors import SpecError
from specs.load import load_spec, spec_from

GOOD: dict[str, Any] = {
    "schema": 1,
    "run": {"name": "test", "steps": 10},
    "model": {"path": "builtin:tiny-digits", "from_scratch": True},
    "data": {"train": "builtin:sort-digits", "prompts_per_step": 8, "max_prompt_tokens": 8, "max_response_tokens": 8},
    "reward": {"terms": [{"kind": "exact_match"}]},
    "algorithm": {"kind": "grpo", "group_size": 4},
}
GONE = object()


def edited(edits: dict[str, Any]) -> dict[str, Any]:
    """GOOD with keys set (dotted; list entries by number) or, for GONE, taken out."""
    raw = copy.deepcopy(GOOD)
    for key, value in edits.items():
        *parents, last = key.split(".")
        node: Any = raw
        for part in parents:
            node = node[int(part)] if isinstance(node, list) else node.setdefault(part, {})
        if value is GONE:
            del node[last]
        else:
            node[int(last) if isinstance(node, list) else last] = value
    return raw


def problems(edits: dict[str, Any]) -> list[Any]:
    with pytest.raises(SpecError) as caught:
        spec_from(edited(edits))
    return caught.value.problems


FLASH = {"actor.devices": [0], "actor.attn_implementation": "flash_attention_2"}
FAKE = {"actor.engine": {"kind": "fake"}, "rollout.engine": {"kind": "fake"}}
BROKEN: list[tuple[dict[str, Any], str, str]] = [
    # unknown keys, at every depth
    ({"runn": {"name": "x"}}, "runn", "`run`"),
    ({"run.step": 3}, "run.step", "`steps`"),
    ({"run.seeds": 3}, "run.seeds", "`seed`"),
    ({"model.attn_implementatoin": "sdpa"}, "model.attn_implementatoin", "`attn_implementation`"),
    ({"data.max_promt_tokens": 3}, "data.max_promt_tokens", "`max_prompt_tokens`"),
    ({"actor.optimizer.learning_rate": 0.1}, "actor.optimizer.learning_rate", "`actor.optimizer.lr`"),
    ({"actor.lr": 0.1}, "actor.lr", "`actor.optimizer.lr`"),
    ({"actor.temperature": 0.1}, "actor.temperature", "`rollout.temperature`"),
    ({"algorithm.beta": 0.1}, "algorithm.beta", "`algorithm.kl_coef`"),
    (
        {"actor.engine": {"kind": "ddp", "logit_chunk_tokens": 5}},
        "actor.engine.logit_chunk_tokens",
        "`logits_chunk_tokens`",
    ),
    ({"actor.engine": {"kind": "fake", "logits_chunk_tokens": 5}}, "actor.engine.logits_chunk_tokens", 'kind "ddp"'),
    ({"rollout.engine": {"max_seqs": 5}}, "rollout.engine.max_seqs", "`max_sequences`"),
    ({"reward.terms.0.wieght": 2.0}, "reward.terms.0.wieght", "`weight`"),
    ({"reward.terms.0.pattern": "x"}, "reward.terms.0.pattern", 'kind "regex"'),
    ({"rollout.gradient_checkpointing": True}, "rollout.gradient_checkpointing", "`actor.gradient_checkpointing`"),
    ({"critic": {"lr": 1.0}}, "critic", "grpo has no critic"),
    ({"zzz": 1}, "zzz", "knows: schema, run"),
    ({"schema_": 1}, "schema_", "`schema`"),
    # missing
    ({"schema": GONE}, "schema", "add `schema = 1`"),
    ({"run": GONE}, "[run]", "add [run] with name, steps"),
    ({"run.steps": GONE}, "run.steps", "add `steps = …` under [run]"),
    ({"algorithm.kind": GONE}, "algorithm.kind", "missing"),
    ({"reward.terms.0.kind": GONE}, "reward.terms.0.kind", "exact_match"),
    ({"reward.terms": []}, "reward.terms", "at least 1 entry"),
    ({"reward.terms.0": {"kind": "regex"}}, "reward.terms.0.pattern", "missing"),
    # types: nothing is coerced
    ({"schema": 2}, "schema", "newer rlctl"),
    ({"schema": "1"}, "schema", "write `schema = 1`"),
    ({"schema": True}, "schema", "reads schema 1"),
    ({"run.steps": "8"}, "run.steps", "must be a whole number, not text\n  hint: write it without quotes"),
    ({"run.steps": True}, "run.steps", "must be a whole number, not true or false"),
    ({"run.steps": 8.0}, "run.steps", "hint: write 8"),
    ({"run.name": 5}, "run.name", 'write it in quotes: "5"'),
    ({"model.from_scratch": 1}, "model.from_scratch", "must be true or false"),
    ({"model.from_scratch": "true"}, "model.from_scratch", "without quotes"),
    ({"actor.optimizer": {"lr": "1e-3"}}, "actor.optimizer.lr", "without quotes"),
    ({"actor.devices": 0}, "actor.devices", "write it in brackets: [0]"),
    ({"actor.devices": ["0"]}, "actor.devices.0", "whole number"),
    ({"actor": 3}, "actor", "must be a table"),
    ({"rollout.stop": "x"}, "rollout.stop", "must be a list"),
    ({"actor.env": {"A": 1}}, "actor.env.A", "must be text"),
    ({"rollout.temperature": float("inf")}, "rollout.temperature", "finite"),
    ({"rollout.temperature": float("nan")}, "rollout.temperature", "finite"),
    # bounds and choices
    ({"run.steps": 0}, "run.steps", "must be greater than 0"),
    ({"run.seed": 2**31}, "run.seed", "must be less than 2147483648"),
    ({"run.name": "a b"}, "run.name", "letters, digits"),
    ({"run.name": "../up"}, "run.name", "letters, digits"),
    ({"model.path": ""}, "model.path", "must not be empty"),
    ({"rollout.top_p": 1.5}, "rollout.top_p", "must be at most 1"),
    ({"actor.processes": 0}, "actor.processes", "must be at least 1"),
    ({"actor.optimizer.betas": [0.9]}, "actor.optimizer.betas", "needs 2 entries"),
    ({"actor.optimizer.schedule": "cosin"}, "actor.optimizer.schedule", 'did you mean "cosine"?'),
    ({"actor.launcher": "mpirun"}, "actor.launcher", "known: python, torchrun, deepspeed, srun"),
    ({"actor.engine": {"kind": "dpp"}}, "actor.engine.kind", 'did you mean "ddp"?'),
    ({"reward.terms.0.kind": "exact-match"}, "reward.terms.0.kind", 'did you mean "exact_match"?'),
    ({"algorithm.kind": "ppo"}, "algorithm.kind", "unknown kind; known: grpo"),
    ({"reward.terms.0": {"kind": "function", "path": "score"}}, "reward.terms.0.path", "file.py:name"),
    # arithmetic
    ({"algorithm.group_size": 1}, "algorithm.group_size", "teaches nothing"),
    ({"algorithm.mini_batches_per_step": 3}, "algorithm.mini_batches_per_step", "8 prompts × 4 answers = 32 samples"),
    ({"algorithm.mini_batches_per_step": 32, "actor.processes": 2}, "actor.processes", "without work"),
    ({"rollout.processes": 9}, "rollout.processes", "at most 8"),
    ({"actor.micro_batch_tokens": 15}, "actor.micro_batch_tokens", "at least 16"),
    ({"rollout.engine.prefill_tokens": 7}, "rollout.engine.prefill_tokens", "longest prompt"),
    ({"reward.terms.0": {"kind": "overlong", "buffer_tokens": 9}}, "reward.terms.0.buffer_tokens", "longest answer"),
    ({"actor.optimizer.warmup_steps": 11}, "actor.optimizer.warmup_steps", "10 optimizer steps"),
    ({"actor.optimizer.betas": [0.9, 1.0]}, "actor.optimizer.betas", "below 1"),
    ({"eval": {"every": 1, "prompts": 5}, "data.max_rows": 5}, "eval.prompts", "leaves none"),
    ({"reward.terms.0.weight": 0.0}, "reward.terms", "every weight is 0"),
    ({"reward.terms.0": {"kind": "regex", "pattern": "("}}, "reward.terms.0.pattern", "not a regular expression"),
    # keys without effect
    ({"ref": {}}, "[ref]", "algorithm.kl_coef is 0"),
    ({"algorithm.kl_estimator": "k2"}, "algorithm.kl_estimator", "has no effect"),
    ({"actor.optimizer.min_lr_ratio": 0.1}, "actor.optimizer.min_lr_ratio", "has no effect"),
    ({"data.split": "train"}, "data.split", "not a hub data set"),
    ({"data.system": "hi", "data.chat": "never"}, "data.system", "has no effect"),
    ({"data.template": "{a}", "data.prompt_column": "b"}, "data.prompt_column", "has no effect"),
    ({"data.template": "Sort!"}, "data.template", "names no column"),
    ({"eval": {"every": 1, "split": "test"}}, "eval.split", "held out"),
    ({"eval": {"every": 1, "data": "builtin:sort-digits"}}, "eval.data", "training prompts"),
    ({"tracking": {"kind": "tensorboard", "project": "x"}}, "tracking.project", "has no effect"),
    ({"tracking": {"kind": "wandb"}}, "tracking.project", "needs one"),
    ({"actor.env": {"OMP_NUM_THREADS": "2"}, "actor.threads": 3}, "actor.threads", "wins"),
    # roles
    ({"reward.processes": 2}, "reward.processes", "reward.workers"),
    ({"reward.devices": [0]}, "reward.devices", "CPU"),
    ({"reward.launcher": "torchrun"}, "reward.launcher", "one process"),
    ({"rollout.launcher": "torchrun"}, "rollout.launcher", "independent"),
    # nodes
    ({"rollout.nodes": 2}, "rollout.nodes", "stays on the driver's host"),
    ({"reward.nodes": 2}, "reward.nodes", "stays on the driver's host"),
    (
        {"actor.nodes": 2, "actor.processes": 3, "actor.launcher": "srun"},
        "actor.processes",
        "use a multiple of 2, e.g. 4",
    ),
    ({"actor.nodes": 2, "actor.processes": 2}, "actor.launcher", "on this host only"),
    ({"actor.nodes": 2, "actor.processes": 2, "actor.launcher": "torchrun"}, "cluster.hostfile", "nothing names them"),
    ({"cluster": {"hostfile": "hosts"}}, "cluster.hostfile", "every role has nodes = 1"),
    (
        {"actor": {"nodes": 2, "processes": 2, "launcher": "srun"}, "cluster": {"hostfile": "hosts"}},
        "cluster.hostfile",
        "srun knows the hosts",
    ),
    (
        {
            "actor": {"nodes": 2, "processes": 2, "launcher": "torchrun"},
            "cluster": {"remote_shell": ["ssh", "b"], "hostfile": "h"},
        },
        "cluster.remote_shell",
        "names no host",
    ),
    (
        {"actor": {"nodes": 2, "processes": 2, "launcher": "srun", "devices": [0, 1]}},
        "actor.devices",
        "2 GPUs on each of 2 nodes for 2 processes",
    ),
    ({"actor.devices": [0, 1]}, "actor.devices", "2 GPUs for 1 processes"),
    ({"actor.devices": [0, 0], "actor.processes": 2}, "actor.devices", "stands twice"),
    ({"actor.devices": [-1]}, "actor.devices", "start at 0"),
    ({"actor.env": {"RANK": "0"}}, "actor.env.RANK", "sets this one itself"),
    ({"actor.env": {"CUDA_VISIBLE_DEVICES": "0"}}, "actor.env.CUDA_VISIBLE_DEVICES", "use actor.devices"),
    ({"model.attn_implementation": "flash_attention_2"}, "model.attn_implementation", "needs a GPU"),
    (FLASH, "actor.attn_implementation", "bf16 only"),
    # fakes
    ({"actor.engine": {"kind": "fake"}}, "rollout.engine.kind", "for all roles or for none"),
    ({**FAKE, "actor.dtype": "bf16"}, "actor.dtype", "has no effect"),
    ({**FAKE, "actor.gradient_checkpointing": True}, "actor.gradient_checkpointing", "has no effect"),
    ({**FAKE, "model.attn_implementation": "sdpa"}, "model.attn_implementation", "has no effect"),
    ({**FAKE, "rollout.devices": [0]}, "rollout.devices", "has no effect"),
    ({**FAKE, "model.from_scratch": False}, "model.from_scratch", "reads no weights"),
    ({**FAKE, "algorithm.kl_coef": 0.1, "ref": {}}, "ref.engine.kind", "for all roles or for none"),
]


@pytest.mark.parametrize(("edits", "key", "words"), BROKEN, ids=[f"{key}-{n}" for n, (_, key, _) in enumerate(BROKEN)])
def test_a_broken_spec_names_its_key_and_the_way_out(edits: dict[str, Any], key: str, words: str) -> None:
    found = problems(edits)
    about = [str(problem) for problem in found if problem.key == key]
    assert about, [str(problem) for problem in found]
    assert any(words in text for text in about), about
    assert len(found) == 1, [str(problem) for problem in found]


def test_the_good_spec_is_good_and_unchanged_by_loading() -> None:
    spec = spec_from(copy.deepcopy(GOOD))
    assert spec.samples_per_step == 32
    resolved = spec.resolved()
    for section, keys in GOOD.items():
        if isinstance(keys, dict):
            for key, value in keys.items():
                if key != "terms":
                    assert resolved[section][key] == value


def test_whole_numbers_serve_as_numbers_and_lists_as_lists() -> None:
    spec = spec_from(edited({"rollout.temperature": 2, "rollout.stop": ["a"], "actor.optimizer.betas": [0, 0.9]}))
    assert spec.rollout.temperature == 2.0
    assert spec.rollout.stop == ("a",)


def test_all_problems_come_at_once_and_in_one_message() -> None:
    found = problems({"run.steps": 0, "actor.optimizer": {"rl": 1.0}, "rollout.top_p": "1", "data.chat": "maybe"})
    assert {problem.key for problem in found} == {"run.steps", "actor.optimizer.rl", "rollout.top_p", "data.chat"}


def test_all_rules_speak_at_once() -> None:
    found = problems({"ref": {}, "algorithm.mini_batches_per_step": 5, "data.split": "x"})
    assert {problem.key for problem in found} == {"[ref]", "algorithm.mini_batches_per_step", "data.split"}


def test_an_engine_table_without_kind_is_the_default_engine() -> None:
    spec = spec_from(edited({"rollout.engine": {"max_sequences": 7}}))
    assert spec.rollout.engine.kind == "torch"
    assert spec.rollout.engine.max_sequences == 7


@pytest.mark.parametrize(
    ("text", "place", "words"),
    [
        ("schema = 1\n[run\n", ":2:5: not TOML", "[run"),
        ("schema = 1\nname = hello\n", ":2:8: not TOML", "text needs quotes"),
        ("schema = 1\nflag = True\n", ":2:8: not TOML", "lower case"),
        ("schema = 1\nschema = 1\n", ":2:11: not TOML", "stands twice"),
        ("schema = 1\n[run]\na = [1,\n", ": not TOML", "not closed"),
    ],
)
def test_broken_toml_names_line_and_column(tmp_path: Path, text: str, place: str, words: str) -> None:
    file = tmp_path / "spec.toml"
    file.write_text(text)
    with pytest.raises(SpecError) as caught:
        load_spec(file)
    assert f"{file}{place}" in str(caught.value) or place == ": not TOML"
    assert words in str(caught.value)


def test_files_that_are_no_specs(tmp_path: Path) -> None:
    (tmp_path / "latin.toml").write_bytes(b'name = "\xe9"\n')
    for name, words in (("none.toml", "no such file"), (".", "a folder"), ("latin.toml", "not UTF-8")):
        with pytest.raises(SpecError, match=words):
            load_spec(tmp_path / name)


def test_dates_are_not_text() -> None:
    import datetime

    found = problems({"run.name": datetime.date(2026, 1, 1)})
    assert "not a date or time" in str(found[0])
