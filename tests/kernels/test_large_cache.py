"""Pages whose places don't fit in 32 bits."""

from __future__ import annotations

import pytest
import torch

from quantkit_kernels.triton.cache import LayerPages, SequenceTables, Side, SideLayout, StepTokens
from quantkit_kernels.triton.close_pages import close_pages
from quantkit_kernels.triton.rope_store import rope_store


@pytest.mark.gpu
def test_pages_beyond_two_to_the_31():
    """The last of so many pages that its numbers' places don't fit in 32 bits."""
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    dim, count, on = 128, 2**31 // (64 * 128) + 8, torch.device("cuda")
    k, v, wk, wv = (torch.zeros(count, 64, dim, dtype=torch.bfloat16, device=on) for _ in range(4))
    number = {"dtype": torch.int32, "device": on}
    table = torch.full((1, 1, 1, 2), count - 1, **number)
    tables = SequenceTables(table, torch.full((1, 1, 1), 63, **number), torch.zeros(1, **number), table,
                            torch.zeros(1, 1, 1, **number))
    plain = SideLayout("plain", 16)
    pages, step = LayerPages(Side(plain, k, residual=wk), Side(plain, v, residual=wv)), StepTokens(
        torch.zeros(1, 2, **number), 64)
    qkv = torch.ones(1, 3 * dim, dtype=torch.bfloat16, device=on)
    turns = torch.ones(1, dim // 2, device=on), torch.zeros(1, dim // 2, device=on)
    rope_store(qkv, *turns, pages, tables, step, 0, heads=1, kv_heads=1, dim=dim)
    wk[-1, :63] = wv[-1, :63] = 3
    close_pages(pages, tables, step, 0)
    assert torch.equal(wv[-1, 63], qkv[0, :dim]) and torch.equal(v[-1], wv[-1]) and torch.equal(k[-1], wk[-1])
    assert not wv[:-1].any() and not v[:-1].any()
