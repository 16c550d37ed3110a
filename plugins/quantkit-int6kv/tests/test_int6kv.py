"""The 6-bit codec: the kit's promises, its packing, and its place between int4 and int8."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quantkit.kv.codecs.kivi import GroupedGrid
from quantkit.kv.codecs.per_token import Int8Vectors
from quantkit.support.errors import UsageError
from quantkit.testing import check_codec
from quantkit_int6kv.codec import Int6Codec, SixBitVectors

CODEC = SixBitVectors(hadamard=False)


def vectors(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def test_contract() -> None:
    check_codec(Int6Codec)
    check_codec(Int6Codec, residual_length=0, sinks=0)


def test_keys_are_rotated_and_say_so_in_their_name() -> None:
    codec = Int6Codec()
    assert (codec.keys().name, codec.keys().hadamard) == ("int6_hadamard", True)
    assert (codec.values().name, codec.values().hadamard) == ("int6", False)


def test_no_number_is_farther_than_half_a_step() -> None:
    x = vectors(4, 9, 64) * 3
    parts = CODEC.encode(x)
    step = parts["scale"].float().repeat_interleave(32, -1)
    assert bool(((CODEC.decode(parts) - x).abs() <= step / 2 * 1.0001).all())
    assert bool((parts["low"].float() <= x.unflatten(-1, (-1, 32)).amin(-1)).all())


def test_four_codes_lie_in_three_bytes_lowest_first() -> None:
    """Against numpy, bit by bit."""
    levels = torch.arange(64).float().repeat(1)  # two groups of 32 whose codes are known
    parts = CODEC.encode(torch.cat((levels[:32], levels[32:])))
    low, scale = parts["low"].double().numpy(), parts["scale"].double().numpy()
    codes = np.concatenate([np.rint((group - lo) / s) for group, lo, s in
                            zip(levels.numpy().reshape(2, 32), low, scale)]).astype(np.int64)
    bits = "".join(f"{code:06b}"[::-1] for code in codes)
    expected = [int(bits[i:i + 8][::-1], 2) for i in range(0, len(bits), 8)]
    assert parts["codes"].tolist() == expected


def test_its_bytes_and_its_error_are_between_int4_and_int8() -> None:
    def size_and_error(codec: SixBitVectors | Int8Vectors | GroupedGrid) -> tuple[int, float]:
        x = vectors(8, 64, 64)
        layout = codec.layout(64, torch.bfloat16)
        size = sum(torch.empty(shape, dtype=dtype).nbytes for shape, dtype in layout.values())
        return size, float((codec.decode(codec.encode(x)) - x).square().mean())

    small, six, large = map(size_and_error, (GroupedGrid(4, channels=False), CODEC, Int8Vectors()))
    assert small[0] < six[0] == 56 < large[0] and small[1] > six[1] * 8 > large[1]


def test_a_head_that_32_does_not_divide_is_refused() -> None:
    with pytest.raises(UsageError, match="divisible by 32"):
        CODEC.layout(80, torch.bfloat16)
