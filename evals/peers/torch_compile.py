"""An 8B Llama that torch compiles, as gpt-fast does: the tokens a second that one sequence decodes on a GPU.

    python evals/peers/torch_compile.py --weights bf16,int8,int4 --context 1100 --out FILE

Weights are random. A layer is compiled once (``coordinate_descent_tuning``), and a step of all layers, the
head and the choice of the next token is one CUDA graph. int8: a scale a row, converted on its way into the
product; int4: torch's own kernel for groups of 128 (``_weight_int4pack_mm``), the head in bfloat16. Needs
torch only. https://github.com/meta-pytorch/gpt-fast
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

LARGE = {"hidden": 4096, "inner": 14336, "heads": 32, "kv_heads": 8, "dim": 128, "vocab": 128256,
         "layers": 32}
TINY = {"hidden": 256, "inner": 512, "heads": 4, "kv_heads": 2, "dim": 64, "vocab": 512, "layers": 2}
GROUP, RUNS, TOKENS = 128, 5, 100


class Weight(nn.Module):
    """A Linear's weight ``[n, k]`` of some kind."""

    def __init__(self, kind: str, n: int, k: int, device: torch.device) -> None:
        super().__init__()
        self.kind = kind
        if kind == "int8":
            weight = torch.randint(-127, 128, (n, k), dtype=torch.int8, device=device)
            self.register_buffer("scale", torch.full((n,), 2e-4, dtype=torch.bfloat16, device=device))
        elif kind == "int4":
            codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device=device)
            weight = torch.ops.aten._convert_weight_to_int4pack(codes, 8)
            self.register_buffer("scale", torch.full((k // GROUP, n, 2), 4e-3, dtype=torch.bfloat16,
                                                     device=device))
        else:
            weight = torch.randn(n, k, dtype=torch.bfloat16, device=device) * 0.02
        self.register_buffer("weight", weight)
        self.n = n

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x [1, 1, k]`` → ``[1, 1, n]``."""
        if self.kind == "int8":
            return F.linear(x, self.weight.to(x.dtype)) * self.scale
        if self.kind == "int4":
            rows = x.reshape(-1, x.shape[-1])
            product = torch.ops.aten._weight_int4pack_mm(rows, self.weight, GROUP, self.scale)
            return product.view(*x.shape[:-1], self.n)
        return F.linear(x, self.weight)


class Layer(nn.Module):
    """A layer and its cache of ``context`` positions."""

    def __init__(self, kind: str, shape: dict[str, int], context: int, device: torch.device) -> None:
        super().__init__()
        self.shape, h, d = shape, shape["heads"], shape["dim"]
        self.qkv = Weight(kind, (h + 2 * shape["kv_heads"]) * d, shape["hidden"], device)
        self.o = Weight(kind, shape["hidden"], h * d, device)
        self.gate_up = Weight(kind, 2 * shape["inner"], shape["hidden"], device)
        self.down = Weight(kind, shape["hidden"], shape["inner"], device)
        size = 1, shape["kv_heads"], context, d
        for name in ("k", "v"):
            self.register_buffer(name, torch.randn(size, dtype=torch.bfloat16, device=device))
        for name in ("norm1", "norm2"):
            self.register_buffer(name, torch.ones(shape["hidden"], dtype=torch.bfloat16, device=device))

    def forward(self, x: torch.Tensor, at: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor,
                mask: torch.Tensor) -> torch.Tensor:
        """``x [1, 1, hidden]`` of the token at position ``at``, int64 ``[1]``."""
        h, g, d = self.shape["heads"], self.shape["kv_heads"], self.shape["dim"]
        qkv = self.qkv(F.rms_norm(x, (x.shape[-1],), self.norm1, 1e-5)).view(1, 1, h + 2 * g, d)
        q, k, v = qkv.transpose(1, 2).split((h, g, g), dim=1)
        q, k = (torch.cat((part[..., :d // 2] * cos - part[..., d // 2:] * sin,
                           part[..., d // 2:] * cos + part[..., :d // 2] * sin), -1) for part in (q, k))
        self.k.index_copy_(2, at, k)
        self.v.index_copy_(2, at, v)
        y = F.scaled_dot_product_attention(q, self.k, self.v, attn_mask=mask, enable_gqa=True)
        x = x + self.o(y.transpose(1, 2).reshape(1, 1, h * d))
        gate, up = self.gate_up(F.rms_norm(x, (x.shape[-1],), self.norm2, 1e-5)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


def measure(kind: str, shape: dict[str, int], context: int, device: torch.device,
            compiled: bool) -> dict[str, Any]:
    """Tokens a second of steps at positions from ``context`` on."""
    length = -(-(context + TOKENS) // 64) * 64
    layers = [Layer(kind, shape, length, device) for _ in range(shape["layers"])]
    table = torch.randn(shape["vocab"], shape["hidden"], dtype=torch.bfloat16, device=device)
    norm = torch.ones(shape["hidden"], dtype=torch.bfloat16, device=device)
    head = Weight("bf16" if kind == "int4" else kind, shape["vocab"], shape["hidden"], device)
    ids, at = (torch.full((1,), number, dtype=torch.int64, device=device) for number in (1, context))
    places = torch.arange(length, device=device)
    angles = places[:, None] * 5e5 ** -(torch.arange(0, shape["dim"], 2, device=device) / shape["dim"])
    cosines, sines = angles.cos().bfloat16(), angles.sin().bfloat16()
    if compiled:
        options = {"coordinate_descent_tuning": True}
        for layer in layers:
            layer.compile(fullgraph=True, dynamic=False, options=options)
        head.compile(fullgraph=True, dynamic=False, options=options)

    def step() -> None:
        x = table[ids][:, None]
        mask = (places <= at)[None, None, None]
        for layer in layers:
            x = layer(x, at, cosines[at], sines[at], mask)
        ids.copy_(head(F.rms_norm(x, (x.shape[-1],), norm, 1e-5))[0].argmax(-1))
        at.add_(1)

    begin = time.perf_counter()
    with torch.inference_mode():
        for _ in range(3):
            step()
    made, run = time.perf_counter() - begin, step
    if device.type == "cuda":
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.inference_mode(), torch.cuda.graph(graph):
            step()
        run = graph.replay
    speeds = []
    for _ in range(RUNS):
        at.fill_(context)
        begin = time.perf_counter()
        for _ in range(TOKENS):
            run()
        ids.tolist()
        speeds.append(TOKENS / (time.perf_counter() - begin))
    return {"weights": kind, "context": context, "tok_s": median(speeds), "low": min(speeds),
            "high": max(speeds), "compile_s": made}


def main() -> None:
    global RUNS, TOKENS
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", maxsplit=1)[0])
    parser.add_argument("--weights", default="bf16,int8,int4")
    parser.add_argument("--context", type=int, default=1100)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rehearse", action="store_true", help="a tiny model on the CPU, not compiled")
    args = parser.parse_args()
    device, shape = torch.device("cpu" if args.rehearse else "cuda"), TINY if args.rehearse else LARGE
    if args.rehearse:
        RUNS, TOKENS = 1, 2
    about = {"torch": torch.__version__, "gpu": None if args.rehearse else torch.cuda.get_device_name()}
    rows = []
    for kind in args.weights.split(","):
        torch.manual_seed(0)
        rows.append(measure(kind, shape, args.context, device, not args.rehearse))
        print(rows[-1], flush=True)
        args.out.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
