"""bitsandbytes' NF4 layout: exact, checked on reading, and bitsandbytes as the oracle."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantkit.formats.base import Codes, Format, QuantizedTensor
from quantkit.formats.bnb_nf4 import FORMAT, STATE
from quantkit.formats.level_values import CODEBOOK, dynamic_map
from quantkit.formats.spec import Granularity, QuantSpec
from quantkit.support.errors import CheckpointError, SpecError
from tests.helpers.quantized import nf4_spec, random_codes

SHAPES = [(1, 1), (1, 63), (3, 43), (8, 64), (5, 64), (7, 13), (96, 192), (300, 64)]


def test_is_a_format() -> None:
    assert isinstance(FORMAT, Format)
    assert (FORMAT.name, FORMAT.quant_method) == ("bnb-nf4", "bitsandbytes")


@settings(max_examples=60, deadline=None, derandomize=True)
@given(rows=st.integers(1, 40), cols=st.integers(1, 90), size=st.sampled_from([32, 64, 128]),
       nested=st.booleans(), dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
       seed=st.integers(0, 999))
def test_round_trip(rows: int, cols: int, size: int, nested: bool, dtype: torch.dtype, seed: int) -> None:
    spec = nf4_spec(nested, size)
    codes = random_codes(spec, rows, cols, seed)
    packed = FORMAT.pack(codes, dtype)
    layout = FORMAT.layout(spec, (rows, cols), dtype)
    assert {k: (t.dtype, tuple(t.shape)) for k, t in packed.tensors.items()} == layout
    back = FORMAT.unpack(packed)
    assert torch.equal(back.codes, codes.codes)
    if nested:
        assert float((back.scale - codes.scale).abs().max()) <= 0.02
    else:
        assert torch.equal(back.scale, codes.scale)
    expected = np.array(CODEBOOK, dtype=np.float32)[codes.codes.numpy()].reshape(-1)
    expected = expected * np.repeat(back.scale.numpy(), size)[:rows * cols]
    np.testing.assert_array_equal(FORMAT.dequantize(packed).numpy(), expected.reshape(rows, cols))


def test_layout_by_hand() -> None:
    plain = FORMAT.layout(nf4_spec(False), (100, 130), torch.bfloat16)
    text = '{"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [100, 130]}'
    assert plain == {"weight": (torch.uint8, (6500, 1)), "weight.absmax": (torch.float32, (204,)),
                     "weight.quant_map": (torch.float32, (16,)), STATE: (torch.uint8, (len(text),))}
    nested = FORMAT.layout(nf4_spec(True), (300, 128), torch.bfloat16)
    assert nested["weight.absmax"] == (torch.uint8, (600,))
    assert nested["weight.nested_absmax"] == (torch.float32, (3,))
    assert nested["weight.nested_quant_map"] == (torch.float32, (256,))


def test_high_nibble_is_the_even_element() -> None:
    codes = Codes(nf4_spec(False), torch.tensor([[1, 2, 15]], dtype=torch.uint8), torch.ones(1))
    assert FORMAT.pack(codes, torch.float32).tensors["weight"].tolist() == [[0x12], [0xF7]]


@pytest.mark.parametrize("offset", [1e-30, 0.1, 0.123456789, 1.1754943508222875e-38, 3.4e37, 65504.0])
def test_nested_state_has_one_length_for_every_offset(offset: float) -> None:
    codes = replace(random_codes(nf4_spec(True), 4, 64), scale=torch.full((4,), offset))
    packed = FORMAT.pack(codes, torch.float16)
    assert packed.tensors[STATE].shape == FORMAT.layout(nf4_spec(True), (4, 64), torch.float16)[STATE][1]
    state = json.loads(bytes(packed.tensors[STATE].numpy()))
    assert state["nested_offset"] == pytest.approx(offset, rel=1e-6)
    assert torch.allclose(FORMAT.unpack(packed).scale, codes.scale)


def test_nested_scales_that_overflow_are_refused() -> None:
    codes = replace(random_codes(nf4_spec(True), 4, 64), scale=torch.full((4,), 3.4e38))
    with pytest.raises(SpecError, match="overflows"):
        FORMAT.pack(codes, torch.float32)


def test_tables_are_fresh_tensors() -> None:
    """safetensors refuses tensors that share memory."""
    one, two = (FORMAT.pack(random_codes(nf4_spec(True), 2, 64), torch.float32) for _ in range(2))
    for name in ("weight.quant_map", "weight.nested_quant_map"):
        assert one.tensors[name].data_ptr() != two.tensors[name].data_ptr()


def test_refusals() -> None:
    integer = QuantSpec(bits=4, granularity=Granularity(strategy="channel"))
    assert "pack-quantized" in str(FORMAT.reason_against(integer, (4, 4)))
    assert "use 64" in str(FORMAT.reason_against(nf4_spec(False, 60), (4, 64)))
    assert "empty" in str(FORMAT.reason_against(nf4_spec(False), (0, 64)))
    with pytest.raises(SpecError, match="block size 63"):
        FORMAT.layout(nf4_spec(False, 63), (4, 63), torch.float32)


def damaged(packed: QuantizedTensor, state: bytes) -> QuantizedTensor:
    tensors = {**packed.tensors, STATE: torch.frombuffer(bytearray(state), dtype=torch.uint8)}
    return replace(packed, tensors=tensors)


@pytest.mark.parametrize("state", [
    b"{", b"[]", b"null", b"\xff\xfe", b'{"nested_offset": "x"}', b'{"nested_offset": 1.0}', b"[" * 100_000,
    b'{"quant_type":"nf4","blocksize":64,"dtype":"float32","shape":[4,64],"nested_blocksize":256,'
    b'"nested_dtype":"float32","nested_offset":NaN}'])
@pytest.mark.parametrize("nested", [True, False])
def test_a_damaged_state_is_refused(state: bytes, nested: bool) -> None:
    packed = FORMAT.pack(random_codes(nf4_spec(nested), 4, 64), torch.float32)
    with pytest.raises(CheckpointError, match="quant_state"):
        FORMAT.dequantize(damaged(packed, state))


def test_a_state_of_another_shape_is_refused_and_compact_json_is_read() -> None:
    packed = FORMAT.pack(random_codes(nf4_spec(False), 4, 64), torch.float32)
    state = json.loads(bytes(packed.tensors[STATE].numpy()))
    compact = json.dumps(state, separators=(",", ":")).encode()
    assert torch.equal(FORMAT.dequantize(damaged(packed, compact)), FORMAT.dequantize(packed))
    state["shape"] = [64, 4]
    with pytest.raises(CheckpointError, match="contradicts"):
        FORMAT.unpack(damaged(packed, json.dumps(state).encode()))


def test_dynamic_map_golden() -> None:
    """Its known landmarks: ascending, 256 distinct levels, 0 and 1 among them, no -1."""
    table = dynamic_map()
    assert table.shape == (256,) and bool((table[1:] > table[:-1]).all())
    assert float(table[-1]) == 1.0 and float(table[127]) == 0.0
    assert float(table[0]) == pytest.approx(-0.99296875) and float(table[128]) == pytest.approx(5.5e-7)


@pytest.mark.sampled(20)
@pytest.mark.oracle
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_bitsandbytes_writes_and_reads_the_same(shape: tuple[int, int], nested: bool,
                                                dtype: torch.dtype) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    weight = (torch.randn(shape, generator=torch.Generator().manual_seed(3)) * 0.05).to(dtype)
    theirs, state = functional.quantize_4bit(weight, blocksize=64, quant_type="nf4",
                                             compress_statistics=nested)
    plain = functional.quantize_4bit(weight, blocksize=64, quant_type="nf4")[1]
    nibbles = theirs.reshape(-1)
    levels = torch.stack((nibbles >> 4, nibbles & 15), dim=-1).reshape(-1)[: weight.numel()].reshape(shape)
    packed = FORMAT.pack(Codes(nf4_spec(nested), levels, plain.absmax), dtype)
    assert torch.equal(packed.tensors["weight"], theirs)
    for name, tensor in state.as_dict(packed=True).items():
        ours = packed.tensors[f"weight.{name}"]
        if name.startswith("quant_state"):
            assert json.loads(bytes(ours.numpy())) == json.loads(bytes(tensor.numpy()))
        else:
            assert torch.equal(ours, tensor), name
    stored = {k.removeprefix("weight."): t.clone() for k, t in packed.tensors.items() if k != "weight"}
    read = functional.QuantState.from_dict(stored, torch.device("cpu"))
    read.dtype = torch.float32
    values = functional.dequantize_4bit(packed.tensors["weight"], read)
    assert torch.equal(values.reshape(shape), FORMAT.dequantize(packed))
