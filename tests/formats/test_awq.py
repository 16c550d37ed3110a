"""AutoAWQ's GEMM layout: exact, refusals, and AutoAWQ's own packing as the oracle."""

import numpy as np
import pytest
import torch

from quantkit.formats.awq import BACK, FORMAT, ORDER
from quantkit.formats.base import Codes, Format
from quantkit.formats.spec import Granularity, QuantSpec
from quantkit.support.errors import SpecError
from tests.helpers.quantized import random_codes


def awq_spec(group: int | None, dtype: str = "float16", **more) -> QuantSpec:
    granularity = Granularity(strategy="channel" if group is None else "group", size=group)
    return QuantSpec(**{"bits": 4, "symmetric": False, "granularity": granularity,
                        "scale_dtype": dtype} | more)


def test_is_a_format() -> None:
    assert isinstance(FORMAT, Format)
    assert (FORMAT.name, FORMAT.quant_method) == ("awq", "awq")
    assert [ORDER[i] for i in BACK] == list(range(8))


@pytest.mark.parametrize("size", [None, 16])
def test_an_independent_writer_makes_the_same_bytes(numpy_layouts, size) -> None:
    codes = random_codes(awq_spec(size), 24, 48)
    arrays = [t.numpy() for t in (codes.codes, codes.scale, codes.zero)]
    packed = FORMAT.pack(codes, torch.float16)
    for name, array in numpy_layouts.awq(*arrays).items():
        np.testing.assert_array_equal(packed.tensors[name].numpy(), array, err_msg=name)
    np.testing.assert_array_equal(FORMAT.dequantize(packed).numpy(), numpy_layouts.dequantized(*arrays))


def test_one_word_by_hand() -> None:
    codes = Codes(awq_spec(None), torch.arange(8, dtype=torch.uint8).unsqueeze(1), torch.ones(8, 1),
                  torch.zeros(8, 1, dtype=torch.uint8))
    word = FORMAT.pack(codes, torch.float16).tensors["qweight"].view(torch.uint32).item()
    assert f"{word:08x}" == "75316420"


def test_refusals() -> None:
    assert "zero points always" in str(FORMAT.reason_against(awq_spec(32, symmetric=True), (8, 32)))
    assert "holds 4 bits" in str(FORMAT.reason_against(awq_spec(32, bits=8), (8, 32)))
    assert "out_features 12" in str(FORMAT.reason_against(awq_spec(32), (12, 32)))
    assert "doesn't divide" in str(FORMAT.reason_against(awq_spec(32), (8, 40)))
    with pytest.raises(SpecError, match="float32 scales"):
        FORMAT.layout(awq_spec(32, "float32"), (8, 32), torch.bfloat16)


@pytest.mark.oracle
@pytest.mark.parametrize("size", [None, 32])
def test_autoawq_packs_and_dequantizes_the_same(size) -> None:
    gemm = pytest.importorskip("awq.modules.linear.gemm", reason="autoawq is not installed")
    packing = pytest.importorskip("awq.utils.packing_utils")
    codes = random_codes(awq_spec(size), 64, 96)
    packed = FORMAT.pack(codes, torch.float16)
    dense = torch.nn.Linear(96, 64, bias=False)
    dense.weight.data = FORMAT.dequantize(packed)
    theirs = gemm.WQLinear_GEMM.from_linear(dense, 4, size or 96, scales=codes.scale.T.contiguous(),
                                            zeros=codes.zero.T.float().contiguous())
    for name, tensor in packed.tensors.items():
        assert torch.equal(getattr(theirs, name), tensor), name
    weight = packing.dequantize_gemm(theirs.qweight, theirs.qzeros, theirs.scales, 4, size or 96)
    assert torch.equal(weight.T.float(), FORMAT.dequantize(packed).half().float())


@pytest.mark.oracle
def test_gptqmodel_dequantizes_the_same() -> None:
    linear = pytest.importorskip("gptqmodel.nn_modules.qlinear.torch_awq",
                                 reason="gptqmodel is not installed")
    packed = FORMAT.pack(random_codes(awq_spec(32), 64, 96), torch.float16)
    theirs = linear.AwqTorchLinear(bits=4, group_size=32, sym=False, desc_act=False, in_features=96,
                                   out_features=64, bias=False, register_buffers=True)
    for name, tensor in packed.tensors.items():
        setattr(theirs, name, tensor)
    x = torch.eye(96, dtype=torch.float16)
    assert torch.equal(theirs(x).T.float(), FORMAT.dequantize(packed).half().float())
