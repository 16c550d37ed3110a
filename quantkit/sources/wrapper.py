"""A model source that presents another one's model in a changed form."""

from __future__ import annotations

from collections.abc import Mapping

from quantkit.sources.base import ModelSource, SourceIdentity


class Wrapper:
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

    def close(self) -> None:
        """Close the source."""
        self._source.close()
