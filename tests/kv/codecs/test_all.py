"""What holds for every codec that rounds."""

import pytest
import torch

from quantkit.kv.codecs import int4, int8


@pytest.mark.parametrize("codec", [int8.CODEC, int4.CODEC])
def test_it_writes_to_nothing(codec):
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))
    before = x.clone()
    parts = codec.encode(x)
    copies = {name: part.clone() for name, part in parts.items()}
    codec.decode(parts)
    assert torch.equal(x, before) and all(torch.equal(parts[name], copies[name]) for name in parts)
