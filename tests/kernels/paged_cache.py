"""Sequences whose keys and values lie in shuffled pages, encoded by quantkit's codecs; what nobody wrote is
NaN, or any code."""

from __future__ import annotations

import math

import torch

from quantkit.kv.base import PAGE
from quantkit.kv.codecs.kivi import GroupedGrid
from quantkit.kv.codecs.per_token import Float8Vectors, Int8Vectors, PlainVectors
from quantkit.kv.codecs.rotation import HadamardVectors
from quantkit_kernels.triton.cache import LayerPages, SequenceTables, Side, SideLayout, StepTokens

KINDS = {"plain": lambda bits, keys: PlainVectors(None), "int8": lambda bits, keys: Int8Vectors(),
         "fp8": lambda bits, keys: Float8Vectors(), "channel": lambda bits, keys: GroupedGrid(bits, True),
         "token": lambda bits, keys: GroupedGrid(bits, False),
         "hadamard": lambda bits, keys: HadamardVectors(bits, keys)}


def parsed(name, keys):
    """``channel4`` and the like."""
    kind = name.rstrip("234") if name[0] in "cth" else name
    bits = int(name[len(kind):] or {"plain": 16}.get(kind, 8))
    return KINDS[kind](bits, keys), SideLayout(kind, bits, kind == "hadamard" and keys)


class _Side:
    """Pages of one side."""

    def __init__(self, name, keys, count, residual, d, on, seed):
        self.device, self.dtype = on
        self.codec, self.coding = parsed(name, keys)
        self.random = torch.Generator().manual_seed(seed)
        self.count, self.d = count, d
        self.parts = {}
        self.layout = {name: (shape, dtype, (PAGE,)) for name, (shape, dtype) in
                       self.codec.layout(d, self.dtype).items()}
        self.layout |= {name: (shape, dtype, ()) for name, (shape, dtype) in
                        self.codec.shared(d, self.dtype).items()}
        for part, (shape, dtype, slots) in self.layout.items():
            full = (count, *slots, *shape)
            self.parts[part] = torch.full(full, math.nan).to(dtype) if dtype.is_floating_point else (
                torch.randint(0, 127, full, generator=self.random).to(dtype))
        self.residual = torch.full((residual, PAGE, d), math.nan, dtype=self.dtype) if residual else None

    def put(self, page, x):
        """Encode ``x [n, D]``, n <= 64, into a page; returns what comes back, float64."""
        n = len(x)
        parts = self.codec.encode(x)
        for name, part in parts.items():
            if self.layout[name][2]:
                self.parts[name][page, :n] = part
            else:
                assert n == PAGE
                self.parts[name][page] = part
        return self.codec.decode(parts).double()

    def wait(self, page, x):
        self.residual[page, :len(x)] = x
        return x.double()

    def side(self):
        parts = {name: part.to(self.device) for name, part in self.parts.items()}
        return Side(self.coding, parts.get("codes", parts.get("values")), parts.get("scale"),
                    parts.get("low", parts.get("mean")),
                    None if self.residual is None else self.residual.to(self.device))


class PagedCache:
    """So many slots of each head, a step's own tokens among them.

    Args:
        lengths: ``[R][Hkv]``, with the tokens of this step.
        counts: tokens of this step, of each sequence.
        d: head dimension.
        on: device and dtype.
        keys, values: codings.
        residual_length, first: of vectors that wait; ``None``: none do.
        placed: whether positions are kept: a slot from before the step is then at twice its number.
        value_size: of values.
    """

    def __init__(self, lengths, counts, d, on, keys="plain", values="plain", residual_length=None, first=0,
                 placed=False, seed=0, value_size=1.0):
        device, dtype = on
        layers, layer = 2, 1
        self.on, self.layer = on, layer
        self.waits = residual_length is not None
        self.residual_length, self.first = residual_length or 0, first
        self.lengths = torch.tensor(lengths)
        self.counts = counts
        r, hkv = self.lengths.shape
        random = torch.Generator().manual_seed(seed)
        width = int(-(-self.lengths.max() // PAGE)) + 1
        total = r * hkv * width
        coded = _Side(keys, True, total, total if self.waits else 0, d, on, seed + 1)
        other = _Side(values, False, total, total if self.waits else 0, d, on, seed + 2)
        order = iter(torch.randperm(total, generator=random).tolist())
        worder = iter(torch.randperm(total, generator=random).tolist())
        shape = (r, layers, hkv)
        table = torch.full((*shape, width), 2**30, dtype=torch.int32)
        wtable, starts = table.clone(), torch.zeros(shape, dtype=torch.int32)
        at = torch.full((total, PAGE), -5, dtype=torch.int32)
        wat = at.clone()
        before = torch.full(shape, 10**6, dtype=torch.int32)
        seen = torch.zeros(r, dtype=torch.int32)
        self.plain, self.coded, self.at = {}, {}, {}
        for s in range(r):
            longest = int(self.lengths[s].max())
            seen[s] = (2 * longest if placed else longest) - counts[s]
            for h in range(hkv):
                n = int(self.lengths[s, h])
                before[s, layer, h] = n - counts[s]
                x = [torch.randn(n, d, generator=random) + torch.randn(d, generator=random),
                     torch.randn(n, d, generator=random) * value_size]
                x = [one.to(dtype) for one in x]
                last = int(seen[s]) + counts[s] - 1
                old = n - counts[s]
                places = torch.cat((torch.arange(old) * 2, torch.arange(last - counts[s] + 1, last + 1))) if (
                    placed) else torch.arange(n)
                self.at[s, h] = places
                self.plain[s, h] = [one.double() for one in x]
                self.coded[s, h] = [one.double() for one in x]
                end = self.border(n) if self.waits else n
                begin = self.border(n - counts[s]) if self.waits else n
                starts[s, layer, h] = begin
                for start in range(first, end, PAGE):
                    page = next(order)
                    table[s, layer, h, (start - first) // PAGE] = page
                    stop = min(start + PAGE, n)
                    at[page, :stop - start] = places[start:stop]
                    for one, side, of in zip(x, (coded, other), range(2)):
                        self.coded[s, h][of][start:stop] = side.put(page, one[start:stop])
                if not self.waits:
                    continue
                slots = [*range(0, min(first, n), PAGE), *range(begin, n, PAGE)]
                for place, start in enumerate(slots):
                    page = next(worder)
                    wtable[s, layer, h, place] = page
                    stop = min(start + PAGE, n)
                    wat[page, :stop - start] = places[start:stop]
                    for one, side in zip(x, (coded, other)):
                        side.wait(page, one[start:stop])
        self.pages = LayerPages(coded.side(), other.side(), at.to(device) if placed else None,
                                wat.to(device) if placed and self.waits else None)
        self.seen = seen
        self.tables = SequenceTables(table.to(device), before.to(device), seen.to(device),
                                     wtable.to(device) if self.waits else None,
                                     starts.to(device) if self.waits else None, self.residual_length,
                                     self.first)
        rows = [(s, p) for s in range(r) for p in range(counts[s])]
        self.rows = rows
        whose = torch.tensor(rows, dtype=torch.int32).view(-1, 2)
        self.step = StepTokens(whose.to(device), int(self.lengths.max()))

    def border(self, n):
        return max(self.first, (n - self.residual_length) & -PAGE)

    def reads(self, s, h, n):
        """Keys and values in float64, as the query of the n-th slot reads them."""
        k, v = (one[:n].clone() for one in self.plain[s, h])
        end = self.border(n) if self.waits else n
        k[self.first:end], v[self.first:end] = (one[self.first:end] for one in self.coded[s, h])
        return k, v

    def weights(self, q, token, h, scale, window=None, limit=None, sinks=0, softcap=None, sink_scores=None):
        """``[G, n]`` of the token's queries, and values, in q's precision."""
        s, p = self.rows[token]
        n = int(self.lengths[s, h]) - self.counts[s] + p + 1
        if n <= 0:
            return None, None
        group = q.shape[1] // self.lengths.shape[1]
        k, v = (one.to(q.dtype) for one in self.reads(s, h, n))
        at, query = self.at[s, h][:n], int(self.seen[s]) + p
        visible = at <= query
        if window is not None:
            visible &= at > query - window
        if limit is not None:
            visible &= (at > query - limit) | (at < sinks)
        x = q[token, h * group:(h + 1) * group].cpu() @ k.T * scale
        if softcap is not None:
            x = softcap * torch.tanh(x / softcap)
        x = x.masked_fill(~visible, -math.inf)
        if not bool(visible.any()):
            return None, None
        if sink_scores is not None:
            none = sink_scores.cpu()[h * group:(h + 1) * group, None].to(q.dtype) / math.log2(math.e)
            return torch.cat((x, none), 1).softmax(-1)[:, :-1], v
        return x.softmax(-1), v

    def expected(self, q, **how):
        """Attention by torch in q's precision, and exactly."""
        found = []
        for kind in (q.dtype, torch.float64):
            given = q.cpu().to(kind)
            out = torch.zeros(q.shape, dtype=kind)
            group = q.shape[1] // self.lengths.shape[1]
            for token in range(len(self.rows)):
                for h in range(self.lengths.shape[1]):
                    weights, v = self.weights(given, token, h, **how)
                    if weights is not None:
                        out[token, h * group:(h + 1) * group] = weights @ v
            found.append(out.to(q.device))
        return found
