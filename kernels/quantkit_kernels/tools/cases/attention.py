"""Attention over pages; and keys and values in pages, encoded simply, which it is measured over."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton

from quantkit_kernels import reference
from quantkit_kernels.tools.cases.case import (
    AotCase,
    BenchCase,
    BenchSetup,
    absent_pointers,
    aot_case,
    size,
    threads,
)
from quantkit_kernels.triton import attention_weights, decode_attention, dependent, prefill_attention
from quantkit_kernels.triton.attention_arguments import constants, reason_against
from quantkit_kernels.triton.cache import (
    CHANNEL,
    FP8,
    HADAMARD,
    INT8,
    PAGE,
    PLAIN,
    TOKEN,
    LayerPages,
    SequenceTables,
    Side,
    SideLayout,
    StepTokens,
)

HEADS, KV_HEADS = 32, 8
CODINGS = {
    "bf16": (SideLayout(PLAIN, 16), SideLayout(PLAIN, 16)),
    "int8": (SideLayout(INT8, 8), SideLayout(INT8, 8)), "fp8": (SideLayout(FP8, 8), SideLayout(FP8, 8)),
    **{f"int{bits}": (SideLayout(CHANNEL, bits), SideLayout(TOKEN, bits)) for bits in (4, 3, 2)},
    **{f"hadamard{bits}": (SideLayout(HADAMARD, bits, True), SideLayout(HADAMARD, bits))
       for bits in (4, 3, 2)},
    "int8/int4": (SideLayout(INT8, 8), SideLayout(TOKEN, 4))}
"""Of keys and of values."""
MAIN = ("bf16", "int8", "fp8", "int4", "hadamard4")
NARROW = 24
"""Copies of a page's scales, and of what else is small. Codes in copies of 4 bytes are 64 more."""
POINTERS = {"q_ptr": "*bf16", "k_residual_ptr": "*bf16", "v_residual_ptr": "*bf16",
            **dict.fromkeys(("k_scale_ptr", "k_shift_ptr", "v_scale_ptr", "v_shift_ptr", "at_ptr",
                             "residual_at_ptr", "table_ptr", "residual_table_ptr", "start_ptr", "length_ptr",
                             "seen_ptr", "rows_ptr"), "*i32")}
NUMBERS = {**dict.fromkeys(("factor", "cap"), "fp32"),
           **dict.fromkeys(("window", "limit", "sinks", "residual_length", "first", "layer", "layers",
                            "width", "residual_width", "q_step"), "i32")}
CUBIC = 0.240464, 0.00209768
"""Level c of rotated vectors' 4-bit codes is ``u (a + b u²)``, u = c − 7.5."""


def bench_cases(setup: BenchSetup) -> Iterator[BenchCase]:
    """Codings by contexts; a prompt."""
    for coding in MAIN:
        for batch, length in setup.shapes.contexts:
            yield _bench_decode(setup, batch, length, coding)
    for coding in ("bf16", "int8"):
        yield _bench_prefill(setup, max(setup.shapes.rows), coding)


def _labeled(kernel: str, coding: str) -> str:
    return kernel if coding == "bf16" else f"{kernel} {coding}"


def _bench_decode(setup: BenchSetup, batch: int, length: int, coding: str) -> BenchCase:
    dim = setup.shapes.dim
    q = setup.normal(batch, setup.shapes.heads, dim)
    paged = paged_context(setup, batch, length, coding)
    pages_bytes = int(batch * setup.shapes.kv_heads * length * slot_bytes(paged.pages))
    page_sets = [paged.pages] + [cloned(paged.pages) for _ in range(setup.copies(pages_bytes) - 1)]
    kv_bytes = size(paged.k, paged.v)
    theirs = [(paged.k, paged.v)] + [(paged.k.clone(), paged.v.clone())
                                     for _ in range(setup.copies(kv_bytes) - 1)]

    def ours(at: int) -> torch.Tensor:
        return decode_attention.decode_attention(q, page_sets[at], paged.tables, paged.step, 0,
                                                 scale=dim**-0.5)

    def sdpa(at: int) -> torch.Tensor:
        return F.scaled_dot_product_attention(q[:, :, None], *theirs[at], enable_gqa=True)[:, :, 0]

    return BenchCase(_labeled("attention", coding), f"b{batch} {length}", ours, sdpa, "sdpa",
                     pages_bytes + 2 * size(q), kv_bytes + 2 * size(q), 4 * length * q.numel(),
                     len(page_sets), len(theirs), 0.05)


def _bench_prefill(setup: BenchSetup, length: int, coding: str) -> BenchCase:
    shapes = setup.shapes
    q = setup.normal(length, shapes.heads, shapes.dim)
    paged = paged_context(setup, 1, length, coding, new=length)
    tiles = torch.tensor(prefill_attention.tiles_of([0], [length], shapes.heads // shapes.kv_heads),
                         dtype=torch.int32, device=setup.device)

    def ours(at: int) -> torch.Tensor:
        return prefill_attention.prefill_attention(q, paged.pages, paged.tables, paged.step, 0, tiles,
                                                   scale=shapes.dim**-0.5)

    def sdpa(at: int) -> torch.Tensor:
        return F.scaled_dot_product_attention(q.transpose(0, 1)[None], paged.k, paged.v, is_causal=True,
                                              enable_gqa=True)[0].transpose(0, 1)

    moved = int(shapes.kv_heads * length * slot_bytes(paged.pages)) + 2 * size(q)
    return BenchCase(_labeled("prefill", coding), f"m{length}", ours, sdpa, "sdpa", moved,
                     size(paged.k, paged.v) + 2 * size(q), 2 * (length + 1) * q.numel(), tolerance=0.05,
                     cold=False)


class EncodedPages(NamedTuple):
    """Codes, scale and shift as in :class:`~quantkit_kernels.triton.cache.Side`, and what they stand for in
    float32."""

    codes: torch.Tensor
    scale: torch.Tensor | None
    shift: torch.Tensor | None
    decoded: torch.Tensor


def encoded(x: torch.Tensor, coding: SideLayout) -> EncodedPages:
    """``x [P, 64, D]`` in 4 bits or more."""
    wide = x.float()
    if coding.kind == PLAIN:
        return EncodedPages(x, None, None, wide)
    if coding.kind == INT8:
        codes, scale = reference.encode_int8(wide)
        return EncodedPages(codes, scale, None, codes.float() * scale.float()[..., None])
    if coding.kind == FP8:
        scale = (wide.abs().amax(-1) / 440).clamp(min=1e-30).to(torch.bfloat16)
        floats = (wide / scale.float()[..., None]).clamp(-448, 448).to(torch.float8_e4m3fn)
        return EncodedPages(floats.view(torch.uint8), scale, None, floats.float() * scale.float()[..., None])
    if coding.kind == HADAMARD:
        return _hadamard(wide, coding.centered)
    at = -2 if coding.kind == CHANNEL else -1
    groups = wide.unflatten(at, (-1, 32))
    low = groups.amin(at, keepdim=True).to(torch.bfloat16)
    scale = ((groups.amax(at, keepdim=True) - low.float()) / 15).clamp(min=1e-30).to(torch.bfloat16)
    codes = ((groups - low.float()) / scale.float()).round().clamp(0, 15)
    decoded = codes * scale.float() + low.float()
    return EncodedPages(_packed(codes.flatten(at - 1, at)), scale.squeeze(at), low.squeeze(at),
                        decoded.flatten(at - 1, at))


def _hadamard(x: torch.Tensor, centered: bool) -> EncodedPages:
    mean = x.mean(-2).to(torch.bfloat16) if centered else None
    if mean is not None:
        x = x - mean.float()[:, None]
    u = torch.arange(16, device=x.device) - 7.5
    book = u * (CUBIC[0] + CUBIC[1] * u * u)
    scale = x.square().mean(-1).sqrt().to(torch.bfloat16)
    codes = torch.bucketize(x / scale.float()[..., None], (book[1:] + book[:-1]) / 2)
    decoded = book[codes] * scale.float()[..., None]
    return EncodedPages(_packed(codes), scale, mean,
                        decoded if mean is None else decoded + mean.float()[:, None])


def _packed(codes: torch.Tensor) -> torch.Tensor:
    """4-bit codes, two a byte, lowest first."""
    low, high = codes.to(torch.uint8).unflatten(-1, (-1, 2)).unbind(-1)
    return low | high << 4


@dataclass(frozen=True)
class PagedContext:
    """What attention is given, and the keys and values as it reads them, ``[B, Hkv, S, D]``."""

    pages: LayerPages
    tables: SequenceTables
    step: StepTokens
    k: torch.Tensor
    v: torch.Tensor


def paged_context(setup: BenchSetup, batch: int, length: int, coding: str, new: int = 1) -> PagedContext:
    """Random keys and values in shuffled pages; of each sequence the last ``new`` tokens are the step's.
    Where codings go by whole pages, the vectors of the last page wait if it isn't full."""
    heads, dim, device = setup.shapes.kv_heads, setup.shapes.dim, setup.device
    codings, each = CODINGS[coding], -(-length // PAGE)
    count = batch * heads * each
    vectors = [setup.normal(batch, heads, length, dim) for _ in codings]
    has_residual = min(layout.bits for layout in codings) < 8
    order = torch.randperm(count, device=device)
    table = order.to(torch.int32).view(batch, 1, heads, each)
    sides, read = [], []
    for x, layout in zip(vectors, codings):
        rows = F.pad(x, (0, 0, 0, each * PAGE - length)).reshape(count, PAGE, dim)
        parts = encoded(rows, layout)
        decoded = parts.decoded.view(batch, heads, -1, dim)[:, :, :length].to(x.dtype)
        if has_residual:
            decoded[:, :, length // PAGE * PAGE:] = x[:, :, length // PAGE * PAGE:]
        sides.append(Side(layout, _placed(parts.codes, order),
                          None if parts.scale is None else _placed(parts.scale, order),
                          None if parts.shift is None else _placed(parts.shift, order),
                          _placed(rows, order) if has_residual else None))
        read.append(decoded)
    # vectors of all slots wait here, those before the last page beside their codes: they aren't read
    before = torch.full((batch, 1, heads), length - new, dtype=torch.int32, device=device)
    tables = SequenceTables(table, before, before[:, 0, 0].clone(), table if has_residual else None,
                            torch.zeros_like(before) if has_residual else None)
    places = [[row, place] for row in range(batch) for place in range(new)]
    step = StepTokens(torch.tensor(places, dtype=torch.int32, device=device), length)
    return PagedContext(LayerPages(sides[0], sides[1]), tables, step, *read)


def _placed(part: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Pages in another order."""
    out = torch.empty_like(part)
    out[order] = part
    return out


def cloned(pages: LayerPages) -> LayerPages:
    """The same elsewhere in memory."""
    def side(of: Side) -> Side:
        return Side(of.coding, of.codes.clone(), *(None if part is None else part.clone()
                                                   for part in (of.scale, of.shift, of.residual)))

    return LayerPages(side(pages.k), side(pages.v))


def slot_bytes(pages: LayerPages) -> float:
    """Bytes of a slot of one head: its codes, and its share of what a page stores beside them."""
    parts = [part for side in (pages.k, pages.v) for part in (side.codes, side.scale, side.shift)]
    return sum(part[0].numel() * part.element_size() for part in parts if part is not None) / PAGE


def aot_cases(family: str) -> Iterator[AotCase]:
    """Head dimensions, codings, windows."""
    for coding in CODINGS:
        for dim in (64, 96, 128, 256) if coding in MAIN else (128,):
            if reason_against(*CODINGS[coding], dim, family) is None:
                yield _aot_decode(dim, coding, family)
                yield _aot_prefill(dim, coding, family)
    for coding in MAIN:
        yield _aot_decode(128, coding, family, limited=True)
        yield _aot_decode(128, coding, family, apart=True)
        yield _aot_prefill(128, coding, family, limited=True)
        yield _aot_weights(128, coding, family)
    for cases_of in (_aot_decode, _aot_prefill):
        yield cases_of(128, "int8", family, limited=True, placed=True)
        yield cases_of(256, "bf16", family, capped=True)
    for cases_of in (_aot_decode, _aot_prefill):
        yield cases_of(64, "bf16", family, sinks=True)
    yield _aot_join(64, family, sinks=True)
    yield _aot_join(128, family)


class _CommonArguments(NamedTuple):
    """What the kernels that read pages have in common."""

    label: str
    signature: dict[str, str]
    constants: dict[str, Any]


def _common(d: int, coding: str, family: str, limited: bool = False, placed: bool = False,
            capped: bool = False) -> _CommonArguments:
    k, v = CODINGS[coding]
    label = f"d{d} {coding}{' SWA' * (limited and not placed)}{' placed' * placed}{' cap' * capped}"
    types = {f"{side}_ptr": "*bf16" if layout.kind == PLAIN else "*i32"
             for side, layout in (("k", k), ("v", v))}
    return _CommonArguments(label, POINTERS | types | NUMBERS, constants(
        k, v, HEADS, KV_HEADS, d, k.bits < 8 or v.bits < 8, limited, placed, capped, family != "cdna"))


def _aot_join(d: int, family: str, sinks: bool = False) -> AotCase:
    scores, none = _sinks(sinks)
    return aot_case(f"join d{d}{' sinks' * sinks}", decode_attention.reduce_kernel,
                    {**dict.fromkeys(("o_ptr", "m_ptr", "l_ptr"), "*fp32"), **scores,
                     **dict.fromkeys(("length_ptr", "rows_ptr"), "*i32"), "y_ptr": "*bf16",
                     **dict.fromkeys(("layer", "layers", "y_step", "splits"), "i32")},
                    {"HKV": KV_HEADS, "G": HEADS // KV_HEADS, "D": d, "DP": d, **none,
                     "COUNT": decode_attention.PIECE, "WIDTH": min(d, decode_attention.WIDTH),
                     "EARLY": family in dependent.FAMILIES, "num_warps": 1},
                    multiples=("y_step",))


def _sinks(given: bool) -> tuple[dict[str, str], dict[str, None]]:
    """The type of scores of no key, or that there are none."""
    return ({"sink_ptr": "*fp32"}, {}) if given else ({}, {"sink_ptr": None})


def _aot_decode(d: int, coding: str, family: str, apart: bool = False, sinks: bool = False,
                **what: bool) -> AotCase:
    """``apart``: another kernel joins splits."""
    apart |= not decode_attention.can_join(family, CODINGS[coding][0])
    common = _common(d, coding, family, **what)
    options = decode_attention.options(family, *CODINGS[coding], d)
    pointers = {**common.signature, **dict.fromkeys(("o_ptr", "m_ptr", "l_ptr"), "*fp32"),
                **({} if apart else {"y_ptr": "*bf16", "count_ptr": "*i32"}), **_sinks(sinks)[0]}
    return aot_case(f"decode {common.label}{' apart' * apart}{' sinks' * sinks}",
                    decode_attention.split_kv_kernel, {**pointers, "y_step": "i32", "splits": "i32"},
                    {**common.constants, **absent_pointers(decode_attention.split_kv_kernel, pointers),
                     "VALUES": True, "COUNT": decode_attention.PIECE,
                     "FEW": 0 if apart else decode_attention.FEW, "CDNA": family == "cdna", **options},
                    multiples=("q_step", "y_step"), matrix=True, wide_loads=1,
                    narrow=NARROW if d == 128 else None, weights=2 * 64 * d / threads(options, family))


def _aot_prefill(d: int, coding: str, family: str, sinks: bool = False, **what: bool) -> AotCase:
    common = _common(d, coding, family, **what)
    scores, none = _sinks(sinks)
    k, v = CODINGS[coding]
    options = prefill_attention.options(family, k, v, d)
    # all threads together load a page's side, which may be less than 16 bytes each
    wide = 64 * d * max(k.bits, v.bits) // 8 >= 16 * threads(options, family)
    return aot_case(f"prefill {common.label}{' sinks' * sinks}", prefill_attention.tile_kernel,
                    {**common.signature, **scores, "tile_ptr": "*i32", "y_ptr": "*bf16", "y_step": "i32"},
                    {**common.constants, **none, "GP": triton.next_power_of_2(HEADS // KV_HEADS), **options},
                    multiples=("q_step", "y_step"), matrix=True, wide_loads=wide)


def _aot_weights(d: int, coding: str, family: str) -> AotCase:
    common = _common(d, coding, family)
    return aot_case(f"weights {common.label}", attention_weights.weights_kernel,
                    {**common.signature, **dict.fromkeys(("m_ptr", "l_ptr", "w_ptr"), "*fp32"),
                     **dict.fromkeys(("splits", "slots"), "i32")},
                    {**common.constants, "PEAKS": False, "COUNT": decode_attention.PIECE,
                     "JOIN": attention_weights.JOIN, **attention_weights.options(family)},
                    multiples=("q_step"), matrix=True, wide_loads=1)
