"""Reports what a role would build, from the role's own interpreter: `python -m workers.offline.build_on_meta`.

Reads a `ProbeRequest` from standard input and writes a `Probed` per role, one JSON line each, as soon as it is known.
Output of libraries goes to standard error. Nothing is written to disk and no port is opened.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import TextIO

from backends.hf.tokenizer import load_codec
from backends.protocol import OnMeta, Rank
from backends.registry import rollout_engine, train_engine
from specs.errors import RlctlError
from specs.schema.roles import ROLES
from specs.wire.meta_request import Probed, ProbeRequest, RoleRequest
from specs.wire.role_config import TEXT_CONFIGS, RolloutConfig, TrainConfig
from workers.offline.one_update import one_update
from workers.watchdog import die_with_parent, set_process_name


def main() -> int:
    die_with_parent()
    set_process_name("rlctl-probe")
    replies = _own_stdout()
    request = ProbeRequest.model_validate_json(sys.stdin.read())
    for role, asked in request.roles.items():
        replies.write(_reply(role, asked).model_dump_json() + "\n")
        replies.flush()
    return 0


def _own_stdout() -> TextIO:
    """Standard output reserved for results: prints of engines are redirected to standard error."""
    kept = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return kept


def _reply(role: str, asked: RoleRequest) -> Probed:
    started = time.monotonic()
    look: Callable[[str, RoleRequest], Probed] = one_update if asked.shape is not None else _on_meta
    try:
        found = look(role, asked)
    except Exception as error:  # every error is reported to the user together with its role
        traceback.print_exc()
        known = isinstance(error, RlctlError)
        said = error.message if isinstance(error, RlctlError) else f"{type(error).__name__}: {error}"
        found = Probed(role=role, error=said, hint=error.hint if known else "")  # type: ignore[attr-defined]
    return found.model_copy(update={"seconds": round(time.monotonic() - started, 3)})


def _on_meta(role: str, asked: RoleRequest) -> Probed:
    """Uses the same code as the role's engine, without memory for weights."""
    if not ROLES[role].holds_model:
        config = TEXT_CONFIGS[role].model_validate(asked.body)
        codec = load_codec(config.model_path, trust_remote_code=config.trust_remote_code)
        return Probed(role=role, tokens=len(codec.tokenizer))
    rank, found = Rank(0, asked.ranks, 0), None
    if ROLES[role].samples:
        rollout = RolloutConfig.model_validate(asked.body)
        found = rollout_engine(rollout.engine.kind).on_meta(rollout, rank)
    else:
        trainer = TrainConfig.model_validate(asked.body)
        found = train_engine(trainer.engine.kind).on_meta(trainer, rank)
    return _seen(role, found)


def _seen(role: str, found: OnMeta | None) -> Probed:
    return Probed(role=role) if found is None else Probed(role=role, model=found.model, not_seen=found.not_seen)


if __name__ == "__main__":
    sys.exit(main())
