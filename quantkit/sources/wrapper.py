"""A model source that presents another one's model in a changed form."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from quantkit.sources.base import (
    ModelSource,
    SourceIdentity,
    TensorInfo,
    TensorStorage,
    file_bytes,
    prefetch,
    release,
)


class SourceWrapper:
    """The source's model; subclasses say what is different.

    Args:
        source: whose model it is; closed with this.
    """

    def __init__(self, source: ModelSource) -> None:
        self._source, self.uri = source, source.uri

    def side_files(self) -> Mapping[str, bytes]:
        """The source's."""
        return self._source.side_files()

    def identity(self) -> SourceIdentity:
        """The source's."""
        return self._source.identity()

    def prefetch(self, names: Iterable[str]) -> None:
        """Prefetch tensors by the wrapped source's names."""
        prefetch(self._source, map(self._inner, names))

    def release(self) -> None:
        """The source's."""
        release(self._source)

    @property
    def file_bytes(self) -> int:
        """Bytes of the source's weight files."""
        return file_bytes(self._source)

    def stored(self) -> Mapping[str, TensorStorage] | None:
        """How the source's file keeps the tensors, by their names here; ``None`` if it doesn't say."""
        method = getattr(self._source, "stored", None)
        kept = None if method is None else method()
        return None if kept is None else {name: kept[self._inner(name)] for name in self.tensors()
                                          if self._inner(name) in kept}

    def tensors(self) -> Mapping[str, TensorInfo]:
        """The source's."""
        return self._source.tensors()

    def _inner(self, name: str) -> str:
        """What a tensor is called in the source."""
        return name

    def close(self) -> None:
        """Close the source."""
        self._source.close()
