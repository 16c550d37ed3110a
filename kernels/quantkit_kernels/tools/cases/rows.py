"""What is between products: norms, levels, rotations, the choice of tokens; and GPTQ's inner loop."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from quantkit_kernels import reference
from quantkit_kernels.tools.cases.case import (
    HEAD_ROWS,
    POINTERS,
    AotCase,
    BenchCase,
    BenchSetup,
    absent_pointers,
    aot_case,
    size,
)
from quantkit_kernels.triton import (
    argmax,
    block_scaled,
    bounds,
    dependent,
    gptq,
    hadamard,
    levels,
    rms_norm,
    sampling,
    token_groups,
    w4a4,
)
from quantkit_kernels.triton.token_groups import GroupRounding

TEMPERATURE, TOP_K = 0.8, 50
TOP_P, MIN_P = 0.95, 0.01
VOCABULARY = 128256
TOP_LEVEL = 15
GROUPED = {16: "nvfp4 a4", 32: "mxfp4 a4"}
"""Formats that round activations, and the channels of each of their groups."""
NORMS = {"": {}, " add": {"r_ptr": "*bf16", "h_ptr": "*bf16"},
         " after": {"r_ptr": "*bf16", "h_ptr": "*bf16", "v_ptr": "*bf16"}}
"""A norm, with a residual added before it, or to a norm before it."""


def bench_cases(setup: BenchSetup) -> Iterator[BenchCase]:
    """All of it, by rows; tokens of as many rows as a head is asked for."""
    for m in setup.shapes.rows:
        yield _bench_norm(setup, m)
        yield _bench_norm_levels(setup, m)
        yield _bench_levels(setup, m)
    for m in setup.shapes.rows:
        yield _bench_rotation(setup, m)
    for m in (m for m in setup.shapes.rows if m <= HEAD_ROWS):
        logits = 3 * setup.normal(m, setup.shapes.linears[-1][1])
        yield _bench_argmax(logits)
        yield _bench_choose(logits)
    yield _bench_gptq(setup)


def _rounded(x: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    return (wide / (wide.abs().amax(-1, keepdim=True) / 127)).round_().to(torch.int8)


def _bench_levels(setup: BenchSetup, m: int) -> BenchCase:
    x = setup.normal(m, setup.shapes.hidden)
    moved = size(x) + x.numel() + 4 * m
    return BenchCase("quantize int8", f"m{m}", lambda at: levels.quantize(x, torch.int8).values,
                     lambda at: _rounded(x), "amax, div, round", moved, moved, cold=False)


def _bench_norm_levels(setup: BenchSetup, m: int) -> BenchCase:
    hidden = setup.shapes.hidden
    x, residual = setup.normal(m, hidden), setup.normal(m, hidden)
    weight = torch.rand(hidden, dtype=setup.dtype, device=setup.device) + 0.5
    moved = 3 * size(x) + size(weight) + x.numel() + 4 * m
    return BenchCase("rms_norm int8", f"m{m}",
                     lambda at: rms_norm.rms_norm_levels(x, weight, 1e-5, torch.int8, residual)[0].values,
                     lambda at: _rounded(F.rms_norm(x + residual, (hidden,), weight, 1e-5)),
                     "add, norm, round", moved, moved, cold=False)


def _bench_norm(setup: BenchSetup, m: int) -> BenchCase:
    hidden = setup.shapes.hidden
    x, residual = setup.normal(m, hidden), setup.normal(m, hidden)
    weight = torch.rand(hidden, dtype=setup.dtype, device=setup.device) + 0.5
    moved = 4 * size(x) + size(weight)
    return BenchCase("rms_norm add", f"m{m}", lambda at: rms_norm.rms_norm(x, weight, 1e-5, residual)[0],
                     lambda at: F.rms_norm(x + residual, (hidden,), weight, 1e-5), "add, rms_norm",
                     moved, moved, cold=False)


def _bench_rotation(setup: BenchSetup, m: int) -> BenchCase:
    """Beside a product with the whole matrix."""
    x = setup.normal(m, setup.shapes.hidden)
    signs, mix, dense = reference.rotation(setup.shapes.hidden, setup.device)
    matrix = dense.to(setup.dtype)
    return BenchCase("hadamard", f"m{m}", lambda at: hadamard.apply_hadamard(x, signs, mix),
                     lambda at: x @ matrix, "matmul", 2 * size(x), 2 * size(x) + size(matrix), cold=False)


def _bench_argmax(logits: torch.Tensor) -> BenchCase:
    def check() -> tuple[torch.Tensor, torch.Tensor]:
        highest = logits == logits.amax(-1, keepdim=True)
        wanted = torch.stack([row.nonzero()[0, 0] for row in highest])
        return argmax.argmax(logits)[0] + 1, wanted + 1  # none is 0

    return BenchCase("argmax", f"m{len(logits)}", lambda at: argmax.argmax(logits)[0],
                     lambda at: logits.argmax(-1), "argmax", size(logits), size(logits), tolerance=0.0,
                     cold=False, check=check)


def _bench_choose(logits: torch.Tensor) -> BenchCase:
    rows, device = len(logits), logits.device
    temperature, top_p, min_p = (torch.full((rows,), setting, device=device)
                                 for setting in (TEMPERATURE, TOP_P, MIN_P))
    top_k = torch.full((rows,), TOP_K, dtype=torch.int32, device=device)
    seed = torch.arange(rows, device=device)

    def ours(at: int) -> torch.Tensor:
        return sampling.choose(logits, temperature, seed, seed, top_k, top_p, min_p)[0]

    def chances() -> tuple[torch.Tensor, torch.Tensor]:
        scores, ids = (logits.float() / TEMPERATURE).sort(dim=-1, descending=True, stable=True)
        scores = scores.masked_fill(scores < scores[:, TOP_K - 1:TOP_K], -torch.inf)
        each = scores.softmax(-1)
        gone = (each.cumsum(-1) - each >= TOP_P) | (each < MIN_P * each[:, :1])
        return each.masked_fill(gone, 0.0), ids

    def theirs(at: int) -> torch.Tensor:
        each, ids = chances()
        return ids.gather(-1, torch.multinomial(each, 1))[:, 0]

    def check() -> tuple[torch.Tensor, torch.Tensor]:
        each, ids = chances()
        drawn = (each > 0) & (ids == ours(0)[:, None])
        return drawn.any(-1), torch.ones(rows, device=device)

    return BenchCase("sample", f"m{rows}", ours, theirs, "sort, multinomial", size(logits), size(logits),
                     tolerance=0.0, cold=False, check=check)


def _bench_gptq(setup: BenchSetup) -> BenchCase:
    """A block of columns of the attention's output, in float32 as it is solved, beside the loop in torch."""
    device = setup.device
    _, out, columns = min(setup.shapes.linears, key=lambda linear: linear[1])
    n = min(gptq.LONGEST, columns // 8)
    work = torch.randn(1, n, out, device=device) * 0.1
    mixed = torch.randn(n, 2 * n, device=device)
    hessian = mixed @ mixed.T / (2 * n) + torch.eye(n, device=device)
    upper = torch.linalg.cholesky(torch.linalg.inv(hessian.cpu())).mT.contiguous().to(device)[None]
    scale = torch.rand(1, 1, out, device=device) * 0.02 + 0.02
    zero = torch.full_like(scale, 8.0)
    groups = torch.zeros(1, n, dtype=torch.int64, device=device)
    codes, errors = torch.empty_like(work), torch.empty_like(work)
    pivots = upper[0].diagonal().cpu().tolist()

    def ours(at: int) -> torch.Tensor:
        gptq.solve_block(work, upper, scale, zero, groups, 4, codes, errors)
        return codes

    def theirs(at: int) -> torch.Tensor:
        left, chosen = work[0].clone(), torch.empty_like(work)
        for i, pivot in enumerate(pivots):
            level = (left[i] / scale[0, 0]).round_().add_(zero[0, 0]).clamp_(0, TOP_LEVEL)
            error = (left[i] - (level - zero[0, 0]) * scale[0, 0]).div_(pivot)
            left[i + 1:].addcmul_(upper[0, i, i + 1:, None], error[None], value=-1)
            chosen[0, i] = level
        return chosen

    moved = size(work, codes, errors, upper)
    # where a number lies within rounding of the middle of two levels, either is right
    return BenchCase("gptq", f"{n}x{out}", ours, theirs, "loop", moved, moved, n * n * out, tolerance=0.01,
                     cold=False)


def aot_cases(family: str) -> Iterator[AotCase]:
    """Norms, levels and activations in groups; rotations; the choice of tokens; blocks of GPTQ's columns."""
    yield from _aot_norms(family)
    yield from _aot_groups(family)
    yield from _aot_rotations()
    yield from _aot_sampling(family)
    floats = ("work_ptr", "corner_ptr", "scale_ptr", "zero_ptr", "level_ptr", "error_ptr")
    steps = ("work_step", "level_step", "error_step")
    for n in (gptq.LONGEST, gptq.LONGEST // 2):
        yield aot_case(f"gptq {n} columns", gptq.solve_block_kernel,
                       {**dict.fromkeys(floats, "*fp32"), "group_ptr": "*i64",
                        **dict.fromkeys(("n", "out", "groups", *steps), "i32")},
                       gptq.constants(n, 4), multiples=("out", "groups", *steps))


def _aot_norms(family: str) -> Iterator[AotCase]:
    kinds = {"int8": "*i8", "e4m3": "*fp8e4nv" if family in ("hopper", "blackwell") else "*fp16"}
    for n in (4096, levels.LONGEST):
        constants = levels.constants(n, family in dependent.FAMILIES)
        for label, added in NORMS.items():
            for kind in ("", *kinds):
                pointers = {"x_ptr": "*bf16", "w_ptr": "*bf16", "y_ptr": kinds.get(kind, "*bf16"), **added,
                            **({"t_ptr": "*fp32"} if kind else {})}
                yield aot_case(f"rms_norm{label}{kind and ' '}{kind} {n}", rms_norm.rms_norm_kernel,
                               {**pointers, "eps": "fp32"},
                               {**absent_pointers(rms_norm.rms_norm_kernel, pointers), **constants},
                               wide_loads=1)
        for kind, pointer in kinds.items():
            yield aot_case(f"quantize {kind} {n}", levels.quantize_kernel,
                           {"x_ptr": "*bf16", "l_ptr": pointer, "t_ptr": "*fp32", "x_row": "i32"}, constants,
                           multiples=("x_row",), wide_loads=1)


def _aot_groups(family: str) -> Iterator[AotCase]:
    """Hidden states and what a gate opens, rounded in groups, as values and packed."""
    early = family in dependent.FAMILIES
    for group, name in (*GROUPED.items(), (128, "fp8 squares")):
        bits = 8 if group == 128 else 4
        for packed in (0, block_scaled.BK) if family in w4a4.NATIVE and bits == 4 else (0,):
            how = GroupRounding(group, torch.empty(1) if group == token_groups.FINE else None, packed, bits)
            label = f"{name}{' packed' * bool(packed)}"
            pointers = {"x_ptr": "*bf16", "l_ptr": "*u8" if packed else "*bf16", "t_ptr": "*fp32",
                        **({} if how.factor is None else {"f_ptr": "*fp32"})}
            for n in (4096, 14336):
                yield aot_case(f"round {label} {n}", token_groups.round_groups_kernel,
                               {**pointers, "x_row": "i32"},
                               {**absent_pointers(token_groups.round_groups_kernel, pointers),
                                **token_groups.constants(n, how, early)}, multiples=("x_row",), wide_loads=1)
            for n in (4096, rms_norm.LONGEST_GROUPED):
                for added in ("", " after"):
                    given = {**pointers, "w_ptr": "*bf16", **NORMS[added]}
                    yield aot_case(f"norm{'s' * bool(added)} {label} {n}", rms_norm.rms_norm_groups_kernel,
                                   {**given, "eps": "fp32"},
                                   {**absent_pointers(rms_norm.rms_norm_groups_kernel, given),
                                    **rms_norm.group_constants(n, how, early)}, wide_loads=1)


def _aot_rotations() -> Iterator[AotCase]:
    """Heads and hidden states, whole and in parts; there and back."""
    factors = {"signs_ptr": "*fp32", "mix_ptr": "*fp32"}
    for n in (64, 96, 128, 256, 4096, 14336, hadamard.WHOLE):
        for back in (False, True) if n <= 256 else (False,):
            constants = hadamard.constants(n)
            assert constants is not None
            yield aot_case(f"hadamard{' back' * back} {n}", hadamard.rotate_kernel,
                           {"x_ptr": "*bf16", **factors, "y_ptr": "*bf16", "m": "i32", "step": "i32"},
                           {"BACK": back, **constants}, multiples=("step",), wide_loads=1)
    for n in (11008, 28672, hadamard.LONGEST):
        parts, mixes = hadamard.part_constants(n)
        yield aot_case(f"hadamard parts {n}", hadamard.parts_kernel,
                       {"x_ptr": "*bf16", "signs_ptr": "*fp32", "t_ptr": "*fp32", "m": "i32", "step": "i32"},
                       {"BACK": False, **parts}, multiples=("step",), wide_loads=1)
        yield aot_case(f"hadamard mix {n}", hadamard.mix_kernel,
                       {"t_ptr": "*fp32", **factors, "y_ptr": "*bf16"}, {"BACK": False, **mixes})


def _aot_sampling(family: str) -> Iterator[AotCase]:
    """Everything in bfloat16, and what reads logits in other dtypes too."""
    cut = argmax.cut(VOCABULARY)
    parts = {"PARTS": cut.parts, "PAD": cut.pad}
    settings = {"value_ptr": "*fp32", "warm_ptr": "*fp32", "k_ptr": "*i32", "p_ptr": "*fp32"}
    tables = {"table_ptr": "*fp32", "key_ptr": "*i32", "sum_ptr": "*fp32"}
    peaks = {"value_ptr": "*fp32", "id_ptr": "*i32", "finite_ptr": "*i32"}
    numbers = dict.fromkeys(("step", "v", "rows"), "i32")
    for dtype, label in ((torch.bfloat16, ""), (torch.float16, " fp16"), (torch.float32, " fp32")):
        search = {"PASSES": bounds.passes(dtype), "LOW": bounds.LOW[dtype], **parts}
        x = POINTERS[dtype]
        yield aot_case(f"argmax peak{label}", argmax.peak_kernel,
                       {"x_ptr": x, **peaks, "step": "i32", "v": "i32"},
                       {"PARTS": cut.parts, "PART": cut.size, **argmax.peak_options(family)},
                       multiples=("step", "v"), wide_loads=1)
        for weighted in (False, True):
            rule = "top-p" if weighted else "top-k"
            yield aot_case(f"sampling {rule}{label}", bounds.search_kernel,
                           {"x_ptr": x, **settings, **tables, "bound_ptr": "*fp32", **numbers, "done": "i32"},
                           {"WEIGHTED": weighted, "BOUND": weighted, "PART": cut.size, "CHUNK": bounds.CHUNK,
                            "num_warps": bounds.WARPS, **search}, multiples=("step", "v"))
            if dtype == torch.bfloat16:
                yield aot_case(f"sampling {rule} settle", bounds.settle_kernel,
                               {**settings, **tables, "v": "i32", "rows": "i32",
                                **dict.fromkeys(("before_ptr", "bound_ptr", "total_ptr"), "*fp32")},
                               {"WEIGHTED": weighted, "BOUND": weighted, "num_warps": 1, **search},
                               multiples=("v",))
        options = {"BOUND": True, "FLOOR": True, "PART": cut.size, "num_warps": argmax.WARPS, **parts}
        floats = ("value_ptr", "warm_ptr", "min_ptr", "bound_ptr", "tally_ptr")
        yield aot_case(f"sampling tally{label}", sampling.tally_kernel,
                       {"x_ptr": x, **dict.fromkeys(floats, "*fp32"), **numbers}, options,
                       multiples=("step", "v"), wide_loads=1)
        yield aot_case(f"sampling draw{label}", sampling.draw_kernel,
                       {"x_ptr": x, **dict.fromkeys((*floats, "total_ptr"), "*fp32"),
                        **dict.fromkeys(("id_ptr", "finite_ptr", "good_ptr"), "*i32"),
                        **dict.fromkeys(("seed_ptr", "step_ptr", "out_ptr"), "*i64"), **numbers},
                       {"SHARE": True, **options}, multiples=("step", "v"), wide_loads=1)
    yield aot_case("argmax join", argmax.join_peaks_kernel,
                   {**peaks, "out_ptr": "*i64", "good_ptr": "*i32"}, {**parts, "num_warps": 1})
