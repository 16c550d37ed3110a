"""Does what a plan lacks, keeps each piece when it is done, and says how long the rest may take."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from quantkit.errors import Stopped
from quantkit.evaluate.sweep.jobs import Piece, do
from quantkit.evaluate.sweep.store import PieceResult, PieceStore
from quantkit.executor.base import Executor, Task
from quantkit.progress import Listener, ProgressEvent, silent

TOLD = 1000
"""Units that progress counts, whatever pieces take."""


def run_pieces(pieces: Sequence[Piece], store: PieceStore, executor: Executor, progress: Listener = silent,
               loading: Listener = silent) -> Iterator[tuple[int, PieceResult]]:
    """Do pieces of work; each is kept before the next result is waited for, and given with its number.

    Args:
        pieces: none of which was done.
        store: keeps them.
        executor: where they are done.
        progress: told of shares of the whole, weighed by the seconds that pieces may take.
        loading: told of weights that are loaded, if that is done here.

    Raises:
        QuantkitError: one failed; those before it are kept.
        Stopped: interrupted, likewise.
    """
    total = sum(piece.seconds for piece in pieces) or 1.0
    begun = [0.0]
    tasks: list[Task] = []
    for piece in pieces:
        listeners = () if executor.remote else (_part(progress, piece, begun, total), loading)
        tasks.append((piece.label, (piece.job, *listeners), piece.needs))
    try:
        for number, result in executor.as_completed(do, tasks):
            piece = pieces[number]
            store.put(piece.key, result)
            begun[0] += piece.seconds
            progress(ProgressEvent(int(TOLD * begun[0] / total), TOLD, piece.label))
            yield number, result
    except KeyboardInterrupt:
        raise Stopped("stopped; what was measured is kept", next="run the same command again to go on"
                      ) from None


def _part(progress: Listener, piece: Piece, begun: list[float], total: float) -> Listener:
    """A listener for the events of one piece, as parts of the whole."""
    def listen(event: ProgressEvent) -> None:
        share = event.done / event.total if event.total else 0.0
        progress(ProgressEvent(int(TOLD * (begun[0] + share * piece.seconds) / total), TOLD, piece.label))

    return listen
