"""Sequences' tokens in portions that go through a program at once."""

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


def chunks_of(counts: Sequence[int], rows: int, most: int | None = None,
              starts: Sequence[int] = ()) -> Iterable[list[Chunk]]:
    """Portions of tokens.

    Args:
        counts: tokens of each sequence.
        rows: tokens of a portion, at most.
        most: a sequence's tokens in a portion are of one block of so many positions.
        starts: the position of each sequence's first token; needed with ``most``.
    """
    now: list[Chunk] = []
    room = rows
    for sequence, count in enumerate(counts):
        start = 0
        while start < count:
            take = min(room, count - start)
            if most is not None:
                take = min(take, most - (starts[sequence] + start) % most)
            now.append(Chunk(sequence, start, take))
            start, room = start + take, room - take
            if not room or start < count:
                yield now
                now, room = [], rows
    if now:
        yield now


def selected_rows(pieces: Sequence[Chunk], wanted: Sequence[range]) -> list[int]:
    """Rows of a portion whose places in their sequences are wanted."""
    found, row = [], 0
    for piece in pieces:
        found += [row + at - piece.start for at in wanted[piece.sequence]
                  if piece.start <= at < piece.start + piece.count]
        row += piece.count
    return found


def single_position(at: int, count: int) -> range:
    """The one position of a row that is wanted."""
    at += count if at < 0 else 0
    if not 0 <= at < count:
        raise ValueError(f"last is {at} in a row of {count} tokens")
    return range(at, at + 1)


def join_rows(parts: Sequence[torch.Tensor], size: int) -> torch.Tensor:
    """Rows ``[n, size]`` of all portions."""
    if not parts:
        return torch.empty(0, size)
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def pad_rows(rows: torch.Tensor, counts: Sequence[int], length: int) -> torch.Tensor:
    """Sequences' rows ``[n, size]``, one after another → ``[B, length, size]``, 0 behind their ends."""
    if all(count == length for count in counts):
        return rows.view(len(counts), length, rows.shape[1])
    return torch.stack([torch.nn.functional.pad(one, (0, 0, 0, length - len(one)))
                        for one in rows.split(counts)])
