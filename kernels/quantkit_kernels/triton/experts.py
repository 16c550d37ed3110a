"""Mixtures of experts: which experts a token gets, and products with each one's own weight.

A router chooses a few experts for every token (https://arxiv.org/abs/2101.03961). The weights of all lie one
below the other, as those of one large product do. A *pair* is a token and one of its experts: pair ``p`` is
choice ``p % chosen`` of token ``p // chosen``. Pairs are put in order of their experts, and cut into tiles of
one expert each, which programs of :func:`~quantkit_kernels.triton.matmul.matmul_kernel` multiply. All of it
is worked out on the device, so that a step can be a graph.

A pair's result doesn't depend on other pairs: a sum is cut by the weight's shape alone, wherever its row
stands in whichever tile. A token's results are added in the order of its choices.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl

from quantkit_kernels.triton.fragment import MAGIC, ROWS, family_of
from quantkit_kernels.triton.levels import QuantizedActivations
from quantkit_kernels.triton.matmul import Gate, LaunchPlan, arguments, is_gate, matmul_kernel
from quantkit_kernels.triton.packed import TritonWeight

APART = 64
"""Pairs up to which each is a tile of its own: there are hardly two of one expert."""
BLOCK = 1024
"""Pairs that a program looks at together."""
COLUMNS = 512
"""Numbers of a token's result that one program adds."""


@triton.jit
def route_kernel(scores_ptr: tl.tensor, rows_ptr: tl.tensor, chosen_ptr: tl.tensor, share_ptr: tl.tensor,
                 order_ptr: tl.tensor, tile_ptr: tl.tensor, scores_row: tl.tensor, E: tl.constexpr,
                 EP: tl.constexpr, CHOSEN: tl.constexpr, NORMALIZED: tl.constexpr, ALONE: tl.constexpr
                 ) -> None:
    """One token: the CHOSEN largest of a softmax over its scores, the first of equals first. A token of
    nobody (rows ``[n, 2]``, −1) gets expert E, which there isn't. With ALONE its pairs are tiles too."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, EP)
    somebodys = tl.load(rows_ptr + 2 * token) >= 0
    score = tl.load(scores_ptr + token * scores_row + at, mask=at < E, other=float("-inf")).to(tl.float32)
    score = tl.where(score == score, score, float("-inf"))
    share = tl.exp(score - tl.max(score, 0))
    total = tl.sum(share, 0)
    share = tl.where(share == share, share, 0.0)  # of numbers that aren't finite some expert is chosen too
    left = tl.where(at < E, share, -1.0)
    if NORMALIZED:
        total = 0.0
        for _ in tl.static_range(CHOSEN):
            total += tl.max(left, 0)
            left = tl.where(at == tl.argmax(left, 0, tie_break_left=True), -1.0, left)
        left = tl.where(at < E, share, -1.0)
    for choice in tl.static_range(CHOSEN):
        best = tl.minimum(tl.argmax(left, 0, tie_break_left=True), E - 1)
        pair = token * CHOSEN + choice
        tl.store(share_ptr + pair, tl.max(left, 0) / total)
        tl.store(chosen_ptr + pair, tl.where(somebodys, best, E))
        left = tl.where(at == best, -1.0, left)
        if ALONE:
            tl.store(order_ptr + pair, pair.to(tl.int32))
            tl.store(tile_ptr + 3 * pair, best)
            tl.store(tile_ptr + 3 * pair + 1, pair.to(tl.int32))
            tl.store(tile_ptr + 3 * pair + 2, tl.where(somebodys, 1, 0))


@triton.jit(do_not_specialize=["pairs"])
def order_kernel(chosen_ptr: tl.tensor, order_ptr: tl.tensor, tile_ptr: tl.tensor, pairs: tl.tensor,
                 E: tl.constexpr, BM: tl.constexpr, BLOCK: tl.constexpr) -> None:
    """One expert: its pairs behind those of all experts before it, and its tiles of BM pairs.

    Its tiles begin at ``before // BM + expert``, where ``before`` are all pairs of experts before it: so much
    room is always enough for theirs, and no program needs to wait for another. What is left has no pairs.
    """
    expert = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    before, count = 0, 0
    for start in range(0, pairs, BLOCK):
        chosen = tl.load(chosen_ptr + start + at, mask=start + at < pairs, other=E)
        before += tl.sum((chosen < expert).to(tl.int32), 0)
        count += tl.sum((chosen == expert).to(tl.int32), 0)
    place = before
    for start in range(0, pairs, BLOCK):
        chosen = tl.load(chosen_ptr + start + at, mask=start + at < pairs, other=E)
        mine = (chosen == expert).to(tl.int32)
        tl.store(order_ptr + place + tl.cumsum(mine, 0) - 1, start + at, mask=mine != 0)
        place += tl.sum(mine, 0)
    first = before // BM + expert
    last = (before + count) // BM + expert + 1
    if expert == E - 1:
        last = pairs // BM + E
    for tile in range(first, last):
        begin = (tile - first) * BM
        tl.store(tile_ptr + 3 * tile, expert)
        tl.store(tile_ptr + 3 * tile + 1, before + begin)
        tl.store(tile_ptr + 3 * tile + 2, tl.maximum(tl.minimum(BM, count - begin), 0))


@triton.jit
def combine_kernel(x_ptr: tl.tensor, share_ptr: tl.tensor, rows_ptr: tl.tensor, r_ptr: tl.tensor,
                   y_ptr: tl.tensor, n: tl.tensor, CHOSEN: tl.constexpr, BLOCK: tl.constexpr) -> None:
    """One token: ``x [pairs, n]`` times shares, added in order, then the residual ``[tokens, n]``."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    seen = (column < n) & (tl.load(rows_ptr + 2 * token) >= 0)
    total = tl.zeros([BLOCK], tl.float32)
    for choice in tl.static_range(CHOSEN):
        share = tl.load(share_ptr + token * CHOSEN + choice)
        part = tl.load(x_ptr + (token * CHOSEN + choice) * n + column, mask=seen, other=0.0)
        total += share * part.to(tl.float32)
    if r_ptr is not None:
        total += tl.load(r_ptr + token * n + column, mask=seen, other=0.0).to(tl.float32)
    tl.store(y_ptr + token * n + column, total.to(y_ptr.dtype.element_ty), mask=column < n)


@dataclass(frozen=True)
class Pairs:
    """Tokens and their experts.

    Attributes:
        chosen: int32 ``[tokens, chosen]``.
        share: float32 ``[tokens, chosen]``.
        order: int32 ``[pairs]``, by expert.
        tiles: int32 ``[t, 3]``: an expert, where its pairs begin in the order, and how many they are; 0:
            there is nothing to do.
        size: pairs of a tile, at most.
        rows: int32 ``[tokens, 2]``, see :class:`~quantkit_kernels.triton.cache.StepTokens`.
    """

    chosen: torch.Tensor
    share: torch.Tensor
    order: torch.Tensor
    tiles: torch.Tensor
    size: int
    rows: torch.Tensor


def largest_tile(family: str) -> int:
    """Pairs of a tile, at most: as many as sums have room for in registers, whatever the format."""
    return 32 if family == "ampere" else 64


def tile_size(pairs: int, experts: int, family: str) -> int:
    """Pairs of a tile: about as many as an expert has."""
    if pairs <= APART:
        return 16
    return min(max(16, triton.next_power_of_2(pairs // experts)), largest_tile(family))


def route(scores: torch.Tensor, rows: torch.Tensor, chosen: int, normalized: bool) -> Pairs:
    """The most likely experts of each token.

    Args:
        scores: ``[n, experts]`` of the router, 16-bit or float32, each row contiguous.
        rows: int32 ``[n, 2]``: tokens of −1 are nobody's and get no expert.
        chosen: experts a token.
        normalized: their shares of the softmax over all are made to sum to 1.
    """
    n, experts = scores.shape
    device, pairs = scores.device, n * chosen
    size, alone = tile_size(pairs, experts, family_of(device)), pairs <= APART
    result = Pairs(torch.empty(n, chosen, dtype=torch.int32, device=device),
                   torch.empty(n, chosen, dtype=torch.float32, device=device),
                   torch.empty(pairs, dtype=torch.int32, device=device),
                   torch.empty(pairs if alone else pairs // size + experts, 3, dtype=torch.int32,
                               device=device), size, rows)
    if n == 0:
        return result
    route_kernel[(n,)](scores, rows, result.chosen, result.share, result.order, result.tiles,
                       scores.stride(0), E=experts, EP=triton.next_power_of_2(experts), CHOSEN=chosen,
                       NORMALIZED=normalized, ALONE=alone, num_warps=1)
    if not alone:
        order_kernel[(experts,)](result.chosen, result.order, result.tiles, pairs, E=experts, BM=size,
                                 BLOCK=BLOCK, num_warps=4)
    return result


def multiply_experts(x: torch.Tensor | QuantizedActivations, w: TritonWeight, pairs: Pairs, *, experts: int,
                     outputs: int, bias: torch.Tensor | None = None, gated: Gate | None = None,
                     chosen: int = 1) -> torch.Tensor:
    """Every pair's row by its expert's weight.

    Args:
        x: ``[tokens, k]`` with ``chosen`` experts a token, or ``[pairs, k]`` with 1; levels with a scale a
            row for weights that take them.
        w: the weights of all experts one below the other, each filled up to :func:`padded_rows`; gated ones
            as all gates, then all that they open. Not one with a kernel of its own.
        pairs: the result of :func:`route`.
        experts: how many there are.
        outputs: columns of the result.
        bias: ``[experts, outputs]``, twice as many columns if gated.
        gated: a :data:`~quantkit_kernels.triton.matmul.Gate`, for weights that were packed ``gated``.

    Returns:
        ``[pairs, outputs]`` in x's dtype; of pairs of nobody's tokens undefined.

    Raises:
        ValueError: another shape or dtype, or such a weight.
    """
    blocks, over = divmod(w.words.shape[0], experts)
    number = pairs.chosen.numel()
    values = x.values if isinstance(x, QuantizedActivations) else x
    if (over or w.decoder.levels != isinstance(x, QuantizedActivations) or w.decoder.product is not None
            or values.shape != (number // chosen, w.k) or values.dtype not in w.decoder.takes):
        raise ValueError(f"x {list(values.shape)} {values.dtype}, a weight [{w.n}, {w.k}] of {experts} "
                         f"experts and {number} pairs don't fit together")
    if is_gate(gated) != w.gated:
        raise ValueError("a gate goes with weights that were packed so, and with no others")
    y = torch.empty(number, outputs, dtype=x.dtype, device=values.device)
    if number == 0:
        return y
    values = values if values.stride(1) == 1 else values.contiguous()
    scale = x.scale.repeat_interleave(chosen) if isinstance(x, QuantizedActivations) else None
    plan, constants = expert_arguments(w, pairs.size, blocks, chosen)
    matmul_kernel[(blocks, len(pairs.tiles), 1)](
        values, scale, w.words, w.scale, bias, None, y, number, outputs, values.stride(0), 0, y.stride(0),
        MAGIC.get(values.dtype, 0), table_ptr=w.table, tile_ptr=pairs.tiles, order_ptr=pairs.order,
        part_ptr=None, count_ptr=None, GATED=gated, **constants, **plan.options)
    return y


def expert_arguments(w: TritonWeight, size: int, blocks: int, chosen: int
                     ) -> tuple[LaunchPlan, dict[str, Any]]:
    """The plan, and compile-time arguments but GATED, for tiles of ``size`` pairs."""
    plan, constants = arguments(w, size)
    options = {name: value for name, value in plan.options.items() if name != "launch_pdl"}
    return replace(plan, split=False, early=False, options=options), constants | {
        "BM": size, "SPLIT": False, "BLOCKS": blocks, "CHOSEN": chosen, "PDL": False}


def combine(x: torch.Tensor, pairs: Pairs, residual: torch.Tensor | None = None) -> torch.Tensor:
    """Pairs' results ``[pairs, n]`` by their shares, and a residual ``[tokens, n]`` → ``[tokens, n]``, added
    in float32 and rounded once; zeros for nobody's tokens."""
    tokens, chosen = pairs.chosen.shape
    y = x.new_empty(tokens, x.shape[1])
    if tokens:
        residual = None if residual is None else residual.contiguous()
        grid = tokens, -(-x.shape[1] // COLUMNS)
        combine_kernel[grid](x, pairs.share, pairs.rows, residual, y, x.shape[1], CHOSEN=chosen,
                             BLOCK=COLUMNS, num_warps=4)
    return y


def padded_rows(n: int, gated: bool) -> int:
    """Rows that an expert's weight of ``n`` rows takes, or of each half of it if ``gated``."""
    tile = ROWS // 2 if gated else ROWS
    return -(-n // tile) * tile
