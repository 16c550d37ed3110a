"""A validating, lazy reader of ``.safetensors`` files and of folders of them.

Everything the header says is checked against the file before any tensor is touched, in time and
memory bounded by the header's size. Format: https://huggingface.co/docs/safetensors
"""

from __future__ import annotations

import math
import mmap
import os
import warnings
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from quantkit.sources.base import TensorInfo, check_finite
from quantkit.support.errors import SourceError
from quantkit.support.paths import file_state, reading
from quantkit.support.strict_json import parse_object, read_object

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
          "I64": torch.int64, "I32": torch.int32, "U32": torch.uint32, "I16": torch.int16, "I8": torch.int8,
          "U8": torch.uint8, "BOOL": torch.bool, "F8_E4M3": torch.float8_e4m3fn,
          "F8_E5M2": torch.float8_e5m2}
MAX_HEADER = 64 * 2**20
MAX_TENSORS = 200_000
MAX_DIMS = 8
MAX_SIZE = 2**48
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
NO_PICKLE = "pickles run code when read, so quantkit reads none"
CONVERT = "convert to safetensors with the tools that made it, or get the model's safetensors version"


class SafetensorsFile:
    """One file. Tensors are views of a memory map: reading one costs no copy.

    The file must not be cut or overwritten in place while there are views: they would change, or the process
    be stopped by the system. :meth:`check_unchanged` says whether that has happened; a file that is replaced
    by another of its name, as downloads and quantkit do it, is still there for those who have mapped it.

    Attributes:
        path: the place of the file.
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
        self._finite: set[str] = set()  # tensors whose values were checked
        self._map: mmap.mmap | None = None
        self._mapped: Callable[[], mmap.mmap | None] = lambda: None  # by this object, or by a view
        self._closed = False
        with reading(self.path, SourceError), self.path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(0)
            head = file.read(64)
            length = int.from_bytes(head[:8], "little")
            if not 2 <= length <= min(MAX_HEADER, size - 8) or head[8:9] != b"{":
                raise self._not_safetensors(head, size, length)
            file.seek(8)
            self._parse(parse_object(file.read(length), f"the header of {self.path}"), size - 8 - length)
            self._start, self._opened = 8 + length, file_state(os.fstat(file.fileno()))
            if size > self._start:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                self._mapped = weakref.ref(self._map)

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor, a read-only view of the file: writing to it is a fault of the system. When it is read
        for the first time, its values are checked.

        Raises:
            SourceError: the name is unknown, the file is closed, or a value is NaN or infinite.
        """
        if name not in self.infos:
            raise SourceError(f"{self.path} has no tensor {name[:120]!r}")
        if self._closed:
            raise SourceError(f"{self.path} is closed", why=f"tensor {name!r} was asked for afterwards")
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
        if name not in self._finite:
            check_finite(flat, name, self.path)
            self._finite.add(name)
        return flat.reshape(info.shape)

    def release(self) -> None:
        """What was read needn't stay in memory: it comes back from the file when it is needed again, also
        where the file was closed and views are left."""
        if (mapped := self._mapped()) is not None and hasattr(mmap, "MADV_DONTNEED"):
            mapped.madvise(mmap.MADV_DONTNEED)

    def check_unchanged(self) -> None:
        """Raise SourceError if the file was cut or written to since it was opened, and something maps it."""
        if self._mapped() is None:
            return
        try:
            now = file_state(self.path.stat())
        except OSError:  # it was deleted, which takes nothing from those who have mapped it
            return
        if now != self._opened and now[2] == self._opened[2]:
            raise SourceError(f"{self.path} was changed while the model in it was in memory",
                              why="weights are read from the file itself, and it isn't what was loaded",
                              next="load the model again; to replace a file, write another and rename it")

    def prefetch(self, name: str) -> None:
        """Ask the system to read a tensor into its cache meanwhile; this process's memory stays as it is."""
        if self._map is not None and hasattr(mmap, "MADV_WILLNEED"):
            begin, end = (self._start + at for at in self._spans[name])
            begin -= begin % mmap.PAGESIZE
            if end > begin:
                self._map.madvise(mmap.MADV_WILLNEED, begin, end - begin)

    def close(self) -> None:
        """Let go of the map; views that are still alive keep it open."""
        self._map, self._closed = None, True

    def _bad(self, what: str, why: str | None = None) -> SourceError:
        return SourceError(f"{self.path} is malformed: {what}", why=why, next="download the file again")

    def _not_safetensors(self, head: bytes, size: int, length: int) -> SourceError:
        """What else the file is. Magic bytes decide only here: a header of 640 bytes begins like a pickle."""
        if head.startswith(b"version https://git-lfs"):
            return SourceError(f"{self.path} is a Git LFS pointer, not the weights",
                               why="the repository was cloned without its large files", next="git lfs pull")
        if head.startswith((b"PK\x03\x04", b"\x80\2", b"\x80\3", b"\x80\4", b"\x80\5")):
            return SourceError(f"{self.path} is a pickle file under another name",
                               why=NO_PICKLE, next=CONVERT)
        if head.startswith(b"GGUF"):
            return SourceError(f"{self.path} is a GGUF file under another name",
                               next="rename it to end in .gguf, and give the file itself")
        if size == 0:
            return self._bad("it is empty")
        if size < 10:
            return self._bad(f"it has {size} bytes", "a header alone takes more")
        if not 2 <= length <= min(MAX_HEADER, size - 8):
            return self._bad(f"its header claims {length:,} bytes at offset 0",
                             f"the file has {size:,}, and {MAX_HEADER:,} are allowed")
        return self._bad("its header at offset 8 is no JSON object")

    def _parse(self, header: dict[str, Any], data: int) -> None:
        metadata = header.pop("__metadata__", {})
        if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
            raise self._bad("its __metadata__ is not a map of strings")
        self.metadata = metadata
        if len(header) > MAX_TENSORS:
            raise self._bad(f"it lists {len(header):,} tensors", f"{MAX_TENSORS:,} are allowed")
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
            raise self._bad(f"its tensors take {end:,} bytes, {data:,} follow the header",
                            "the file is truncated or has something appended")

    def _entry(self, name: str, entry: Any, data: int) -> tuple[TensorInfo, tuple[int, int]]:
        label = f"tensor {name[:120]!r}"
        if not name or len(name) > 512 or not name.isprintable() or any(c in name for c in ("/", "\\", "..")):
            raise self._bad(f"{label} has a name that no tensor needs")
        if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
            raise self._bad(f"{label} needs exactly dtype, shape and data_offsets")
        dtype = entry["dtype"]
        shape = entry["shape"]
        span = entry["data_offsets"]
        if not isinstance(dtype, str) or dtype not in DTYPES:
            raise self._bad(f"{label} has dtype {str(dtype)[:40]!r}", f"known: {', '.join(DTYPES)}")
        if not _naturals(shape) or len(shape) > MAX_DIMS or math.prod(max(n, 1) for n in shape) > MAX_SIZE:
            raise self._bad(f"{label} has shape {str(shape)[:80]}")
        if not _naturals(span) or len(span) != 2 or not span[0] <= span[1] <= data:
            raise self._bad(f"{label} lies at {str(span)[:80]}",
                            f"{data:,} bytes of data follow the header: the file is truncated, or lies")
        info = TensorInfo(name, tuple(shape), DTYPES[dtype])
        if info.nbytes != span[1] - span[0]:
            raise self._bad(f"{label} of shape {shape} and {dtype} takes {info.nbytes} bytes, "
                            f"its offsets {span} span {span[1] - span[0]}")
        return info, (span[0], span[1])


def _naturals(value: Any) -> bool:
    return isinstance(value, list) and all(type(v) is int and 0 <= v <= MAX_SIZE for v in value)


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
        self.files: dict[str, SafetensorsFile] = {}
        listed = self._listed()
        names = sorted(set(listed.values())) if listed else [SINGLE]
        self._where: dict[str, SafetensorsFile] = {}
        try:
            for name in names:
                file = self.files[name] = SafetensorsFile(plain_file(self.folder, name))
                for tensor in file.infos:
                    if tensor in self._where:
                        raise SourceError(f"tensor {tensor!r} is in {self._where[tensor].path} and in {name}",
                                          why="readers would disagree on which of the two counts")
                    self._where[tensor] = file
            for tensor, name in listed.items():
                if self._where.get(tensor) is not self.files[name]:
                    raise SourceError(f"{self.folder / INDEX} places tensor {tensor[:120]!r} in {name}, "
                                      "which doesn't hold it", next="download the folder again")
        except BaseException:
            self.close()
            raise
        self.infos: Mapping[str, TensorInfo] = {n: f.infos[n] for n, f in self._where.items()}

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor by name; as :meth:`SafetensorsFile.tensor`."""
        if name not in self._where:
            raise SourceError(f"{self.folder} has no tensor {name[:120]!r}")
        return self._where[name].tensor(name)

    def prefetch(self, name: str) -> None:
        self._where[name].prefetch(name)

    def release(self) -> None:
        for file in self.files.values():
            file.release()

    def close(self) -> None:
        for file in self.files.values():
            file.close()

    def _listed(self) -> dict[str, str]:
        """Tensor → shard by the index; empty if the folder has the one file instead."""
        index, single = self.folder / INDEX, self.folder / SINGLE
        if not (index.exists() or index.is_symlink()):
            if not (single.exists() or single.is_symlink()):
                raise self._no_weights()
            return {}
        table = read_object(plain_file(self.folder, INDEX), MAX_HEADER).get("weight_map")
        if not isinstance(table, dict) or not table or not all(isinstance(v, str) for v in table.values()):
            raise SourceError(f"{index} has no usable 'weight_map'", next="download the file again")
        if single.exists() and SINGLE not in table.values():
            raise SourceError(f"{self.folder} holds {SINGLE} and an index that doesn't name it",
                              why="readers disagree on which of the two is the model",
                              next=f"remove or rename the one that is stale: {single} or {index}")
        return table

    def _no_weights(self) -> SourceError:
        pickles = sorted(p.name for p in self.folder.glob("*") if p.suffix in PICKLES)
        if pickles:
            return SourceError(f"{self.folder} has its weights as pickle: {', '.join(pickles[:3])}",
                               why=NO_PICKLE, next=CONVERT)
        return SourceError(f"{self.folder} has no weights",
                           why=f"neither {SINGLE} nor {INDEX} is in it", next="download the folder again")


def plain_file(folder: Path, name: str) -> Path:
    """``folder / name`` if name is a plain file name whose file lies in that folder.

    A link is followed only if it leads to a file beside its own folder's (the hub's cache links
    ``snapshots/SHA/FILE`` to ``blobs/``, two levels up); anything else that leaves is refused.
    """
    if not name or name in (".", "..") or len(name) > 255 or any(c in name for c in "/\\\0:"):
        raise SourceError(f"{folder} names a weight file {name[:120]!r}",
                          why="a weight file must lie directly in the model's folder",
                          next="don't use this model: a path in an index is an attack or a mistake")
    path = folder / name
    try:
        if path.is_symlink():
            target, home = path.resolve(), folder.resolve()
            cached = home.parent.name == "snapshots" and target.parent == home.parent.parent / "blobs"
            if target.parent != home and not cached:
                raise SourceError(f"{path} is a link that leaves its folder", why="it is not followed",
                                  next="put the file itself there")
        if not path.is_file():
            raise SourceError(f"the file {path} is missing", next="download the folder again")
    except (OSError, RuntimeError, UnicodeError) as error:  # a loop of links; a name the disk can't hold
        raise SourceError(f"the file {str(path)!r} can't be reached", why=str(error)[:200]) from None
    return path
