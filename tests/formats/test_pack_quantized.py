"""pack-quantized: exact layout, refusals that say what to do, and compressed-tensors as the oracle."""

import numpy as np
import pytest
import torch

from quantkit.formats.base import Codes
from quantkit.formats.pack_quantized import FORMAT
from quantkit.formats.spec import Granularity, QuantSpec
from quantkit.support.errors import SpecError
from tests.helpers.quantized import integer_spec, random_codes


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_dequantize_against_numpy(bits: int, symmetric: bool) -> None:
    codes = random_codes(integer_spec(bits, 4, symmetric), 5, 12)
    zero = np.full((5, 3), 2 ** (bits - 1)) if codes.zero is None else codes.zero.numpy()
    levels = codes.codes.numpy().astype(np.float32).reshape(5, 3, 4)
    expected = (levels - zero[..., None].astype(np.float32)) * codes.scale.numpy()[..., None]
    weight = FORMAT.dequantize(FORMAT.pack(codes, torch.bfloat16))
    assert weight.dtype == torch.float32
    np.testing.assert_array_equal(weight.numpy(), expected.reshape(5, 12))


def test_layout_by_hand() -> None:
    assert FORMAT.layout(integer_spec(4, 64, False), (100, 128), torch.bfloat16) == {
        "weight_packed": (torch.int32, (100, 16)), "weight_scale": (torch.bfloat16, (100, 2)),
        "weight_shape": (torch.int64, (2,)), "weight_zero_point": (torch.int32, (13, 2))}
    whole = QuantSpec(bits=8, granularity=Granularity(strategy="tensor"))
    assert FORMAT.layout(whole, (4, 5), torch.float16) == {
        "weight_packed": (torch.int32, (4, 2)), "weight_scale": (torch.float16, (1,)),
        "weight_shape": (torch.int64, (2,))}


def test_model_scale_dtype_becomes_the_models() -> None:
    spec = QuantSpec(bits=4, granularity=Granularity(strategy="channel"))
    codes = Codes(spec, torch.zeros(2, 8, dtype=torch.uint8), torch.ones(2, 1))
    packed = FORMAT.pack(codes, torch.float16)
    assert packed.spec.scale_dtype == "float16"
    assert packed.tensors["weight_scale"].dtype == torch.float16


@pytest.mark.parametrize(("cols", "size", "remedies"), [
    (576, 128, ["group size 64", "channel"]), (100, 64, ["50", "100", "channel"]), (97, 64, ["97"]),
    (128, 63, ["64"]), (128, 65, ["64"]), (64, 128, ["64"])])
def test_group_size_that_does_not_divide(cols: int, size: int, remedies: list[str]) -> None:
    reason = FORMAT.reason_against(integer_spec(4, size), (8, cols))
    assert reason is not None and f"group size {size} doesn't divide in_features {cols}" in reason
    for remedy in remedies:
        assert remedy in reason
    with pytest.raises(SpecError, match="doesn't divide"):
        FORMAT.layout(integer_spec(4, size), (8, cols), torch.bfloat16)


def test_other_refusals() -> None:
    nf = QuantSpec(kind="nf", bits=4, granularity=Granularity(strategy="block", size=64))
    assert "bnb-nf4" in str(FORMAT.reason_against(nf, (8, 64)))
    assert "empty" in str(FORMAT.reason_against(integer_spec(4, None), (0, 64)))
    assert "empty" in str(FORMAT.reason_against(integer_spec(4, None), (8, 0)))
    whole = QuantSpec(bits=8, symmetric=False, granularity=Granularity(strategy="tensor"))
    assert "channel" in str(FORMAT.reason_against(whole, (8, 64)))
    with pytest.raises(SpecError, match="float32 scales for bfloat16"):
        FORMAT.layout(integer_spec(4, 64, scale_dtype="float32"), (8, 64), torch.bfloat16)
    assert FORMAT.reason_against(integer_spec(4, 64), (8, 64)) is None


@pytest.mark.oracle
@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("size", [None, 32])
@pytest.mark.parametrize("symmetric", [True, False])
def test_compressed_tensors_reads_and_writes_the_same(bits: int, size: int | None, symmetric: bool) -> None:
    base = pytest.importorskip("compressed_tensors.compressors.pack_quantized.base")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    spec = integer_spec(bits, size, symmetric, "float32")
    codes = random_codes(spec, 13, 96, seed=bits)
    packed = FORMAT.pack(codes, torch.float32)
    arguments = {"num_bits": bits, "type": "int", "symmetric": symmetric,
                 "strategy": spec.granularity.strategy, "group_size": size}
    scheme = quantization.QuantizationScheme(
        targets=["Linear"], weights=quantization.QuantizationArgs(**arguments))
    theirs = base.PackedQuantizationCompressor.decompress(dict(packed.tensors), scheme)["weight"]
    assert torch.equal(theirs, FORMAT.dequantize(packed))
    state = {"weight": theirs, "weight_scale": codes.scale}
    if codes.zero is not None:
        state["weight_zero_point"] = (codes.zero.to(torch.int16) - 2 ** (bits - 1)).to(torch.int8)
    written = base.PackedQuantizationCompressor.compress(state, scheme)
    assert set(written) == set(packed.tensors)
    for name, tensor in packed.tensors.items():
        assert torch.equal(written[name], tensor), name
