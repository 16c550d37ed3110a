"""4-bit floats with rounded activations in the GPU runtime, beside the kernel that runs everything."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from quantkit.formats.fp4 import MXFP4, NVFP4
from quantkit.models.linear import Linear
from quantkit.ops import gpu, triton_linear
from quantkit.ops.dispatch import codes_of
from quantkit.ops.hadamard import apply_hadamard
from quantkit.ops.reference import REFERENCE
from quantkit.ops.stored_weight import QuantizedWeight
from quantkit.ops.tokens import round_groups
from quantkit.runtime.gpu.linears import FusedLinear
from quantkit.runtime.memory.weights import gpu_packed_bytes
from quantkit.testing.formats import formula, random_codes
from tests.helpers.quantized import quant_spec

KERNEL, CPU = triton_linear.FP4A4, torch.device("cpu")
NVFP4_SPEC = quant_spec("fp", 4, "group", 16, scale_dtype="e4m3", activations="group")
MXFP4_SPEC = quant_spec("fp", 4, "group", 32, scale_dtype="e8m0", activations="group")


@pytest.fixture(params=["hopper", "blackwell"])
def family(request, monkeypatch):
    """Of the GPU that weights are packed for."""
    from quantkit_kernels.triton import fragment, w4a4

    if torch.cuda.is_available():
        pytest.skip("imitates GPUs on a CPU; where there is one, test_model.py runs whole models on it")
    monkeypatch.setattr(gpu, "SIMULATE", True)
    for module in (fragment, w4a4):
        monkeypatch.setattr(module, "family_of", lambda device: request.param)
    return request.param


@pytest.fixture(params=[(NVFP4, NVFP4_SPEC), (MXFP4, MXFP4_SPEC)], ids=["nvfp4", "mxfp4"])
def stored(request):
    """``stored(rows, columns, seed, times)``: a weight as a checkpoint has it; its inputs' number times."""
    form, spec = request.param

    def make(rows, columns, seed=0, times=1.0):
        codes = random_codes(spec, (rows, columns), seed)
        if codes.input_factor is not None:
            codes = dataclasses.replace(codes, input_factor=codes.input_factor * times)
        return form.pack(codes, torch.float32)

    return make


def drawn(rows, columns):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(1))


def linear_of(name, weight):
    return Linear(name, QuantizedWeight(weight))


@pytest.mark.parametrize("rows", [1, 5])
def test_as_the_reference(family, stored, rows):
    weight, x = stored(40, 320), drawn(rows, 320)
    packed = KERNEL.prepare(weight)
    assert (packed.inputs.packed > 0) == (family == "blackwell")
    expected = REFERENCE.run(x, REFERENCE.prepare(weight))
    torch.testing.assert_close(KERNEL.run(x, packed), expected, rtol=1e-5, atol=1e-5 * expected.abs().max())


def test_bytes_are_known_before_it_is_packed(family, stored):
    for columns in (256, 320):
        weight = stored(200, columns)
        assert gpu_packed_bytes(weight, torch.float32, CPU) == KERNEL.prepare(weight).nbytes


def test_linears_that_round_their_input_alike_are_one_product(family, stored):
    weights = [stored(40, 256, 0), stored(24, 256, 1), stored(24, 256, 2, times=2.0)]
    x = drawn(3, 256)
    for chosen in (weights[:2], weights):
        fused = FusedLinear([linear_of(str(at), weight) for at, weight in enumerate(chosen)], torch.float32,
                            CPU)
        apart = chosen[0].spec == NVFP4_SPEC and len(chosen) == 3
        assert len(fused._parts) == (3 if apart else 1) and fused.takes is None
        assert (fused.inputs is None) == apart
        expected = torch.cat([REFERENCE.run(x, REFERENCE.prepare(weight)) for weight in chosen], 1)
        torch.testing.assert_close(fused(x), expected, rtol=1e-5, atol=1e-5 * expected.abs().max())


def test_a_gate_and_what_it_opens(family, stored):
    weights, x = [stored(72, 256, 0), stored(72, 256, 1)], drawn(2, 256)
    fused = FusedLinear([linear_of(str(at), weight) for at, weight in enumerate(weights)], torch.float32, CPU,
                        "silu")
    gate, up = (REFERENCE.run(x, REFERENCE.prepare(weight)) for weight in weights)
    expected = torch.nn.functional.silu(gate) * up
    torch.testing.assert_close(fused(x), expected, rtol=1e-4, atol=1e-5 * expected.abs().max())
    assert fused.width == 72


def test_inputs_that_are_rotated_before(family):
    spec = MXFP4_SPEC.model_copy(update={"rotation": "hadamard"})
    weight = MXFP4.pack(random_codes(spec, (40, 256)), torch.float32)
    x = drawn(2, 256)
    fused = FusedLinear([linear_of("w", weight)], torch.float32, CPU)
    rotated = round_groups(apply_hadamard(x), spec)
    expected = rotated @ formula(codes_of(weight)).T
    # a level may be the other of two neighbors
    assert (fused(x) - expected).norm() < 0.02 * expected.norm()
