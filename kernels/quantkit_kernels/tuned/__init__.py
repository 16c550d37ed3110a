"""Launch parameters of matrix products that were measured: one JSON file for each GPU, ``h200.json``.

Without a file, or for a shape that isn't in it, whoever asks goes by rules of its own. Files are made by
``python -m quantkit_kernels.tools.tune`` and looked for in the folder that ``QUANTKIT_TUNED`` names, then
here.

A row's bits must not depend on how many rows there are. So the segments that K is cut into are one number
for a weight's shape, and only the shape of a program goes by the number of rows.
"""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

BUCKETS = (16, 32, 64, 128, 256, 2048)
"""Numbers of rows that are measured; others go by the next above, or the last."""
ALLOWED = {"bm": (16, 32, 64, 128, 256), "warps": (1, 2, 4, 8, 16), "stages": tuple(range(1, 11)),
           "pdl": (0, 1)}
MOST_SEGMENTS = 256
LARGEST = 16 * 2**20
"""Bytes of a file; one of 1,000 products has 500,000."""
VARIABLE = "QUANTKIT_TUNED"


@dataclass(frozen=True)
class ProductKey:
    """A product: how the weights are decoded, their shape, and columns that share a scale (0: all)."""

    kernel: str
    n: int
    k: int
    group: int


@dataclass
class TunedEntry:
    """What was measured of a product: segments of K, and by bucket of rows some of ``bm``, ``warps``,
    ``stages`` and ``pdl`` (whether kernels begin early). Where the asker's own rules were the fastest there
    is nothing."""

    segments: int | None = None
    rows: dict[int, dict[str, int]] = field(default_factory=dict)


@dataclass
class _Trial:
    parameters: dict[str, int]
    asked: set[tuple[ProductKey, int]] = field(default_factory=set)


_trials: list[_Trial] = []


def lookup(device: torch.device, kernel: str, n: int, k: int, group: int, m: int) -> dict[str, int] | None:
    """Parameters for m rows of activations.

    Args:
        device: the device of the product.
        kernel: the result of :func:`kernel_name`.
        n, k: of the weight.
        group: columns that share a scale; 0: all.
        m: rows of activations.

    Returns:
        ``segments`` of K, ``bm`` rows of a program, ``warps``, ``stages``, ``pdl``: those of them that were
        measured.
        ``None`` if nothing is known.

    Raises:
        ValueError: the GPU's file is damaged, or another GPU's.
    """
    key = ProductKey(kernel, n, k, group)
    if _trials:
        _trials[-1].asked.add((key, m))
        return _trials[-1].parameters
    if device.type != "cuda":
        return None
    entry = _load(_name(device.index), tuple(folders())).get(key)
    return None if entry is None else parameters(entry, m)


def parameters(entry: TunedEntry, m: int) -> dict[str, int]:
    """The parameters of a measured product for m rows."""
    segments = {} if entry.segments is None else {"segments": entry.segments}
    return segments | entry.rows.get(bucket(m), {})


def bucket(m: int) -> int:
    """The number of rows whose measurement counts for m."""
    return next((bucket for bucket in BUCKETS if m <= bucket), BUCKETS[-1])


def kernel_name(decode: Any, mode: str) -> str:
    """How a decoder and its mode are called in files: ``int4 symmetric``."""
    return f"{decode.__name__.removeprefix('decode_')} {mode}"


@contextmanager
def trial(parameters: dict[str, int]) -> Iterator[set[tuple[ProductKey, int]]]:
    """Until it ends every lookup answers ``parameters``; gives the set of what was asked for, and of how many
    rows."""
    tried = _Trial(parameters)
    _trials.append(tried)
    try:
        yield tried.asked
    finally:
        _trials.pop()


def folders() -> Iterator[Path]:
    """Where files are looked for."""
    if named := os.environ.get(VARIABLE):
        yield Path(named)
    yield Path(__file__).parent


def file_name(device: str) -> str:
    """``NVIDIA H200`` → ``h200.json``."""
    short = re.sub(r"^(nvidia|amd) ", "", device.strip().lower())
    return re.sub(r"[^a-z0-9]+", "_", short).strip("_") + ".json"


def read(file: Path, device: str) -> dict[ProductKey, TunedEntry]:
    """What a file says. Raises ValueError, which names the file, if that isn't understood in full."""
    try:
        if not file.is_file():
            raise ValueError("it is not a regular file")
        if (size := file.stat().st_size) > LARGEST:
            raise ValueError(f"it has {size:,} bytes, {LARGEST:,} are allowed")
        content = json.loads(file.read_text(encoding="utf-8"))
        _exactly(content, {"device", "made", "products"}, "the file")
        if content["device"] != device:
            raise ValueError(f"it is of {content['device']!r}, this is {device!r}")
        table: dict[ProductKey, TunedEntry] = {}
        for product in content["products"]:
            key, entry = _product(product)
            if key in table:
                raise ValueError(f"{key} is there twice")
            table[key] = entry
        return table
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{file}: {error}") from error


def write(file: Path, device: str, facts: Mapping[str, Any], table: Mapping[ProductKey, TunedEntry]) -> None:
    """Write atomically: a reader sees the old file or the new one."""
    products = [{"kernel": key.kernel, "n": key.n, "k": key.k, "group": key.group, "segments": entry.segments,
                 "rows": {str(m): entry.rows[m] for m in sorted(entry.rows)}} for key, entry in table.items()]
    lines = ",\n  ".join(json.dumps(product) for product in products)
    text = (f'{{"device": {json.dumps(device)},\n "made": {json.dumps(dict(facts))},\n'
            f' "products": [\n  {lines}\n ]}}\n')
    part = file.with_name(file.name + ".partial")
    part.write_text(text, encoding="utf-8")
    part.replace(file)


def _product(content: Any) -> tuple[ProductKey, TunedEntry]:
    _exactly(content, {"kernel", "n", "k", "group", "segments", "rows"}, "a product")
    if not isinstance(content["kernel"], str):
        raise ValueError(f"the kernel is {content['kernel']!r}, it must be a name")
    for name, least in (("n", 1), ("k", 1), ("group", 0)):
        _whole(content[name], range(least, 2**31), name)
    if content["segments"] is not None:
        _whole(content["segments"], range(1, MOST_SEGMENTS + 1), "segments")
    if not isinstance(content["rows"], dict):
        raise ValueError("rows must be an object")
    rows = {}
    for name, chosen in content["rows"].items():
        if name not in map(str, BUCKETS):
            raise ValueError(f"{name!r} rows: there are {', '.join(map(str, BUCKETS))}")
        if not isinstance(chosen, dict) or not chosen.keys() <= ALLOWED.keys():
            raise ValueError(f"of {name} rows there can be {', '.join(ALLOWED)}, and nothing else")
        for parameter, value in chosen.items():
            _whole(value, ALLOWED[parameter], parameter)
        rows[int(name)] = chosen
    return ProductKey(content["kernel"], content["n"], content["k"],
                      content["group"]), TunedEntry(content["segments"],
                                                                                                   rows)


def _exactly(value: Any, names: set[str], what: str) -> None:
    if not isinstance(value, dict) or set(value) != names:
        raise ValueError(f"{what} must have {', '.join(sorted(names))}, and nothing else")


def _whole(value: Any, allowed: range | tuple[int, ...], what: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value not in allowed:
        raise ValueError(f"{what} is {value!r}")


@functools.cache
def _name(index: int | None) -> str:
    return torch.cuda.get_device_name(index)


@functools.cache
def _load(device: str, places: tuple[Path, ...]) -> dict[ProductKey, TunedEntry]:
    """The first file there is."""
    for folder in places:
        if (file := folder / file_name(device)).is_file():
            return read(file, device)
    return {}
