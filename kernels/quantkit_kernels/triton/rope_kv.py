"""Rotate queries and keys, and put keys and values into pages, in one pass over each.

Rotary embedding in its rotate-half form, https://arxiv.org/abs/2104.09864: dimension i is paired with
``i + D / 2``. A page holds 64 slots of one key head; see :mod:`~quantkit_kernels.triton.paged_attention`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

LEVELS = tl.constexpr(127)
LEAST = tl.constexpr(0x00800000)  # the smallest normal bfloat16, as the bits of a float32
MOST = tl.constexpr(0x7F7F0000)  # the largest
ROUND = tl.constexpr(12582912.0)  # 1.5 * 2 ** 23: adding it rounds to an integer, half to even
FEW = 16
"""Up to this many tokens each has programs of its own."""


@dataclass(frozen=True)
class Pages:
    """Where keys and values of one layer lie.

    Attributes:
        k, v: ``[pages, 64, D]``: bfloat16, float16, float32, or int8 codes.
        k_scale, v_scale: bfloat16 ``[pages, 64]`` for codes, else ``None``.
        positions: int32 ``[pages, 64]``, or ``None`` where a slot's number is its position.
    """

    k: torch.Tensor
    v: torch.Tensor
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None
    positions: torch.Tensor | None = None

    def __post_init__(self) -> None:
        """Raises ValueError if parts are missing or don't fit together."""
        coded = self.k.dtype == torch.int8
        scales = [s for s in (self.k_scale, self.v_scale) if s is not None]
        rows = [*scales, *([] if self.positions is None else [self.positions])]
        if (self.k.shape != self.v.shape or self.k.dtype != self.v.dtype or len(scales) != 2 * coded
                or any(part.shape != self.k.shape[:2] for part in rows)
                or any(s.dtype != torch.bfloat16 for s in scales)
                or not all(part.is_contiguous() for part in (self.k, self.v, *rows))):
            raise ValueError("k and v must be alike, codes must have bfloat16 scales, and all be contiguous")

    @property
    def coded(self) -> bool:
        """Whether they hold int8 codes."""
        return self.k_scale is not None


@triton.jit
def _rotated(x_ptr: tl.tensor, cos_ptr: tl.tensor, sin_ptr: tl.tensor, here: tl.tensor, row: tl.tensor,
             seen: tl.tensor, HALF: tl.constexpr, D: tl.constexpr, TURN: tl.constexpr) -> tl.tensor:
    """Both halves of a head in float32, rounded to x's dtype."""
    a = tl.load(x_ptr + here, mask=seen, other=0.0)
    b = tl.load(x_ptr + here + HALF, mask=seen, other=0.0)
    dtype = a.dtype
    a, b = a.to(tl.float32), b.to(tl.float32)
    if TURN:
        turned = (a * tl.load(cos_ptr + row, mask=seen, other=0.0)
                  - b * tl.load(sin_ptr + row, mask=seen, other=0.0))
        b = (b * tl.load(cos_ptr + row + HALF, mask=seen, other=0.0)
             + a * tl.load(sin_ptr + row + HALF, mask=seen, other=0.0))
        a = turned
    return a.to(dtype).to(tl.float32), b.to(dtype).to(tl.float32)


@triton.jit
def _store(pages_ptr: tl.tensor, scale_ptr: tl.tensor, slot: tl.tensor, rd: tl.tensor, a: tl.tensor,
           b: tl.tensor, seen: tl.tensor, HALF: tl.constexpr, D: tl.constexpr, CODED: tl.constexpr) -> None:
    """A head into its slot: as it is, or as codes and a scale."""
    to = pages_ptr + slot[:, None] * D + rd[None, :]
    if CODED:
        most = tl.maximum(tl.max(tl.abs(a), 1), tl.max(tl.abs(b), 1))
        bits = tl.math.div_rn(most, tl.full(most.shape, LEVELS, tl.float32)).to(tl.int32, bitcast=True)
        # upwards, so that no code is beyond 127; normal, so that one over it is finite
        bits = tl.minimum(tl.maximum((bits + 0xFFFF) & -65536, LEAST), MOST)
        one = tl.full(most.shape, 1.0, tl.float32)
        inverse = tl.math.div_rn(one, bits.to(tl.float32, bitcast=True))[:, None]
        a = tl.minimum(tl.maximum((a * inverse + ROUND) - ROUND, -LEVELS), LEVELS)
        b = tl.minimum(tl.maximum((b * inverse + ROUND) - ROUND, -LEVELS), LEVELS)
        tl.store(scale_ptr + slot, (bits >> 16).to(tl.int16), mask=slot >= 0)
        tl.store(to, a.to(tl.int8), mask=seen)
        tl.store(to + HALF, b.to(tl.int8), mask=seen)
    else:
        tl.store(to, a.to(pages_ptr.dtype.element_ty), mask=seen)
        tl.store(to + HALF, b.to(pages_ptr.dtype.element_ty), mask=seen)


@triton.jit(do_not_specialize=["n"])
def rope_kv_kernel(q_ptr: tl.tensor, k_ptr: tl.tensor, v_ptr: tl.tensor, cos_ptr: tl.tensor,
                   sin_ptr: tl.tensor, row_ptr: tl.tensor, out_ptr: tl.tensor, pk_ptr: tl.tensor,
                   pv_ptr: tl.tensor, sk_ptr: tl.tensor, sv_ptr: tl.tensor, at_ptr: tl.tensor,
                   slot_ptr: tl.tensor, pos_ptr: tl.tensor, n: tl.tensor, q_step: tl.tensor,
                   k_step: tl.tensor, v_step: tl.tensor, H: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr,
                   HALF: tl.constexpr, BT: tl.constexpr, CODED: tl.constexpr, INDEXED: tl.constexpr,
                   PLACED: tl.constexpr) -> None:
    """BT tokens of one head: of q (program_id(1) < H), of k, or of v.

    ``*_step``: elements from a token to the next. HALF: D / 2 rounded up to a power of two is the tile.
    """
    head = tl.program_id(1)
    rt = tl.program_id(0) * BT + tl.arange(0, BT)
    rd = tl.arange(0, HALF)
    there = rt < n
    token = rt.to(tl.int64)
    row = tl.load(row_ptr + rt, mask=there, other=0).to(tl.int64) if INDEXED else token
    row = row[:, None] * D + rd[None, :]
    inside = (rd < D // 2)[None, :]
    if head < H:
        seen = there[:, None] & inside
        here = token[:, None] * q_step + head * D + rd[None, :]
        a, b = _rotated(q_ptr, cos_ptr, sin_ptr, here, row, seen, D // 2, D, True)
        to = out_ptr + (token[:, None] * H + head) * D + rd[None, :]
        tl.store(to, a.to(out_ptr.dtype.element_ty), mask=seen)
        tl.store(to + D // 2, b.to(out_ptr.dtype.element_ty), mask=seen)
    elif head < H + HKV:
        head -= H
        slot = tl.load(slot_ptr + token * HKV + head, mask=there, other=-1).to(tl.int64)
        seen = (slot >= 0)[:, None] & inside
        here = token[:, None] * k_step + head * D + rd[None, :]
        a, b = _rotated(k_ptr, cos_ptr, sin_ptr, here, row, seen, D // 2, D, True)
        _store(pk_ptr, sk_ptr, slot, rd, a, b, seen, D // 2, D, CODED)
        if PLACED:
            tl.store(at_ptr + slot, tl.load(pos_ptr + rt, mask=there, other=0).to(tl.int32), mask=slot >= 0)
    else:
        head -= H + HKV
        slot = tl.load(slot_ptr + token * HKV + head, mask=there, other=-1).to(tl.int64)
        seen = (slot >= 0)[:, None] & inside
        here = token[:, None] * v_step + head * D + rd[None, :]
        a, b = _rotated(v_ptr, cos_ptr, sin_ptr, here, row, seen, D // 2, D, False)
        _store(pv_ptr, sv_ptr, slot, rd, a, b, seen, D // 2, D, CODED)


def constants(n: int, h: int, hkv: int, d: int) -> dict[str, int | bool]:
    """Compile-time arguments and options for n tokens.

    Without fused multiply-adds the codes are those of the same computation in torch, bit for bit.
    """
    shape = {"BT": 1, "num_warps": 1} if n <= FEW else {"BT": 16, "num_warps": 4}
    return {"H": h, "HKV": hkv, "D": d, "HALF": triton.next_power_of_2(d // 2), "enable_fp_fusion": False,
            **shape}


def rope_kv(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor,
            pages: Pages, slots: torch.Tensor, positions: torch.Tensor | None = None,
            rows: torch.Tensor | None = None) -> torch.Tensor:
    """Write rotated keys, and values, into pages; return rotated queries.

    Args:
        q: ``[N, H, D]``, bfloat16, float16 or float32, D even. Tokens may be apart, as in a fused q, k, v.
        k, v: ``[N, Hkv, D]``, q's dtype.
        cos, sin: float32 ``[T, D]``; both halves of a row are the same angles.
        pages: written at ``slots``: numbers are rounded to the pages' dtype; int8 codes to the nearest, half
            to even, with a scale of ``absmax / 127`` rounded up to a normal bfloat16.
        slots: int32 or int64 ``[N, Hkv]``, ``page * 64 + offset``; −1: that head keeps nothing.
        positions: integers ``[N]``, stored where ``pages.positions`` are.
        rows: integers ``[N]``, each token's row of cos and sin; ``None``: row n is token n's.

    Returns:
        ``[N, H, D]``, contiguous. Rotated in float32 and rounded to q's dtype, as what is stored is.

    Raises:
        ValueError: shapes or dtypes don't fit.
    """
    n, h, d = q.shape
    hkv = k.shape[1]
    if (k.shape != (n, hkv, d) or v.shape != k.shape or d % 2 or slots.shape != (n, hkv)
            or pages.k.shape[-1] != d or not q.dtype == k.dtype == v.dtype
            or cos.shape != sin.shape or cos.shape[1:] != (d,) or (rows is None and cos.shape[0] != n)
            or cos.dtype != torch.float32 or sin.dtype != torch.float32):
        raise ValueError("q, k, v, cos, sin, pages and slots don't fit together")
    if (pages.positions is None) != (positions is None):
        raise ValueError("positions are stored if and only if the pages have room for them")
    out = torch.empty(n, h, d, dtype=q.dtype, device=q.device)
    if n == 0:
        return out
    q, k, v = (x if x.stride()[1:] == (d, 1) else x.contiguous() for x in (q, k, v))
    scales = (pages.k, pages.v)
    if pages.k_scale is not None and pages.v_scale is not None:
        scales = (pages.k_scale.view(torch.int16), pages.v_scale.view(torch.int16))
    common = constants(n, h, hkv, d)
    rope_kv_kernel[(-(-n // common["BT"]), h + 2 * hkv)](
        q, k, v, cos.contiguous(), sin.contiguous(), slots if rows is None else rows.contiguous(), out,
        pages.k, pages.v, *scales, slots if pages.positions is None else pages.positions, slots.contiguous(),
        slots if positions is None else positions.contiguous(), n, q.stride(0), k.stride(0), v.stride(0),
        CODED=pages.coded, INDEXED=rows is not None, PLACED=positions is not None, **common)
    return out
