"""The end of a step of decoding."""

from __future__ import annotations

import pytest
import torch

from quantkit_kernels.triton.advance import advance
from quantkit_kernels.triton.cache import SequenceTables, StepTokens


def test_a_step_is_counted(on):
    lengths = torch.arange(4 * 3 * 2, dtype=torch.int32, device=on[0]).view(4, 3, 2)
    seen = torch.tensor([5, 6, 7, 8], dtype=torch.int32, device=on[0])
    rows = torch.tensor([[2, 0], [-1, 0], [0, 0]], dtype=torch.int32, device=on[0])
    before = lengths.clone()
    advance(SequenceTables(lengths, lengths, seen), StepTokens(rows, 9))
    more = torch.tensor([1, 0, 1, 0], dtype=torch.int32, device=on[0])
    assert torch.equal(lengths, before + more[:, None, None]) and seen.tolist() == [6, 6, 8, 8]
    with pytest.raises(ValueError, match="contiguous"):
        advance(SequenceTables(lengths, lengths.transpose(1, 2), seen), StepTokens(rows, 9))
