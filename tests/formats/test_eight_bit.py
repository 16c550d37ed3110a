"""int-quantized and float-quantized: exact layout, refusals with a remedy, compressed-tensors as oracle."""

import numpy as np
import pytest
import torch

from quantkit.formats import eight_bit
from quantkit.formats.spec import Granularity, QuantSpec
from quantkit.plugins.manager import registry
from quantkit.support.errors import SpecError
from tests.helpers.quantized import random_codes

FORMATS = {"int": eight_bit.INT, "fp": eight_bit.FLOAT}
KINDS = pytest.mark.parametrize("kind", FORMATS)


def eight_bit_spec(kind: str, strategy: str = "channel", dtype: str = "bfloat16",
                   **keys: object) -> QuantSpec:
    return QuantSpec.model_validate({"kind": kind, "bits": 8, "granularity": {"strategy": strategy},
                                     "scale_dtype": dtype, "activations": "token", **keys})


@KINDS
def test_dequantize_against_numpy(kind: str) -> None:
    codes = random_codes(eight_bit_spec(kind), 5, 12)
    levels = codes.codes.numpy().astype(np.int32)
    if kind == "fp":
        exponent, mantissa = levels >> 3 & 15, levels & 7
        size = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
        real = np.where(levels >> 7, -size, size).astype(np.float32)
    else:
        real = (levels - 128).astype(np.float32)
    weight = FORMATS[kind].dequantize(FORMATS[kind].pack(codes, torch.bfloat16))
    assert weight.dtype == torch.float32
    np.testing.assert_array_equal(weight.numpy(), real * codes.scale.numpy())


@KINDS
def test_refusals_say_what_to_do(kind: str) -> None:
    form = FORMATS[kind]
    assert form.reason_against(eight_bit_spec(kind), (8, 64)) is None
    other = "fp" if kind == "int" else "int"
    assert f"use format {FORMATS[other].name if other == 'fp' else 'pack-quantized'}" in str(
        form.reason_against(eight_bit_spec(other), (8, 64)))
    nf = QuantSpec(kind="nf", bits=4, granularity=Granularity(strategy="block", size=64))
    assert "bnb-nf4" in str(form.reason_against(nf, (8, 64)))
    assert "empty" in str(form.reason_against(eight_bit_spec(kind), (0, 64)))
    with pytest.raises(SpecError, match="float32 scales for bfloat16"):
        form.layout(eight_bit_spec(kind, dtype="float32"), (8, 64), torch.bfloat16)


def test_what_belongs_into_pack_quantized() -> None:
    form, pack = FORMATS["int"], registry("formats").get("pack-quantized")
    for keys, said in (({"activations": None}, "activations: token"),
                       ({"activations": None, "symmetric": False}, "symmetric: true"),
                       ({"activations": None, "bits": 4}, "int4"),
                       ({"activations": None, "granularity": {"strategy": "group", "size": 32}}, "groups")):
        assert said in str(form.reason_against(eight_bit_spec("int", **keys), (8, 64)))
        assert pack.reason_against(eight_bit_spec("int", **keys), (8, 64)) is None
    assert "int-quantized" in str(pack.reason_against(eight_bit_spec("int"), (8, 64)))
    assert "float-quantized" in str(pack.reason_against(eight_bit_spec("fp"), (8, 64)))
    assert FORMATS["fp"].reason_against(eight_bit_spec("fp", activations=None), (8, 64)) is None


@pytest.mark.oracle
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("strategy", ["tensor", "channel"])
@pytest.mark.parametrize(("kind", "activations"), [("int", "token"), ("fp", "token"), ("fp", None)])
def test_compressed_tensors_reads_and_writes_the_same(kind: str, strategy: str, activations: str | None,
                                                      dtype: str) -> None:
    """Its compressors of these names decompress our tensors, and compress the result to the same bytes."""
    base = pytest.importorskip("compressed_tensors.compressors.naive_quantized.base")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    spec, real = eight_bit_spec(kind, strategy, dtype, activations=activations), getattr(torch, dtype)
    codes = random_codes(spec, 13, 96, seed=1)
    packed = FORMATS[kind].pack(codes, real)
    arguments = {"num_bits": 8, "type": {"int": "int", "fp": "float"}[kind], "symmetric": True,
                 "strategy": strategy}
    scheme = quantization.QuantizationScheme(
        targets=["Linear"], weights=quantization.QuantizationArgs(**arguments))
    compressor = {"int": base.IntQuantizationCompressor, "fp": base.FloatQuantizationCompressor}[kind]
    if activations is None:
        compressor = base.NaiveQuantizationCompressor
    theirs = compressor.decompress(dict(packed.tensors), scheme)["weight"]
    assert torch.equal(theirs.float(), FORMATS[kind].dequantize(packed).to(real).float())
    if real != torch.float32:
        return  # a rounded weight needn't round back to the same code
    written = compressor.compress({"weight": theirs, "weight_scale": packed.tensors["weight_scale"]}, scheme)
    assert set(written) == set(packed.tensors)
    for name, tensor in packed.tensors.items():
        assert written[name].dtype == tensor.dtype
        same = [one.view(torch.uint8) for one in (written[name], tensor)]
        assert torch.equal(*same), name
