"""The base of all specs."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Frozen(BaseModel):
    """Base of every spec: immutable, no coercion, unknown keys are errors."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")
