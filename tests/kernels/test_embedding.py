"""Rows of a packed weight, looked up."""

from __future__ import annotations

import pytest
import torch

from quantkit_kernels.triton import w16a16
from quantkit_kernels.triton.embedding import embed


def test_into_a_part_of_a_wider_buffer(on, randn):
    weight = randn(20, 600, on=on)
    buffer = weight.new_full((3, 1000), float("nan"))
    out = buffer[:, 16:616]
    ids = torch.tensor([3, 0, 19], dtype=torch.int32, device=on[0])
    assert embed(ids, w16a16.pack(weight), on[1], out=out) is out
    assert torch.equal(out, weight[ids]) and buffer[:, :16].isnan().all() and buffer[:, 616:].isnan().all()
    assert embed(ids[:0], w16a16.pack(weight), on[1]).shape == (0, 600)


def test_embed_refuses_wrong_shapes_and_dtypes():
    packed, ids = w16a16.pack(torch.zeros(4, 8)), torch.zeros(2, dtype=torch.int64)
    for one, w, out in ((ids[None], packed, None), (ids.float(), packed, None),
                        (ids, w16a16.pack(torch.zeros(4, 8), gated=True), None),
                        (ids, packed, torch.zeros(2, 7))):
        with pytest.raises(ValueError, match="must be"):
            embed(one, w, torch.float32, out=out)
