"""A compiled grammar at work on one sequence."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch

from quantkit.structure.base import ConstraintError

MAX_STEP_SECONDS = 0.25
"""Of processor time for one token."""
FREE_SECONDS, SECONDS_PER_TOKEN = 1.0, 0.005
"""Of processor time for all tokens so far: this much, and this much a token. Others wait meanwhile."""


class GrammarConstraint:
    """A :class:`~quantkit.structure.base.TokenConstraint` by llguidance.

    Args:
        matcher: llguidance's, at its beginning; nobody else uses it.
        vocab_size: ids that it knows.
        eos_ids: the ids that end a text: allowed where the grammar is complete, and only there.
    """

    def __init__(self, matcher: Any, vocab_size: int, eos_ids: frozenset[int]) -> None:
        self._matcher, self._eos = matcher, eos_ids
        self._bits = np.zeros((vocab_size + 31) // 32, dtype=np.int32)
        self._vocab_size = vocab_size
        self._seconds, self._tokens = 0.0, 0

    @property
    def ended(self) -> bool:
        """See :class:`~quantkit.structure.base.TokenConstraint`."""
        return bool(self._matcher.is_stopped())

    def mask(self, scores: torch.Tensor) -> torch.Tensor:
        """See :class:`~quantkit.structure.base.TokenConstraint`."""
        begin = time.thread_time()
        self._matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
        self._spend(begin)
        allowed = np.unpackbits(self._bits.view(np.uint8), count=self._vocab_size, bitorder="little")
        excluded = torch.ones(scores.numel(), dtype=torch.bool)  # a model's rows past its vocabulary too
        size = min(scores.numel(), self._vocab_size)
        excluded[:size] = torch.from_numpy(allowed[:size]) == 0
        return scores.masked_fill(excluded, -torch.inf)

    def accept(self, token: int) -> None:
        """See :class:`~quantkit.structure.base.TokenConstraint`."""
        begin = time.thread_time()
        self._tokens += 1
        taken = self._matcher.consume_token(token)
        self._spend(begin)
        if not taken:
            raise ConstraintError(f"token {token} doesn't follow the grammar of the answer")

    def _spend(self, begin: float) -> None:
        """Check for errors and for the time since ``begin``."""
        if self._matcher.is_error():
            raise ConstraintError("the answer can't be constrained further",
                                  why=self._matcher.get_error().strip().splitlines()[0][:300],
                                  next="simplify the schema or grammar")
        spent = time.thread_time() - begin
        self._seconds += spent
        if spent > MAX_STEP_SECONDS or self._seconds > FREE_SECONDS + SECONDS_PER_TOKEN * self._tokens:
            raise ConstraintError("the grammar of the answer takes too much work",
                                  why=f"{self._seconds:.2f} s of processor time for {self._tokens} tokens",
                                  next="simplify the schema or grammar")
