"""Normalize and rotate the heads of queries and keys, and put keys and values into pages, in one pass.

Rotary embedding in its rotate-half form, https://arxiv.org/abs/2104.09864: dimension i is paired with
``i + R / 2``, R the dimensions that are rotated. What a token's sequence holds, where its next slot lies and
which position it has are read on the device, so that a step of decoding can be captured once and replayed.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from quantkit_kernels.triton.cache import CHANNEL, HADAMARD, PLAIN, LayerPages, SequenceTables, StepTokens
from quantkit_kernels.triton.hadamard import FARTHEST, factors, finite, mixed, within
from quantkit_kernels.triton.kv_encode import pointers, store_vectors

FEW = 16
"""Up to this many tokens each has programs of its own."""


@triton.jit
def _hadamard(x: tl.tensor, signs_ptr: tl.tensor, mix_ptr: tl.tensor, DTYPE: tl.constexpr, D: tl.constexpr,
              COUNT: tl.constexpr, PADDED: tl.constexpr, LOG: tl.constexpr, ROOT: tl.constexpr) -> tl.tensor:
    """Vectors float32 ``[rows, n]``, 0 from D on, times the rotation of width D, rounded to DTYPE."""
    rd = tl.arange(0, x.shape[1])
    x = within(x, FARTHEST) * tl.load(signs_ptr + rd, mask=rd < D, other=0.0)[None, :]
    return finite(mixed(x, mix_ptr, COUNT, PADDED, LOG, ROOT), DTYPE).to(tl.float32)


@triton.jit
def _rotated(x_ptr: tl.tensor, norm_ptr: tl.tensor, cos_ptr: tl.tensor, sin_ptr: tl.tensor,
             offsets: tl.tensor, position: tl.tensor, stored: tl.tensor, eps: tl.tensor, D: tl.constexpr,
             DP: tl.constexpr, R: tl.constexpr, NORM: tl.constexpr) -> tl.tensor:
    """A head of tokens that begin at ``here [rows]``, float32 ``[rows, DP]`` rounded to x's dtype."""
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    rd = tl.arange(0, DP)
    other = tl.where(rd < R // 2, rd + R // 2, tl.where(rd < R, rd - R // 2, rd))
    seen = stored[:, None] & (rd < D)[None, :]
    x = tl.load(x_ptr + offsets[:, None] + rd[None, :], mask=seen, other=0.0).to(tl.float32)
    y = tl.load(x_ptr + offsets[:, None] + other[None, :], mask=seen, other=0.0).to(tl.float32)
    if NORM:
        factor = tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
        x, y = x * factor, y * factor
        if norm_ptr.dtype.element_ty == DTYPE:  # as models with such weights are trained
            x, y = x.to(DTYPE).to(tl.float32), y.to(DTYPE).to(tl.float32)
        x *= tl.load(norm_ptr + rd, mask=rd < D, other=0.0).to(tl.float32)[None, :]
        y *= tl.load(norm_ptr + other, mask=rd < D, other=0.0).to(tl.float32)[None, :]
        x, y = finite(x, DTYPE).to(tl.float32), finite(y, DTYPE).to(tl.float32)
    angle = position[:, None] * (R // 2) + (rd % (R // 2))[None, :]
    turns = stored[:, None] & (rd < R)[None, :]
    cos = tl.load(cos_ptr + angle, mask=turns, other=1.0)
    sin = tl.load(sin_ptr + angle, mask=turns, other=0.0)
    sin = tl.where((rd < R // 2)[None, :], -sin, sin)
    return finite(x * cos + y * sin, DTYPE).to(tl.float32)


@triton.jit(do_not_specialize=["n", "layer", "width", "first"])
def rope_store_kernel(q_ptr: tl.tensor, k_ptr: tl.tensor, v_ptr: tl.tensor, q_norm_ptr: tl.tensor,
                      k_norm_ptr: tl.tensor, cos_ptr: tl.tensor, sin_ptr: tl.tensor, signs_ptr: tl.tensor,
                      mix_ptr: tl.tensor, out_ptr: tl.tensor, kc_ptr: tl.tensor, ks_ptr: tl.tensor,
                      kl_ptr: tl.tensor, vc_ptr: tl.tensor, vs_ptr: tl.tensor, vl_ptr: tl.tensor,
                      at_ptr: tl.tensor, rows_ptr: tl.tensor, table_ptr: tl.tensor, length_ptr: tl.tensor,
                      seen_ptr: tl.tensor, start_ptr: tl.tensor, n: tl.tensor, layer: tl.tensor,
                      width: tl.tensor, first: tl.tensor, q_step: tl.tensor, k_step: tl.tensor,
                      v_step: tl.tensor, eps: tl.tensor, LAYERS: tl.constexpr, H: tl.constexpr,
                      HKV: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, R: tl.constexpr,
                      BT: tl.constexpr, NORM: tl.constexpr, KIND: tl.constexpr, BITS: tl.constexpr,
                      VKIND: tl.constexpr, VBITS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
                      PLACED: tl.constexpr, TURN: tl.constexpr, VTURN: tl.constexpr, COUNT: tl.constexpr,
                      PADDED: tl.constexpr, LOG: tl.constexpr, ROOT: tl.constexpr) -> None:
    """BT tokens of one head: of q (program_id(1) < H), of k, or of v.

    ``*_step``: elements from a token to the next. DP: D rounded up to a power of two. ``kc, ks, kl``: codes,
    scale and shift of keys, ``v*`` of values; with HAS_RESIDUAL those are the pages that wait, as is the
    table.
    """
    head = tl.program_id(1)
    rt = tl.program_id(0) * BT + tl.arange(0, BT)
    in_step = rt < n
    row = tl.load(rows_ptr + rt * 2, mask=in_step, other=-1).to(tl.int64)
    place = tl.load(rows_ptr + rt * 2 + 1, mask=in_step, other=0)
    stored = row >= 0
    position = (tl.load(seen_ptr + row, mask=stored, other=0) + place).to(tl.int64)
    token = rt.to(tl.int64)
    rd = tl.arange(0, DP)
    if head < H:
        x = _rotated(q_ptr, q_norm_ptr, cos_ptr, sin_ptr, token * q_step + head * D, position, stored, eps, D,
                     DP, R, NORM)
        if TURN:
            x = _hadamard(x, signs_ptr, mix_ptr, q_ptr.dtype.element_ty, D, COUNT, PADDED, LOG, ROOT)
        tl.store(out_ptr + ((token * H + head) * D)[:, None] + rd[None, :], x.to(out_ptr.dtype.element_ty),
                 mask=in_step[:, None] & (rd < D)[None, :])
    else:
        side_index = (row * LAYERS + layer) * HKV + (head - H) % HKV
        at = tl.load(length_ptr + side_index, mask=stored, other=0) + place
        index = at
        if HAS_RESIDUAL:
            index = tl.where(at < first, at, at - tl.load(start_ptr + side_index, mask=stored,
                                                          other=0) + first)
        page = tl.load(table_ptr + side_index * width + index // 64, mask=stored, other=0).to(tl.int64)
        slot = page * 64 + at % 64
        if head < H + HKV:
            x = _rotated(k_ptr, k_norm_ptr, cos_ptr, sin_ptr, token * k_step + (head - H) * D, position,
                         stored, eps, D, DP, R, NORM)
            if TURN:
                x = _hadamard(x, signs_ptr, mix_ptr, k_ptr.dtype.element_ty, D, COUNT, PADDED, LOG, ROOT)
            store_vectors(x, kc_ptr, ks_ptr, kl_ptr, slot, stored, D, KIND, BITS)
            if PLACED:
                tl.store(at_ptr + slot, position.to(tl.int32), mask=stored)
        else:
            offsets = (token * v_step + (head - H - HKV) * D)[:, None] + rd[None, :]
            x = tl.load(v_ptr + offsets, mask=stored[:, None] & (rd < D)[None, :], other=0.0).to(tl.float32)
            if VTURN:
                x = _hadamard(x, signs_ptr, mix_ptr, v_ptr.dtype.element_ty, D, COUNT, PADDED, LOG, ROOT)
            store_vectors(x, vc_ptr, vs_ptr, vl_ptr, slot, stored, D, VKIND, VBITS)


def constants(n: int, heads: int, kv_heads: int, dim: int, pages: LayerPages) -> dict[str, Any]:
    """Compile-time arguments and options for n tokens, but LAYERS, R and NORM."""
    shape = {"BT": 1, "num_warps": 1} if n <= FEW else {"BT": 16, "num_warps": 4}
    k, v = pages.k.coding, pages.v.coding
    kinds = (PLAIN, 0, PLAIN, 0) if pages.has_residual else (k.kind, k.bits, v.kind, v.bits)
    placed = pages.residual_positions if pages.has_residual else pages.positions
    return {"H": heads, "HKV": kv_heads, "D": dim, "DP": triton.next_power_of_2(dim),
            **dict(zip(("KIND", "BITS", "VKIND", "VBITS"), kinds)), "HAS_RESIDUAL": pages.has_residual,
            "PLACED": placed is not None, "TURN": k.kind == HADAMARD, "VTURN": v.kind == HADAMARD,
            **factors(dim), "enable_fp_fusion": False, **shape}


def rope_store(qkv: torch.Tensor | tuple[torch.Tensor, torch.Tensor, torch.Tensor], cos: torch.Tensor,
               sin: torch.Tensor, pages: LayerPages, tables: SequenceTables, step: StepTokens, layer: int, *,
               heads: int, kv_heads: int, dim: int, q_norm: torch.Tensor | None = None,
               k_norm: torch.Tensor | None = None, eps: float = 1e-6,
               rotation: tuple[torch.Tensor, torch.Tensor] | None = None,
               out: torch.Tensor | None = None) -> torch.Tensor:
    """Write a layer's keys and values of a step into its pages; return its queries.

    Each token goes to slot ``lengths + place`` of every head and stands at position ``seen + place``. Where
    vectors wait, they go to the pages that wait, as they are; :func:`~.close_pages.close_pages` follows.

    Args:
        qkv: ``[N, (H + 2 Hkv) D]``, bfloat16, float16 or float32, or queries ``[N, H D]``, keys and values
            ``[N, Hkv D]`` of one dtype. Rows may lie apart.
        cos, sin: float32 ``[positions, R / 2]``, R even and at most D: what is behind R isn't rotated.
        tables, step: whose tokens these are.
        layer: index in the tables.
        heads, kv_heads, dim: H, Hkv and D.
        q_norm, k_norm: ``[D]``, weights of a root-mean-square normalization of each head, before it is
            rotated: tables of q's dtype, which is rounded before they multiply it, or float32.
        eps: added to the mean square.
        rotation: signs float32 ``[D]`` and the small matrix of :func:`~.hadamard.rotate`, on the device:
            keys, and queries with them, or values are multiplied by it if their coding is turned.
        out: contiguous ``[N, H, D]``.

    Returns:
        ``[N, H, D]`` in q's dtype, zeros for nobody's tokens. Computed in float32, rounded after the norm,
        the embedding and the rotation, as what is stored is; too large numbers become the largest.

    Raises:
        ValueError: shapes or dtypes don't fit, or a coding can't be written vector by vector.
    """
    h, hkv, d = heads, kv_heads, dim
    q, k, v = qkv.split((h * d, hkv * d, hkv * d), 1) if isinstance(qkv, torch.Tensor) else qkv
    n = q.shape[0]
    signs, mix = (cos, cos) if rotation is None else rotation
    _check(q, k, v, cos, sin, pages, tables, step, h, hkv, d, rotation)
    if any(w is not None and (w.shape != (d,) or w.dtype not in (q.dtype, torch.float32))
           for w in (q_norm, k_norm)) or (q_norm is None) != (k_norm is None):
        raise ValueError(f"weights of norms must be two of [{d}] in q's dtype or float32")
    y = q.new_empty(n, h, d) if out is None else out
    if y.shape != (n, h, d) or y.dtype != q.dtype or not y.is_contiguous():
        raise ValueError(f"queries must go to {[n, h, d]} in their dtype, not {list(y.shape)} {y.dtype}")
    if n == 0:
        return y
    q, k, v = (x if x.stride(1) == 1 else x.contiguous() for x in (q, k, v))
    table, places = tables.pages, pages.positions
    sides = (*pointers(pages.k), *pointers(pages.v))
    if pages.k.residual is not None and pages.v.residual is not None and tables.residual is not None:
        table, places = tables.residual, pages.residual_positions
        sides = (pages.k.residual,) * 3 + (pages.v.residual,) * 3
    common = constants(n, h, hkv, d, pages)
    rope_store_kernel[(-(-n // common["BT"]), h + 2 * hkv)](
        q, k, v, q if q_norm is None else q_norm, q if k_norm is None else k_norm, cos, sin, signs, mix, y,
        *sides, step.rows if places is None else places, step.rows, table, tables.lengths, tables.seen,
        tables.lengths if tables.starts is None else tables.starts, n, layer, table.shape[3], tables.first,
        q.stride(0), k.stride(0), v.stride(0), eps, LAYERS=table.shape[1], R=2 * cos.shape[1],
        NORM=q_norm is not None, **common)
    return y


def _check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor,
           pages: LayerPages, tables: SequenceTables, step: StepTokens, h: int, hkv: int, d: int,
           rotation: tuple[torch.Tensor, torch.Tensor] | None) -> None:
    n = q.shape[0]
    if (q.shape != (n, h * d) or k.shape != (n, hkv * d) or v.shape != k.shape
            or not q.dtype == k.dtype == v.dtype or cos.shape != sin.shape or not 0 < 2 * cos.shape[1] <= d
            or not cos.dtype == sin.dtype == torch.float32
            or not (cos.is_contiguous() and sin.is_contiguous())
            or step.rows.shape != (n, 2) or step.rows.dtype != torch.int32 or not step.rows.is_contiguous()):
        raise ValueError("q, k, v, cos, sin and the step's rows don't fit together")
    check_tables(pages, tables, hkv)
    codings = pages.k.coding, pages.v.coding
    if not pages.has_residual and any(coding.kind == CHANNEL or coding.centered for coding in codings):
        raise ValueError("64 vectors that are encoded together must wait for each other")
    if any(coding.kind == HADAMARD for coding in codings):
        small = d // (d & -d)
        if rotation is None or rotation[0].shape != (d,) or rotation[1].shape != (small, small):
            raise ValueError(f"hadamard vectors need a rotation: signs [{d}] and a matrix [{small}, {small}]")


def check_tables(pages: LayerPages, tables: SequenceTables, kv_heads: int) -> None:
    """Raises ValueError if a layer's pages and the tables don't fit together."""
    rows, layers = tables.lengths.shape[:2]
    of_heads: list[torch.Tensor | None] = [tables.pages, tables.lengths]
    residuals: list[torch.Tensor | None] = []
    if pages.has_residual:
        of_heads += [tables.residual, tables.starts]
        residuals = [pages.k.residual, pages.v.residual]
    if (any(t is None or t.shape[:3] != (rows, layers, kv_heads) or t.dtype != torch.int32
            or not t.is_contiguous() for t in of_heads) or any(t is None for t in residuals)
            or tables.seen.shape != (rows,) or tables.seen.dtype != torch.int32):
        raise ValueError("the tables and the layer's pages don't fit together")
