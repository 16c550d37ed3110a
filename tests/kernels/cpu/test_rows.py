"""Norm, SiLU and quantization of rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quantkit_kernels.cpu import hadamard
from quantkit_kernels.cpu.program import Program
from quantkit_kernels.cpu.rows import NormAdd, RowKernel
from quantkit_kernels.cpu.weight_decoder import BYTES, E4M3, FLOATS, INT8, SUB, WORDS
from tests.kernels.cpu import reference

FAMILIES = (BYTES, WORDS, FLOATS)
TOKENS = (INT8, E4M3)


def rows_of(m, k, seed=0):
    return torch.randn(m, k, generator=torch.Generator().manual_seed(seed))


def given_rows(source, outlier=None):
    """Rows ``[3, 96]``, a kernel's other arguments for what it makes of them, and that by the reference."""
    x, second, weight = rows_of(3, 96), rows_of(3, 96, 1), rows_of(1, 96, 2)[0]
    if outlier is not None:
        x[1, 7] = outlier
    if source == "plain":
        return x, {}, x.numpy()
    if source == "norm":
        return x, {"weight": weight, "eps": bits(1e-5)}, reference.norm(x.numpy(), weight.numpy(), 1e-5)
    gate = reference.silu_mul if source == "silu" else reference.gelu_mul
    return x, {"second": second}, gate(x.numpy(), second.numpy())


@pytest.mark.sampled(4)
@pytest.mark.parametrize("family", FAMILIES, ids=str)
@pytest.mark.parametrize("source", ["plain", "norm", "silu", "gelu"])
def test_the_bits_of_the_reference(isa, leave, same, source, family):
    x, values, expected = given_rows(source)
    found = leave(isa, RowKernel(source, family), x, **values)
    wanted = [expected] if family is FLOATS else reference.quantize(expected, family)
    for got, want in zip(found, wanted):
        same(got, want)


@pytest.mark.parametrize("family", TOKENS, ids=str)
@pytest.mark.parametrize("source", ["plain", "norm", "silu"])
def test_one_scale_a_row_has_the_bits_of_the_reference(isa, leave, same, source, family):
    x, values, expected = given_rows(source, outlier=1e4)
    codes, scales, sums = leave(isa, RowKernel(source, family), x, **values)
    levels, steps = reference.quantize_row(expected, family)
    same(codes, levels)
    same(scales[:, :1], steps)
    if family is INT8:
        same(sums[:, 0], levels.sum(1))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(scale=st.sampled_from([0.0, 1e-42, 1e-30, 1.0, 1e4, 1e30]), seed=st.integers(0, 50))
def test_e4m3_is_torchs(fastest, leave, scale, seed):
    x = rows_of(1, 64, seed) * scale
    values, scales, _ = leave(fastest, RowKernel("plain", E4M3), x)
    exact = x / scales[:, :1]
    assert torch.equal(values, exact.clamp(-448, 448).to(torch.float8_e4m3fn).float())
    assert scales[0, 0] == max(x.abs().max(), torch.tensor(2.0**-100)) / 448


@pytest.mark.sampled(4)
@pytest.mark.parametrize("family", TOKENS, ids=str)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("at", [0, 40, 63])
def test_a_broken_row_has_no_scale(isa, leave, family, bad, at):
    x = rows_of(2, 64)
    x[0, at] = bad
    _, scales, _ = leave(isa, RowKernel("plain", family), x)
    assert torch.isnan(scales[0, 0]) and torch.isfinite(scales[1, 0])


def bits(x):
    return int(np.float32(x).view(np.int32))


@pytest.mark.parametrize("family", (BYTES, WORDS), ids=str)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(scale=st.sampled_from([0.0, 1e-42, 1e-30, 1.0, 1e4, 1e30]), seed=st.integers(0, 50),
       at=st.integers(0, 31))
def test_no_code_is_off_by_more_than_half_a_step(fastest, leave, family, scale, seed, at):
    x = rows_of(1, 64, seed) * scale
    x[0, at] = 50 * scale  # an outlier in the first subgroup leaves the second as it is
    codes, scales, sums = leave(fastest, RowKernel("plain", family), x)
    assert codes.abs().max() <= family.levels and torch.isfinite(scales).all() and (scales > 0).all()
    back = codes.double().view(-1, SUB) * scales.double().view(-1, 1)
    step = scales.double().view(-1, 1)
    assert ((back - x.double().view(-1, SUB)).abs() <= 0.5001 * step).all()
    sizes = (SUB, SUB // 2)
    assert torch.equal(sums[0], torch.cat([codes.int().view(-1, size).sum(1).int() for size in sizes]))


def test_the_norm_is_torchs(fastest, leave):
    x, weight = rows_of(4, 576), rows_of(1, 576, 3)[0]
    found = leave(fastest, RowKernel("norm", FLOATS), x, weight=weight, eps=bits(1e-6))[0]
    true = torch.nn.functional.rms_norm(x.double(), (576,), weight.double(), 1e-6)
    assert torch.allclose(found.double(), true, rtol=5e-7, atol=1e-7)


def test_what_pads_a_row_is_no_part_of_its_mean(fastest, leave):
    x, weight = (torch.nn.functional.pad(one, (0, 24)) for one in (rows_of(2, 40), rows_of(1, 40)[0]))
    found = leave(fastest, RowKernel("norm", FLOATS), x, weight=weight, eps=bits(1e-6), size=40)[0]
    true = torch.nn.functional.rms_norm(x[:, :40].double(), (40,), weight[:40].double(), 1e-6)
    assert torch.allclose(found[:, :40].double(), true, rtol=1e-6, atol=1e-7) and (found[:, 40:] == 0).all()


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(values=st.lists(st.floats(-120, 120, width=32), min_size=32, max_size=32))
def test_silu_holds_at_any_size(fastest, leave, values):
    x, ones = torch.tensor([values]), torch.ones(1, 32)
    found = leave(fastest, RowKernel("silu", FLOATS), x, second=ones)[0]
    true = torch.nn.functional.silu(x.double())
    assert torch.allclose(found.double(), true, rtol=1e-6, atol=1e-30)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(values=st.lists(st.floats(-120, 120, width=32), min_size=32, max_size=32))
def test_gelu_holds_at_any_size(fastest, leave, values):
    x, ones = torch.tensor([values]), torch.ones(1, 32)
    found = leave(fastest, RowKernel("gelu", FLOATS), x, second=ones)[0]
    true = torch.nn.functional.gelu(x.double(), approximate="tanh")
    assert torch.allclose(found.double(), true, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("size", [16, 40, 576])
def test_a_norm_is_added_to_what_was_there(isa, pools, room, same, size):
    """Whatever the number of threads; what pads a row stays as it is."""
    width = -(-size // 32) * 32
    x, out, weight = (torch.nn.functional.pad(one, (0, width - size)) for one in (
        rows_of(5, size), rows_of(5, size, 1), rows_of(1, size, 2)))
    expected = out[:, :size].numpy() + reference.norm(x[:, :size].numpy(), weight[0, :size].numpy(), 1e-6)
    for threads in (1, 2):
        found = room(5, width)
        found.copy_(out)
        program = Program(isa)
        program.add(NormAdd(), 5, x=x, weight=weight, out=found, x_stride=width * 4, out_stride=width * 4,
                    size=size, eps=bits(1e-6))
        program.finish()
        pools[threads].run(program.records)
        same(found[:, :size], expected)
        assert not found[:, size:].any()


def test_the_exponential_is_near_the_true_one():
    x = torch.linspace(-87, 88, 200_001).numpy()
    true = np.exp(x.astype(np.float64))
    assert (np.abs(reference.exp(x) - true) / true).max() < 2 * 2.0**-23
    assert reference.exp(np.float32([0.0]))[0] == 1 and reference.exp(np.float32([-1e30]))[0] < 2e-38


def test_the_references_fma_rounds_once():
    a, b, c = np.float32(1 + 2**-12), np.float32(1 + 2**-12), np.float32(-1 - 2**-11)
    assert reference.fma(a, b, c) == np.float32(2**-24)
    make = np.random.default_rng(0)
    x, y, z = (make.standard_normal(2000).astype(np.float32) * np.float32(2.0) ** make.integers(-20, 20, 2000)
               for _ in range(3))
    from fractions import Fraction

    for p, q, r, found in zip(x, y, z, reference.fma(x, y, z)):
        exact = Fraction(float(p)) * Fraction(float(q)) + Fraction(float(r))
        near = [found, np.nextafter(found, np.float32(np.inf)), np.nextafter(found, np.float32(-np.inf))]
        assert min(near, key=lambda one: abs(Fraction(float(one)) - exact)) == found


@pytest.mark.sampled(3)
@pytest.mark.parametrize("width", [16, 48, 96, 112, 128])
@pytest.mark.parametrize("source", ["plain", "norm", "silu"])
@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_rotated_rows_have_the_bits_of_the_reference(isa, leave, same, room, source, width, family):
    padded = -(-width // SUB) * SUB
    count, _ = hadamard.parts(width)
    signs, mix = rows_of(1, width, 3)[0].sign(), rows_of(count, count, 4)
    x, second, weight = (torch.nn.functional.pad(one, (0, padded - width))
                         for one in (rows_of(2, width), rows_of(2, width, 1), rows_of(1, width, 2)))
    values = {"plain": {}, "norm": {"weight": weight[0], "eps": bits(1e-5)},
              "silu": {"second": second}}[source]
    found = leave(isa, RowKernel(source, family, width), x, size=width, signs=signs, mix=mix.flatten(),
                  room=room(hadamard.room_bytes(width), dtype=torch.uint8), **values)
    own = x[:, :width].numpy()
    expected = {"plain": lambda: own,
                "norm": lambda: reference.norm(own, weight[0, :width].numpy(), 1e-5),
                "silu": lambda: reference.silu_mul(own, second[:, :width].numpy())}[source]()
    turned = np.pad(reference.turn(expected, signs.numpy(), mix.numpy()), ((0, 0), (0, padded - width)))
    if family is FLOATS:
        same(found[0], turned)
        return
    codes, scales, _ = reference.quantize(turned, family)
    same(found[0], codes)
    same(found[1], scales)
