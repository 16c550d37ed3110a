"""bitsandbytes' 4-bit NormalFloat layout, with plain or nested block scales.

===========================================  ==================  ==========================
suffix                                       dtype               shape
===========================================  ==================  ==========================
``weight``                                   uint8               ``[ceil(out * in / 2), 1]``
``weight.absmax``                            float32; uint8 if   ``[ceil(out * in / b)]``
                                             nested
``weight.quant_map``                         float32             ``[16]``
``weight.nested_absmax``                     float32             ``[ceil(blocks / 256)]``
``weight.nested_quant_map``                  float32             ``[256]``
``weight.quant_state.bitsandbytes__nf4``     uint8               JSON bytes
===========================================  ==================  ==========================

Weights lie row-major, the even element in the high nibble; a block may cross rows. Nested scales
are ``nested_quant_map[a] * nested_absmax[i // 256] + nested_offset``. QLoRA,
https://arxiv.org/abs/2305.14314.

The JSON of nested scales ends in a number whose text varies in length. It is padded with spaces,
which JSON allows, so that the layout's size is known before the numbers are.
"""

from __future__ import annotations

import json
import math
from typing import Any

import torch

from quantkit.formats.base import Codes, QuantizedTensor
from quantkit.formats.dtypes import dtype_name, resolve
from quantkit.formats.fit import FormatBase, Layout
from quantkit.formats.level_values import CELLS, ZERO, codebook, dynamic_map, nearest_cells
from quantkit.formats.spec import QuantSpec
from quantkit.support.errors import CheckpointError, SpecError
from quantkit.support.strict_json import parse_object

BLOCKS = (32, 64, 128, 256, 512, 1024, 2048, 4096)
NESTED_BLOCK = 256
STATE = "weight.quant_state.bitsandbytes__nf4"
_OFFSET_WIDTH = 24  # the longest text of a float32 value, with a sign


class BnbNF4Format(FormatBase):
    name = "bnb-nf4"
    quant_method = "bitsandbytes"
    converts_scales = True

    def reason_against(self, spec: QuantSpec, shape: tuple[int, int]) -> str | None:
        """Anything but NF4, and block sizes that bitsandbytes doesn't know."""
        if spec.kind != "nf":
            other = "pack-quantized" if spec.kind == "int" else "float-quantized"
            return f"{self.name} holds NF4 codes, not {spec.kind}; use format {other}"
        if shape[0] < 1 or shape[1] < 1:
            return f"a weight of shape {list(shape)} is empty; keep it out with method: null"
        size = spec.granularity.size
        if size not in BLOCKS:
            best = min(BLOCKS, key=lambda b: abs(b - (size or 0)))
            return f"block size {size} is not one of {', '.join(map(str, BLOCKS))}; use {best}"
        return None

    def stored_layout(self, spec: QuantSpec, shape: tuple[int, int], dtype: torch.dtype) -> Layout:
        (blocks,) = spec.scale_shape(shape)
        tensors: Layout = {
            "weight": (torch.uint8, (-(-shape[0] * shape[1] // 2), 1)),
            "weight.absmax": (torch.uint8 if spec.nested else torch.float32, (blocks,)),
            "weight.quant_map": (torch.float32, (16,))}
        if spec.nested:
            tensors["weight.nested_absmax"] = (torch.float32, (-(-blocks // NESTED_BLOCK),))
            tensors["weight.nested_quant_map"] = (torch.float32, (256,))
        state = quant_state(spec, shape, dtype, 0.0 if spec.nested else None)
        tensors[STATE] = (torch.uint8, (len(state),))
        return tensors

    def stored_tensors(self, codes: Codes, layout: Layout, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Codes → nibbles; nested scales are rounded to 8 bits here, as bitsandbytes does.

        Raises:
            SpecError: the mean of nested scales overflows.
        """
        spec, shape = codes.spec, (codes.codes.shape[0], codes.codes.shape[1])
        flat = codes.codes.reshape(-1)
        if flat.numel() % 2:
            flat = torch.nn.functional.pad(flat, (0, 1), value=ZERO)
        tensors = {"weight": ((flat[::2] << 4) | flat[1::2]).unsqueeze(1),
                   "weight.absmax": codes.scale.to(torch.float32),
                   "weight.quant_map": codebook().to(flat.device)}
        offset = None
        if spec.nested:
            mean = codes.scale.mean()
            offset = mean.item()
            if not math.isfinite(offset):
                raise SpecError("the mean of the block scales overflows float32", next="nested: false")
            tensors["weight.absmax"], tensors["weight.nested_absmax"] = _nest(codes.scale - mean)
            tensors["weight.nested_quant_map"] = dynamic_map().to(flat.device)
        state = quant_state(spec, shape, dtype, offset)
        tensors[STATE] = torch.frombuffer(bytearray(state), dtype=torch.uint8)
        return tensors

    def unpack(self, packed: QuantizedTensor) -> Codes:
        """Nibbles → codes, exactly those that were packed; nested scales come back as rounded.

        Raises:
            CheckpointError: the quantization state contradicts the weight's spec, shape or dtype.
        """
        nibbles = packed.tensors["weight"].reshape(-1)
        rows, cols = packed.shape
        codes = torch.stack((nibbles >> 4, nibbles & 15), dim=-1).reshape(-1)[: rows * cols]
        return Codes(resolve(packed.spec, packed.dtype), codes.reshape(rows, cols), self._absmax(packed))

    def dequantize(self, packed: QuantizedTensor) -> torch.Tensor:
        """``codebook[code] * absmax`` in float32 ``[out, in]``; raises as :meth:`unpack` does."""
        rows, cols = packed.shape
        count, block = rows * cols, packed.spec.granularity.size or 1
        absmax = self._absmax(packed)
        table = packed.tensors["weight.quant_map"]
        # one lookup yields the pair that a byte holds, as one 64-bit number: a plain index_select of
        # numbers is ten times as fast as one of rows
        pairs = torch.stack((table.repeat_interleave(16), table.repeat(16)), dim=-1).view(torch.int64)
        values = pairs.reshape(-1).index_select(0, packed.tensors["weight"].reshape(-1).to(torch.int32))
        weight = values.view(torch.float32)[:count]
        full = count // block * block
        weight[:full].view(-1, block).mul_(absmax[: full // block].unsqueeze(1))
        if full < count:
            weight[full:] *= absmax[-1]
        return weight.reshape(rows, cols)

    def rows(self, packed: QuantizedTensor, ids: torch.Tensor) -> torch.Tensor:
        """Only these rows of the weight, float32 ``[n, in]``; raises what :meth:`unpack` raises."""
        columns = packed.shape[1]
        at = ids.unsqueeze(1) * columns + torch.arange(columns, device=ids.device)
        pair = packed.tensors["weight"].reshape(-1)[at // 2]
        nibble = torch.where(at % 2 == 0, pair >> 4, pair & 15).to(torch.int64)
        if "offset" not in packed.cache:  # reading it waits for the device
            packed.cache["offset"] = _read_state(packed)
        offset: Any = packed.cache["offset"]
        block = at // (packed.spec.granularity.size or 1)
        scale = packed.tensors["weight.absmax"][block]
        if offset is not None:
            outer = packed.tensors["weight.nested_absmax"][block // NESTED_BLOCK]
            scale = packed.tensors["weight.nested_quant_map"][scale.to(torch.int32)] * outer + offset
        return packed.tensors["weight.quant_map"][nibble] * scale

    def _absmax(self, packed: QuantizedTensor) -> torch.Tensor:
        offset = _read_state(packed)
        absmax = packed.tensors["weight.absmax"]
        if offset is None:
            return absmax.to(torch.float32)
        values = packed.tensors["weight.nested_quant_map"][absmax.to(torch.int32)]
        outer = packed.tensors["weight.nested_absmax"].repeat_interleave(NESTED_BLOCK)[: values.numel()]
        return values * outer + offset


def _nest(centered: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 ``[n]`` → (uint8 ``[n]`` into the dynamic map, float32 ``[ceil(n / 256)]`` maxima).

    bitsandbytes' CPU code rounds to one of 65536 equal cells before it looks for the nearest entry;
    doing the same is what makes the bytes equal.
    """
    count = centered.numel()
    blocks = torch.nn.functional.pad(centered, (0, -count % NESTED_BLOCK)).view(-1, NESTED_BLOCK)
    outer = blocks.abs().amax(dim=1)
    scaled = (blocks * (1 / outer).unsqueeze(1)).nan_to_num_().clamp_(-1, 1)
    cells = ((scaled + 1) * 0.5 * (CELLS - 1) + 0.5).to(torch.int32)
    codes = nearest_cells().to(cells.device)[cells]
    codes[outer == 0] = 0
    return codes.reshape(-1)[:count].contiguous(), outer


def quant_state(spec: QuantSpec, shape: tuple[int, int], dtype: torch.dtype, offset: float | None) -> bytes:
    """What :data:`STATE` holds; ``offset`` is that of nested scales."""
    state: dict[str, object] = {"quant_type": "nf4", "blocksize": spec.granularity.size,
                                "dtype": dtype_name(dtype), "shape": list(shape)}
    if offset is None:
        return json.dumps(state).encode()
    state |= {"nested_blocksize": NESTED_BLOCK, "nested_dtype": "float32", "nested_offset": offset}
    text = json.dumps(state)
    return text.ljust(len(text) - len(json.dumps(offset)) + _OFFSET_WIDTH).encode()


def _read_state(packed: QuantizedTensor) -> float | None:
    """The nested offset, or ``None`` for plain scales, after checking the rest of the state."""
    raw = bytes(packed.tensors[STATE].cpu().numpy())
    try:
        state = parse_object(raw, "it", error=CheckpointError)
        offset = float(state["nested_offset"]) if packed.spec.nested else None
    except (CheckpointError, ValueError, KeyError, TypeError, OverflowError) as error:
        raise CheckpointError(f"{STATE} is not the quantization state of {packed.spec.label()}",
                              why=f"{type(error).__name__}: {error}"[:200]) from error
    expected = json.loads(quant_state(packed.spec, packed.shape, packed.dtype, offset))
    if state != expected or (offset is not None and not math.isfinite(offset)):
        raise CheckpointError(f"{STATE} contradicts the weight it lies beside",
                              why=f"it says {json.dumps(state)[:200]}, the weight is {json.dumps(expected)}")
    return offset


FORMAT = BnbNF4Format()
