"""The frozen reference model of a run: which one it is, and whether its tokenizer is the actor's."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from rlctl.models.hub import TOKENS, Folder, HubFile, HubFolder, unread, with_tokens
from specs.errors import Problem
from specs.schema.roles import REF, RoleName
from specs.schema.spec import Spec
from specs.text import show

SHOWN = 3  # differing tokens that a message shows


@dataclass(frozen=True)
class FrozenModel:
    """The reference model. `model` is empty where none is loaded."""

    role: RoleName
    needed: bool
    model: str
    why: str

    @property
    def loaded(self) -> bool:
        return bool(self.model)


def reference_of(spec: Spec) -> FrozenModel:
    """The reference of the KL term."""
    if not spec.needs_ref:
        return FrozenModel(REF, False, "", "algorithm.kl_coef is 0: not loaded")
    if spec.ref_is_actor:
        return FrozenModel(REF, True, "", "the actor without its adapters: no second model is loaded")
    if spec.ref is not None and spec.ref.model:
        return FrozenModel(REF, True, spec.ref.model, "set by ref.model")
    return FrozenModel(REF, True, spec.model.path, "the actor's starting weights")


# ── the same tokens ───────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class VocabularyDifference:
    """How another tokenizer departs from the actor's: ids that are other tokens there (None: no token), and how many
    tokens it has beyond them."""

    changed: tuple[tuple[int, str, str | None], ...]  # id, the actor's token, the other's
    extra: int


def compare_vocabularies(actor: Folder, other: Folder) -> VocabularyDifference | None:
    """Token by token, from the tokenizers' files in two model folders; None where one has none that can be read."""
    mine, theirs = _tokenizer_file(actor), _tokenizer_file(other)
    if mine is None or theirs is None:
        return None
    if mine.name == theirs.name == "tokenizer.json" and mine.read_bytes() == theirs.read_bytes():
        return VocabularyDifference((), 0)
    ours, others = _tokens(mine, actor), _tokens(theirs, other)
    if ours is None or others is None:
        return None
    changed = ((number, ours[number], others.get(number)) for number in sorted(ours))
    return VocabularyDifference(
        tuple(one for one in changed if one[1] != one[2]), sum(number not in ours for number in others)
    )


def vocabulary_problems(actor: Folder, other: Folder, key: str, path: str) -> tuple[list[Problem], list[Problem]]:
    """(errors, warnings) about the tokenizer of the model `path` that `key` names, beside the actor's."""
    actor, other = (with_tokens(one) if isinstance(one, HubFolder) else one for one in (actor, other))
    if _not_read(actor) or _not_read(other):
        message = "its tokenizer was not compared with the actor's: the hub was too slow to read both from"
        return [], [Problem(key, message, 'hf download ID --include "tokenizer*" brings them', show(path))]
    found = compare_vocabularies(actor, other)
    if found is None:
        message = "has no tokenizer.json or vocab.json to compare with the actor's"
        return [], [Problem(key, message, "put the tokenizer it was trained with beside its weights", show(path))]
    if found.changed:
        some = [_shown(*one) for one in found.changed[:SHOWN]]
        more = f", and {len(found.changed) - SHOWN} more" if len(found.changed) > SHOWN else ""
        count = _count(len(found.changed))
        message = f"its tokenizer differs from the actor's in {count}: {', '.join(some)}{more}"
        return [Problem(key, message, "use a model with the actor's tokenizer", show(path))], []
    if found.extra:
        message = f"its tokenizer has {_count(found.extra)} that the actor's lacks"
        return [], [
            Problem(key, message, "fine if the model is of the same family: these tokens are never scored", show(path))
        ]
    return [], []


def _count(tokens: int) -> str:
    return "1 token" if tokens == 1 else f"{tokens} tokens"


def _shown(number: int, mine: str, theirs: str | None) -> str:
    return f"{number} is {show(mine, 20)} and {'nothing' if theirs is None else show(theirs, 20)} there"


def _tokenizer_file(folder: Folder) -> Path | HubFile | None:
    return next((folder / name for name in TOKENS if (folder / name).is_file()), None)


def _not_read(folder: Folder) -> bool:
    """Whether there may be a tokenizer that has not come from the hub in time."""
    file = _tokenizer_file(folder)
    return unread(folder, TOKENS if file is None else [file.name])


def _tokens(file: Path | HubFile, folder: Folder) -> dict[int, str] | None:
    """Id → token, added ones too; None where the file is of an unknown form."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        if file.name == "vocab.json":
            extra = folder / "added_tokens.json"
            vocabulary = content | (json.loads(extra.read_text(encoding="utf-8")) if extra.is_file() else {})
            return {number: token for token, number in vocabulary.items()}
        listed = content["model"]["vocab"]
        pairs = listed.items() if isinstance(listed, dict) else ((one[0], n) for n, one in enumerate(listed))
        tokens = {number: token for token, number in pairs}
        return tokens | {token["id"]: token["content"] for token in content.get("added_tokens") or ()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError):
        return None
