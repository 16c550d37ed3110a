"""NF4 rounding against NumPy, and bitsandbytes as the oracle, byte for byte."""

import numpy as np
import pytest
import torch

from quantkit.formats.bnb_nf4 import FORMAT
from quantkit.formats.level_values import CODEBOOK
from quantkit.formats.spec import Granularity, QuantSpec
from quantkit.quantization.methods.base import MethodOptions
from quantkit.quantization.methods.rounding import NF4 as METHOD
from quantkit.support.errors import SpecError
from tests.helpers.quantized import nf4_spec


def weights() -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(5)
    normal = torch.randn(24, 96, generator=random) * 0.02
    zero_block = normal.clone()
    zero_block.view(-1)[64:128] = 0
    outlier = normal.clone()
    outlier[3, 3] = 65504.0
    return {"normal": normal, "odd": torch.randn(5, 13, generator=random), "zeros": torch.zeros(4, 64),
            "zero block": zero_block, "outlier": outlier, "denormal": normal * 1e-39,
            "equal": torch.ones(3, 50), "one": torch.tensor([[-3.0]]), "minus zeros": -torch.zeros(2, 40)}


@pytest.mark.parametrize("name", list(weights()))
def test_nearest_entry_in_numpy(name: str) -> None:
    weight = weights()[name]
    codes = METHOD.run(weight, None, nf4_spec(), MethodOptions())
    table = np.array(CODEBOOK, dtype=np.float32)
    flat = weight.numpy().reshape(-1)
    for start in range(0, flat.size, 64):
        block = flat[start:start + 64].astype(np.float64)
        absmax = np.abs(block).max()
        assert float(codes.scale[start // 64]) == pytest.approx(absmax, abs=1e-37)
        distance = np.abs(block[:, None] - table[None].astype(np.float64) * absmax)
        chosen = distance[np.arange(block.size), codes.codes.view(-1)[start:start + 64].numpy()]
        assert (chosen <= distance.min(1) + absmax * 1e-6 + 1e-38).all()


def test_refuses_int_and_a_damaged_weight() -> None:
    integers = QuantSpec(bits=4, granularity=Granularity(strategy="channel"))
    assert "not int" in str(METHOD.reason_against(integers))
    weight = torch.ones(2, 64)
    weight[1, 1] = float("nan")
    with pytest.raises(SpecError, match="NaN or infinite"):
        METHOD.run(weight, None, nf4_spec(), MethodOptions())


@pytest.mark.sampled(8)
@pytest.mark.oracle
@pytest.mark.parametrize("name", list(weights()))
@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_equals_bitsandbytes(name: str, nested: bool, dtype: torch.dtype) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    weight = weights()[name].to(dtype)
    for size in (32, 64, 256):
        theirs, state = functional.quantize_4bit(weight, blocksize=size, quant_type="nf4",
                                                 compress_statistics=nested)
        packed = FORMAT.pack(METHOD.run(weight.float(), None, nf4_spec(nested, size), MethodOptions()), dtype)
        assert torch.equal(packed.tensors["weight"], theirs)
        assert torch.equal(packed.tensors["weight.absmax"], state.absmax)
        # as one row: where CPUs have AVX-512, 0.50 mistakes the scales of blocks that go over a row's end
        state.dtype, state.shape = torch.float32, torch.Size([1, weight.numel()])
        values = functional.dequantize_4bit(theirs, state)
        assert torch.equal(FORMAT.dequantize(packed), values.reshape(weight.shape))
