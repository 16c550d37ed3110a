"""nvfp4-pack-quantized and mxfp4-pack-quantized: exact layout against NumPy and compressed-tensors."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantkit.formats import e2m1, e4m3
from quantkit.formats.base import Codes, Format
from quantkit.formats.fp4 import MXFP4, NVFP4
from quantkit.formats.level_values import E2M1
from quantkit.formats.spec import QuantSpec
from quantkit.plugins.manager import registry
from quantkit.support.errors import SpecError
from quantkit.testing.formats import random_codes
from tests.helpers.quantized import quant_spec

NV = quant_spec("fp", 4, "group", 16, scale_dtype="e4m3")
MX = quant_spec("fp", 4, "group", 32, scale_dtype="e8m0")
NV_A4, MX_A4 = (spec.model_copy(update={"activations": "group"}) for spec in (NV, MX))
BOTH = pytest.mark.parametrize(("form", "spec"), [(NVFP4, NV), (NVFP4, NV_A4), (MXFP4, MX), (MXFP4, MX_A4)])


@BOTH
def test_is_a_registered_format(form: Format, spec: QuantSpec) -> None:
    assert isinstance(form, Format) and registry("formats").get(form.name) is form
    assert form.reason_against(spec, (3, 64)) is None


def test_two_codes_a_byte_the_earlier_one_low() -> None:
    codes = torch.tensor([[2, 9, 15, 0]], dtype=torch.uint8)  # 1, -0.5, -6, 0
    assert e2m1.pack(codes).tolist() == [[2 | 9 << 4, 15]]
    assert torch.equal(e2m1.unpack(e2m1.pack(codes)), codes)


def test_powers_of_2_in_a_byte() -> None:
    stored = torch.arange(256).to(torch.uint8)
    powers = e2m1.decode_e8m0(stored)
    assert powers[0] == 2.0**-127 and powers[254] == 2.0**127 and bool(powers[255].isnan())
    assert torch.equal(e2m1.encode_e8m0(powers[:255]), stored[:255])


def test_the_nearest_numbers_with_ties_to_even() -> None:
    values = torch.linspace(-8, 8, 3201)
    levels = np.unique(np.array(E2M1))
    nearest = e2m1.nearest_(values.clone()).numpy()
    for value, level in zip(values.numpy(), nearest, strict=True):
        assert abs(value - level) == np.abs(levels - value).min()
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    assert e2m1.nearest_(ties).tolist() == [0, 1, 1, 2, 2, 4, 4]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(spec=st.sampled_from([NV, NV_A4, MX]), rows=st.sampled_from([1, 2, 7, 33]), groups=st.integers(1, 6),
       seed=st.integers(0, 999))
def test_round_trip_is_exact(spec: QuantSpec, rows: int, groups: int, seed: int) -> None:
    form = NVFP4 if spec.scale_dtype == "e4m3" else MXFP4
    codes = random_codes(spec, (rows, groups * (spec.granularity.size or 1)), seed)
    packed = form.pack(codes, torch.bfloat16)
    layout = form.layout(spec, packed.shape, torch.bfloat16)
    assert {k: (t.dtype, tuple(t.shape)) for k, t in packed.tensors.items()} == layout
    back = form.unpack(packed)
    for name in ("codes", "scale", "outer", "input_factor"):
        stored, given_tensor = getattr(back, name), getattr(codes, name)
        assert (given_tensor is None and stored is None) or torch.equal(stored, given_tensor)
    ids = torch.tensor([rows - 1, 0])
    assert torch.equal(form.rows(packed, ids), form.dequantize(packed)[ids])


@settings(max_examples=200, deadline=None, derandomize=True)
@given(factor=st.floats(2.0**-10, 2.0**20, width=32), seed=st.integers(0, 9999))
def test_any_global_scale_of_a_file_comes_back(factor: float, seed: int) -> None:
    """Ours are powers of 2, others' are any numbers, and scales are quotients then."""
    random = torch.Generator().manual_seed(seed)
    stored = torch.randint(1, 127, (4, 3), generator=random, dtype=torch.uint8)
    number = torch.tensor([[factor]])
    codes = Codes(NV, torch.zeros(4, 48, dtype=torch.uint8), e4m3.decode(stored) / number, outer=1 / number)
    packed = NVFP4.pack(codes, torch.bfloat16)
    assert torch.equal(NVFP4.unpack(packed).scale, codes.scale)
    assert torch.equal(packed.tensors["weight_scale"].view(torch.uint8), stored)


@pytest.mark.parametrize(("form", "spec"), [(NVFP4, NV), (MXFP4, MX)])
def test_dequantize_against_numpy(form: Format, spec: QuantSpec) -> None:
    packed = form.pack(random_codes(spec, (5, 96)), torch.bfloat16)
    octets = packed.tensors["weight_packed"].numpy()
    codes = np.stack([octets & 15, octets >> 4], axis=-1).reshape(5, 96)
    exponent, mantissa = codes >> 1 & 3, codes & 1
    size = np.where(exponent == 0, mantissa / 2, (1 + mantissa / 2) * 2.0 ** (exponent - 1.0))
    stored = packed.tensors["weight_scale"].view(torch.uint8).numpy()
    if spec is MX:
        scale = 2.0 ** (stored.astype(np.float32) - 127)
    else:
        high, low = (stored >> 3 & 15).astype(np.float32), (stored & 7).astype(np.float32)
        scale = np.where(high == 0, low / 8 * 2.0**-6, (1 + low / 8) * 2.0 ** (high - 7))
        scale = scale.astype(np.float32) / packed.tensors["weight_global_scale"].numpy()
    expected = np.where(codes >> 3, -size, size) * np.repeat(scale, spec.granularity.size, axis=1)
    np.testing.assert_array_equal(form.dequantize(packed).numpy(), expected.astype(np.float32))


@pytest.mark.oracle
@pytest.mark.parametrize(("form", "spec"), [(NVFP4, NV), (MXFP4, MX)])
def test_compressed_tensors_reads_the_same_weights_and_writes_the_same_bytes(form: Format,
                                                                             spec: QuantSpec) -> None:
    compressors = pytest.importorskip("compressed_tensors.compressors",
                                      reason="compressed-tensors is not installed (extra: oracle)")
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    strategy, dtype = ("tensor_group", torch.float8_e4m3fn) if spec is NV else ("group", torch.uint8)
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(
        num_bits=4, type="float", strategy=strategy, group_size=spec.granularity.size, scale_dtype=dtype))
    compressor = compressors.BaseCompressor.get_value_from_registry(form.name)
    codes = random_codes(spec, (9, 96))
    packed = form.pack(codes, torch.bfloat16)
    weight = form.dequantize(packed)
    assert torch.equal(compressor.decompress(dict(packed.tensors), scheme)["weight"],
                       weight.to(torch.bfloat16))
    state = {"weight": weight, "weight_scale": codes.scale}
    if codes.outer is not None:
        state |= {"weight_scale": codes.scale / codes.outer,
                  "weight_global_scale": packed.tensors["weight_global_scale"]}
    again = compressor.compress(state, scheme)
    same = {name: tensor.view(torch.uint8) for name, tensor in again.items()}
    assert torch.equal(same["weight_packed"] & 0x77, packed.tensors["weight_packed"] & 0x77)  # but for -0
    assert torch.equal(same["weight_scale"], packed.tensors["weight_scale"].view(torch.uint8))


def test_refusals_say_what_to_do() -> None:
    assert "group size 16 doesn't divide in_features 40" in str(NVFP4.reason_against(NV, (8, 40)))
    assert "empty" in str(MXFP4.reason_against(MX, (0, 64)))
    assert "holds fp4 in groups of 16 with e4m3 scales" in str(NVFP4.reason_against(MX, (8, 64)))
    wide = NV.model_copy(update={"granularity": MX.granularity})
    assert "not fp4 g32 e4m3" in str(NVFP4.reason_against(wide, (8, 64)))
    with pytest.raises(SpecError, match="can't hold fp4 g32 e8m0"):
        NVFP4.layout(MX, (8, 64), torch.bfloat16)
    codes = dataclasses.replace(random_codes(NV_A4, (2, 32)), input_factor=None)
    with pytest.raises(SpecError, match="without a scale of its inputs"):
        NVFP4.pack(codes, torch.bfloat16)
