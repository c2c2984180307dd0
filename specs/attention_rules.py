"""The attention of every role: what is known of it before anything is built, and what cannot be had."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from specs.attention import AttentionFacts, Decision, decide, score_changes
from specs.engine_tables import OWN_ATTENTION
from specs.errors import Problem
from specs.explain import show
from specs.interpreters import packages_of
from specs.model_facts import model_facts
from specs.model_files import config_of
from specs.schema import RoleName, Spec

# Engines whose models are transformers' own, built by backends/hf.py.
_BUILT_HERE = ("ddp", "fsdp2", "zero", "zero3", "torch")


def attention_of(spec: Spec, role: RoleName, spec_dir: Path | None = None) -> Decision | None:
    """What a role's attention will be; None where the role has no model, or one without attention.

    `spec_dir` None: by the spec alone. Else the model's config, the role's interpreter and the GPUs of this machine are
    looked at. `implementation` is empty where the engine decides, and only `as_built.json` can say.
    """
    if role == "reward":
        return None
    section: Any = spec.role(role)
    kind, asked = section.engine.kind, spec.attention(role)
    if kind == "fake":
        return None
    if kind in OWN_ATTENTION:
        return Decision(asked, "", "", f"{kind} chooses its attention itself; as_built.json says what it took")
    if kind not in _BUILT_HERE:
        return Decision(asked, "" if asked == "auto" else asked, "", f"{kind} comes from another package")
    return decide(asked, _facts(spec, role, spec_dir))


def attention_problems(spec: Spec, spec_dir: Path | None = None) -> Iterator[Problem]:
    """Attention that cannot be had. By the spec alone, or with what it names (`attention_of`)."""
    named = set()
    # What a trainer says of a key of all roles comes before what the sampler says: it is the wish that counts there.
    for role in sorted(spec.roles, key=("actor", "ref", "rollout", "reward").index):
        found = attention_of(spec, role, spec_dir)
        key = _key(spec, role)
        if found is not None and found.problem and key not in named:
            named.add(key)
            yield Problem(key, found.problem, found.hint, show(found.asked))


def shadowed_attention(spec: Spec) -> Iterator[Problem]:
    """A wish for all roles that every role overrules."""
    if "attn_implementation" not in spec.model.model_fields_set or spec.actor.engine.kind == "fake":
        return
    asking = [role for role in spec.roles if role != "reward" and attention_of(spec, role) is not None]
    if not any(_key(spec, role).startswith("model.") and _listens(spec, role) for role in asking):
        message = "has no effect: every role has an attn_implementation of its own, or an engine that chooses it"
        value = show(spec.model.attn_implementation)
        yield Problem("model.attn_implementation", message, "remove the key", value)


def _listens(spec: Spec, role: RoleName) -> bool:
    return not (role == "rollout" and spec.rollout.engine.kind in OWN_ATTENTION)


def _key(spec: Spec, role: RoleName) -> str:
    """Where the spec says what a role's attention is."""
    written = "actor" if role == "ref" and spec.ref is None else role
    own = getattr(spec.role(written), "attn_implementation", None)
    return f"{written}.attn_implementation" if own else "model.attn_implementation"


def _facts(spec: Spec, role: RoleName, spec_dir: Path | None) -> AttentionFacts:
    section: Any = spec.role(role)
    config = {} if spec_dir is None else config_of(spec.model_path(role), spec_dir)
    shape = model_facts(config)
    return AttentionFacts(
        device="cuda" if section.devices else "cpu",
        dtype=spec.rollout_dtype if role == "rollout" else section.dtype,
        learns=role == "actor",
        role=role,
        decodes=section.engine.kind == "torch",
        versions=None if spec_dir is None else packages_of(section, spec_dir),
        capability=gpu_capability() if spec_dir is not None and section.devices and section.nodes == 1 else None,
        head_dim=shape.head_dim if shape else 0,
        scores=score_changes(config),
    )


@cache
def gpu_capability() -> tuple[int, int] | None:
    """The lowest compute capability of this machine's GPUs, as its driver tells; None where there is none."""
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.split()
        return min((int(line.split(".")[0]), int(line.split(".")[1])) for line in told)
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None
