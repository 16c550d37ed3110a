"""A model source that presents another one's model in a changed form."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from quantkit.sources.base import ModelSource, SourceIdentity, prefetch, release


class SourceWrapper:
    """What stays as it is; config and tensors are for subclasses to say.

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

    def _inner(self, name: str) -> str:
        """What a tensor is called in the source."""
        return name

    def close(self) -> None:
        """Close the source."""
        self._source.close()
