"""Roles whose process builds something else than it was told: the product's handlers, over a library that misbehaves.

`ping` with {"sabotage": NAME} sets what is wrong from the next build on, "" puts it right. What is patched lies below
the product's reading back: nothing here touches what a role reports.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

from backends.protocol import Rank
from specs.wire.messages import Message, Verb
from workers.serve import Emit, Handler, Reply

Handlers = Mapping[Verb, Handler]


def actor(rank: Rank) -> Handlers:
    return _sabotaged("actor", rank)


def ref(rank: Rank) -> Handlers:
    return _sabotaged("trainer", rank)


def rollout(rank: Rank) -> Handlers:
    return _sabotaged("rollout", rank)


def _sabotaged(worker: str, rank: Rank) -> Handlers:
    own: Handlers = import_module(f"workers.roles.{worker}").handlers(rank)
    active = ExitStack()
    if name := os.environ.get("SABOTAGE"):
        active.enter_context(SABOTAGES[name]())

    def ping(message: Message, emit: Emit) -> Reply:
        active.close()
        if name := message.body.get("sabotage"):
            active.enter_context(SABOTAGES[name]())
        return {}, {}

    return {**own, Verb.PING: ping}


def _wrap(owner: Any, name: str, change: Callable[..., Any]) -> AbstractContextManager[Any]:
    """`owner.name` replaced by `change(real, *args, **kwargs)`."""
    real = getattr(owner, name)
    return patch.object(owner, name, lambda *args, **kwargs: change(real, *args, **kwargs))


# ── after the model is made ───────────────────────────────────────────────────────────────────────


def _once_built(spoil: Callable[[Any], None]) -> AbstractContextManager[Any]:
    """`eval` is the last thing that is called on every model that is built."""
    from transformers import PreTrainedModel

    def change(real: Any, model: Any) -> Any:
        spoil(model)
        return real(model)

    return _wrap(PreTrainedModel, "eval", change)


def _attention() -> AbstractContextManager[Any]:
    return _once_built(lambda model: model.set_attn_implementation("eager"))


def _attention_of_a_layer() -> AbstractContextManager[Any]:
    def spoil(model: Any) -> None:
        last = model.model.layers[-1].self_attn
        last.config = copy.deepcopy(last.config)
        last.config._attn_implementation = "eager"

    return _once_built(spoil)


def stranger(*args: Any, **kwargs: Any) -> Any:
    """Computes what it should, so that only its name tells."""
    from backends.packed.packed_attention import sdpa_by_layout

    return sdpa_by_layout(*args, **kwargs)


@contextmanager
def _attention_function() -> Iterator[None]:
    """The name stays "sdpa", the function is another."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    from backends.packed import packed_attention

    with patch.object(packed_attention, "install", lambda: None):
        ALL_ATTENTION_FUNCTIONS["sdpa"] = stranger
        yield
    packed_attention.install()


def _frozen() -> AbstractContextManager[Any]:
    def spoil(model: Any) -> None:
        next(model.parameters()).requires_grad_(False)

    return _once_built(spoil)


@contextmanager
def _dtype() -> Iterator[None]:
    """Each engine computes in bf16, where it decides what it computes in."""
    import torch
    from transformers import PreTrainedModel

    from backends.ddp import engine as ddp
    from backends.fsdp2 import engine as fsdp2

    def flat(real: Any, model: Any, dtype: Any, **kwargs: Any) -> Any:
        return real(model, torch.bfloat16, **kwargs)

    def moved(real: Any, model: Any, *args: Any) -> Any:
        return real(model, *args).bfloat16()

    computes = patch.object(fsdp2, "DTYPES", dict.fromkeys(fsdp2.DTYPES, torch.bfloat16))
    with _wrap(ddp, "FlatParameters", flat), computes, _wrap(PreTrainedModel, "to", moved):
        yield


# ── another model ─────────────────────────────────────────────────────────────────────────────────


def _config(**changed: Any) -> AbstractContextManager[Any]:
    from transformers import AutoConfig

    def change(real: Any, path: str, **kwargs: Any) -> Any:
        return real(path, **{**kwargs, **changed})

    return _wrap(AutoConfig, "from_pretrained", change)


def _another_model() -> AbstractContextManager[Any]:
    """The same shape in another folder: only its path tells."""
    from transformers import AutoConfig

    return _wrap(AutoConfig, "from_pretrained", lambda real, path, **kwargs: real(os.environ["OTHER_MODEL"], **kwargs))


def _fake_vocabulary() -> AbstractContextManager[Any]:
    from backends.fake import bigram

    return _wrap(bigram, "read_vocab_size", lambda real, config: real(config) + 1)


# ── another mesh ──────────────────────────────────────────────────────────────────────────────────


def _mesh() -> AbstractContextManager[Any]:
    """Two whole copies instead of one that is cut in two."""
    from backends.fsdp2 import engine

    def change(real: Any, table: Any, rank: Any, device: Any) -> Any:
        return real(table.model_copy(update={"replicate": 2, "shard": 1}), rank, device)

    return _wrap(engine, "ShardMesh", change)


SABOTAGES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "attention": _attention,
    "attention of a layer": _attention_of_a_layer,
    "attention function": _attention_function,
    "another model": _another_model,
    "dtype": _dtype,
    "vocabulary": lambda: _config(vocab_size=16),
    "layers": lambda: _config(num_hidden_layers=3, layer_types=["full_attention"] * 3),
    "width of the MLP": lambda: _config(intermediate_size=96),
    "frozen": _frozen,
    "mesh": _mesh,
    "fake vocabulary": _fake_vocabulary,
}
SUPPORT = Path(__file__).resolve().parent
