"""Typed reading of a GGUF file's keys of its architecture; what isn't as it should be is an error."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

import numpy as np

from quantkit.support.errors import SourceError

HF_FOLDER = "give the model's Hugging Face folder instead"
MAX_INT, HUGE = 2**31 - 1, 1e30


def decimal(value: float) -> float:
    """The shortest decimal number that float32 stores as this: 9.999999747378752e-06 was written as 1e-5."""
    return float(str(np.float32(value)))


class GGUFMetadata:
    """``{architecture}.*``.

    Args:
        metadata: all keys.
        where: the file's name, for errors.
        architecture: whose keys are read.
        known: keys that are read, or say nothing about the maths.

    Raises:
        SourceError: another key of the architecture.
    """

    def __init__(self, metadata: Mapping[str, Any], where: str, architecture: str, known: Set[str]) -> None:
        self.metadata = metadata
        self.where = where
        self.architecture = architecture
        prefix = f"{architecture}."
        mine = {key.removeprefix(prefix) for key in metadata if key.startswith(prefix)}
        if unknown := sorted(mine - known):
            raise SourceError(f"{where} sets {prefix}{unknown[0][:80]}",
                              why="it may change the model's maths, and quantkit doesn't know it",
                              next=HF_FOLDER)

    def bad(self, key: str, value: Any, why: str) -> SourceError:
        """The error of a value that can't be taken."""
        return SourceError(f"{self.where}: {self.architecture}.{key} is {str(value)[:80]!r}", why=why,
                           next=HF_FOLDER)

    def layers(self, key: str) -> Any:
        """The value as it is: one, or a list with one a layer."""
        return self.metadata.get(f"{self.architecture}.{key}")

    def raw(self, key: str) -> Any:
        """The value; a list with one value a layer counts as that value if all are equal."""
        value = self.layers(key)
        if isinstance(value, list):
            if not value or any(v != value[0] for v in value):
                raise self.bad(key, value, "layers that differ are not supported")
            return value[0]
        return value

    def integer(self, key: str, default: int | None = None, least: int = 1) -> int:
        """A whole number from ``least``; without a default it must be there."""
        value = self.raw(key)
        if value is None:
            if default is None:
                raise SourceError(f"{self.where} has no {self.architecture}.{key}",
                                  why="the model can't be built without it", next="use another conversion")
            return default
        if type(value) is not int or not least <= value <= MAX_INT:
            raise self.bad(key, value, f"a whole number from {least} is needed")
        return value

    def real(self, key: str, default: float | None = None) -> float:
        """A number above 0. As float32 stores it: 1e-5 is 9.999999747378752e-06 there."""
        value = self.raw(key)
        if value is None and default is not None:
            return default
        if type(value) not in (int, float) or not 0 < value < HUGE:
            raise self.bad(key, value, f"a number above 0 and below {HUGE:g} is needed")
        return float(value)
