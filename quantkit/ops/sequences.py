"""Runs torch operations one sequence at a time, so that a result doesn't depend on the batch."""

from __future__ import annotations

import torch


def by_sequence(x: torch.Tensor) -> list[torch.Tensor]:
    """``[1, …]`` for each sequence of ``x [B, …]``, in memory of its own.

    torch cuts a tensor into vectors and shares it out to threads by its size, and computes what is left over
    by other instructions: the bits of an exponential or of a sum may depend on where in the tensor it stands.
    So functions that round otherwise than by one IEEE operation an element see one sequence a call: the shape
    that it has alone.
    """
    return [sequence.clone() for sequence in x.split(1)] if x.shape[0] > 1 else [x]
