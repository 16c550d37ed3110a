"""Sources that present another source's model: in a changed form, or checked because a plugin made it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from quantkit.plugins.registry import a_type
from quantkit.sources.base import (
    MappedFile,
    ModelSource,
    OuterModel,
    SourceIdentity,
    TensorInfo,
    TensorStorage,
    check_finite,
    file_bytes,
    in_file,
    mapped_files,
    name_in_file,
    outer_of,
    prefetch,
    release,
)
from quantkit.support.errors import PluginError


class SourceWrapper:
    """The source's model; subclasses say what is different.

    Args:
        source: the source that has the model; it is closed with this one.
    """

    def __init__(self, source: ModelSource) -> None:
        self._source, self.uri = source, source.uri

    def config(self) -> dict[str, Any]:
        return self._source.config()

    def tensors(self) -> Mapping[str, TensorInfo]:
        return self._source.tensors()

    def tensor(self, name: str) -> torch.Tensor:
        return self._source.tensor(self._inner(name))

    def side_files(self) -> Mapping[str, bytes]:
        return self._source.side_files()

    def identity(self) -> SourceIdentity:
        return self._source.identity()

    def prefetch(self, names: Iterable[str]) -> None:
        """Prefetch tensors by the wrapped source's names."""
        prefetch(self._source, map(self._inner, names))

    def release(self) -> None:
        release(self._source)

    def mapped_files(self) -> Sequence[MappedFile]:
        return mapped_files(self._source)

    @property
    def file_bytes(self) -> int:
        return file_bytes(self._source)

    @property
    def outer(self) -> OuterModel | None:
        return outer_of(self._source)

    def stored(self) -> Mapping[str, TensorStorage] | None:
        """How the source's file keeps the tensors, by their names here; ``None`` if it doesn't say."""
        method = getattr(self._source, "stored", None)
        kept = None if method is None else method()
        return None if kept is None else {name: kept[self._inner(name)] for name in self.tensors()
                                          if self._inner(name) in kept}

    def in_file(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return in_file(self._source, {self._inner(name): tensor for name, tensor in tensors.items()})

    def name_in_file(self, name: str) -> str:
        return name_in_file(self._source, self._inner(name))

    def _inner(self, name: str) -> str:
        """What a tensor is called in the source."""
        return name

    def close(self) -> None:
        self._source.close()


METHODS = ("config", "tensors", "tensor", "side_files", "identity", "close")
"""The methods that every source has."""


class CheckedSource(SourceWrapper):
    """A plugin's source, or a plugin's transform of one. Every method raises PluginError if what the source
    returned isn't what :class:`~quantkit.sources.base.ModelSource` says.

    Args:
        source: the plugin's source.
        maker: the thing that made it, for messages: ``source 'zip' of quantkit-zip``.
    """

    def __init__(self, source: ModelSource, maker: str) -> None:
        if lacking := [method for method in METHODS if not callable(getattr(source, method, None))]:
            raise PluginError(f"{maker} gave {a_type(source)}, which isn't a source",
                              why=f"it has no {', '.join(lacking)}")
        super().__init__(source)
        self._maker = maker
        self._infos: Mapping[str, TensorInfo] | None = None

    def config(self) -> dict[str, Any]:
        config = self._source.config()
        self._must(isinstance(config, dict), "config()", config, "a dictionary")
        return config

    def tensors(self) -> Mapping[str, TensorInfo]:
        if self._infos is None:  # it is asked for once
            infos = self._source.tensors()
            self._must(isinstance(infos, Mapping) and all(
                isinstance(info, TensorInfo) for info in infos.values()),
                       "tensors()", infos, "a mapping of names to TensorInfo")
            self._infos = infos
        return self._infos

    def tensor(self, name: str) -> torch.Tensor:
        tensor, info = self._source.tensor(name), self.tensors().get(name)
        self._must(isinstance(tensor, torch.Tensor), f"tensor({name!r})", tensor, "a tensor")
        if info is not None and (tensor.dtype, tuple(tensor.shape)) != (info.dtype, tuple(info.shape)):
            raise PluginError(f"{self._maker}: tensor({name!r}) is {tensor.dtype} {list(tensor.shape)}",
                              why=f"tensors() announces {info.dtype} {list(info.shape)}")
        check_finite(tensor, name, self._maker)
        return tensor

    def side_files(self) -> Mapping[str, bytes]:
        files = self._source.side_files()
        self._must(isinstance(files, Mapping) and all(isinstance(file, bytes) for file in files.values()),
                   "side_files()", files, "a mapping of file names to bytes")
        return files

    def identity(self) -> SourceIdentity:
        identity = self._source.identity()
        self._must(isinstance(identity, SourceIdentity), "identity()", identity, "a SourceIdentity")
        return identity

    def _must(self, holds: bool, call: str, returned: object, wanted: str) -> None:
        if not holds:
            raise PluginError(f"{self._maker}: {call} returned {a_type(returned)}, not {wanted}",
                              why="quantkit.sources.base.ModelSource says what a source gives")
