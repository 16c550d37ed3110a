"""fp8 in squares: compressed-tensors' strategy ``block`` and DeepSeek's layout."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantkit.formats.base import Format
from quantkit.formats.eight_bit import FINE_GRAINED as DEEPSEEK
from quantkit.formats.eight_bit import FLOAT as FLOATS
from quantkit.formats.spec import QuantSpec
from quantkit.plugins.manager import registry
from quantkit.support.errors import SpecError
from quantkit.testing.formats import random_codes
from tests.helpers.quantized import quant_spec


def squares(size: int, scale_dtype: str, activations: str | None = "group") -> QuantSpec:
    return quant_spec("fp", 8, "tile", size, scale_dtype=scale_dtype, activations=activations)


def test_deepseek_is_a_registered_format() -> None:
    assert isinstance(DEEPSEEK, Format) and registry("formats").get("fine-grained-fp8") is DEEPSEEK
    assert (DEEPSEEK.quant_method, DEEPSEEK.scales, DEEPSEEK.alone) == ("fp8", "float32", True)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(form=st.sampled_from([FLOATS, DEEPSEEK]), size=st.sampled_from([2, 16, 128]), rows=st.integers(1, 200),
       cols=st.integers(1, 200), seed=st.integers(0, 999))
def test_round_trip_is_exact_also_of_squares_that_are_cut(form: Format, size: int, rows: int, cols: int,
                                                          seed: int) -> None:
    spec = squares(size, "bfloat16" if form is FLOATS else "float32")
    codes = random_codes(spec, (rows, cols), seed)
    packed = form.pack(codes, torch.bfloat16)
    suffix, dtype = ("weight_scale", torch.bfloat16) if form is FLOATS else ("weight_scale_inv",
                                                                             torch.float32)
    assert {k: (t.dtype, tuple(t.shape)) for k, t in packed.tensors.items()} == {
        "weight": (torch.float8_e4m3fn, (rows, cols)), suffix: (dtype, (-(-rows // size), -(-cols // size)))}
    back = form.unpack(packed)
    assert torch.equal(back.codes, codes.codes) and torch.equal(back.scale, codes.scale)
    weight = form.dequantize(packed)
    scale = codes.scale.numpy().repeat(size, axis=0)[:rows].repeat(size, axis=1)[:, :cols]
    np.testing.assert_array_equal(weight.numpy(), packed.tensors["weight"].float().numpy() * scale)
    ids = torch.tensor([rows - 1, 0, rows // 2])
    assert torch.equal(form.rows(packed, ids), weight[ids])


def test_refusals_say_what_to_do() -> None:
    assert FLOATS.reason_against(squares(128, "bfloat16"), (8, 64)) is None
    assert "use activations: group" in str(DEEPSEEK.reason_against(squares(128, "float32", None), (8, 64)))
    rows = quant_spec("fp", 8, "channel", scale_dtype="float32")
    assert "use strategy tile" in str(DEEPSEEK.reason_against(rows, (8, 64)))
    assert "use strategy channel" in str(registry("formats").get("int-quantized").reason_against(
        quant_spec("int", 8, "group", 32), (8, 64)))
    with pytest.raises(SpecError, match="can't store bfloat16 scales"):
        DEEPSEEK.layout(squares(128, "bfloat16"), (8, 64), torch.bfloat16)


@pytest.mark.oracle
def test_compressed_tensors_reads_the_same_weights() -> None:
    compressors = pytest.importorskip("compressed_tensors.compressors",
                                      reason="compressed-tensors is not installed (extra: oracle)")
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(
        num_bits=8, type="float", strategy="block", block_structure=[32, 32]))
    packed = FLOATS.pack(random_codes(squares(32, "bfloat16"), (70, 97)), torch.bfloat16)
    compressor = compressors.BaseCompressor.get_value_from_registry("float-quantized")
    assert torch.equal(compressor.decompress(dict(packed.tensors), scheme)["weight"],
                       FLOATS.dequantize(packed).to(torch.bfloat16))
