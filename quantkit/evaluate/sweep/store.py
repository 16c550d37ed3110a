"""Keeps what measurements gave, by everything that it depends on, in the user's cache folder."""

from __future__ import annotations

import hashlib
import json
import shutil
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from quantkit.checkpoint.durable import sync_folder, write_file
from quantkit.errors import QuantkitError
from quantkit_kernels.kept import cache_folder

VERSION = 1
"""Of what is kept: another one finds nothing of it."""
_DATA, _ARRAYS = "measurement.json", "tokens.safetensors"


@dataclass(frozen=True)
class MeasurementResult:
    """What a measurement gave.

    Attributes:
        data: dicts, lists, texts and numbers.
        arrays: numpy arrays by name.
        measured: when, as ISO 8601 in UTC.
        seconds: that it took.
    """

    data: dict[str, Any]
    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    measured: str = ""
    seconds: float = 0.0


class MeasurementStore:
    """A folder a measurement, made whole or not at all.

    Args:
        folder: of all measurements; ``None``: nothing is kept.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def get(self, key: Mapping[str, Any] | None) -> MeasurementResult | None:
        """What this measurement gave before; ``None`` if it wasn't made. What can't be read is dropped, with
        a warning, and made again."""
        if self._folder is None or key is None or not (place := self._place(key)).is_dir():
            return None
        try:
            return _read(place)
        except Exception as error:  # damaged by whatever: its content is worth nothing then
            warnings.warn(f"a kept measurement is damaged and is made again: {type(error).__name__}: "
                          f"{str(error)[:200]}", stacklevel=2)
            shutil.rmtree(place, ignore_errors=True)
            return None

    def put(self, key: Mapping[str, Any] | None, result: MeasurementResult) -> None:
        """Keep what a measurement gave. Raises QuantkitError if that can't be written."""
        if self._folder is None or key is None:
            return
        place = self._place(key)
        fresh = place.with_name(place.name + ".new")
        try:
            shutil.rmtree(fresh, ignore_errors=True)
            fresh.mkdir(parents=True)
            if result.arrays:
                from safetensors.numpy import save

                write_file(fresh / _ARRAYS, [save({name: np.ascontiguousarray(array)
                                                   for name, array in result.arrays.items()})])
            content = {"key": dict(key), "data": result.data, "measured": result.measured,
                       "seconds": result.seconds, "arrays": sorted(result.arrays)}
            write_file(fresh / _DATA, [json.dumps(content).encode()])
            shutil.rmtree(place, ignore_errors=True)
            fresh.replace(place)
            sync_folder(place.parent)
        except OSError as error:
            with suppress(OSError):
                shutil.rmtree(fresh)
            raise QuantkitError(f"what was measured can't be kept in {self._folder}",
                                why=error.strerror or str(error),
                                next="free some space, or keep it elsewhere: QUANTKIT_CACHE=DIR quantkit "
                                     "eval …") from error

    def _place(self, key: Mapping[str, Any]) -> Path:
        assert self._folder is not None
        content = json.dumps({"version": VERSION, **key}, sort_keys=True)
        return self._folder / hashlib.sha256(content.encode()).hexdigest()[:32]


def _read(place: Path) -> MeasurementResult:
    content = json.loads((place / _DATA).read_text(encoding="utf-8"))
    arrays: dict[str, np.ndarray] = {}
    if content["arrays"]:
        from safetensors.numpy import load

        arrays = load((place / _ARRAYS).read_bytes())
        if sorted(arrays) != content["arrays"]:
            raise ValueError("arrays are missing")
    return MeasurementResult(content["data"], arrays, content["measured"], content["seconds"])


def user_store() -> MeasurementStore:
    """The store in the user's cache folder, or in ``QUANTKIT_CACHE``."""
    base = cache_folder()
    return MeasurementStore(None if base is None else base.with_name("evaluations"))
