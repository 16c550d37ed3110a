"""A validating, lazy reader of ``.safetensors`` files and of folders of them.

Everything the header says is checked against the file before any tensor is touched, in time and
memory bounded by the header's size. Format: https://huggingface.co/docs/safetensors
"""

from __future__ import annotations

import math
import mmap
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from quantkit.errors import SourceError
from quantkit.sources.base import TensorInfo
from quantkit.sources.strict_json import parse_object, read_object

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
          "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
          "U8": torch.uint8, "BOOL": torch.bool, "F8_E4M3": torch.float8_e4m3fn,
          "F8_E5M2": torch.float8_e5m2}
MAX_HEADER = 64 * 2**20
MAX_TENSORS = 200_000
MAX_DIMS = 8
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


class SafetensorsFile:
    """One file. Tensors are views of a memory map: reading one costs no copy.

    Attributes:
        path: the file.
        infos: every tensor by name.
        metadata: the header's ``__metadata__``.

    Raises:
        SourceError: the file is missing, truncated, malformed or hostile; file, tensor and offset
            are named.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.infos: dict[str, TensorInfo] = {}
        self.metadata: dict[str, str] = {}
        self._spans: dict[str, tuple[int, int]] = {}
        self._map: mmap.mmap | None = None
        try:
            with self.path.open("rb") as file:
                size = file.seek(0, 2)
                file.seek(0)
                head = file.read(8)
                self._refuse_other_files(head + file.read(120), size)
                length = int.from_bytes(head, "little")
                if not 2 <= length <= min(MAX_HEADER, size - 8):
                    raise self._bad(f"its header claims {length} bytes at offset 0",
                                    f"the file has {size}, and {MAX_HEADER} are allowed")
                file.seek(8)
                self._parse(parse_object(file.read(length), f"the header of {self.path}"), size - 8 - length)
                self._start = 8 + length
                if size > self._start:
                    self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise SourceError(f"{self.path} can't be read", why=error.strerror or str(error)) from error

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor, a read-only view of the file. Raises SourceError for an unknown name."""
        if name not in self.infos:
            raise SourceError(f"{self.path} has no tensor {name!r}")
        info, (begin, end) = self.infos[name], self._spans[name]
        if begin == end or self._map is None:
            return torch.empty(info.shape, dtype=info.dtype)
        offset = self._start + begin
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            if offset % info.dtype.itemsize == 0:
                flat = torch.frombuffer(self._map, dtype=info.dtype, offset=offset,
                                        count=(end - begin) // info.dtype.itemsize)
            else:  # legal in the format, not for a view
                flat = torch.frombuffer(bytearray(self._map[offset:self._start + end]), dtype=info.dtype)
        return flat.reshape(info.shape)

    def close(self) -> None:
        """Let go of the map; views that are still alive keep it open."""
        self._map = None

    def _bad(self, what: str, why: str | None = None) -> SourceError:
        return SourceError(f"{self.path} is malformed: {what}", why=why, next="download the file again")

    def _refuse_other_files(self, head: bytes, size: int) -> None:
        if size == 0:
            raise self._bad("it is empty")
        if head.startswith(b"version https://git-lfs"):
            raise SourceError(f"{self.path} is a Git LFS pointer, not the weights",
                              next="git lfs pull")
        if head[:2] == b"PK" or head[:1] == b"\x80":
            raise SourceError(f"{self.path} is a pickle file under another name",
                              why="pickles run code when read, so quantkit reads none",
                              next="get the model's safetensors version")
        if size < 10:
            raise self._bad(f"it has {size} bytes", "a header alone takes more")

    def _parse(self, header: dict[str, Any], data: int) -> None:
        metadata = header.pop("__metadata__", None) or {}
        if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
            raise self._bad("its __metadata__ is not a map of strings")
        self.metadata = metadata
        if len(header) > MAX_TENSORS:
            raise self._bad(f"it lists {len(header)} tensors", f"{MAX_TENSORS} are allowed")
        for name, entry in header.items():
            info, span = self._entry(name, entry, data)
            self.infos[name], self._spans[name] = info, span
        end = 0
        for name, (begin, stop) in sorted(self._spans.items(), key=lambda item: item[1]):
            if begin != end:
                raise self._bad(f"tensor {name!r} begins at offset {begin}, the one before ends at {end}",
                                "tensors must lie one after another, without overlap or gap")
            end = stop
        if end != data:
            raise self._bad(f"its tensors take {end} bytes, {data} follow the header",
                            "the file is truncated or has something appended")

    def _entry(self, name: str, entry: Any, data: int) -> tuple[TensorInfo, tuple[int, int]]:
        label = f"tensor {name[:120]!r}"
        if not name or len(name) > 512 or not name.isprintable() or any(c in name for c in "/\\"):
            raise self._bad(f"{label} has a name that no tensor needs")
        if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
            raise self._bad(f"{label} needs exactly dtype, shape and data_offsets")
        dtype, shape, span = entry["dtype"], entry["shape"], entry["data_offsets"]
        if not isinstance(dtype, str) or dtype not in DTYPES:
            raise self._bad(f"{label} has dtype {str(dtype)[:40]!r}", f"known: {', '.join(DTYPES)}")
        if not _naturals(shape) or len(shape) > MAX_DIMS:
            raise self._bad(f"{label} has shape {str(shape)[:80]}")
        if not _naturals(span) or len(span) != 2 or not span[0] <= span[1] <= data:
            raise self._bad(f"{label} lies at {str(span)[:80]}", f"the data has {data} bytes")
        info = TensorInfo(name, tuple(shape), DTYPES[dtype])
        if math.prod(shape) * info.dtype.itemsize != span[1] - span[0]:
            raise self._bad(f"{label} of shape {shape} and {dtype} takes {info.nbytes} bytes, "
                            f"its offsets {span} span {span[1] - span[0]}")
        return info, (span[0], span[1])


def _naturals(value: Any) -> bool:
    return isinstance(value, list) and all(type(v) is int and 0 <= v < 2**62 for v in value)


class ShardedTensors:
    """All tensors of a folder: ``model.safetensors``, or the shards that its index names.

    Attributes:
        infos: every tensor by name.
        files: the opened files by plain name.

    Raises:
        SourceError: no weights, a shard is missing or outside the folder, the index and the shards
            disagree, or two shards hold the same tensor.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        index = self.folder / INDEX
        listed: dict[str, str] | None = None
        if index.is_file():
            listed = self._index(index)
            names = sorted(set(listed.values()))
        elif (self.folder / SINGLE).exists():
            names = [SINGLE]
        else:
            raise self._no_weights()
        self.files = {name: SafetensorsFile(plain_file(self.folder, name)) for name in names}
        self._where: dict[str, SafetensorsFile] = {}
        for name, file in self.files.items():
            for tensor in file.infos:
                if tensor in self._where:
                    raise SourceError(f"tensor {tensor!r} is in {self._where[tensor].path.name} and in {name}")
                self._where[tensor] = file
        for tensor, name in (listed or {}).items():
            if self._where.get(tensor) is not self.files[name]:
                raise SourceError(f"{index} places tensor {tensor[:120]!r} in {name}, which doesn't hold it",
                                  next="download the folder again")
        self.infos: Mapping[str, TensorInfo] = {n: f.infos[n] for n, f in self._where.items()}

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor by name, a view of its file."""
        if name not in self._where:
            raise SourceError(f"{self.folder} has no tensor {name!r}")
        return self._where[name].tensor(name)

    def close(self) -> None:
        """Close every file."""
        for file in self.files.values():
            file.close()

    def _index(self, path: Path) -> dict[str, str]:
        table = read_object(path, MAX_HEADER).get("weight_map")
        if not isinstance(table, dict) or not table or not all(isinstance(v, str) for v in table.values()):
            raise SourceError(f"{path} has no usable 'weight_map'")
        return table

    def _no_weights(self) -> SourceError:
        pickles = sorted(p.name for p in self.folder.glob("*") if p.suffix in (".bin", ".pt", ".pth", ".ckpt"))
        if pickles:
            return SourceError(f"{self.folder} has its weights as pickle: {', '.join(pickles[:3])}",
                               why="pickles run code when read, so quantkit reads none",
                               next="get the model's safetensors version, or convert it with its authors' tools")
        return SourceError(f"{self.folder} has no weights",
                           why=f"neither {SINGLE} nor {INDEX} is in it", next="download the folder again")


def plain_file(folder: Path, name: str) -> Path:
    """``folder / name`` if name is a plain file name whose file lies in that folder.

    A link is followed only if it leads to a file beside its own folder's (the hub's cache links
    ``snapshots/SHA/FILE`` to ``blobs/``, two levels up); anything else that leaves is refused.
    """
    if not name or name in (".", "..") or any(c in name for c in "/\\\0:"):
        raise SourceError(f"{folder} names a weight file {name[:120]!r}",
                          why="a weight file must lie directly in the model's folder",
                          next="don't use this model: a path in an index is an attack or a mistake")
    path = folder / name
    if path.is_symlink():
        target, blobs = path.resolve(), (folder.resolve().parent.parent / "blobs")
        if target.parent not in (folder.resolve(), blobs):
            raise SourceError(f"{path} is a link that leaves its folder", why="it is not followed")
    if not path.is_file():
        raise SourceError(f"the weight file {path} is missing", next="download the folder again")
    return path
