"""What all values of plans, profiles and clusters are made of: frozen models, and numbers within their limits."""

from __future__ import annotations

from enum import Enum
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from lightning_osdp.planning.spec.files import MAX_NUMBER

Count = Annotated[int, Field(ge=1, le=1 << 53)]
"""A number of things of which there is at least one."""

Size = Annotated[int, Field(ge=0, lt=1 << 63)]
"""A number of bytes or elements."""

NonNegative = Annotated[float, Field(ge=0, le=MAX_NUMBER)]
"""A quantity or a factor: neither negative nor so large that sums and products overflow."""

Seconds = NonNegative
"""A time that was measured."""

Finite = Annotated[float, Field(ge=-MAX_NUMBER, le=MAX_NUMBER)]
"""A number that sums and products don't overflow with."""


class FrozenModel(BaseModel):
    """An immutable, comparable value with JSON in and out; unknown fields, infinities and NaN are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class TextEnum(str, Enum):
    """An enumeration whose members are text, as the StrEnum of Python 3.11 and later."""

    __str__ = str.__str__
