"""Keeps the results of measurements in the user's cache folder, by everything that they depend on."""

from __future__ import annotations

import errno
import hashlib
import json
import shutil
import tempfile
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
from safetensors.numpy import load, save

from quantkit.checkpoint.durable import sync_folder, write_file
from quantkit.support.errors import QuantkitError
from quantkit.support.frozen import Frozen
from quantkit.support.paths import read_regular
from quantkit_kernels.kept import cache_folder

VERSION = 3
"""Of what is kept: another one finds nothing of it."""
NEW = ".new-"
"""Beginning of the name of a folder that is being made."""
MAX_BYTES, MAX_ARRAYS = 2**28, 2**32
"""Bytes of what a measurement gave, and of its arrays; thousands of windows have a thousandth of that."""
_DATA, _ARRAYS = "measurement.json", "tokens.safetensors"


class MeasuredData(Frozen):
    """The numbers of a measurement; each kind of job has a class of its own.

    Attributes:
        cpu: name of the processor that did it.
    """

    cpu: str = ""


Data = TypeVar("Data", bound=MeasuredData, covariant=True)


@dataclass(frozen=True)
class MeasurementResult(Generic[Data]):
    """What a measurement gave.

    Attributes:
        data: the numbers of the measurement.
        arrays: numpy arrays by name.
        measured: its date and time, as ISO 8601 in UTC.
        seconds: the time that it took.
        lasting: whether it is kept; what was spoiled by other work on the machine is made again.
    """

    data: Data
    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    measured: str = ""
    seconds: float = 0.0
    lasting: bool = True


class MeasurementStore:
    """A folder a measurement, made whole or not at all.

    Args:
        folder: holds all measurements; ``None``: nothing is kept.

    Attributes:
        keeps: whether measurements are kept.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder, self.keeps = folder, folder is not None

    def has(self, key: Mapping[str, Any] | None) -> bool:
        """Whether this measurement was made before, as far as a look at its folder tells."""
        return self._folder is not None and key is not None and (self._place(key) / _DATA).is_file()

    def get(self, key: Mapping[str, Any] | None, kind: type[Data]) -> MeasurementResult[Data] | None:
        """What this measurement gave before; ``None`` if it wasn't made. What can't be read is dropped, with
        a warning, and made again."""
        if self._folder is None or key is None or not (place := self._place(key)).is_dir():
            return None
        try:
            return _read(place, key, kind)
        except Exception as error:  # damaged by whatever: its content is worth nothing then
            warnings.warn(f"a kept measurement is damaged and is made again: {type(error).__name__}: "
                          f"{str(error)[:200]}", stacklevel=2)
            shutil.rmtree(place, ignore_errors=True)
            return None

    def put(self, key: Mapping[str, Any] | None, result: MeasurementResult[MeasuredData]) -> None:
        """Keep what a measurement gave. Raises QuantkitError if that can't be written."""
        if self._folder is None or key is None or not result.lasting:
            return
        place = self._place(key)
        fresh: Path | None = None
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            # a name of its own: another run may keep the same measurement
            fresh = Path(tempfile.mkdtemp(prefix=NEW, dir=self._folder))
            arrays = save({name: np.ascontiguousarray(array) for name, array in result.arrays.items()})
            write_file(fresh / _ARRAYS, [arrays])
            content = json.dumps({"key": dict(key), "data": result.data.model_dump(),
                                  "measured": result.measured,
                                  "seconds": result.seconds, "arrays": hashlib.sha256(arrays).hexdigest()})
            digest = hashlib.sha256(content.encode()).hexdigest()
            write_file(fresh / _DATA, [f"{digest}\n{content}".encode()])
            shutil.rmtree(place, ignore_errors=True)
            with suppress(FileExistsError):
                _rename(fresh, place)
            sync_folder(place.parent)
        except OSError as error:
            raise QuantkitError(f"what was measured can't be kept in {self._folder}",
                                why=error.strerror or str(error),
                                next="free some space, or keep it elsewhere: QUANTKIT_CACHE=DIR quantkit "
                                     "eval …") from error
        finally:
            if fresh is not None:
                shutil.rmtree(fresh, ignore_errors=True)

    def _place(self, key: Mapping[str, Any]) -> Path:
        assert self._folder is not None
        content = json.dumps({"version": VERSION, **key}, sort_keys=True)
        return self._folder / hashlib.sha256(content.encode()).hexdigest()[:32]


def _rename(fresh: Path, place: Path) -> None:
    """Raises FileExistsError if another run was faster."""
    try:
        fresh.rename(place)
    except OSError as error:
        if error.errno in (errno.EEXIST, errno.ENOTEMPTY):
            raise FileExistsError(error.errno, error.strerror) from error
        raise


def _read(place: Path, key: Mapping[str, Any], kind: type[Data]) -> MeasurementResult[Data]:
    """Raises ValueError and others if it is damaged, or of another measurement."""
    digest, _, text = read_regular(place / _DATA, MAX_BYTES).decode().partition("\n")
    arrays = read_regular(place / _ARRAYS, MAX_ARRAYS)
    if hashlib.sha256(text.encode()).hexdigest() != digest:
        raise ValueError("its hash is another")
    content = json.loads(text)
    if content["key"] != json.loads(json.dumps(dict(key))):
        raise ValueError("it is of another measurement")
    if content["arrays"] != hashlib.sha256(arrays).hexdigest():
        raise ValueError("the hash of its arrays is another")
    data = kind.model_validate(content["data"], strict=False)  # JSON has lists in the place of tuples
    return MeasurementResult(data, load(arrays), content["measured"], content["seconds"])


def user_folder() -> Path | None:
    """Where measurements are kept: in the user's cache folder, or in ``QUANTKIT_CACHE``."""
    base = cache_folder()
    return None if base is None else base.with_name("evaluations")


def user_store() -> MeasurementStore:
    """The store in :func:`user_folder`."""
    return MeasurementStore(user_folder())
