"""Other libraries' products with quantized weights, timed beside ours where they are installed.

A peer has random weights of its own, of the same shape and in as many copies as a GPU's cache is too small
for; its result is compared with torch's on what those weights stand for. One that isn't installed, or fails,
is left out from then on, and why is kept.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from quantkit_kernels.tools.bench_cases.case import BenchCase, ModelShapes, Run, copies

GROUP = 128
TOLERANCE = 0.05


@dataclass(frozen=True)
class PeerWeight:
    """A peer's weight.

    Attributes:
        make: a copy of it, packed; each time it is called, another.
        dense: the weight that it stands for, ``[n, k]``.
        nbytes: the bytes of a copy.
        run: activations ``[m, k]``, a packed copy → ``[m, n]``.
    """

    make: Callable[[], Any]
    dense: torch.Tensor
    nbytes: int
    run: Callable[[torch.Tensor, Any], torch.Tensor]


@dataclass(frozen=True)
class PeerKernel:
    """A library's kernel.

    Attributes:
        name: short, for a table.
        beside: kernels of ours, by how their names begin.
        rows: the numbers of rows at which it is run.
        module: the module that must be installed.
        weight: n, k, device and dtype → a weight.
    """

    name: str
    beside: str
    rows: tuple[int, ...]
    module: str
    weight: Callable[[int, int, torch.device, torch.dtype], PeerWeight]


@dataclass(frozen=True)
class PeerRun:
    """A peer on one shape: ``run`` takes the number of a copy, ``check`` gives its result and torch's."""

    name: str
    run: Run
    copies: int
    nbytes: int
    check: Callable[[], tuple[torch.Tensor, torch.Tensor]]


def _random_int4(n: int, k: int, device: torch.device,
                 dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes uint8 ``[n, k]``, scales ``[n, k / 128]`` and what they stand for; 8 is 0."""
    codes = torch.randint(0, 16, (n, k), dtype=torch.uint8, device=device)
    scale = (torch.rand(n, k // GROUP, device=device) * 0.01 + 0.01).to(dtype)
    dense = ((codes.to(dtype).view(n, -1, GROUP) - 8) * scale[..., None]).view(n, k)
    return codes, scale, dense


def _tinygemm(n: int, k: int, device: torch.device, dtype: torch.dtype) -> PeerWeight:
    """torch's own, bfloat16 only."""
    codes, scale, dense = _random_int4(n, k, device, dtype)
    pairs = codes[:, ::2] << 4 | codes[:, 1::2]
    grids = torch.stack([scale, torch.zeros_like(scale)], -1).transpose(0, 1).contiguous()
    packed = torch.ops.aten._convert_weight_to_int4pack(pairs, 8)
    return PeerWeight(lambda: (packed.clone(), grids.clone()), dense, n * k // 2 + 4 * n * k // GROUP,
                      lambda x, weight: torch.ops.aten._weight_int4pack_mm(x, weight[0], GROUP, weight[1]))


def _compiled(n: int, k: int, device: torch.device, dtype: torch.dtype) -> PeerWeight:
    """8-bit weights by the compiler: it is to convert them on their way into the product."""
    codes = torch.randint(-127, 128, (n, k), dtype=torch.int8, device=device)
    scale = (torch.rand(n, device=device) * 0.001 + 0.001).to(dtype)

    def product(x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return F.linear(x, codes.to(x.dtype)) * scale

    fast: Any = torch.compile(product, dynamic=False, fullgraph=True,
                              options={"coordinate_descent_tuning": True})
    return PeerWeight(lambda: (codes.clone(), scale.clone()), codes.to(dtype) * scale[:, None], n * k + 2 * n,
                      lambda x, weight: fast(x, *weight))


def _gemlite_int4(n: int, k: int, device: torch.device, dtype: torch.dtype) -> PeerWeight:
    from gemlite.helper import A16Wn

    codes, scale, dense = _random_int4(n, k, device, dtype)

    def make() -> Any:
        grids = (tensor.view(-1, 1) for tensor in (scale, torch.full_like(scale, 8)))
        return A16Wn(device=str(device)).from_weights(codes, *grids, 4, GROUP, None)

    return PeerWeight(make, dense, n * k // 2 + 4 * n * k // GROUP, lambda x, weight: weight(x))


def _gemlite_int8(n: int, k: int, device: torch.device, dtype: torch.dtype) -> PeerWeight:
    from gemlite import helper

    kind = getattr(helper, "A16W8_INT8", None) or helper.A16W8
    dense = torch.randn(n, k, dtype=dtype, device=device) * 0.02
    return PeerWeight(lambda: kind(device=str(device)).from_weights(dense, None), dense, n * k + 2 * n,
                      lambda x, weight: weight(x))


def _bitsandbytes(n: int, k: int, device: torch.device, dtype: torch.dtype) -> PeerWeight:
    import bitsandbytes
    from bitsandbytes import functional

    def make() -> Any:
        return functional.quantize_4bit(weight, blocksize=64, quant_type="nf4")

    weight = torch.randn(n, k, dtype=dtype, device=device) * 0.02
    packed, state = make()
    dense = functional.dequantize_4bit(packed, state).to(dtype).view(n, k)
    return PeerWeight(make, dense, n * k // 2 + 4 * n * k // 64,
                      lambda x, weight: bitsandbytes.matmul_4bit(x, weight[0].t(), quant_state=weight[1]))


PEERS = (PeerKernel("tinygemm", "w4a16 g128", (1, 4, 16, 64), "torch", _tinygemm),
         PeerKernel("gemlite", "w4a16 g128", (1, 16), "gemlite", _gemlite_int4),
         PeerKernel("compile", "w8a16", (1,), "torch", _compiled),
         PeerKernel("gemlite", "w8a16", (1, 16), "gemlite", _gemlite_int8),
         PeerKernel("bnb", "nf4 b64", (1, 4, 16, 64), "bitsandbytes", _bitsandbytes))
"""``compile``: torch's compiler; ``bnb``: bitsandbytes."""


@dataclass
class Peers:
    """What stands beside each case.

    Attributes:
        shapes, device, dtype: as cases were made for.
        every: all the peers.
        left_out: name → why, of those that aren't there or failed.
    """

    shapes: ModelShapes
    device: torch.device
    dtype: torch.dtype
    every: tuple[PeerKernel, ...] = PEERS
    left_out: dict[str, str] = field(default_factory=dict)
    _held: dict[tuple[str, str], tuple[PeerWeight, list[Any]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for peer in self.every:
            if importlib.util.find_spec(peer.module) is None:
                self.left_out[peer.name] = f"{peer.module} is not installed"

    def of(self, case: BenchCase) -> Iterator[PeerRun]:
        """The peers that are measured beside ``case``, by its kernel, its Linear and its rows."""
        match = re.fullmatch(r"(.+) m(\d+)", case.shape)
        sizes = {name: (n, k) for name, n, k in self.shapes.linears}
        if match is None or match[1] not in sizes:
            return
        for peer in self.every:
            if case.kernel == peer.beside and int(match[2]) in peer.rows and peer.name not in self.left_out:
                try:
                    runner = self._runner(peer, match[1], *sizes[match[1]], int(match[2]))
                except Exception as error:  # of a library we don't know is one peer less
                    self.fails(peer.name, case, error)
                else:
                    yield runner

    def fails(self, name: str, case: BenchCase, error: Exception | str) -> None:
        """Leave this peer out from now on."""
        text = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
        self.left_out[name] = f"{case.shape}: {(text.strip().splitlines() or [''])[0]}"

    def _runner(self, peer: PeerKernel, linear: str, n: int, k: int, m: int) -> PeerRun:
        self._held = {key: weight for key, weight in self._held.items()
                      if key[1] == linear}  # the others' memory
        key = (f"{peer.name} {peer.beside}", linear)
        if key not in self._held:
            weight = peer.weight(n, k, self.device, self.dtype)
            self._held[key] = weight, [weight.make() for _ in range(copies(self.shapes, weight.nbytes))]
        weight, packs = self._held[key]
        x = torch.randn(m, k, dtype=self.dtype, device=self.device)
        return PeerRun(peer.name, lambda at: weight.run(x, packs[at]), len(packs), weight.nbytes,
                       lambda: (weight.run(x, packs[0]), F.linear(x, weight.dense)))
