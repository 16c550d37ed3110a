"""A cache into which kernels write, beside one that torch writes."""

from __future__ import annotations

from dataclasses import replace

import torch

from quantkit.kv.base import KVCodecs
from quantkit.kv.batch import rotated_for_codec
from quantkit.kv.codecs.kivi import GroupedGrid
from quantkit.kv.codecs.per_token import Float8Vectors, Int8Vectors, PlainVectors
from quantkit.kv.codecs.rotation import HadamardVectors
from quantkit.kv.page_pool import MoveCounter
from quantkit.kv.sequence import SequenceState
from quantkit.kv.store import PageStore
from quantkit.ops import hadamard
from quantkit_kernels import reference
from quantkit_kernels.triton.cache import LayerPages, SequenceTables, Side, SideLayout, StepTokens
from quantkit_kernels.triton.close_pages import close_pages
from quantkit_kernels.triton.rope_store import rope_store

H, HKV, EPS = 2, 2, 1e-6
CODINGS = {"none": PlainVectors(None), "bf16": PlainVectors(torch.bfloat16), "int8": Int8Vectors(),
           "fp8": Float8Vectors(), **{f"token{bits}": GroupedGrid(bits, False) for bits in (2, 3, 4)},
           **{f"channel{bits}": GroupedGrid(bits, True) for bits in (2, 3, 4)},
           **{f"hadamard{bits}": HadamardVectors(bits, False) for bits in (2, 3, 4)},
           **{f"hadamard{bits}c": HadamardVectors(bits, True) for bits in (2, 3, 4)}}


def kernel_coding(name):
    """As kernels know it."""
    if name in ("none", "bf16", "int8", "fp8"):
        return SideLayout(name, 8) if name.endswith("8") else SideLayout("plain", 16)
    return SideLayout(name.rstrip("c").rstrip("234"), int(name.rstrip("c")[-1]), name.endswith("c"))


class Cache:
    """Two layers of a cache, of which the kernels write the second; what is expected lies on the CPU, where
    torch divides exactly."""

    def __init__(self, on, keys, values, dim, residual_length=0, first=0, numbered=False, sequences=2):
        self.on, self.dim, self.names = on, dim, (keys, values)
        self.codecs = KVCodecs(CODINGS[keys], CODINGS[values], residual_length, first)
        self.expected, self.store = (PageStore(self.codecs, HKV, dim, on[1], numbered, device, MoveCounter())
                                     for device in (torch.device("cpu"), on[0]))
        self.stored = [[SequenceState(1, HKV, first=first) for _ in range(sequences)] for _ in range(2)]
        self.turn = tuple(part.to(on[0]) for part in hadamard.hadamard_factors(dim))

    def tables(self):
        """Of all sequences, as layer 1 of 2; what lies behind a head's pages is far outside."""
        sequences = self.stored[1]
        for sequence in sequences:
            sequence.lay_out(None if self.store.residual is None else self.codecs.residual_length)

        def joined(name):
            parts = [getattr(sequence, name)[0] for sequence in sequences]
            width = max(part.shape[1] for part in parts) + 1
            table = torch.full((len(sequences), 2, HKV, width), 1 << 30, dtype=torch.int32)
            for row, part in zip(table, parts):
                row[1, :, :part.shape[1]] = torch.from_numpy(part)
            return table.to(self.on[0])

        def numbers(name):
            rows = [torch.from_numpy(getattr(sequence, name)) for sequence in sequences]
            return torch.stack([row.expand(2, -1) for row in rows]).to(torch.int32).to(self.on[0])

        waits = self.store.residual is not None
        seen = torch.tensor([int(sequence.seen[0]) for sequence in sequences], dtype=torch.int32,
                            device=self.on[0])
        return SequenceTables(joined("table"), numbers("lengths"), seen, joined("residual")
                              if waits else None,
                              numbers("starts") if waits else None, self.codecs.residual_length,
                              self.codecs.first)

    def pages(self):
        """The second store's, as kernels are given them."""
        parts, waits = self.store.pages.parts, self.store.residual
        sides = []
        for side, name in zip("kv", self.names):
            own = {key[2:]: part for key, part in parts.items() if key.startswith(f"{side}.")}
            sides.append(Side(kernel_coding(name), own.get("codes", own.get("values")), own.get("scale"),
                              own.get("low", own.get("mean")),
                              None if waits is None else waits.parts[f"{side}.values"]))
        return LayerPages(*sides, parts.get("positions"), None
                          if waits is None else waits.parts.get("positions"))

    def step(self, counts, qkv, angles, rows=None, run=True, **about):
        """Tokens of each sequence: the torch path into one store, the kernels into the other → both q."""
        before = [sequence.lengths.copy() for sequence in self.stored[1]]
        placed = [(row, place) for row, count in enumerate(counts) for place in range(count)]
        order = range(len(placed)) if rows is None else rows
        starts = [int(sequence.seen[0]) for sequence in self.stored[0]]
        positions = torch.tensor([starts[row] + place for row, place in placed], device=self.on[0])
        q, k, v = parts(qkv, self.dim)
        cos, sin = (t[positions].repeat(1, 2) for t in angles)
        turned = self.codecs.keys.hadamard, self.codecs.values.hadamard
        if about.get("q_norm") is not None:
            q, k = (normed(x, about[f"{name}_norm"]) for name, x in (("q", q), ("k", k)))
        q, k = (reference.rotate(x.float(), cos, sin).to(self.on[1]) for x in (q, k))
        if turned[0]:
            q, k = hadamard.apply_hadamard(q), rotated_for_codec(k)
        if turned[1]:
            v = rotated_for_codec(v)
        at = 0
        for row, count in enumerate(counts):
            own = slice(at, at + count)
            at += count
            state = self.stored[0][row].layers[0]
            slots = self.expected.allocate(state, count)
            spread = positions[own].repeat(HKV).cpu()
            both = (x[own].transpose(0, 1).reshape(-1, self.dim).cpu() for x in (k, v))
            self.expected.write(slots, *both, spread)
            self.expected.encode_full_pages(state)
            self.store.allocate(self.stored[1][row].layers[0], count)
        if not run:
            return None
        tables = self.tables()
        lengths = torch.stack([torch.from_numpy(row).expand(2, -1) for row in before]).contiguous()
        seen = torch.tensor(starts, dtype=torch.int32, device=self.on[0])
        tables = replace(tables, lengths=lengths.to(self.on[0]), seen=seen)
        where = torch.tensor([placed[at] for at in order], dtype=torch.int32, device=self.on[0]).view(-1, 2)
        step, given = StepTokens(where, 1 << 20), qkv[list(order)]
        out = rope_store(given, *angles, self.pages(), tables, step, 1, heads=H, kv_heads=HKV, dim=self.dim,
                         eps=EPS, rotation=self.turn, **about)
        if self.store.residual is not None:
            close_pages(self.pages(), tables, step, 1)
        return out, q[list(order)]

    def fill(self, counts, randn, angles):
        """Put this number of tokens of each sequence into both stores, settled, without any kernel."""
        self.step(counts, fused(randn, sum(counts), self.dim, self.on, seed=7), angles, run=False)
        for mine, other in zip(self.store.all, self.expected.all):
            mine.parts.update({name: part.clone().to(self.on[0]) for name, part in other.parts.items()})
        self.settle()

    def settle(self):
        """Both stores give back what is encoded."""
        for store, sequences in zip((self.expected, self.store), self.stored):
            for sequence in sequences:
                store.free_encoded_residual(sequence.layers[0])

    def same(self):
        """Every byte of both stores."""
        for mine, other in zip(self.store.all, self.expected.all):
            for name, part in other.parts.items():
                assert torch.equal(mine.parts[name].cpu(), part), name


def parts(qkv, dim):
    return (x.unflatten(1, (-1, dim)) for x in qkv.split((H * dim, HKV * dim, HKV * dim), 1))


def normed(x, weight):
    """As in the models: rounded before a weight of the same dtype."""
    normal = torch.nn.functional.rms_norm(x.float(), x.shape[-1:], None, EPS)
    if weight.dtype == x.dtype:
        return normal.to(x.dtype) * weight
    return (normal * weight).to(x.dtype)


def angles(rows, width, device):
    turn = torch.rand(rows, width // 2, generator=torch.Generator().manual_seed(9)) * 6.3
    return turn.cos().to(device), turn.sin().to(device)


def fused(randn, n, dim, on, seed=0):
    return randn(n, (H + 2 * HKV) * dim, seed=seed, on=on)
