"""trellis: what symbols mean, by a plain loop; exact packing; refusals that say what to do."""

import pytest
import torch

from quantkit.formats import trellis_code
from quantkit.formats.base import Format
from quantkit.formats.spec import Granularity, QuantSpec
from quantkit.formats.trellis import FORMAT
from quantkit.support.errors import SpecError
from tests.helpers.quantized import random_codes, trellis_spec


def meaning(symbols: list[int], bits: int, window: int) -> list[int]:
    """Of a ring, place by place, in whole numbers."""
    found = []
    for place in range(64):
        state = 0
        for back in range(16):  # more than any window needs
            state |= symbols[(place - back) % 64] << bits * back
        state %= 2**window
        mixed = (state * 0x9E35) % 65536 ^ (state * 0x6A4D) // 65536
        found.append(sum(int(digit, 16) for digit in f"{mixed:x}") - 30)
    return found


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("window", [10, 12, 13, 16])
def test_what_symbols_mean(bits: int, window: int) -> None:
    codes = random_codes(trellis_spec(bits, window), 128, 3, bits)
    found = FORMAT.dequantize(FORMAT.pack(codes, torch.bfloat16))
    for tile in range(2):
        for column in range(3):
            rows = [64 * tile + place // 4 + 16 * (place % 4) for place in range(64)]
            ring = [int(codes.codes[row, column]) for row in rows]
            for row, value in zip(rows, meaning(ring, bits, window)):
                assert found[row, column] == value * codes.scale[row, 0]


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_what_symbols_mean_by_a_learned_table(bits: int) -> None:
    """A weight is the 8 bits of its column's stream that begin with its own, around the ring."""
    codes = random_codes(trellis_spec(bits, 8), 128, 3, bits)
    packed = FORMAT.pack(codes, torch.bfloat16)
    weight = FORMAT.dequantize(packed)
    half = [byte - 256 if byte > 127 else byte for byte in bytes.fromhex(trellis_code.LEVELS[bits])]
    assert len(half) == 128 and max(map(abs, half)) == 127
    for tile in range(2):
        for column in range(3):
            octets = packed.tensors["weight_trellis"][tile, column].numpy().tobytes()
            ring = int.from_bytes(octets, "little")
            ring |= ring << 64 * bits
            for row in range(64):
                state = ring >> bits * row & 255
                value = half[state % 128] * (1 if state < 128 else -1)
                assert weight[64 * tile + row, column] == value * codes.scale[64 * tile + row, 0]


def test_values_are_spread_like_a_sum_of_four_nibbles() -> None:
    values = trellis_code.table(3, 16).double()
    assert abs(float(values.mean())) < 0.05
    assert abs(float(values.std()) / trellis_code.DEVIATION - 1) < 0.01
    assert (int(values.min()), int(values.max())) == (-30, 30)


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("window", [8, 12])
@pytest.mark.parametrize(("rows", "cols"), [(64, 1), (64, 33), (192, 64)])
def test_round_trip_is_exact(bits: int, window: int, rows: int, cols: int) -> None:
    spec = trellis_spec(bits, window)
    codes = random_codes(spec, rows, cols, 1)
    packed = FORMAT.pack(codes, torch.bfloat16)
    assert {k: (t.dtype, tuple(t.shape)) for k, t in packed.tensors.items()} == FORMAT.layout(
        spec, (rows, cols), torch.bfloat16)
    assert packed.nbytes == rows * cols * bits // 8 + 2 * rows
    back = FORMAT.unpack(packed)
    assert torch.equal(back.codes, codes.codes) and torch.equal(back.scale, codes.scale) and back.zero is None


def test_refusals() -> None:
    assert isinstance(FORMAT, Format)
    assert "multiples of 64, not 96" in str(FORMAT.reason_against(trellis_spec(3), (96, 64)))
    assert "empty" in str(FORMAT.reason_against(trellis_spec(3), (64, 0)))
    whole = QuantSpec(bits=4, granularity=Granularity(strategy="channel"))
    assert "use format pack-quantized" in str(FORMAT.reason_against(whole, (64, 64)))
    with pytest.raises(SpecError, match="can't store float32 scales"):
        FORMAT.layout(trellis_spec(3, scale_dtype="float32"), (64, 64), torch.bfloat16)


@pytest.mark.parametrize(("changes", "said"), [
    ({"window": None}, "needs a window"), ({"window": 9}, "should be 8, 10, 11"),
    ({"window": 17}, "or 16"), ({"bits": 5}, "2 to 4 bits"),
    ({"symmetric": False}, "symmetric"), ({"kind": "int", "bits": 4}, "alone has a window"),
    ({"granularity": {"strategy": "group", "size": 64}}, "a scale a channel")])
def test_specs_that_mean_nothing(changes: dict[str, object], said: str) -> None:
    plain = {"kind": "trellis", "bits": 3, "window": 12, "granularity": {"strategy": "channel"}}
    with pytest.raises(ValueError, match=said):
        QuantSpec.model_validate(plain | changes)
