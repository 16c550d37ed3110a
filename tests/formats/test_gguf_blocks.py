"""llama.cpp's blocks against gguf-py's reader and writer of them, which llama.cpp's authors wrote."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize, quantize
from hypothesis import given, settings
from hypothesis import strategies as st

from quantkit.formats import gguf_blocks
from quantkit.formats.base import Codes
from quantkit.formats.spec import Granularity, QuantSpec
from quantkit.plugins.manager import registry
from quantkit.quantization.methods.rounding import RTN
from quantkit.support.errors import SpecError
from quantkit.testing.contract import same_bits
from quantkit.testing.formats import random_codes

TYPES = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL")


def form_of(name: str) -> gguf_blocks.GgufFormat:
    form: gguf_blocks.GgufFormat = registry("formats").get(f"gguf-{name.lower()}")
    return form


@pytest.mark.parametrize("name", TYPES)
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32), rows=st.integers(1, 5), blocks=st.integers(1, 3))
def test_gguf_reads_what_we_pack(name: str, seed: int, rows: int, blocks: int) -> None:
    form = form_of(name)
    codes = random_codes(form.spec, (rows, blocks * form.block), seed)
    packed = form.pack(codes, torch.bfloat16)
    kind = gguf.GGMLQuantizationType[name]
    assert gguf.GGML_QUANT_SIZES[kind] == (form.block, form.block_bytes)
    theirs = torch.from_numpy(dequantize(packed.tensors["blocks"].numpy(), kind).copy())
    ours = form.dequantize(packed)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-9)
    if codes.minimum is None:
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", TYPES)
def test_unpacking_gives_back_the_codes(name: str) -> None:
    form = form_of(name)
    codes = random_codes(form.spec, (7, 2 * form.block), 3)
    back = form.unpack(form.pack(codes, torch.float32))
    for part in ("codes", "scale", "minimum", "outer", "outer_minimum"):
        ours, theirs = getattr(back, part), getattr(codes, part)
        assert (ours is None) == (theirs is None)
        assert ours is None or same_bits(ours + 0, theirs + 0), part


@pytest.mark.parametrize("name", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_blocks_that_gguf_makes_are_read(name: str) -> None:
    weight = torch.randn(4, 96, generator=torch.Generator().manual_seed(1)).numpy()
    kind = gguf.GGMLQuantizationType[name]
    blocks = quantize(weight, kind)
    form = form_of(name)
    packed = form.pack(random_codes(form.spec, (4, 96)), torch.float32)
    theirs = type(packed)(packed.format, packed.spec, (4, 96), torch.float32,
                          {"blocks": torch.from_numpy(np.ascontiguousarray(blocks))})
    torch.testing.assert_close(form.dequantize(theirs), torch.from_numpy(dequantize(blocks, kind).copy()),
                               rtol=1e-6, atol=1e-9)
    again = form.pack(form.unpack(theirs), torch.float32)
    assert same_bits(again.tensors["blocks"], theirs.tensors["blocks"])


@pytest.mark.parametrize("name", ["Q8_0", "Q4_0", "Q5_0"])
def test_rounding_is_as_close_as_ggufs(name: str) -> None:
    weight = torch.randn(16, 128, generator=torch.Generator().manual_seed(2))
    form, kind = form_of(name), gguf.GGMLQuantizationType[name]
    ours: Codes = RTN.run(weight, None, form.spec, RTN.options(clip_search=True))
    theirs = torch.from_numpy(dequantize(quantize(weight.numpy(), kind), kind).copy())
    error = form.dequantize(form.pack(ours, torch.float32)) - weight
    assert error.square().sum() < (theirs - weight).square().sum()


def test_rows_are_decoded_alone() -> None:
    form = form_of("Q6_K")
    packed = form.pack(random_codes(form.spec, (9, 256)), torch.bfloat16)
    ids = torch.tensor([8, 0, 3])
    assert torch.equal(form.rows(packed, ids), form.dequantize(packed)[ids])


def test_other_weights_are_refused() -> None:
    form = form_of("Q4_K")
    reason = form.reason_against(form.spec, (8, 576))
    assert "blocks of 256, which don't divide in_features 576" in str(reason)
    other = QuantSpec(bits=4, granularity=Granularity(strategy="group", size=32))
    assert "holds int4 g32 min s6" in str(form.reason_against(other, (8, 256)))
    with pytest.raises(SpecError, match="can't hold"):
        form.layout(other, (8, 256), torch.bfloat16)
