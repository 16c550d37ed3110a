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
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from quantkit_kernels.tools.cases.case import BenchCase, BenchSetup, Run

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
        weight: what it is made for, outputs and inputs → a weight.
    """

    name: str
    beside: str
    rows: tuple[int, ...]
    module: str
    weight: Callable[[BenchSetup, int, int], PeerWeight]


@dataclass(frozen=True)
class PeerRun:
    """A peer on one shape: ``run`` takes the number of a copy, ``check`` gives its result and torch's."""

    name: str
    run: Run
    copies: int
    nbytes: int
    check: Callable[[], tuple[torch.Tensor, torch.Tensor]]


class _RandomInt4(NamedTuple):
    """Codes uint8 ``[n, k]``, scales ``[n, k / 128]`` and what they stand for; 8 is 0."""

    codes: torch.Tensor
    scale: torch.Tensor
    dense: torch.Tensor

    @classmethod
    def made(cls, setup: BenchSetup, n: int, k: int) -> _RandomInt4:
        codes = torch.randint(0, 16, (n, k), dtype=torch.uint8, device=setup.device)
        scale = (torch.rand(n, k // GROUP, device=setup.device) * 0.01 + 0.01).to(setup.dtype)
        dense = ((codes.to(setup.dtype).view(n, -1, GROUP) - 8) * scale[..., None]).view(n, k)
        return cls(codes, scale, dense)


def _tinygemm(setup: BenchSetup, n: int, k: int) -> PeerWeight:
    """torch's own, bfloat16 only."""
    random = _RandomInt4.made(setup, n, k)
    pairs = random.codes[:, ::2] << 4 | random.codes[:, 1::2]
    grids = torch.stack([random.scale, torch.zeros_like(random.scale)], -1).transpose(0, 1).contiguous()
    packed = torch.ops.aten._convert_weight_to_int4pack(pairs, 8)
    return PeerWeight(lambda: (packed.clone(), grids.clone()), random.dense, n * k // 2 + 4 * n * k // GROUP,
                      lambda x, weight: torch.ops.aten._weight_int4pack_mm(x, weight[0], GROUP, weight[1]))


def _compiled(setup: BenchSetup, n: int, k: int) -> PeerWeight:
    """8-bit weights by the compiler: it is to convert them on their way into the product."""
    codes = torch.randint(-127, 128, (n, k), dtype=torch.int8, device=setup.device)
    scale = (torch.rand(n, device=setup.device) * 0.001 + 0.001).to(setup.dtype)

    def product(x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return F.linear(x, codes.to(x.dtype)) * scale

    fast: Any = torch.compile(product, dynamic=False, fullgraph=True,
                              options={"coordinate_descent_tuning": True})
    return PeerWeight(lambda: (codes.clone(), scale.clone()), codes.to(setup.dtype) * scale[:, None],
                      n * k + 2 * n, lambda x, weight: fast(x, *weight))


def _gemlite_int4(setup: BenchSetup, n: int, k: int) -> PeerWeight:
    from gemlite.helper import A16Wn

    random = _RandomInt4.made(setup, n, k)

    def make() -> Any:
        grids = (tensor.view(-1, 1) for tensor in (random.scale, torch.full_like(random.scale, 8)))
        return A16Wn(device=str(setup.device)).from_weights(random.codes, *grids, 4, GROUP, None)

    return PeerWeight(make, random.dense, n * k // 2 + 4 * n * k // GROUP, lambda x, weight: weight(x))


def _gemlite_int8(setup: BenchSetup, n: int, k: int) -> PeerWeight:
    from gemlite import helper

    kind = getattr(helper, "A16W8_INT8", None) or helper.A16W8
    dense = setup.normal(n, k) * 0.02
    return PeerWeight(lambda: kind(device=str(setup.device)).from_weights(dense, None), dense, n * k + 2 * n,
                      lambda x, weight: weight(x))


def _bitsandbytes(setup: BenchSetup, n: int, k: int) -> PeerWeight:
    import bitsandbytes
    from bitsandbytes import functional

    def make() -> Any:
        return functional.quantize_4bit(weight, blocksize=64, quant_type="nf4")

    weight = setup.normal(n, k) * 0.02
    packed, state = make()
    dense = functional.dequantize_4bit(packed, state).to(setup.dtype).view(n, k)
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
        setup: what the cases were made for.
        every: all the peers.
        left_out: name → why, of those that aren't there or failed.
    """

    setup: BenchSetup
    every: tuple[PeerKernel, ...] = PEERS
    left_out: dict[str, str] = field(default_factory=dict)
    _weights: dict[tuple[str, str], tuple[PeerWeight, list[Any]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for peer in self.every:
            if importlib.util.find_spec(peer.module) is None:
                self.left_out[peer.name] = f"{peer.module} is not installed"

    def of(self, case: BenchCase) -> Iterator[PeerRun]:
        """The peers that are measured beside ``case``, by its kernel, its Linear and its rows."""
        match = re.fullmatch(r"(.+) m(\d+)", case.shape)
        sizes = {name: (n, k) for name, n, k in self.setup.shapes.linears}
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
        self._weights = {key: weight for key, weight in self._weights.items()
                      if key[1] == linear}  # the others' memory
        key = (f"{peer.name} {peer.beside}", linear)
        if key not in self._weights:
            weight = peer.weight(self.setup, n, k)
            self._weights[key] = weight, [weight.make() for _ in range(self.setup.copies(weight.nbytes))]
        weight, packs = self._weights[key]
        x = self.setup.normal(m, k)
        return PeerRun(peer.name, lambda at: weight.run(x, packs[at]), len(packs), weight.nbytes,
                       lambda: (weight.run(x, packs[0]), F.linear(x, weight.dense)))
