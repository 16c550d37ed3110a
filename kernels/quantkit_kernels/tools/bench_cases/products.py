"""Matrix products with quantized weights, beside the same with plain ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
import torch.nn.functional as F

from quantkit_kernels.tools.bench_cases.case import HEAD_ROWS, BenchCase, ModelShapes, copies, size
from quantkit_kernels.triton import fp4, fp8, iq4, nf4, w4a4, w4a16, w8a8, w8a16, w16a16
from quantkit_kernels.triton.group_scales import pack_scales, pack_superblocks
from quantkit_kernels.triton.levels import QuantizedActivations, quantize
from quantkit_kernels.triton.matmul import multiply
from quantkit_kernels.triton.packed import TritonWeight
from quantkit_kernels.triton.token_groups import round_groups

Weight = tuple[str, TritonWeight, torch.Tensor]


def cases(shapes: ModelShapes, device: torch.device, dtype: torch.dtype) -> Iterator[BenchCase]:
    """Every Linear of a layer, and the head."""
    for linear in shapes.linears:
        for make in (_plain, _int4, _int4_small, _int4_zeros, _int8, _fp8, _nf4, _nvfp4, _mxfp4, _iq4, _q4_k,
                     _w8a8, _fp8a8, _nvfp4_a4, _mxfp4_a4):
            if make is _q4_k and linear[2] % 256:
                continue  # no superblocks
            yield from _products(shapes, linear, make, device, dtype)


def _plain(n: int, k: int, device: torch.device, dtype: torch.dtype) -> Weight:
    dense = torch.randn(n, k, dtype=dtype, device=device) * 0.02
    return "w16a16", w16a16.pack(dense), dense


def _int4(n: int, k: int, device: torch.device, dtype: torch.dtype, zeros: bool = False,
          group: int = 128) -> Weight:
    codes = torch.randint(0, 16, (n, k), dtype=torch.uint8, device=device)
    scale = (torch.rand(n, k // group, device=device) * 0.01 + 0.01).to(torch.bfloat16).float()
    zero = torch.randint(4, 12, scale.shape, dtype=torch.uint8, device=device) if zeros else None
    middle = 8 if zero is None else zero.to(dtype)[..., None]
    dense = ((codes.to(dtype).view(n, -1, group) - middle) * scale[..., None].to(dtype)).view(n, k)
    return f"w4a16 g{group}{' zp' * zeros}", w4a16.pack(codes, scale, zero), dense


def _int4_small(n: int, k: int, device: torch.device, dtype: torch.dtype) -> Weight:
    return _int4(n, k, device, dtype, group=64)


def _int4_zeros(n: int, k: int, device: torch.device, dtype: torch.dtype) -> Weight:
    return _int4(n, k, device, dtype, True)


def _bytes(n: int, k: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    codes = torch.randint(-127, 128, (n, k), dtype=torch.int8, device=device)
    return codes, torch.rand(n, device=device) * 0.001 + 0.001


def _floats(n: int, k: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    codes = (torch.randn(n, k, device=device) * 100).clamp_(-448, 448).to(torch.float8_e4m3fn)
    return codes, torch.rand(n, device=device) * 0.001 + 0.001


def _int8(n: int, k: int, device: torch.device, dtype: torch.dtype) -> Weight:
    codes, scale = _bytes(n, k, device)
    return "w8a16", w8a16.pack(codes, scale), codes.to(dtype) * scale[:, None].to(dtype)


def _w8a8(n: int, k: int, device: torch.device, dtype: torch.dtype) -> Weight:
    codes, scale = _bytes(n, k, device)
    return "w8a8", w8a8.pack(codes, scale), codes.to(dtype) * scale[:, None].to(dtype)


def _fp8(n: int, k: int, device: torch.device, dtype: torch.dtype) -> Weight:
    codes, scale = _floats(n, k, device)
    return "fp8", fp8.pack(codes, scale), codes.to(dtype) * scale[:, None].to(dtype)


def _fp8a8(n: int, k: int, device: torch.device, dtype: torch.dtype) -> Weight:
    codes, scale = _floats(n, k, device)
    return "fp8 by fp8", w8a8.pack(codes, scale), codes.to(dtype) * scale[:, None].to(dtype)


def _nf4(n: int, k: int, device: torch.device, dtype: torch.dtype) -> Weight:
    codes = torch.randint(0, 16, (n, k), dtype=torch.uint8, device=device)
    absmax = torch.rand(n, k // nf4.BLOCK, device=device) * 0.1 + 0.1
    levels = torch.tensor(nf4.LEVELS, device=device).to(dtype)[codes.int()]
    dense = (levels.view(n, -1, nf4.BLOCK) * absmax[..., None].to(dtype)).view(n, k)
    return "nf4 b64", nf4.pack(codes, absmax.view(-1)), dense


def _nibbles(n: int, k: int, device: torch.device) -> torch.Tensor:
    return torch.randint(0, 16, (n, k), dtype=torch.uint8, device=device)


def _dense(levels: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Levels ``[n, k]`` times scales ``[n, k / group]``."""
    return (levels.unflatten(1, (scale.shape[1], -1)) * scale.to(levels.dtype)[..., None]).flatten(1)


def _e2m1(codes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    levels = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=dtype, device=codes.device)
    return torch.cat((levels, -levels))[codes.int()]


def _nvfp4(n: int, k: int, device: torch.device, dtype: torch.dtype, rounded: bool = False) -> Weight:
    codes = _nibbles(n, k, device)
    scale = (torch.rand(n, k // 16, device=device) * 50 + 50).to(torch.float8_e4m3fn)
    outer, factor = torch.tensor(1e-4, device=device), torch.tensor(64.0, device=device)
    dense = _dense(_e2m1(codes, dtype), scale.float() * outer)
    if rounded:
        return "nvfp4 by nvfp4", w4a4.pack(codes, scale, outer, factor), dense
    return "nvfp4 g16", fp4.pack_fine(codes, scale, outer), dense


def _mxfp4(n: int, k: int, device: torch.device, dtype: torch.dtype, rounded: bool = False) -> Weight:
    codes = _nibbles(n, k, device)
    scale = torch.exp2(torch.randint(-8, -5, (n, k // 32), device=device).float())
    dense = _dense(_e2m1(codes, dtype), scale)
    if rounded:
        return "mxfp4 by mxfp4", w4a4.pack(codes, scale), dense
    return "mxfp4 g32", fp4.pack(codes, scale), dense


def _nvfp4_a4(n: int, k: int, device: torch.device, dtype: torch.dtype) -> Weight:
    return _nvfp4(n, k, device, dtype, True)


def _mxfp4_a4(n: int, k: int, device: torch.device, dtype: torch.dtype) -> Weight:
    return _mxfp4(n, k, device, dtype, True)


def _iq4(n: int, k: int, device: torch.device, dtype: torch.dtype) -> Weight:
    codes = _nibbles(n, k, device)
    scale = (torch.rand(n, k // 32, device=device) * 1e-4 + 1e-4).half().float()
    levels = torch.tensor(iq4.LEVELS, dtype=dtype, device=device)[codes.int()]
    return "iq4 g32", iq4.pack(codes, pack_scales(scale), 32), _dense(levels, scale)


def _q4_k(n: int, k: int, device: torch.device, dtype: torch.dtype) -> Weight:
    codes = _nibbles(n, k, device)
    numbers = [(torch.rand(n, k // 256, device=device) * 1e-4 + 1e-4).half() * sign for sign in (1, -7.5)]
    multiples = [torch.randint(20, 64, (n, k // 32), device=device) for _ in numbers]
    scale, minimum = (count * number.float().repeat_interleave(8, 1)
                      for count, number in zip(multiples, numbers))
    dense = codes.unflatten(1, (k // 32, 32)) * scale[..., None] + minimum[..., None]
    packed = w4a16.pack_minima(codes, pack_superblocks(multiples, numbers), 32)
    return "q4_k g32", packed, dense.flatten(1).to(dtype)


def _products(shapes: ModelShapes, linear: tuple[str, int, int], make: Callable[..., Weight],
              device: torch.device, dtype: torch.dtype) -> Iterator[BenchCase]:
    name, n, k = linear
    kernel, packed, dense = make(n, k, device, dtype)
    again = (replace(packed, words=packed.words.clone(), scale=None if packed.scale is None else
                     packed.scale.clone()) for _ in range(copies(shapes, packed.nbytes) - 1))
    packs = [packed, *again]
    denses = [dense] + [dense.clone() for _ in range(copies(shapes, size(dense)) - 1)]
    for m in shapes.rows:
        if name == "head" and m > HEAD_ROWS:
            continue
        x = torch.randn(m, k, dtype=dtype, device=device)
        operand: torch.Tensor | QuantizedActivations = x
        if packed.decoder.levels:  # torch is given what the levels say
            if packed.inputs is None:
                operand = values = quantize(x, packed.decoder.takes[0])
            else:
                operand = round_groups(x, packed.inputs)
                values = round_groups(x, replace(packed.inputs, packed=0))
            x = (values.values.float() * values.scale[:, None]).to(dtype)
        moved = size(operand.values if isinstance(operand,
                                                  QuantizedActivations) else x) + m * n * x.element_size()

        def ours(at: int, x: torch.Tensor | QuantizedActivations = operand) -> torch.Tensor:
            return multiply(x, packs[at])

        def theirs(at: int, x: torch.Tensor = x) -> torch.Tensor:
            return F.linear(x, denses[at])

        yield BenchCase(kernel, f"{name} m{m}", ours, theirs, "matmul", packed.nbytes + moved,
                        size(dense) + size(x) + m * n * x.element_size(), 2 * m * n * k, len(packs),
                        len(denses), 0.02)
