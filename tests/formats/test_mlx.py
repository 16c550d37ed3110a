"""MLX's affine layout: exact, refusals that say what to do, and mlx as the oracle."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from quantkit.formats.base import Codes
from quantkit.formats.mlx import BITS, FORMAT, GROUPS
from quantkit.formats.spec import Granularity, QuantSpec
from quantkit.support.errors import CheckpointError, SpecError
from tests.helpers.mlx_peer import ask_mlx, with_mlx
from tests.helpers.quantized import integer_spec, random_codes


def minimum_spec(bits: int, size: int, scale_dtype: str = "bfloat16") -> QuantSpec:
    return integer_spec(bits, size, False, scale_dtype).model_copy(update={"minimum": True})


def mlx_codes(bits: int, size: int, rows: int, cols: int, minimum: bool, seed: int = 0,
              scale_dtype: str = "bfloat16") -> Codes:
    """Random codes; minima lie on both sides of zero, and half the scales beside them are negative."""
    spec = integer_spec(bits, size, True, scale_dtype)
    codes = random_codes(spec, rows, cols, seed)
    if not minimum:
        return codes
    random = torch.Generator().manual_seed(seed + 1)
    sign = torch.randint(0, 2, codes.scale.shape, generator=random) * 2 - 1
    values = torch.randn(codes.scale.shape, generator=random).to(getattr(torch, scale_dtype)).float()
    return replace(codes, spec=minimum_spec(bits, size, scale_dtype), scale=codes.scale * sign,
                   minimum=values)


def biases(codes: Codes) -> np.ndarray:
    return (codes.scale * -2.0 ** (codes.spec.bits - 1) if codes.minimum is None else codes.minimum).numpy()


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("minimum", [False, True])
def test_an_independent_writer_makes_the_same_bytes(numpy_layouts, bits: int, minimum: bool) -> None:
    codes = mlx_codes(bits, 32, 5, 96, minimum, seed=bits, scale_dtype="float16")
    packed = FORMAT.pack(codes, torch.float16)
    expected = numpy_layouts.mlx(codes.codes.numpy(), codes.scale.numpy(), biases(codes), bits)
    assert set(packed.tensors) == set(expected)
    for name, array in expected.items():
        np.testing.assert_array_equal(packed.tensors[name].numpy(), array, err_msg=name)
    grouped = codes.codes.numpy().astype(np.float32).reshape(5, 3, 32)
    weight = grouped * codes.scale.numpy()[..., None] + biases(codes)[..., None]
    np.testing.assert_array_equal(FORMAT.dequantize(packed).numpy(), weight.reshape(5, 96))


def test_layout_by_hand() -> None:
    assert FORMAT.layout(integer_spec(3, 64), (100, 128), torch.bfloat16) == {
        "weight": (torch.uint32, (100, 12)), "scales": (torch.bfloat16, (100, 2)),
        "biases": (torch.bfloat16, (100, 2))}
    spec = QuantSpec(bits=4, granularity=Granularity(strategy="group", size=32))
    packed = FORMAT.pack(Codes(spec, torch.arange(64, dtype=torch.uint8).view(2, 32) % 16, torch.ones(2, 1)),
                         torch.float32)
    assert packed.spec.scale_dtype == "float32" and packed.tensors["biases"].tolist() == [[-8.0], [-8.0]]
    assert [hex(word) for word in packed.tensors["weight"][0].tolist()] == ["0x76543210", "0xfedcba98"] * 2


@pytest.mark.parametrize(("spec", "shape", "words"), [
    (integer_spec(7, 64), (8, 128), "2, 3, 4, 5, 6, 8 bits, not 7"),
    (integer_spec(4, None), (8, 128), "strategy group"),
    (integer_spec(4, 16), (8, 128), "group size 32 or 64 or 128"),
    (integer_spec(4, 48), (8, 96), "use group size 32"),
    (integer_spec(4, 10), (8, 100), "method: null"),
    (integer_spec(4, 64), (8, 96), "doesn't divide"),
    (integer_spec(4, 64), (0, 64), "empty"),
    (integer_spec(4, 64, False), (8, 128), "minimum: true"),
    (QuantSpec(kind="nf", bits=4, granularity=Granularity(strategy="block", size=64)), (8, 64), "bnb-nf4"),
    (QuantSpec(bits=8, granularity=Granularity(strategy="channel"), activations="token"), (8, 64),
     "int-quantized")], ids=str)
def test_what_it_can_not_hold(spec: QuantSpec, shape: tuple[int, int], words: str) -> None:
    assert words in str(FORMAT.reason_against(spec, shape))
    with pytest.raises(SpecError):
        FORMAT.layout(spec, shape, torch.bfloat16)


def test_scales_are_in_the_models_dtype() -> None:
    with pytest.raises(SpecError, match="float16 scales for bfloat16"):
        FORMAT.layout(integer_spec(4, 64, scale_dtype="float16"), (8, 64), torch.bfloat16)


def test_a_bias_beyond_float16_is_refused() -> None:
    codes = mlx_codes(4, 32, 1, 32, False, scale_dtype="float16")
    with pytest.raises(SpecError, match="bias of 80000"):
        FORMAT.pack(replace(codes, scale=torch.full((1, 1), 10_000.0)), torch.float16)


def test_symmetric_weights_have_symmetric_biases() -> None:
    packed = FORMAT.pack(mlx_codes(4, 32, 4, 64, False), torch.bfloat16)
    packed.tensors["biases"][3, 1] = 0.5
    with pytest.raises(CheckpointError, match="symmetric"):
        FORMAT.unpack(packed)
    assert torch.isfinite(FORMAT.rows(packed, torch.tensor([0, 2]))).all()


@with_mlx
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("size", GROUPS)
def test_mlx_packs_and_reads_the_same(tmp_path, bits: int, size: int) -> None:
    """Of its own tensors, the words are ours too; of ours, it reads the weights that we do, bit for bit."""
    weight = torch.randn(6, 256, generator=torch.Generator().manual_seed(bits)).numpy()
    for name in ("bfloat16", "float16"):
        dtype = getattr(torch, name)
        theirs = {key: torch.from_numpy(array) for key, array in ask_mlx(
            tmp_path, "quantize", weight=weight, bits=bits, size=size, dtype=name).items()}
        stored = {key: tensor if key == "weight" else tensor.to(dtype) for key, tensor in theirs.items()}
        spec = minimum_spec(bits, size, name)
        template = FORMAT.pack(mlx_codes(bits, size, 6, 256, True, scale_dtype=name), dtype)
        packed = replace(template, spec=spec, tensors=stored, cache={})
        again = FORMAT.pack(FORMAT.unpack(packed), dtype)
        assert all(torch.equal(again.tensors[key], tensor) for key, tensor in stored.items())
        for minimum in (False, True):
            ours = FORMAT.pack(mlx_codes(bits, size, 6, 256, minimum, bits, name), dtype)
            plain = {key: (tensor if key == "weight" else tensor.float()).numpy()
                     for key, tensor in ours.tensors.items()}
            read = ask_mlx(tmp_path, "dequantize", bits=bits, size=size, **plain)["weight"]
            np.testing.assert_array_equal(read, FORMAT.dequantize(ours).numpy())
