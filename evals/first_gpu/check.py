"""What a GPU is and whether products are right on it: ``python check.py --out FILE``.

Writes a line of JSON for each of these, as soon as it is known: versions; the bandwidth of a read and of a
copy; and, for each kind of weight, a gated product of 512 rows, computed 20 times: whether all have the same
bits, and how far they are from float64, beside torch in bfloat16. Needs torch and triton only. Exit code 1 if
anything is wrong.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from quantkit_kernels.reference import dequantize_int, dequantize_nf4
from quantkit_kernels.tools.bench import (
    COPY,
    clock_timer,
    copy_bandwidth,
    graph_timer,
    machine,
    read_bandwidth,
)
from quantkit_kernels.triton import fp8, nf4, w4a16, w8a16, w16a16
from quantkit_kernels.triton.matmul import multiply
from quantkit_kernels.triton.packed import TritonWeight

TIMES = 20
MOST = 2.0
"""The error may be so many times torch's."""


def weights(n: int, k: int, device: torch.device,
            dtype: torch.dtype) -> Iterator[tuple[str, TritonWeight, torch.Tensor]]:
    """Random weights of every kind, gated, and the same in float64."""
    torch.manual_seed(0)
    plain = (torch.randn(n, k, device=device) * 0.02).to(dtype)
    yield "w16a16", w16a16.pack(plain, gated=True), plain.double()
    codes = torch.randint(-127, 128, (n, k), dtype=torch.int8, device=device)
    rows = torch.rand(n, device=device) * 1e-4 + 1e-4
    yield "w8a16", w8a16.pack(codes, rows, gated=True), dequantize_int(codes, rows[:, None])
    floats = (torch.randn(n, k, device=device) * 100).clamp_(-448, 448).to(torch.float8_e4m3fn)
    yield "fp8", fp8.pack(floats, rows, gated=True), floats.double() * rows.double()[:, None]
    codes = torch.randint(0, 16, (n, k), dtype=torch.uint8, device=device)
    scale = (torch.rand(n, k // 128, device=device) * 1e-3 + 1e-3).to(torch.bfloat16).float()
    yield "w4a16 g128", w4a16.pack(codes, scale, gated=True), dequantize_int(codes, scale, 8)
    absmax = torch.rand(n * k // nf4.BLOCK, device=device) * 0.01 + 0.01
    yield "nf4", nf4.pack(codes, absmax, gated=True), dequantize_nf4(codes, absmax, nf4.LEVELS)


def product(kind: str, packed: TritonWeight, exact: torch.Tensor, x: torch.Tensor,
            times: int) -> dict[str, Any]:
    """One product, computed so many times."""
    first = multiply(x, packed, gated="silu")
    others = sum(not torch.equal(multiply(x, packed, gated="silu"), first) for _ in range(times - 1))
    gate, up = F.linear(x.double(), exact).chunk(2, 1)
    wanted = F.silu(gate) * up
    gate, up = F.linear(x, exact.to(x.dtype)).chunk(2, 1)
    ours, theirs = (float((got.double() - wanted).norm() / wanted.norm())
                    for got in (first, F.silu(gate) * up))
    return {"product": kind, "rows": len(x), "shape": list(exact.shape), "times": times,
            "other_bits": others, "error": ours, "torch_error": theirs,
            "right": others == 0 and ours <= MOST * theirs}


def facts(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    device, dtype, n, k, rows = torch.device("cuda"), torch.bfloat16, 28672, 4096, 512
    timer, times, size = graph_timer, TIMES, COPY
    if args.rehearse:  # the interpreter is wrong in bfloat16
        device, dtype, n, k, rows = torch.device("cpu"), torch.float16, 256, 128, 70
        timer, times, size = clock_timer, 2, 1 << 20
    smi = None if args.rehearse else subprocess.run(["nvidia-smi"], capture_output=True, text=True).stdout
    yield {**machine(device), "python": sys.version, "system": platform.platform(), "nvidia_smi": smi}
    yield {"read_bytes_per_second": read_bandwidth(timer, 9, device, size),
           "copy_bytes_per_second": copy_bandwidth(timer, 9, device, size)}
    x = torch.randn(rows, k, dtype=dtype, device=device)
    for kind, packed, exact in weights(n, k, device, dtype):
        yield product(kind, packed, exact, x, times)


def main() -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", maxsplit=1)[0])
    parser.add_argument("--out", type=Path, required=True, help="JSON lines")
    parser.add_argument("--rehearse", action="store_true", help="small, interpreted, without a GPU")
    args = parser.parse_args()
    if not args.rehearse and not torch.cuda.is_available():
        print("there is no GPU that torch can use", file=sys.stderr)
        return 2
    right = True
    with args.out.open("w", encoding="utf-8") as file:
        for fact in facts(args):
            print(json.dumps({key: value for key, value in fact.items() if key != "nvidia_smi"}), flush=True)
            file.write(json.dumps(fact) + "\n")
            file.flush()
            right &= fact.get("right", True)
    return int(not right)


if __name__ == "__main__":
    sys.exit(main())
