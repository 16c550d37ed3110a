"""The interface of model sources."""

from __future__ import annotations

import shlex
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, cast, runtime_checkable

import torch

from quantkit.formats.base import QuantizedTensor
from quantkit.formats.finite import all_finite
from quantkit.support.errors import SourceError
from quantkit.support.units import human_bytes

PLAIN = frozenset({"F64", "F32", "F16", "BF16", "float64", "float32", "float16", "bfloat16",
                   "int64", "int32", "bool"})
"""Types of tensors that aren't quantized, as GGUF and torch call them; integers this wide are tables."""


@dataclass(frozen=True)
class TensorInfo:
    """A tensor that hasn't been read: name, shape, torch dtype, bytes it takes as that dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        n = self.dtype.itemsize
        for size in self.shape:
            n *= size
        return n


@dataclass(frozen=True)
class TensorStorage:
    """How a file keeps a tensor: its type in the file's own words (``Q4_K``, ``bfloat16``), and its bytes."""

    type: str
    nbytes: int


@dataclass(frozen=True)
class SourceIdentity:
    """Which model exactly, for the manifest.

    Attributes:
        kind: the source kind's name.
        uri: the name as the user gave it, made absolute for local files only when shown, never stored so.
        revision: commit sha (hub), package version (``pkg:``) or ``None``.
        files: sha256 hex digests by plain file name.
        pinned: whether ``uri`` + ``revision`` can only ever mean these bytes.
    """

    kind: str
    uri: str
    revision: str | None = None
    files: Mapping[str, str] = field(default_factory=dict)
    pinned: bool = False


@dataclass(frozen=True)
class OuterModel:
    """A model of images and text around the text model that a source presents.

    Attributes:
        config: its ``config.json``.
        prefixes: what begins names of tensors in its files, by what begins them in the text model.
        rest: all tensors that aren't the text model's, by the files' names.
        read: reads one of these.
    """

    config: Mapping[str, Any]
    prefixes: Mapping[str, str]
    rest: Mapping[str, TensorInfo]
    read: Callable[[str], torch.Tensor]

    @property
    def rest_bytes(self) -> int:
        return sum(info.nbytes for info in self.rest.values())


def outer_of(source: ModelSource) -> OuterModel | None:
    """The model around a source's text model, if there is one."""
    outer: OuterModel | None = getattr(source, "outer", None)
    return outer


class QuantizedError(SourceError):
    """The model is there and quantized already: a checkpoint, not a source.

    Attributes:
        folder: the folder of the checkpoint.
        identity: the model's identity; files aren't hashed yet.
    """

    def __init__(self, folder: Path, identity: SourceIdentity) -> None:
        self.folder, self.identity = folder, identity
        super().__init__(f"{folder} is already quantized", why="quantizing twice only adds error",
                         next=f"quantkit inspect {shlex.quote(identity.uri)}")


class MappedFile(Protocol):
    """A file whose pages tensors may be, also when its source is closed."""

    def release(self) -> None:
        """Its pages needn't stay in memory: they are read again when they are needed."""

    def check_unchanged(self) -> None:
        """Raise SourceError if it was written to while tensors are pages of it."""


class ModelSource(Protocol):
    """A model that can be read one tensor at a time; the whole of it is never in memory.

    A source may have more, which the functions of this module ask for:

    - ``prefetch(names)``: have these tensors read while other work is done.
    - ``release()``: what was read needn't stay in memory; views of it that are still in use are read again.
    - ``mapped_files()``: its files of which tensors are views.
    - ``stored()``: how the file keeps each tensor, by its Hugging Face name, if not as :meth:`tensors` says.
    - ``file_bytes``: an attribute, the bytes of all weight files.
    """

    uri: str

    def config(self) -> dict[str, Any]:
        """The model's ``config.json`` in Hugging Face's terms."""

    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor by its Hugging Face name, without reading any."""

    def tensor(self, name: str) -> torch.Tensor:
        """Read one tensor. Raises SourceError naming file and tensor when it can't be read."""

    def side_files(self) -> Mapping[str, bytes]:
        """Tokenizer files, ``generation_config.json``, chat template: copied unchanged."""

    def identity(self) -> SourceIdentity:
        """Hashes what was read; may take a while on large files."""

    def close(self) -> None:
        """Release files and memory maps."""


@runtime_checkable
class BlockSource(ModelSource, Protocol):
    """A source whose file has weights in blocks of GGUF's types, by which the model can be run."""

    def stored(self) -> Mapping[str, TensorStorage]:
        """How the file keeps each tensor, by its Hugging Face name."""

    def quantized(self, layer: str) -> QuantizedTensor:
        """The weight of a layer as the file has it; its type has a format of ours."""

    def fingerprint(self) -> str:
        """A hash by which the files are told from others, without their weights being read."""


@dataclass(frozen=True)
class SourceKind:
    """A registered kind of source.

    Attributes:
        matches: whether a uri is of this kind; touches at most the file system.
        open: uri and revision → source; raises SourceError.
        example: for ``--help`` and error messages.
        order: kinds are asked in this order; the hub, which takes any ``owner/name``, comes last.
    """

    matches: Callable[[str], bool]
    open: Callable[[str, str | None], ModelSource]
    example: str
    order: int = 50


def check_finite(tensor: torch.Tensor, name: str, path: str | Path) -> None:
    """Raise SourceError if a floating tensor, read of ``path``, holds a value that is NaN or infinite."""
    if not tensor.dtype.is_floating_point or tensor.dtype == torch.float8_e5m2 or all_finite(tensor):
        return
    values = tensor.float() if tensor.dtype.itemsize == 1 else tensor
    bad = int((~values.isfinite()).sum())
    raise SourceError(f"tensor {name!r} of {path} has values that are not finite",
                      why=f"{bad} of {tensor.numel()} are NaN or infinite: the model can't answer anything",
                      next="get the file again; if it is the same there, the model itself is broken")


def prefetch(source: ModelSource, names: Iterable[str]) -> None:
    """Tell a source which tensors are read next, if it has a use for that."""
    if (method := getattr(source, "prefetch", None)) is not None:
        method(names)


def release(source: ModelSource) -> None:
    """Let a source give back the memory of what was read of it."""
    if (method := getattr(source, "release", None)) is not None:
        method()


def mapped_files(source: object) -> Sequence[MappedFile]:
    """The files of a source or checkpoint of whose pages tensors are views."""
    method: Callable[[], Sequence[MappedFile]] | None = getattr(source, "mapped_files", None)
    return () if method is None else method()


def in_file(source: ModelSource, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors of a source's model by the names, and in the shapes, that its files have them in."""
    method = getattr(source, "in_file", None)
    return dict(tensors) if method is None else dict(method(tensors))


def name_in_file(source: ModelSource, name: str) -> str:
    """What the tensor of the files is called that has one of a source's."""
    method = getattr(source, "name_in_file", None)
    return name if method is None else str(method(name))


def tensor_alone(source: ModelSource, name: str) -> torch.Tensor:
    """One tensor; the memory of what was read before is given back."""
    release(source)
    return source.tensor(name)


def stored_tensors(source: ModelSource) -> Mapping[str, TensorStorage]:
    """How the model's file keeps each tensor, by its Hugging Face name; where the source doesn't say, in the
    dtype that it yields."""
    method = getattr(source, "stored", None)
    if method is not None and (stored := method()) is not None:
        return cast("Mapping[str, TensorStorage]", stored)
    return {name: TensorStorage(str(info.dtype).removeprefix("torch."), info.nbytes)
            for name, info in source.tensors().items()}


def quantized_types(source: ModelSource, names: Collection[str] | None = None) -> tuple[str, ...]:
    """The types of a file's quantized tensors, or of those called ``names``, the one with the most bytes
    first; none if there are none."""
    sizes: dict[str, int] = {}
    infos = source.tensors()
    for name, tensor in stored_tensors(source).items():
        if tensor.type in PLAIN or (names is not None and name not in names):
            continue
        if name in infos and len(infos[name].shape) > 1:
            sizes[tensor.type] = sizes.get(tensor.type, 0) + tensor.nbytes
    return tuple(sorted(sizes, key=lambda kind: -sizes[kind]))


def file_bytes(source: ModelSource) -> int:
    """Bytes of a model's weight files; of all tensors where the source has no files or doesn't say."""
    size = getattr(source, "file_bytes", None)
    return size if isinstance(size, int) else sum(
        tensor.nbytes for tensor in stored_tensors(source).values())


def warn_if_quantized(source: ModelSource) -> None:
    """Warn that a model's file is quantized, before it is quantized once more."""
    if types := quantized_types(source):
        size = human_bytes(file_bytes(source))
        warnings.warn(f"{source.uri} is quantized already ({', '.join(types)}, {size}): quantizing it again "
                      "adds error to what that cost, and may make it larger; the unquantized model gives a "
                      "better result", stacklevel=3)
