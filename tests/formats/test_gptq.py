"""GPTQ's layout in both versions: exact, the quirk of the first, refusals, and GPTQModel as the oracle."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from quantkit.formats import pack_quantized
from quantkit.formats.base import Codes
from quantkit.formats.gptq import FORMAT, V2
from quantkit.formats.spec import Granularity, QuantSpec
from quantkit.support.errors import CheckpointError, SpecError
from tests.helpers.quantized import integer_spec, random_codes

gptq_spec = partial(integer_spec, scale_dtype="float16")
gptq_codes = partial(random_codes, lowest_zero=1)
VERSIONS = pytest.mark.parametrize("form", [FORMAT, V2], ids=["v1", "v2"])


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("size", [None, 32])
@pytest.mark.parametrize("symmetric", [True, False])
@VERSIONS
def test_an_independent_writer_makes_the_same_bytes(numpy_layouts, form, bits, size, symmetric) -> None:
    codes = gptq_codes(gptq_spec(bits, size, symmetric), 64, 96, seed=bits)
    shape = tuple(codes.scale.shape)
    zero = np.full(shape, 2 ** (bits - 1)) if codes.zero is None else codes.zero.numpy().astype(int)
    expected = numpy_layouts.gptq(codes.codes.numpy(), codes.scale.numpy(), zero, bits,
                                  1 if form is FORMAT else 2)
    packed = form.pack(codes, torch.float16)
    assert set(packed.tensors) == set(expected)
    for name, array in expected.items():
        np.testing.assert_array_equal(packed.tensors[name].numpy(), array, err_msg=name)
    np.testing.assert_array_equal(form.dequantize(packed).numpy(),
                                  numpy_layouts.dequantized(codes.codes.numpy(), codes.scale.numpy(), zero))


def test_the_words_of_symmetric_zero_points() -> None:
    codes = gptq_codes(gptq_spec(4, 32), 8, 32)
    for form, word in ((FORMAT, 0x77777777), (V2, 0x88888888)):
        assert set(form.pack(codes,
                             torch.float16).tensors["qzeros"].view(torch.uint32).flatten().tolist()) == {word}


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_the_weights_are_those_of_pack_quantized_lying_down(bits) -> None:
    codes = gptq_codes(gptq_spec(bits, 32), 32, 64)
    other = pack_quantized.FORMAT.pack(codes, torch.float16)
    assert torch.equal(FORMAT.pack(codes, torch.float16).tensors["qweight"], other.tensors["weight_packed"].T)


def with_zero(level: int) -> Codes:
    spec = gptq_spec(4, 32, symmetric=False)
    codes = gptq_codes(spec, 8, 64)
    zero, levels = codes.zero.clone(), codes.codes.clone()
    zero[3, 1] = 0
    levels[3, 32:] = level
    return replace(codes, zero=zero, codes=levels)


def test_a_zero_point_of_0_rises_where_there_is_room() -> None:
    codes = with_zero(14)
    raised = FORMAT.pack(codes, torch.float16)
    assert torch.equal(FORMAT.dequantize(raised), V2.dequantize(V2.pack(codes, torch.float16)))
    assert FORMAT.unpack(raised).zero[3, 1] == 1


def test_a_zero_point_of_0_is_refused_where_there_is_none() -> None:
    with pytest.raises(SpecError, match="no place for a zero point of 0") as caught:
        FORMAT.pack(with_zero(15), torch.float16)
    assert caught.value.next == "format: gptq-v2"
    assert V2.unpack(V2.pack(with_zero(15), torch.float16)).zero[3, 1] == 0


def test_an_ambiguous_word_is_not_read() -> None:
    packed = FORMAT.pack(gptq_codes(gptq_spec(4, 32, False), 8, 64), torch.float16)
    packed.tensors["qzeros"][0, 0] = -1
    with pytest.raises(CheckpointError, match="word for a zero point") as caught:
        FORMAT.unpack(packed)
    assert "gptq_v2" in caught.value.next


def test_groups_out_of_order_are_not_read() -> None:
    packed = FORMAT.pack(gptq_codes(gptq_spec(4, 32), 8, 64), torch.float16)
    index = packed.tensors["g_idx"].flip(0).contiguous()
    with pytest.raises(CheckpointError, match="desc_act"):
        FORMAT.unpack(replace(packed, tensors={**packed.tensors, "g_idx": index}))


def test_symmetric_weights_with_other_zero_points_are_not_read() -> None:
    packed = FORMAT.pack(gptq_codes(gptq_spec(4, 32), 8, 64), torch.float16)
    packed.tensors["qzeros"][0, 0] ^= 1
    with pytest.raises(CheckpointError, match="middle level"):
        FORMAT.dequantize(packed)


@VERSIONS
def test_refusals(form) -> None:
    assert "5" in str(form.reason_against(gptq_spec(5, 32), (32, 64)))
    assert "in_features 36" in str(form.reason_against(gptq_spec(4, None), (32, 36)))
    assert "out_features 33" in str(form.reason_against(gptq_spec(4, None), (33, 64)))
    assert "out_features 16" in str(form.reason_against(gptq_spec(3, None), (16, 64)))
    assert "group size 32" in str(form.reason_against(gptq_spec(4, 64), (32, 96)))
    assert "channel or group" in str(form.reason_against(
        QuantSpec(bits=8, granularity=Granularity(strategy="tensor")), (32, 64)))
    with pytest.raises(SpecError, match="bfloat16 scales"):
        form.layout(gptq_spec(4, 32, scale_dtype="bfloat16"), (32, 64), torch.bfloat16)
    assert form.layout(gptq_spec(4, 32, scale_dtype="model"), (32, 64),
                       torch.bfloat16)["scales"][0] == torch.float16


@pytest.mark.oracle
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_gptqmodel_packs_and_dequantizes_the_same(bits, symmetric) -> None:
    linear = pytest.importorskip("gptqmodel.nn_modules.qlinear.torch", reason="gptqmodel is not installed")
    codes = gptq_codes(gptq_spec(bits, 32, symmetric), 64, 128, seed=bits)
    packed = V2.pack(codes, torch.float16)
    theirs = linear.TorchLinear(bits=bits, group_size=32, sym=symmetric, desc_act=False, in_features=128,
                                out_features=64, bias=False)
    dense = torch.nn.Linear(128, 64, bias=False, dtype=torch.float32)
    dense.weight.data = V2.dequantize(packed)
    zero = torch.full_like(codes.scale, 2 ** (bits - 1)) if codes.zero is None else codes.zero.float()
    theirs.pack_original(dense, codes.scale, zero, packed.tensors["g_idx"])
    for name in ("qweight", "qzeros", "scales"):
        assert torch.equal(getattr(theirs, name), packed.tensors[name]), name
    theirs.post_init()
    weight = theirs.dequantize_weight().T.float()
    # they multiply in float16
    assert torch.equal(weight, V2.dequantize(packed).half().float())
