"""Codes of every grid as Triton's kernels pack them, alone and several weights one below the other."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from quantkit.ops import gpu, triton_linear
from quantkit.ops.dispatch import KernelQuery
from quantkit.runtime.gpu.linears import _side_by_side
from quantkit.runtime.memory.weights import _tile_bytes
from quantkit.testing.formats import formula, random_codes
from tests.helpers.quantized import quant_spec, trellis_spec

KERNELS = (triton_linear.W8, triton_linear.W4, triton_linear.NF, triton_linear.FP, triton_linear.INT,
           triton_linear.FP4, triton_linear.FP4A4, triton_linear.IQ4, triton_linear.TRELLIS)


def minima(bits, size, dtype="bfloat16", **more):
    return quant_spec("int", bits, "group", size, symmetric=False, minimum=True, scale_dtype=dtype, **more)


CASES = {
    # the spec, its kernel, and bits of scales a weight
    "q8_0": (quant_spec("int", 8, "group", 32, signed=True, scale_dtype="float16"), "triton-w8a16", 0.5),
    "q5_0": (quant_spec("int", 5, "group", 32, signed=True, scale_dtype="float16"), "triton-w8a16", 0.5),
    "q4_0": (quant_spec("int", 4, "group", 32, signed=True, scale_dtype="float16"), "triton-w4a16", 1),
    "q4_1": (minima(4, 32, "float16"), "triton-w4a16", 1),
    "q4_k": (minima(4, 32, "float16", superblock=256, scale_bits=6), "triton-w4a16", 0.625),
    "q5_k": (minima(5, 32, "float16", superblock=256, scale_bits=6), "triton-w8a16", 0.625),
    "q6_k": (quant_spec("int", 6, "group", 16, scale_dtype="float16", superblock=256, scale_bits=8),
             "triton-w8a16", 1 + 32 / 512),
    "iq4_nl": (quant_spec("iq", 4, "group", 32, scale_dtype="float16"), "triton-iq4", 0.5),
    "mlx 4": (minima(4, 64, "float16"), "triton-w4a16", 0.5),
    "mlx 8": (minima(8, 64), "triton-w8a16", 0.5),
    "int8 asymmetric": (quant_spec("int", 8, "group", 128, symmetric=False), "triton-w8a16", None),
    "int4 in 16": (quant_spec("int", 4, "group", 16), "triton-w4a16", 1 + 32 / 512),
    "nvfp4": (quant_spec("fp", 4, "group", 16, scale_dtype="e4m3"), "triton-fp4", 0.5 + 32 / 512),
    "mxfp4": (quant_spec("fp", 4, "group", 32, scale_dtype="e8m0"), "triton-fp4", 0.25),
    **{f"trellis {bits}": (trellis_spec(bits, 8), "triton-trellis", None) for bits in (2, 3, 4)},
    "fp8 tiles": (quant_spec("fp", 8, "tile", 128, scale_dtype="float32"), "triton-fp8", 0.25),
}


@pytest.fixture(params=CASES, ids=lambda name: name.replace(" ", "-"))
def case(request):
    return CASES[request.param]


def kernel_of(spec, rows, cols, monkeypatch):
    """The one that doesn't decline."""
    monkeypatch.setattr(gpu, "reason_against", lambda device, dtype: None)
    query = KernelQuery("linear", "cuda", (9, 0), torch.float16, rows, cols, "none", spec, "decode")
    (kernel,) = [kernel for kernel in KERNELS if kernel.reason_against(query) is None]
    return kernel


def near(got, x, weight):
    """At most twice what float16 weights and results lose."""
    exact = x.double() @ weight.double().T
    plain = x @ weight.to(x.dtype).T
    return (got.double() - exact).norm() <= 2 * (plain.double() - exact).norm()


@pytest.mark.sampled(3)
def test_each_has_a_kernel_and_obeys_the_rule(case, monkeypatch):
    from quantkit_kernels.triton.embedding import embed
    from quantkit_kernels.triton.matmul import multiply

    spec, name, bits = case
    kernel, codes = kernel_of(spec, 128, 512, monkeypatch), random_codes(spec, (128, 512))
    assert kernel.name == name
    packed, x = kernel.pack(codes), torch.randn(3, 512, generator=torch.Generator().manual_seed(1)).half()
    if bits is not None:
        assert packed.scale.nbytes * 8 == bits * 128 * 512
    assert near(multiply(x, packed), x, formula(codes))
    rows = embed(torch.tensor([0, 127, 9]), packed, torch.float32)
    torch.testing.assert_close(rows, formula(codes)[[0, 127, 9]], rtol=1e-3, atol=1e-6)


def test_bytes_are_known_before_it_is_packed(case, monkeypatch):
    kernel = kernel_of(case[0], 256, 512, monkeypatch)
    packed = kernel.pack(random_codes(case[0], (256, 512)))
    assert 2 * _tile_bytes(kernel, case[0], 512) == packed.nbytes


@pytest.mark.sampled(3)
def test_weights_one_below_the_other(case, monkeypatch):
    """Of tiles that no row of the second begins; of tensors whose numbers differ."""
    from quantkit_kernels.triton.matmul import multiply

    spec = case[0]
    sizes = (64, 128) if spec.kind == "trellis" else (40, 32)
    kernel = kernel_of(spec, sum(sizes), 256, monkeypatch)
    parts = [random_codes(spec, (rows, 256), seed) for seed, rows in enumerate(sizes)]
    if spec.scale_dtype == "e4m3":
        parts[1] = dataclasses.replace(parts[1], scale=parts[1].scale * 2, outer=parts[1].outer * 2)
    x = torch.randn(4, 256, generator=torch.Generator().manual_seed(1)).half()
    result = multiply(x, kernel.pack(_side_by_side(parts)))
    assert near(result, x, torch.cat([formula(part) for part in parts]))


@pytest.mark.parametrize(("spec", "reason"), [
    (quant_spec("int", 4, "group", 48), "groups of 16, 32, 64"), (minima(4, 16), "groups of 16 without"),
    (quant_spec("fp", 8, "tile", 96, scale_dtype="float32"), "tiles of a multiple of 64"),
    (quant_spec("fp", 4, "group", 16, scale_dtype="e8m0"), "e4m3 scales of groups of 16"),
    (quant_spec("iq", 4, "group", 16, scale_dtype="float16"), "groups of 32 or more"),
    (trellis_spec(3, 12), "a table of 8-bit states"),
    (quant_spec("fp", 4, "group", 256, scale_dtype="e8m0", activations="group"), "groups of up to 128"),
    (quant_spec("fp", 4, "group", 16, scale_dtype="e8m0", activations="group"), "powers of 2 of larger"),
    (quant_spec("fp", 8, "tile", 256, scale_dtype="float32", activations="group"), "tiles of 64 or 128")],
    ids=lambda value: value.label().replace(" ", "-") if hasattr(value, "label") else "")
def test_what_none_of_them_multiplies(spec, reason, monkeypatch):
    monkeypatch.setattr(gpu, "reason_against", lambda device, dtype: None)
    query = KernelQuery("linear", "cuda", (9, 0), torch.float16, 96, 768, "none", spec, "decode")
    reasons = [kernel.reason_against(query) for kernel in KERNELS]
    assert None not in reasons and any(reason in text for text in reasons), reasons
