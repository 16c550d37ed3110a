"""The CPU's kernels for weights with minima, superblocks, groups of 16, 4-bit tables and fp8 tiles."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from quantkit.formats.base import QuantizedTensor
from quantkit.ops import cpu_linear
from quantkit.ops.cpu_weight import multiply
from quantkit.ops.dispatch import KernelQuery
from quantkit.quantization.methods.rounding import RTN
from quantkit.testing.formats import formula, random_codes
from tests.helpers.quantized import quant_spec

KERNELS = (cpu_linear.INT8, cpu_linear.INT4, cpu_linear.NF, cpu_linear.TRELLIS, cpu_linear.FP4,
           cpu_linear.IQ4, cpu_linear.INT, cpu_linear.FP)


def minima(bits, size, dtype="bfloat16", **more):
    return quant_spec("int", bits, "group", size, symmetric=False, minimum=True, scale_dtype=dtype, **more)


CASES = {
    # the spec, its kernel, and bits a weight: of codes as they lie there, and of scales
    "q4_0": (quant_spec("int", 4, "group", 32, signed=True, scale_dtype="float16"), "cpu-int4", 4, 16 / 32),
    "q8_0": (quant_spec("int", 8, "group", 32, signed=True, scale_dtype="float16"), "cpu-int8", 8, 16 / 32),
    "q4_1": (minima(4, 32, "float16"), "cpu-int4", 4, 32 / 32),
    "q4_k": (minima(4, 32, "float16", superblock=256, scale_bits=6), "cpu-int4", 4, 16 / 32 + 32 / 256),
    "q5_0": (quant_spec("int", 5, "group", 32, signed=True, scale_dtype="float16"), "cpu-int8", 5, 16 / 32),
    "q5_k": (minima(5, 32, "float16", superblock=256, scale_bits=6), "cpu-int8", 5, 16 / 32 + 32 / 256),
    "q6_k": (quant_spec("int", 6, "group", 16, scale_dtype="float16", superblock=256, scale_bits=8),
             "cpu-int8", 6, 8 / 16 + 16 / 256),
    "int6 asymmetric": (quant_spec("int", 6, "group", 64, symmetric=False), "cpu-int8", 6, 24 / 64),
    "int5 a row": (quant_spec("int", 5, "channel"), "cpu-int8", 5, 16 / 512),
    "iq4_nl": (quant_spec("iq", 4, "group", 32, scale_dtype="float16"), "cpu-iq4", 4, 16 / 32),
    "mlx 2": (minima(2, 64), "cpu-int4", 2, 32 / 64),
    "mlx 4": (minima(4, 64, "float16"), "cpu-int4", 4, 32 / 64),
    "mlx 6": (minima(6, 128), "cpu-int8", 6, 32 / 128),
    "mlx 8": (minima(8, 32), "cpu-int8", 8, 32 / 32),
    "minima in float32": (minima(4, 128, "float32"), "cpu-int4", 4, 64 / 128),
    "int4 in 16": (quant_spec("int", 4, "group", 16), "cpu-int4", 4, 16 / 16),
    "int3 in 16 asymmetric": (quant_spec("int", 3, "group", 16, symmetric=False), "cpu-int4", 3, 24 / 16),
    "nvfp4": (quant_spec("fp", 4, "group", 16, scale_dtype="e4m3"), "cpu-fp4", 4, 8 / 16 + 16 / 512),
    "mxfp4": (quant_spec("fp", 4, "group", 32, scale_dtype="e8m0"), "cpu-fp4", 4, 8 / 32),
    "fp8 tiles": (quant_spec("fp", 8, "tile", 128, scale_dtype="float32"), "cpu-fp8", 8, None),
}


def made(spec, rows, cols, seed=0):
    """Random codes, and a stored tensor that stands for them."""
    codes = random_codes(spec, (rows, cols), seed)
    return codes, QuantizedTensor("none", spec, (rows, cols), torch.bfloat16, {})


def kernel_of(spec, rows, cols):
    """The one that doesn't decline."""
    query = KernelQuery("linear", "cpu", None, torch.bfloat16, rows, cols, "none", spec, "decode")
    (kernel,) = [kernel for kernel in KERNELS if kernel.reason_against(query) is None]
    return kernel


@pytest.fixture(params=CASES, ids=lambda name: name.replace(" ", "-"))
def case(request):
    return CASES[request.param]


def test_each_has_a_kernel_and_scales_take_as_few_bytes_as_hold_them(case):
    spec, name, bits, scales = case
    kernel = kernel_of(spec, 64, 512)
    assert kernel.name == name
    packed = kernel._pack(*made(spec, 64, 512))
    assert packed.weights.numel() * 8 == bits * 64 * 512
    if scales is not None:
        assert (packed.nbytes - packed.weights.numel()) * 8 == scales * 64 * 512
    else:  # a block of rows has one scale for 128 columns
        assert packed.scales.numel() * 128 * packed.weights.numel() // 512 // 64 <= 64 * 512


@pytest.mark.parametrize("shape", [(70, 512), (33, 256)])
def test_rows_are_what_codes_mean(case, shape):
    codes, stored = made(case[0], *shape)
    packed = kernel_of(case[0], *shape)._pack(codes, stored)
    assert torch.equal(packed.rows(torch.arange(shape[0])), formula(codes))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("m", [1, 5, 20])
def test_products_lose_what_activations_do(case, m):
    """Nothing but the rounding of activations, to 8 or 14 bits, and of sums."""
    codes, stored = made(case[0], 128, 512)
    packed = kernel_of(case[0], 128, 512)._pack(codes, stored)
    x = torch.randn(m, 512, generator=torch.Generator().manual_seed(m))
    weight = formula(codes).double()
    size = (x.double().norm(dim=1, keepdim=True) * weight.norm(dim=1)).norm()
    error = float((multiply(x, packed).double() - x.double() @ weight.T).norm() / size)
    assert error < {"bytes": 8e-3, "words": 2e-4, "floats": 1e-6}[packed.kernel.decoder.family.name]


@pytest.mark.parametrize("name", ["q4_0", "q4_k", "iq4_nl", "nvfp4", "mxfp4", "mlx 4"])
def test_activations_of_8_bits_cost_a_tenth_of_what_4_bit_weights_do(name):
    """Each grid's own rounding of normal weights, beside that of activations: int4's share, or less."""
    spec = CASES[name][0]
    weight = torch.randn(64, 512, generator=torch.Generator().manual_seed(0)) * 0.02
    codes = RTN.quantize(weight, None, spec, RTN.options())
    packed = kernel_of(spec, 64, 512)._pack(codes, made(spec, 64, 512)[1])
    x = torch.randn(64, 512, generator=torch.Generator().manual_seed(1))
    rounded = x.double() @ formula(codes).double().T
    of_weights = (rounded - x.double() @ weight.double().T).norm()
    of_activations = (multiply(x, packed).double() - rounded).norm()
    assert of_activations < 0.1 * of_weights


def test_a_row_does_not_depend_on_the_others(case):
    codes, stored = made(case[0], 65, 512)
    packed = kernel_of(case[0], 65, 512)._pack(codes, stored)
    x = torch.randn(40, 512, generator=torch.Generator().manual_seed(1))
    alone = torch.cat([multiply(row, packed) for row in x.split(1)])
    for count in (2, 3, 8, 9, 16, 17, 40):
        assert torch.equal(multiply(x[:count], packed), alone[:count])


@pytest.mark.parametrize(("spec", "shape", "bound"), [
    (quant_spec("int", 4, "group", 16, symmetric=False), (40, 80), 1e-2),
    (quant_spec("fp", 8, "tile", 128, scale_dtype="float32"), (200, 300), 1e-6)],
    ids=["half a subgroup more", "tiles at the edges"])
def test_columns_that_fill_nothing(spec, shape, bound):
    codes, stored = made(spec, *shape)
    packed = kernel_of(spec, *shape)._pack(codes, stored)
    x = torch.randn(9, shape[1], generator=torch.Generator().manual_seed(0))
    exact = x.double() @ formula(codes).double().T
    assert (multiply(x, packed).double() - exact).norm() < bound * exact.norm()
    assert torch.equal(packed.rows(torch.arange(shape[0])), formula(codes))


@pytest.mark.parametrize("name", ["q4_k", "q6_k", "nvfp4", "mxfp4", "q4_1"])
def test_scales_that_are_not_what_the_spec_says_are_kept_in_32_bits(name):
    """Nothing is rounded, whatever a file holds."""
    spec = CASES[name][0]
    codes, stored = made(spec, 32, 256)
    codes = dataclasses.replace(codes, scale=codes.scale * (1 + 2**-20))
    packed = kernel_of(spec, 32, 256)._pack(codes, stored)
    assert packed.kernel.scales.stored == "f32" and packed.outer is None
    assert torch.equal(packed.rows(torch.arange(32)), formula(codes))


def test_superblocks_and_groups_whose_scale_is_zero():
    spec = CASES["q4_k"][0]
    codes, stored = made(spec, 32, 512)
    codes.outer[:, 0] = codes.scale[:, :8] = 0
    codes.scale[:, 9] = 0
    packed = kernel_of(spec, 32, 512)._pack(codes, stored)
    assert packed.kernel.scales.stored == "u8"
    assert torch.equal(packed.rows(torch.arange(32)), formula(codes))


def test_empty_groups_of_mxfp4_keep_their_byte():
    """Their scale is the smallest power of 2, whose half has none."""
    spec = CASES["mxfp4"][0]
    codes, stored = made(spec, 32, 64)
    codes.scale[0, 0], codes.codes[0, :32] = 2.0**-127, 8
    packed = kernel_of(spec, 32, 64)._pack(codes, stored)
    assert packed.kernel.scales.stored == "e8m0"
    assert torch.equal(packed.rows(torch.arange(32)), formula(codes))
    codes.codes[0, 0] = 1
    assert kernel_of(spec, 32, 64)._pack(codes, stored).kernel.scales.stored == "f32"


@pytest.mark.parametrize(("spec", "reason"), [
    (quant_spec("int", 4, "group", 48), "groups of 16 or a multiple of 32"),
    (quant_spec("fp", 8, "tile", 48, scale_dtype="float32"), "tiles of a multiple of 32"),
    (quant_spec("fp", 8, "tile", 16, scale_dtype="float32"), "tiles of a multiple of 32"),
    (quant_spec("fp", 8, "tile", 128, scale_dtype="float32", activations="group"), "rounds activations"),
    (quant_spec("fp", 4, "group", 16, scale_dtype="e4m3", activations="group"), "leaves activations"),
    (quant_spec("int", 4, "group", 32, superblock=256, scale_bits=8), "divisible by 256")], ids=str)
def test_what_none_of_them_multiplies(spec, reason):
    query = KernelQuery("linear", "cpu", None, torch.bfloat16, 64, 96, "none", spec, "decode")
    reasons = [kernel.reason_against(query) for kernel in KERNELS]
    assert None not in reasons and any(reason in text for text in reasons)
