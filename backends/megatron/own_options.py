"""Options of Megatron-core that a spec adds (`[actor.engine.megatron]`): checked by the classes that take them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, get_type_hints

from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import TransformerConfig
from pydantic import ConfigDict, TypeAdapter, ValidationError

from specs.errors import ModelError
from specs.schema.engines.megatron_table import MegatronTable
from specs.text import show
from specs.wire.role_config import TrainConfig

_OF_LEARNING = (DistributedDataParallelConfig, OptimizerConfig)


def check_options(config: TrainConfig) -> None:
    """Raise ModelError for an option that Megatron-core does not have, whose value it does not take, or that only a
    role that learns has."""
    assert isinstance(config.engine, MegatronTable)
    for name, value in config.engine.megatron.items():
        key = f"{config.role}.engine.megatron.{name} = {show(value)}"
        kinds = [get_type_hints(each)[name] for each in (TransformerConfig, *_OF_LEARNING) if name in _names(each)]
        if not kinds:
            raise ModelError(f"{key}: Megatron-core has no such option", hint="remove the key")
        if config.optimizer is None and name not in _names(TransformerConfig):
            raise ModelError(f"{key}: has no effect, {config.role} does not learn", hint="remove the key")
        try:
            TypeAdapter(kinds[0], config=ConfigDict(arbitrary_types_allowed=True)).validate_python(value, strict=True)
        except ValidationError as error:
            reason = error.errors()[0]["msg"]
            raise ModelError(f"{key}: Megatron-core refuses it: {reason}", hint="change or remove the key") from None


def with_options(config_class: Any, settings: Mapping[str, Any], options: Mapping[str, Any]) -> Any:
    """Build one of Megatron-core's configurations from what rlctl sets and those of the spec's `options` that it has.
    Raises ModelError where these contradict, or Megatron-core refuses them."""
    own = {name: value for name, value in options.items() if name in _names(config_class)}
    for name in own.keys() & settings.keys():
        if own[name] != settings[name]:
            message = f"engine.megatron.{name} = {show(own[name])} contradicts what rlctl sets: {settings[name]!r}"
            raise ModelError(message, hint="remove the key")
    try:
        return config_class(**{**settings, **own})
    except (ValueError, AssertionError) as error:
        if not own:
            raise
        message = f"Megatron-core refuses engine.megatron ({', '.join(own)}): {error}"
        raise ModelError(message, hint="change or remove one of these") from None


def _names(config_class: Any) -> set[str]:
    return {field.name for field in fields(config_class)}
