"""Cuts the tokens of a batch into steps that go through a program at once, and joins their results."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Chunk:
    """Tokens ``[start, start + count)`` of a row of the batch."""

    sequence: int
    start: int
    count: int


def chunks_of(counts: Sequence[int], rows: int, block: int | None = None,
              starts: Sequence[int] = ()) -> Iterable[list[Chunk]]:
    """Cut a batch into steps.

    Args:
        counts: tokens of each sequence.
        rows: tokens of a step, at most.
        block: a step has tokens of a sequence from one block of this many positions only.
        starts: the position of each sequence's first token; needed with ``block``.

    Yields:
        The chunks of a step.
    """
    step: list[Chunk] = []
    free = rows
    for sequence, count in enumerate(counts):
        start = 0
        while start < count:
            size = min(free, count - start)
            if block is not None:
                size = min(size, block - (starts[sequence] + start) % block)
            step.append(Chunk(sequence, start, size))
            start, free = start + size, free - size
            if not free or start < count:
                yield step
                step, free = [], rows
    if step:
        yield step


def selected_rows(chunks: Sequence[Chunk], wanted: Sequence[range]) -> list[int]:
    """The rows of a step whose places in their sequences are in ``wanted``."""
    rows, first = [], 0
    for chunk in chunks:
        rows += [first + place - chunk.start for place in wanted[chunk.sequence]
                 if chunk.start <= place < chunk.start + chunk.count]
        first += chunk.count
    return rows


def single_position(index: int, count: int) -> range:
    """The one place ``index`` of a row of ``count`` tokens. Raises ValueError if there is none."""
    index += count if index < 0 else 0
    if not 0 <= index < count:
        raise ValueError(f"last is {index} in a row of {count} tokens")
    return range(index, index + 1)


def join_rows(parts: Sequence[torch.Tensor], size: int) -> torch.Tensor:
    """The rows ``[n, size]`` of all steps."""
    if not parts:
        return torch.empty(0, size)
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def pad_rows(rows: torch.Tensor, counts: Sequence[int], length: int) -> torch.Tensor:
    """Sequences' rows ``[n, size]``, one after another → ``[B, length, size]``, zeros behind their ends."""
    if all(count == length for count in counts):
        return rows.view(len(counts), length, rows.shape[1])
    return torch.stack([torch.nn.functional.pad(sequence, (0, 0, 0, length - len(sequence)))
                        for sequence in rows.split(counts)])
