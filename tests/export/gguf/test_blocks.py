"""Quantized weights in llama.cpp's blocks: the values that the gguf library finds there are the weight's."""

from __future__ import annotations

import gguf.quants
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from hypothesis import given, settings
from hypothesis import strategies as st

from quantkit.export.gguf.blocks import blocks_of, exact_types, ggml_type, reason_against
from quantkit.export.gguf.tensors import row_order
from quantkit.export.layouts import InexactError
from quantkit.formats.base import Codes, QuantizedTensor
from quantkit.formats.level_values import dequantize
from quantkit.formats.spec import Granularity, QuantSpec
from quantkit.plugins.manager import registry


def packed(bits, *, symmetric=True, strategy="group", size=32, rows=6, cols=128, scale_dtype="float16",
           seed=0, dtype=torch.float16, scales=None, levels=None, zero=None) -> QuantizedTensor:
    """A random weight as pack-quantized."""
    granularity = Granularity(strategy=strategy, size=size if strategy == "group" else None)
    spec = QuantSpec(bits=bits, symmetric=symmetric, granularity=granularity, scale_dtype=scale_dtype)
    random = torch.Generator().manual_seed(seed)
    shape = spec.scale_shape((rows, cols))
    codes = torch.randint(0, 2**bits, (rows, cols), generator=random).to(torch.uint8)
    scale = (torch.rand(shape, generator=random) + 0.1).to(dtype).float() if scales is None else scales
    zeros = torch.randint(0, 2**bits, shape, generator=random).to(torch.uint8) if zero is None else zero
    return registry("formats").get("pack-quantized").pack(
        Codes(spec, codes if levels is None else levels, scale, None if symmetric else zeros), dtype)


def values(blocks: torch.Tensor, kind: str) -> torch.Tensor:
    return torch.from_numpy(gguf.quants.dequantize(blocks.numpy(), GGMLQuantizationType[kind]))


def dequantized(weight: QuantizedTensor) -> torch.Tensor:
    return registry("formats").get(weight.format).dequantize(weight)


@settings(max_examples=60)
@given(bits=st.integers(2, 8), symmetric=st.booleans(), seed=st.integers(0, 1000),
       place=st.sampled_from([("group", 32), ("group", 64), ("group", 128), ("channel", 0), ("tensor", 0)]))
def test_every_type_that_is_named_holds_the_weight(bits, symmetric, seed, place):
    if place[0] == "tensor" and not symmetric:
        return
    weight = packed(bits, symmetric=symmetric, strategy=place[0], size=place[1], seed=seed)
    try:
        kinds = exact_types("q", weight)
    except InexactError as error:
        assert bits > 7 and not symmetric and "from" in error.what
        return
    for kind in kinds:
        assert torch.equal(values(blocks_of(weight, kind), kind), dequantized(weight)), kind


MXFP4 = QuantSpec(kind="fp", bits=4, granularity=Granularity(strategy="group", size=32), scale_dtype="e8m0")


@settings(max_examples=30)
@given(rows=st.integers(1, 5), blocks=st.integers(1, 4), seed=st.integers(0, 1000))
def test_mxfp4_is_llama_cpp_s(rows, blocks, seed):
    random = torch.Generator().manual_seed(seed)
    bytes_ = {"weight_packed": torch.randint(0, 256, (rows, 16 * blocks), generator=random).to(torch.uint8),
              "weight_scale": torch.randint(0, 253, (rows, blocks), generator=random).to(torch.uint8)}
    weight = QuantizedTensor("mxfp4-pack-quantized", MXFP4, (rows, 32 * blocks), torch.bfloat16, bytes_)
    assert reason_against(weight.format, MXFP4, weight.shape) is None
    assert exact_types("q", weight) == ("MXFP4",)
    made = blocks_of(weight, "MXFP4")
    assert made.dtype == torch.uint8 and made.shape == (rows, 17 * blocks)
    assert torch.equal(values(made, "MXFP4"), dequantized(weight))
    assert torch.equal(made.view(rows, blocks, 17)[..., 0], bytes_["weight_scale"])


def test_mxfp4_that_llama_cpp_does_not_have():
    bytes_ = {"weight_packed": torch.zeros(2, 16, dtype=torch.uint8),
              "weight_scale": torch.tensor([[127], [255]], dtype=torch.uint8)}
    weight = QuantizedTensor("mxfp4-pack-quantized", MXFP4, (2, 32), torch.bfloat16, bytes_)
    with pytest.raises(InexactError, match="no numbers"):
        exact_types("q", weight)
    inputs = MXFP4.model_copy(update={"activations": "group"})
    assert "inputs are rounded too" in (reason_against(weight.format, inputs, (2, 32)) or "")
    assert "blocks of 32" in (reason_against(weight.format, MXFP4, (2, 48)) or "")


@pytest.mark.parametrize(("bits", "kind"), [(2, "Q4_0"), (3, "Q4_0"), (4, "Q4_0"), (5, "Q5_0"), (6, "Q8_0"),
                                            (7, "Q8_0"), (8, "Q8_0")])
def test_the_smallest_type_comes_first(bits, kind):
    assert exact_types("q", packed(bits, rows=32))[0] == kind


def test_zero_points():
    plain = torch.ones(6, 4)
    assert exact_types("q", packed(4, symmetric=False, scales=plain))[0] == "Q4_1"
    assert exact_types("q", packed(5, symmetric=False, scales=plain))[0] == "Q5_1"
    # float16 holds no multiples of scales with eleven bits; levels around the zero points fit a wider type
    fine = torch.full((6, 4), 2047 / 2048)
    levels = torch.arange(16, dtype=torch.uint8).repeat(6, 8)
    zero = torch.full((6, 4), 13, dtype=torch.uint8)
    weight = packed(4, symmetric=False, scales=fine, levels=levels, zero=zero)
    assert exact_types("q", weight) == ("Q5_0", "Q8_0")
    assert exact_types("q", packed(2, symmetric=False, scales=fine)) == ("Q4_0", "Q5_0", "Q8_0")
    with pytest.raises(InexactError, match="levels from -2") as caught:
        exact_types("q", packed(8, symmetric=False))
    assert "symmetric: true" in caught.value.next


def test_central_zero_points_are_none():
    central = torch.full((6, 4), 8, dtype=torch.uint8)
    assert exact_types("q", packed(4, symmetric=False, zero=central))[0] == "Q4_0"


@pytest.mark.parametrize("scale", [1e-8, 2e5, 1 + 2**-12, float("inf"), float("nan")])
def test_scales_that_float16_does_not_hold(scale):
    scales = torch.ones(6, 4)
    scales[2, 1] = scale
    weight = packed(8, scales=scales, scale_dtype="float32", dtype=torch.float32)
    with pytest.raises(InexactError, match="layer q has scales that float16") as caught:
        exact_types("q", weight)
    assert "1 of 24" in caught.value.why and "format: gguf-q8_0" in caught.value.next


@pytest.mark.parametrize(("bits", "kinds"), [(3, ("Q4_1", "Q5_1")), (5, ("Q5_1",))])
def test_minima_of_other_formats(monkeypatch, bits, kinds):
    """A format that stores a minimum a group, whatever its layout."""
    form = registry("formats").get("pack-quantized")
    spec = QuantSpec(bits=bits, symmetric=False, minimum=True, scale_dtype="float16",
                     granularity=Granularity(strategy="group", size=64))
    codes = Codes(spec, torch.randint(0, 2**bits, (6, 128)).to(torch.uint8), torch.rand(6, 2).half().float(),
                  minimum=-torch.rand(6, 2).half().float())
    weight = QuantizedTensor(form.name, spec, (6, 128), torch.float16, {})
    monkeypatch.setattr(type(form), "unpack", lambda self, packed: codes)
    assert reason_against(form.name, spec, (6, 128)) is None and exact_types("q", weight) == kinds
    for kind in kinds:
        assert torch.equal(values(blocks_of(weight, kind), kind), dequantize(codes))
    codes.minimum[1, 1] = -1 - 2**-12
    with pytest.raises(InexactError, match="minima that float16"):
        exact_types("q", weight)


def test_bfloat16_scales_are_mostly_exact():
    weight = packed(8, scale_dtype="bfloat16", dtype=torch.bfloat16)
    assert torch.equal(values(blocks_of(weight, "Q8_0"), "Q8_0"), dequantized(weight))


@pytest.mark.parametrize(("weight", "words"), [
    (packed(8, size=16), "groups of 16"), (packed(8, strategy="channel", cols=48), "in_features 48")])
def test_shapes_without_a_type(weight, words):
    assert words in reason_against(weight.format, weight.spec, weight.shape)


def test_specs_without_a_type():
    channel = Granularity(strategy="channel")
    nf = QuantSpec(kind="nf", bits=4, granularity=Granularity(strategy="block", size=64))
    for name, spec, words in (("bnb-nf4", nf, "nf4 b64"), ("int-quantized", QuantSpec(
            bits=8, granularity=channel, activations="token"), "inputs are rounded"),
            ("pack-quantized", QuantSpec(bits=4, granularity=channel, rotation="hadamard"), "rotated")):
        assert words in reason_against(name, spec, (64, 64))


@pytest.mark.parametrize("name", ["gguf-q8_0", "gguf-q4_k", "gguf-q6_k", "gguf-iq4_nl", "gguf-q4_1"])
def test_blocks_of_our_own_formats_stay_as_they_are(name):
    form = registry("formats").get(name)
    blocks = torch.randint(0, 256, form.layout(form.spec, (4, 512), torch.bfloat16)["blocks"][1],
                           dtype=torch.uint8)
    weight = QuantizedTensor(name, form.spec, (4, 512), torch.bfloat16, {"blocks": blocks})
    assert reason_against(name, form.spec, (4, 512)) is None
    assert exact_types("q", weight) == (ggml_type(name),) == (form.ggml_type,)
    assert torch.equal(blocks_of(weight, form.ggml_type), blocks)


def test_large_weights_are_packed_in_pieces(monkeypatch):
    from quantkit.export.gguf import blocks

    weight = packed(4, rows=7)
    at_once = blocks_of(weight, "Q4_0")
    monkeypatch.setattr(blocks, "_AT_ONCE", 3 * 128)
    assert torch.equal(blocks_of(weight, "Q4_0"), at_once)


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_rows_are_interleaved_in_each_head(heads):
    rows = np.arange(24)
    wanted = [head * (24 // heads) + side * (12 // heads) + i for head in range(heads)
              for i in range(12 // heads) for side in range(2)]
    assert rows[row_order(24, heads).numpy()].tolist() == wanted
