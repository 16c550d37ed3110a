"""Matrix products with quantized weights, beside the same with plain ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from quantkit_kernels import tuned
from quantkit_kernels.tools.cases.case import (
    HEAD_ROWS,
    POINTERS,
    AotCase,
    BenchCase,
    BenchSetup,
    absent_pointers,
    aot_case,
    size,
    threads,
)
from quantkit_kernels.tools.cases.rows import GROUPED
from quantkit_kernels.triton import (
    block_scaled,
    dependent,
    dequantize,
    embedding,
    fp4,
    fp8,
    iq4,
    matmul,
    nf4,
    token_groups,
    trellis,
    w4a4,
    w4a16,
    w8a8,
    w8a16,
    w16a16,
)
from quantkit_kernels.triton.fragment import MAGIC, ROWS
from quantkit_kernels.triton.group_scales import pack_scales, pack_superblocks
from quantkit_kernels.triton.levels import QuantizedActivations, quantize
from quantkit_kernels.triton.packed import TritonDecoder, TritonWeight
from quantkit_kernels.triton.token_groups import GroupRounding, round_groups

BF16, FP16 = torch.bfloat16, torch.float16
INT8, E4M3 = torch.int8, torch.float8_e4m3fn
FLOAT32, WORD = torch.float32, torch.int32


class BenchWeight(NamedTuple):
    """The name of a kernel, a weight that it multiplies, and what that stands for."""

    kernel: str
    packed: TritonWeight
    dense: torch.Tensor


def bench_cases(setup: BenchSetup) -> Iterator[BenchCase]:
    """Every Linear of a layer, and the head."""
    for linear in setup.shapes.linears:
        for make in WEIGHTS:
            if make is not _q4_k or linear[2] % 256 == 0:  # else there are no superblocks
                yield from _bench_products(setup, linear, make)


def _codes(setup: BenchSetup, n: int, k: int) -> torch.Tensor:
    """4-bit codes, one a byte."""
    return torch.randint(0, 16, (n, k), dtype=torch.uint8, device=setup.device)


def _scaled(levels: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Levels ``[n, k]`` times scales ``[n, groups]``."""
    return (levels.unflatten(1, (scale.shape[1], -1)) * scale.to(levels.dtype)[..., None]).flatten(1)


def _plain(setup: BenchSetup, n: int, k: int) -> BenchWeight:
    dense = setup.normal(n, k) * 0.02
    return BenchWeight("w16a16", w16a16.pack(dense), dense)


def _int4(setup: BenchSetup, n: int, k: int, group: int = 128, zeros: bool = False) -> BenchWeight:
    codes = _codes(setup, n, k)
    scale = (torch.rand(n, k // group, device=setup.device) * 0.01 + 0.01).to(torch.bfloat16).float()
    zero = torch.randint(4, 12, scale.shape, dtype=torch.uint8, device=setup.device) if zeros else None
    middle = 8 if zero is None else zero.to(setup.dtype).repeat_interleave(group, 1)
    return BenchWeight(f"w4a16 g{group}{' zp' * zeros}", w4a16.pack(codes, scale, zero),
                       _scaled(codes.to(setup.dtype) - middle, scale))


def _eight(setup: BenchSetup, n: int, k: int, kernel: str, pack: Callable[..., TritonWeight],
           floats: bool = False) -> BenchWeight:
    """8 bits, and a scale a row."""
    codes = (torch.randn(n, k, device=setup.device) * 100).clamp_(-448, 448).to(E4M3) if floats else (
        torch.randint(-127, 128, (n, k), dtype=INT8, device=setup.device))
    scale = torch.rand(n, device=setup.device) * 0.001 + 0.001
    return BenchWeight(kernel, pack(codes, scale), _scaled(codes.to(setup.dtype), scale[:, None]))


def _nf4(setup: BenchSetup, n: int, k: int) -> BenchWeight:
    codes = _codes(setup, n, k)
    absmax = torch.rand(n, k // nf4.BLOCK, device=setup.device) * 0.1 + 0.1
    levels = torch.tensor(nf4.LEVELS, device=setup.device).to(setup.dtype)[codes.int()]
    return BenchWeight("nf4 b64", nf4.pack(codes, absmax.view(-1)), _scaled(levels, absmax))


def _e2m1(setup: BenchSetup, codes: torch.Tensor) -> torch.Tensor:
    levels = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=setup.dtype, device=setup.device)
    return torch.cat((levels, -levels))[codes.int()]


def _nvfp4(setup: BenchSetup, n: int, k: int, rounded: bool = False) -> BenchWeight:
    codes, device = _codes(setup, n, k), setup.device
    scale = (torch.rand(n, k // 16, device=device) * 50 + 50).to(E4M3)
    outer, factor = torch.tensor(1e-4, device=device), torch.tensor(64.0, device=device)
    dense = _scaled(_e2m1(setup, codes), scale.float() * outer)
    if rounded:
        return BenchWeight("nvfp4 by nvfp4", w4a4.pack(codes, scale, outer, factor), dense)
    return BenchWeight("nvfp4 g16", fp4.pack_fine(codes, scale, outer), dense)


def _mxfp4(setup: BenchSetup, n: int, k: int, rounded: bool = False) -> BenchWeight:
    codes = _codes(setup, n, k)
    scale = torch.exp2(torch.randint(-8, -5, (n, k // 32), device=setup.device).float())
    dense = _scaled(_e2m1(setup, codes), scale)
    if rounded:
        return BenchWeight("mxfp4 by mxfp4", w4a4.pack(codes, scale), dense)
    return BenchWeight("mxfp4 g32", fp4.pack(codes, scale), dense)


def _iq4(setup: BenchSetup, n: int, k: int) -> BenchWeight:
    codes = _codes(setup, n, k)
    scale = (torch.rand(n, k // 32, device=setup.device) * 1e-4 + 1e-4).half().float()
    levels = torch.tensor(iq4.LEVELS, dtype=setup.dtype, device=setup.device)[codes.int()]
    return BenchWeight("iq4 g32", iq4.pack(codes, pack_scales(scale), 32), _scaled(levels, scale))


def _q4_k(setup: BenchSetup, n: int, k: int) -> BenchWeight:
    codes, device = _codes(setup, n, k), setup.device
    numbers = [(torch.rand(n, k // 256, device=device) * 1e-4 + 1e-4).half() * sign for sign in (1, -7.5)]
    multiples = [torch.randint(20, 64, (n, k // 32), device=device) for _ in numbers]
    scale, minimum = (count * number.float().repeat_interleave(8, 1)
                      for count, number in zip(multiples, numbers))
    dense = codes.unflatten(1, (k // 32, 32)) * scale[..., None] + minimum[..., None]
    return BenchWeight("q4_k g32", w4a16.pack_minima(codes, pack_superblocks(multiples, numbers), 32),
                       dense.flatten(1).to(setup.dtype))


def _trellis(setup: BenchSetup, n: int, k: int, bits: int, shared: bool | None) -> BenchWeight:
    """Of any table: how fast it is looked up doesn't depend on what it says."""
    symbols = torch.randint(0, 2**bits, (-(-n // 64) * 64, k), dtype=torch.uint8, device=setup.device)
    scale = torch.rand(len(symbols), device=setup.device) * 0.001 + 0.001
    levels = tuple(at * 97 % 255 - 127 for at in range(trellis.STATES))
    later = [symbols.unflatten(0, (-1, trellis.RING)).roll(-at, 1).flatten(0, 1).int() for at in range(4)]
    state = sum(symbol << bits * at for at, symbol in enumerate(later)) & trellis.STATES - 1
    dense = torch.tensor(levels, dtype=setup.dtype, device=setup.device)[state]
    packed = trellis.pack(symbols, scale, levels, bits, shared=shared)
    return BenchWeight(f"trellis{packed.mode}", packed, _scaled(dense, scale[:, None]))


WEIGHTS: tuple[Callable[[BenchSetup, int, int], BenchWeight], ...] = (
    _plain, _int4, partial(_int4, group=64), partial(_int4, zeros=True),
    partial(_eight, kernel="w8a16", pack=w8a16.pack),
    partial(_eight, kernel="fp8", pack=fp8.pack, floats=True), _nf4, _nvfp4, _mxfp4, _iq4, _q4_k,
    *(partial(_trellis, bits=bits, shared=shared) for bits in (4, 3, 2) for shared in (False, None)),
    partial(_eight, kernel="w8a8", pack=w8a8.pack),
    partial(_eight, kernel="fp8 by fp8", pack=w8a8.pack, floats=True),
    partial(_nvfp4, rounded=True),
    partial(_mxfp4, rounded=True))


def _bench_products(setup: BenchSetup, linear: tuple[str, int, int],
                    make: Callable[[BenchSetup, int, int], BenchWeight]) -> Iterator[BenchCase]:
    name, n, k = linear
    kernel, packed, dense = make(setup, n, k)
    again = (replace(packed, words=packed.words.clone(), scale=None if packed.scale is None else
                     packed.scale.clone()) for _ in range(setup.copies(packed.nbytes) - 1))
    packs = [packed, *again]
    denses = [dense] + [dense.clone() for _ in range(setup.copies(size(dense)) - 1)]
    for m in setup.shapes.rows:
        if name == "head" and m > HEAD_ROWS:
            continue
        x = setup.normal(m, k)
        operand: torch.Tensor | QuantizedActivations = x
        read = size(x)
        if packed.decoder.levels:  # torch is given what the levels say
            if packed.inputs is None:
                operand = values = quantize(x, packed.decoder.takes[0])
            else:
                operand = round_groups(x, packed.inputs)
                values = round_groups(x, replace(packed.inputs, packed=0))
            read = size(operand.values)
            x = (values.values.float() * values.scale[:, None]).to(setup.dtype)
        written = m * n * x.element_size()

        def ours(at: int, x: torch.Tensor | QuantizedActivations = operand) -> torch.Tensor:
            return matmul.multiply(x, packs[at])

        def theirs(at: int, x: torch.Tensor = x) -> torch.Tensor:
            return F.linear(x, denses[at])

        yield BenchCase(kernel, f"{name} m{m}", ours, theirs, "matmul", packed.nbytes + read + written,
                        size(dense) + size(x) + written, 2 * m * n * k, len(packs), len(denses))


@dataclass(frozen=True)
class ProductFormat:
    """A format: what its ``pack`` makes, for a weight of any shape.

    ``bits``: of a number; ``words``: dtype that they are loaded as; ``scale``: dtype of scales; ``x``: of
    activations; ``most``: instructions a weight with 16 rows of activations; ``layout``: of scales; ``ptx``:
    words that its intermediate code must have.
    """

    name: str
    decoder: TritonDecoder
    bits: int
    bk: int
    group: int = 0
    mode: str = ""
    words: torch.dtype = WORD
    scale: torch.dtype | None = FLOAT32
    x: torch.dtype = BF16
    most: float | None = None
    layout: str = "word"
    ptx: tuple[str, ...] = ()

    def packed(self, n: int, k: int, family: str, gated: bool = False) -> TritonWeight:
        """A packed weight on the meta device, without memory."""
        each = ROWS * self.bk * self.bits // 8 // self.words.itemsize
        words = torch.empty(-(-n // ROWS), -(-k // self.bk), each, dtype=self.words, device="meta")
        scale = None if self.scale is None else torch.empty(0, dtype=self.scale, device="meta")
        return TritonWeight(words, scale, n, k, self.bk, self.group, self.mode, family, self.decoder, gated,
                            self.layout)


class BlockScaledFormat(ProductFormat):
    """A format of 4-bit floats whose loop multiplies codes by codes, and has a layout of its own."""

    def packed(self, n: int, k: int, family: str, gated: bool = False) -> TritonWeight:
        codes, scale = (torch.empty(n, columns, dtype=torch.uint8, device="meta")
                        for columns in (k, k // self.group))
        factor = None if self.scale is None else torch.empty(1, device="meta")
        return block_scaled.pack(codes, scale, factor, GroupRounding(self.group, factor, block_scaled.BK),
                                 family, gated)


BLOCK_SCALED = tuple(
    BlockScaledFormat(GROUPED[group], block_scaled.BLOCKS, 4, block_scaled.BK, group, words=torch.uint8,
                      scale=FLOAT32 if group == token_groups.FINE else None, x=torch.uint8,
                      ptx=(instruction,))
    for group, instruction in ((16, "kind::mxf4nvf4.block_scale"), (32, "kind::mxf4.block_scale")))


def kinds(family: str) -> dict[str, ProductFormat]:
    select = "select" if family == "cdna" else "prmt"
    native = family in ("hopper", "blackwell")
    every = [ProductFormat("w16a16", w16a16.PLAIN, 16, w16a16.BK, mode="plain", words=BF16, scale=None),
             ProductFormat("w8a16", w8a16.INT8, 8, w8a16.BK, mode="row", most=3.8),
             ProductFormat("fp8", fp8.E4M3, 8, fp8.BK, mode="row", most=3.8),
             ProductFormat("nf4", nf4.NF4, 4, 64, 64, select, most=3.5),
             ProductFormat("w8a8", w8a8.INT8, 8, w8a8.BK, mode="int8", words=INT8, x=INT8),
             ProductFormat("fp8a8", w8a8.NATIVE, 8, w8a8.BK, mode="e4m3", words=E4M3, x=E4M3) if native else
             ProductFormat("fp8a8", w8a8.HALF, 8, fp8.BK, mode="row", x=FP16)]
    for group in w4a16.GROUPS:
        # 3.9 is what a 4-bit weight may take where bytes are time; scales and zero points of few columns more
        limits = {128: (2.6, 3.1), 64: (2.6, 3.3), 32: (3.4, 4.4)}[group]
        every += [ProductFormat(f"w4a16 g{group}", w4a16.INT4, 4, group, group, "symmetric", most=limits[0]),
                  ProductFormat(f"w4a16 g{group} zp", w4a16.INT4, 4, group, group, "bfloat16", scale=WORD,
                                most=limits[1])]
    every += _in_groups(select)
    for bits, limit in ((2, 5.4), (3, 5.6), (4, 4.6)):
        looked_up = ProductFormat(f"trellis{bits}", trellis.TRELLIS, bits, trellis.BK, mode=f"{bits}",
                                  layout=trellis.LAYOUT)
        every.append(looked_up)
        if native:
            every.append(replace(looked_up, name=f"trellis{bits} shared", mode=f"{bits} shared", most=limit))
    if family not in w4a4.NATIVE:  # there codes of both are multiplied
        every += [replace(kind, name=f"{kind.name} a4", decoder=decoder) for kind in every
                  for name, decoder in (("mxfp4", w4a4.COARSE), ("nvfp4", w4a4.FINE)) if kind.name == name]
    return {kind.name: kind for kind in every}


def _in_groups(select: str) -> Iterator[ProductFormat]:
    """Minima, scales of few bits, groups of 16, tables and tiles."""
    def four(name: str, decoder: TritonDecoder, group: int, layout: str, mode: str = "") -> ProductFormat:
        words = FLOAT32 if layout in ("fine", "float32") else WORD
        return ProductFormat(name, decoder, 4, min(group, 128) or 64, group, mode or layout, scale=words,
                             layout=layout)

    for group in w4a16.GROUPS:
        yield four(f"w4a16 g{group} min", w4a16.UINT4, group, "bfloat16 low")
    yield four("w4a16 super", w4a16.UINT4, 32, "superblock")
    yield four("w4a16 g16", w4a16.INT4_FINE, 0, "fine", "float16")
    yield four("mxfp4", fp4.E2M1, 32, "e8m0")
    yield four("nvfp4", fp4.E2M1_FINE, 0, "fine", "e4m3")
    yield four("iq4", iq4.IQ4, 32, "float16", select)
    for group, decoder, layout in ((32, w8a16.INT8_GROUPS, "float16"), (64, w8a16.INT8_GROUPS, "bfloat16"),
                                   (64, w8a16.UINT8_GROUPS, "bfloat16 low")):
        yield ProductFormat(f"w8a16 g{group}{' min' if 'low' in layout else ''}", decoder, 8, group, group,
                            layout, scale=WORD, layout=layout)
    yield ProductFormat("w8a16 g16", w8a16.INT8_FINE, 8, w8a16.BK, mode="float16", layout="fine")
    yield ProductFormat("fp8 tiles", fp8.E4M3, 8, fp8.BK, 128, "row")


def aot_cases(family: str) -> Iterator[AotCase]:
    """Few rows and many; groups; both dtypes; a head; every epilogue."""
    known = kinds(family)
    for kind in known.values():
        for m in (16, 64, 2048):
            yield _aot_product(kind, m, family)
    for name in ("w4a16 g128", "w8a16", "nf4", "w16a16"):
        yield _aot_product(known[name], 32, family)
        yield _aot_product(known[name], 16, family, FP16)
    yield _aot_product(known["fp8"], 16, family, FP16)
    for kind in known.values():
        for m in (16, 2048):
            yield _aot_product(kind, m, family, n=28672, gated="silu")
    for name in ("w4a16 g128 zp", "w8a16", "w8a8"):
        yield _aot_product(known[name], 2048, family, full=True)
    yield _aot_product(known["w4a16 g128"], 16, family, n=128256)
    yield _aot_product(known["w8a16"], 16, family, n=128256, k=1000)
    yield _aot_product(known["w16a16"], 16, family, n=128256)
    for name, gated in (("w4a16 g128", None), ("w8a16", "silu"), ("w8a8", "gelu_tanh")):
        yield _aot_product(known[name], 16, family, gated=gated, full=True)
    yield _aot_product(known["w16a16"], 16, family, n=128)
    if family in dependent.FAMILIES:
        for kind in known.values():
            yield _aot_product(kind, 16, family, early=True)
        yield _aot_product(known["w4a16 g128"], 16, family, n=28672, gated="silu", early=True)
    for kind in (*known.values(), *(BLOCK_SCALED if family in w4a4.NATIVE else ())):
        yield _aot_lookup(kind, family)
    for kind in known.values():
        if not kind.decoder.levels or kind.decoder in (w8a8.INT8, w8a8.NATIVE):
            yield _aot_numbers(kind, family)
    yield _aot_numbers(known["w4a16 g128"], family, gated=True)
    yield aot_case("gate", dequantize.gate_kernel,
                   {"x_ptr": "*bf16", "y_ptr": "*bf16", "n": "i32", "x_row": "i32"},
                   {"KIND": "silu", "BLOCK": dequantize.COLUMNS,
                    "num_warps": dequantize.gate_warps(family)}, multiples=("n", "x_row"), wide_loads=2)
    for sums, gated in (("*i32", None), ("*fp32", "silu")):
        yield aot_case(f"finish{' gated' * bool(gated)}", dequantize.finish_kernel,
                       {"sum_ptr": sums, "t_ptr": "*fp32", "s_ptr": "*fp32", "y_ptr": "*bf16",
                        **dict.fromkeys(("m", "n", "r_row", "y_row"), "i32")},
                       {"b_ptr": None, "r_ptr": None, "NPAD": 28672, "GATED": gated, "BLOCK": 1024,
                        "num_warps": 4}, multiples=("n", "r_row", "y_row"), wide_loads=1)
    for kind in BLOCK_SCALED if family in w4a4.NATIVE else ():
        for m in (16, 32, 64, 2048):
            yield _aot_product(kind, m, family)
            yield _aot_product(kind, m, family, n=28672, gated="silu")
        yield _aot_product(kind, 2048, family, full=True)
        yield _aot_product(kind, 16, family, early=True)


def _aot_lookup(kind: ProductFormat, family: str) -> AotCase:
    scale = ({} if kind.scale is None else {"s_ptr": POINTERS[kind.scale]}) | _table(kind)
    return aot_case(f"embed {kind.name}", embedding.embed_kernel,
                    {"ids_ptr": "*i64", "w_ptr": POINTERS[kind.words], "y_ptr": "*bf16", "y_row": "i32",
                     **scale},
                    {**{key: None for key in ("s_ptr", "table_ptr") if key not in scale}, "num_warps": 4,
                     **embedding.constants(kind.packed(128256, 4096, family))}, multiples=("y_row",))


def _aot_numbers(kind: ProductFormat, family: str, gated: bool = False) -> AotCase:
    weight = kind.packed(28672, 4096, family, gated)
    scale = ({} if kind.scale is None else {"s_ptr": POINTERS[kind.scale]}) | _table(kind)
    y = "*bf16"
    if kind.decoder.levels:  # as they are
        scale, y = {}, POINTERS[kind.x]
    constants = dequantize.constants(weight)
    each = threads({"num_warps": int(str(constants["num_warps"]))}, family)
    return aot_case(f"dequantize {kind.name}{' gated' * gated}", dequantize.dequantize_kernel,
                    {"w_ptr": POINTERS[kind.words], "y_ptr": y, "n": "i32", "magic": "i32", **scale},
                    {**{key: None for key in ("s_ptr", "table_ptr") if key not in scale}, **constants},
                    multiples=("n",), wide_loads=max(1, ROWS * kind.bk * kind.bits // 8 // each // 16))


def _epilogue(kind: ProductFormat, full: bool) -> dict[str, str]:
    """Types of the epilogue's arguments that are given."""
    pointers = {"t_ptr": "*fp32"} if kind.decoder.levels else {}
    if kind.scale is not None:
        pointers["s_ptr"] = POINTERS[kind.scale]
    return pointers | ({"b_ptr": "*bf16", "r_ptr": "*bf16"} if full else {})


def _table(kind: ProductFormat) -> dict[str, str]:
    """The type of the table that levels are looked up in."""
    return {"table_ptr": "*i16"} if kind.layout == trellis.LAYOUT else {}


def _aot_product(kind: ProductFormat, m: int, family: str, dtype: torch.dtype | None = None, n: int = 4096,
                 k: int = 4096, gated: str | None = None, full: bool = False, early: bool = False) -> AotCase:
    """``full``: with bias and residual."""
    x = dtype or kind.x
    weight = kind.packed(n, k, family, gated is not None)
    with tuned.trial({"pdl": 1}) if early else nullcontext():
        plan, constants = matmul.arguments(weight, m)
    pointers = {"x_ptr": POINTERS[x], "w_ptr": POINTERS[x if kind.words == BF16 else kind.words],
                "y_ptr": POINTERS[BF16 if kind.decoder.levels else x]}
    pointers |= _epilogue(kind, full) | _table(kind)
    if plan.split:
        pointers |= {"part_ptr": "*i32" if x == INT8 else "*fp32", "count_ptr": "*i32"}
    each = threads(plan.options, family)
    turn = ROWS * kind.bk * plan.unroll
    about: dict[str, Any] = {"wide_loads": turn * kind.bits // 8 // each // 16, "weights": turn / each,
                             "most": kind.most if m == 16 and dtype is None else None}
    if kind.ptx:  # nothing is decoded in registers
        about = {"wide_loads": weight.words.shape[2] // each // 32, "ptx": kind.ptx}
    label = " fp16" * (dtype == FP16) + " gated" * bool(gated) + " all" * full + " early" * early
    shape = "" if n in (4096, 28672) else f" {n}x{k}"
    integers = ("m", "n", "x_row", "r_row", "y_row", "magic")
    kernel = kind.decoder.product or matmul.matmul_kernel
    return aot_case(f"{kind.name} m{m}{label}{shape}", kernel,
                    {**pointers, **dict.fromkeys(integers, "i32")},
                    {**absent_pointers(kernel, pointers), **constants, "GATED": gated, **plan.options},
                    matrix=True,
                    multiples=tuple(key for key in integers
                                    if key != "m" and (key != "magic" or MAGIC.get(x, 0) % 16 == 0)), **about)
