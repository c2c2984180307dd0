"""What every table of the run spec is: frozen, without room for a mistyped key; and the texts that stand in them."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, StringConstraints, field_validator

from specs.plain_values import plain, usable_path

NonEmpty = Annotated[str, StringConstraints(min_length=1)]
PathText = Annotated[str, AfterValidator(usable_path)]
NonEmptyPath = Annotated[NonEmpty, AfterValidator(usable_path)]


class Table(BaseModel):
    """A TOML table: frozen, and without room for a mistyped key."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())

    _plain = field_validator("*")(plain)
