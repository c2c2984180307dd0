"""Reports what a role would build and read, from the role's own interpreter: `python -m workers.offline.build_on_meta`.

Reads a `ProbeRequest` from standard input and writes a `Probed` per role, one JSON line each, as soon as it is known.
Output of libraries goes to standard error. Nothing is written to disk and no port is opened.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from contextlib import nullcontext, suppress
from importlib.util import find_spec
from typing import Any, TextIO

from backends.hf.tokenizer import load_codec
from backends.protocol import Rank
from backends.registry import rollout_engine, train_engine
from backends.rollout.stop_tokens import single_token
from specs.errors import ModelError, RlctlError
from specs.schema.roles import ROLES
from specs.text import show
from specs.wire.finding import Finding
from specs.wire.meta_request import Probed, ProbeRequest, RoleRequest
from specs.wire.role_config import TEXT_CONFIGS, DataConfig, RolloutConfig, TextConfig, TrainConfig
from workers.chat.chat_renderer import ChatTemplateError, renderer_of
from workers.chat.chat_turns import ChatTurns
from workers.data.first_prompts import first_findings
from workers.data.prompts import uses_chat
from workers.watchdog import die_with_parent, set_process_name


def main() -> int:
    die_with_parent()
    set_process_name("rlctl-probe")
    replies = _own_stdout()
    request = ProbeRequest.model_validate_json(sys.stdin.read())
    for role, asked in request.roles.items():
        replies.write(reply(role, asked).model_dump_json() + "\n")
        replies.flush()
    return 0


def _own_stdout() -> TextIO:
    """Standard output reserved for results: prints of engines are redirected to standard error."""
    kept = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return kept


def reply(role: str, asked: RoleRequest) -> Probed:
    """Return what a role would build, or the error that ends it. Never raises."""
    started = time.monotonic()
    try:
        found = _on_meta(role, asked)
    except Exception as error:  # every error is reported to the user together with its role
        traceback.print_exc()
        known = error if isinstance(error, RlctlError) else RlctlError(f"{type(error).__name__}: {error}")
        found = Probed(role=role, error=known.message, hint=known.hint)
    return found.model_copy(update={"seconds": round(time.monotonic() - started, 3)})


def _on_meta(role: str, asked: RoleRequest) -> Probed:
    """Uses the same code as the role's engine, without memory for weights."""
    if not ROLES[role].holds_model:
        return _texts(role, TEXT_CONFIGS[role].model_validate(asked.body))
    rank, about = Rank(0, asked.ranks, 0), Probed(role=role)
    if ROLES[role].samples:
        rollout = RolloutConfig.model_validate(asked.body)
        about = _ends(role, rollout)
        if about.findings:  # an engine would refuse them too
            return about
        found = rollout_engine(rollout.engine.kind).on_meta(rollout, rank)
    else:
        trainer = TrainConfig.model_validate(asked.body)
        found = train_engine(trainer.engine.kind).on_meta(trainer, rank)
    if found is None:
        return about
    return about.model_copy(update={"model": found.model, "not_seen": found.not_seen})


def _texts(role: str, config: TextConfig) -> Probed:
    """Look at a role that reads text: its tokenizer, and what it makes of the first rows."""
    codec = load_codec(config.model_path, trust_remote_code=config.trust_remote_code)
    about = Probed(role=role, tokens=len(codec.tokenizer))
    if isinstance(config, DataConfig) and config.data is not None:
        with renderer_of(codec) if uses_chat(config.data, codec) else nullcontext() as chats:
            found: dict[str, Any] = {"findings": tuple(first_findings(config, codec, chats))}
            if chats is not None:
                with suppress(ChatTemplateError, ModelError):  # it ends an answer with no token of its own
                    found["answer_end"] = ChatTurns(codec, chats).answer_end
            return about.model_copy(update=found)
    return about


def _ends(role: str, config: RolloutConfig) -> Probed:
    """Find the tokens that end a completion, and stop texts that are none."""
    if find_spec("transformers") is None:  # an engine of another package, which reads no tokenizer here
        return Probed(role=role)
    path = config.model.path
    codec = load_codec(path, trust_remote_code=config.model.trust_remote_code)
    found, ids = [], set(codec.stop_ids)
    for text in config.stop:
        try:
            ids.add(single_token(codec, text))
        except ModelError as error:
            found.append(Finding(key="rollout.stop", message=error.message, hint=error.hint, value=show(text)))
    return Probed(role=role, ends=tuple(sorted(ids)), findings=tuple(found))


if __name__ == "__main__":
    sys.exit(main())
