"""Reads the rows of a parquet file in a separate process.

A file of some kilobytes can hold gigabytes: a dictionary names one text a million times, a page decompresses.
And what is malformed may crash the library that reads it.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quantkit.support import isolation
from quantkit.support.errors import CalibrationError

GET_PYARROW = "pip install pyarrow, or name a .jsonl file"
SECONDS = 120.0
MEMORY = 4 * 2**30
"""Bytes of address space; pyarrow by itself takes about one GiB of it."""
MOST = 64 * 2**20
"""Characters of all rows."""
_BATCH = 16
"""Rows that are decoded at once."""


def has_pyarrow() -> bool:
    """Whether parquet can be read."""
    return importlib.util.find_spec("pyarrow") is not None


def read_rows(path: Path, name: str, known: Sequence[str], limit: int) -> list[dict[str, Any]]:
    """The rows at a file's beginning: of their fields those that are text, or lists and structures of it.

    Args:
        path: the file to read.
        name: how messages call it.
        known: the columns that are read, where the file has any of them.
        limit: characters; the row that passes it is the last one.

    Raises:
        CalibrationError: pyarrow isn't there; the file is malformed, has no such column, or takes too much
            memory or time.
    """
    if not has_pyarrow():
        raise CalibrationError(f"{name} is a parquet file, which needs pyarrow", next=GET_PYARROW)
    try:
        answer = isolation.call("quantkit.quantization.calibration.parquet:rows_of", {
            "path": str(path.absolute()), "known": sorted(known), "limit": min(limit, MOST)},
            seconds=SECONDS, memory=MEMORY, keep=False)
    except isolation.LimitError as error:
        raise CalibrationError(f"{name} can't be read as parquet", why=f"it {error}",
                               next="get the file again, or write its rows to a .jsonl file") from None
    except isolation.RaisedError as error:
        raise CalibrationError(f"{name} can't be read as parquet", why=" ".join(str(error).split())[:200],
                               next="get the file again") from None
    if (columns := answer["columns"]) is not None:
        raise CalibrationError(f"{name} has no column of text that is known",
                               why=f"its columns: {', '.join(columns)[:200] or 'none'}",
                               next=f"known: {', '.join(known)}")
    rows: list[dict[str, Any]] = answer["rows"]
    return rows


def rows_of(path: str, known: list[str], limit: int) -> dict[str, Any]:
    """Runs in the other process: returns ``rows``, or the names of the ``columns`` if none is usable."""
    import pyarrow
    import pyarrow.parquet

    pyarrow.set_memory_pool(pyarrow.system_memory_pool())
    rows: list[dict[str, Any]] = []
    with pyarrow.parquet.ParquetFile(path, pre_buffer=False) as opened:
        schema = opened.schema_arrow
        columns = [field.name for field in schema if field.name in known and _is_text(field.type)]
        if not columns:
            return {"rows": [], "columns": [f"{field.name} ({field.type})" for field in schema]}
        for batch in opened.iter_batches(batch_size=_BATCH, columns=columns, use_threads=False):
            for number in range(batch.num_rows):
                row = {name: _plain(batch.column(name)[number]) for name in columns}
                rows.append({name: value for name, value in row.items() if value is not None})
                limit -= _size(row)
                if limit <= 0:
                    return {"rows": rows, "columns": None}
    return {"rows": rows, "columns": None}


def _is_text(kind: Any) -> bool:
    """Whether a column's type is text, or holds some."""
    from pyarrow import types

    if types.is_dictionary(kind) or types.is_list(kind) or types.is_large_list(kind):
        return _is_text(kind.value_type)
    if types.is_struct(kind):
        return any(_is_text(field.type) for field in kind)
    return bool(types.is_string(kind) or types.is_large_string(kind))


def _plain(scalar: Any) -> Any:
    """A value without those of its parts that aren't text."""
    from pyarrow import types

    if not scalar.is_valid:
        return None
    kind = scalar.type
    if types.is_dictionary(kind):
        return _plain(scalar.value)
    if types.is_struct(kind):
        return {field.name: _plain(scalar[field.name]) for field in kind if _is_text(field.type)}
    if types.is_list(kind) or types.is_large_list(kind):
        return [_plain(value) for value in scalar.values]
    return scalar.as_py()


def _size(value: Any) -> int:
    if isinstance(value, dict):
        return sum(map(_size, value.values()))
    if isinstance(value, list):
        return sum(map(_size, value))
    return len(value) if isinstance(value, str) else 1
