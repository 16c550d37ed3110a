"""What the server asks of its replicas, wherever they run."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

HEADER = b"x-quantkit-replica"
"""Header of an answer that names the replica that gave it."""
REPORT = "quantkit.evaluation.report"
"""Type of a message among ASGI's, with errors that the server's terminal is told of."""


@dataclass(frozen=True)
class ForwardedRequest:
    """An HTTP request on its way to a replica.

    Attributes:
        scope: of ASGI, without what belongs to the server's process.
        body: all of it.
        blocks: names of the prompt's blocks, see :func:`quantkit.serving.replicas.prefix.prefix_blocks`.
    """

    scope: Mapping[str, Any]
    body: bytes
    blocks: Sequence[int] = ()


@dataclass(frozen=True)
class ReplicaInfo:
    """A replica that has loaded its models.

    Attributes:
        id: as in :data:`HEADER`.
        pid: of its process.
        node: address of its machine in the cluster.
        chat: whether the first model has a chat template.
        notes: what was said on stderr while it loaded.
    """

    id: str
    pid: int
    node: str
    chat: bool
    notes: str


@dataclass(frozen=True)
class ReplicaAnswer:
    """What one replica answers to a ``GET`` that all of them get."""

    id: str
    status: int
    body: bytes


class ReplicaLostError(Exception):
    """The replica that was answering is gone: its process or its machine ended."""


class Replicas(Protocol):
    """All replicas of a server."""

    def answer(self, request: ForwardedRequest) -> AsyncGenerator[list[Any], None]:
        """ASGI messages of one replica's answer, as many at a time as there are. Closing the generator
        cancels the request.

        Raises:
            ReplicaLostError: the replica ended before its answer did.
        """

    async def get(self, path: str) -> list[ReplicaAnswer]:
        """What replicas answer to ``GET path``; those that don't in time are left out."""

    async def any_runs(self) -> bool:
        """Whether a replica runs, as far as is known."""
