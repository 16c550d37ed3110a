"""One layer's keys and values: pages of codes, and pages of vectors that wait to be encoded.

Codes of one token each are written as they come. Where 64 are encoded together, or the newest are to stay as
they were computed, vectors wait in pages of their own, in the dtype that they were computed in; a query reads
``border(n)`` of the n slots that it sees as codes, however the text was cut into steps.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Sequence

import torch

from quantkit.kv.base import PAGE, KVCodecs, Layout, SideCodec
from quantkit.kv.page_pool import MoveCounter, PagePool, slots_of
from quantkit.kv.sequence import LayerState


class Store:
    """Pages of one layer, of all sequences.

    Args:
        codings: of keys and values.
        heads, dim: of keys.
        dtype: in which keys and values are computed.
        numbered: whether each slot keeps its original position; else a slot's number is its position.
        device: where pages lie.
        moves: counts how often memory came to lie elsewhere.

    Attributes:
        pages: of codes.
        residual: of vectors that wait, if any ever do.

    Raises:
        UsageError: the head dimension doesn't fit.
    """

    def __init__(self, codings: KVCodecs, heads: int, dim: int, dtype: torch.dtype, numbered: bool,
                 device: torch.device, moves: MoveCounter) -> None:
        self._codings, self._heads, self._device, self._numbered = codings, heads, device, numbered
        self._sides = {"k": codings.keys, "v": codings.values}
        places = {"positions": ((), torch.int32)} if numbered else {}
        layout: Layout = {**self._named(lambda one: one.layout(dim, dtype)), **places}
        self.pages = PagePool(layout, device, moves, self._named(lambda one: one.shared(dim, dtype)))
        plain: Layout = {f"{side}.values": ((dim,), dtype) for side in self._sides}
        self.residual = PagePool({**plain, **places}, device, moves) if codings.has_residual(dim,
                                                                                             dtype) else None

    def _named(self, of: Callable[[SideCodec], Layout]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        return {f"{side}.{name}": what for side, one in self._sides.items() for name, what in of(one).items()}

    @property
    def all(self) -> tuple[PagePool, ...]:
        """Both kinds of pages."""
        return (self.pages,) if self.residual is None else (self.pages, self.residual)

    @property
    def page_bytes(self) -> tuple[int, int]:
        """Of a page of codes, and of one of vectors that wait: 0 if none ever do."""
        return self.pages.page_bytes, 0 if self.residual is None else self.residual.page_bytes

    # -- taking and giving

    def reserve(self, held: LayerState, count: int) -> None:
        """Pages for so many more tokens, which no other sequence holds."""
        lengths, first = held.lengths.tolist(), self._codings.first
        ends = [length + count for length in lengths]
        if self.residual is None:
            moved = _grow(self.pages, held.pages, lengths, ends)
        else:
            starts = held.starts.tolist()
            moved = _grow(self.pages, held.pages, [start - first for start in starts],
                          [self._codings.border(end) - first for end in ends])
            begins, ends = ([first + at - start for at, start in zip(ats, starts)] for ats in (lengths, ends))
            moved = _grow(self.residual, held.residual, begins, ends) or moved
        if moved:
            held.moved()

    def allocate(self, held: LayerState, count: int) -> list[int]:
        """Slots for that many tokens, by head, then token: of pages that wait, if any do."""
        self.reserve(held, count)
        pages, before = (held.pages, [0] * self._heads) if self.residual is None else (
            held.residual, [start - self._codings.first for start in held.starts.tolist()])
        slots = [slot for own, length, gone in zip(pages, held.lengths.tolist(), before)
                 for slot in slots_of(own, length - gone, count)]
        held.advance(count)
        return slots

    def settle(self, held: LayerState) -> bool:
        """Give back pages whose vectors are codes by now; whether there were any."""
        if self.residual is None:
            return False
        before = self.residual.used
        for head, length in enumerate(held.lengths.tolist()):
            start = int(held.starts[head])
            done = (self._codings.border(length) - start) // PAGE
            if done > 0:
                gone = self._gone(done)
                self.residual.give(held.residual[head][gone])
                del held.residual[head][gone]
                held.starts[head] = start + done * PAGE
                held.moved()
        return self.residual.used < before

    def release(self, held: LayerState) -> None:
        """Give back everything."""
        self.pages.give(itertools.chain.from_iterable(held.pages))
        if self.residual is not None:
            self.residual.give(itertools.chain.from_iterable(held.residual))

    def fork(self, held: LayerState, own: LayerState, shared: bool) -> None:
        """``own``, which holds nothing, gets what ``held`` does: the same pages, or copies of them."""
        for pages, name in zip(self.all, ("pages", "residual")):
            mine = [list(one) for one in getattr(held, name)]
            pages.share(itertools.chain.from_iterable(mine))
            for one in () if shared else mine:
                pages.own(one, 0)
            setattr(own, name, mine)
        own.lengths[:], own.starts[:], own.seen, own.steps = held.lengths, held.starts, held.seen, held.steps
        own.prompt, own.absorbed, own.sums = held.prompt, held.absorbed, held.sums  # never written to
        own.moments = copy.deepcopy(held.moments)
        held.moved()  # its next token is written to a page that is shared now
        own.moved()

    def shrink(self, holders: Sequence[LayerState]) -> None:
        """Give memory back if much of it is free."""
        for pages, name in zip(self.all, ("pages", "residual")):
            moved = pages.shrink()
            if moved is None:
                continue
            for held in holders:
                setattr(held, name, [[moved.get(page, page) for page in own] for own in getattr(held, name)])
                held.moved()

    # -- writing

    def write(self, slots: Sequence[int], k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor) -> None:
        """Store ``k, v [n, D]`` at the slots that :meth:`allocate` gave, and ``positions [n]``."""
        if not slots:
            return
        where = torch.tensor(slots, dtype=torch.int64, device=self._device)
        pages, values = self.pages, {"k.values": k, "v.values": v}
        if self.residual is None:
            values = self._encoded(k, v)
        else:
            pages, values = self.residual, {name: self._waitable(x) for name, x in values.items()}
        if self._numbered:
            values["positions"] = positions.to(torch.int32)
        pages.write(where, values)

    def _waitable(self, x: torch.Tensor) -> torch.Tensor:
        """As a page of vectors holds it: nothing is infinite."""
        assert self.residual is not None
        dtype = self.residual.parts["k.values"].dtype
        most = torch.finfo(dtype).max
        return x.clamp(-most, most).to(dtype)

    def close(self, held: LayerState) -> None:
        """Encode what has waited long enough; the vectors stay where they are until :meth:`settle`."""
        if self.residual is None:
            return
        source: list[int] = []
        target: list[int] = []
        for head, length in enumerate(held.lengths.tolist()):
            start = int(held.starts[head])
            done = (self._codings.border(length) - start) // PAGE
            place = (start - self._codings.first) // PAGE
            source += held.residual[head][self._gone(done)]
            target += held.pages[head][place:place + done]
        if not source:
            return
        pages = torch.tensor(source, device=self._device)
        k, v = (self.residual.parts[f"{side}.values"][pages] for side in "kv")
        values = self._encoded(k, v)
        if self._numbered:
            values["positions"] = self.residual.parts["positions"][pages]
        self.pages.fill(torch.tensor(target, device=self._device), values)

    def _gone(self, count: int) -> slice:
        """Where a head's pages are that were the next to be encoded."""
        kept = self._codings.first // PAGE
        return slice(kept, kept + max(0, count))

    def _encoded(self, k: torch.Tensor, v: torch.Tensor) -> dict[str, torch.Tensor]:
        return {f"{side}.{name}": part for side, x in (("k", k), ("v", v))
                for name, part in self._sides[side].encode(x).items()}

    # -- reading

    def read(self, held: LayerState, side: str, borders: Sequence[int] | None = None) -> torch.Tensor:
        """``[Hkv, S, D]``, decoded; behind a head's length anything finite.

        Args:
            held: whose.
            side: ``k`` or ``v``.
            borders: how many slots of each head to read as codes where others wait; by default all that
                are old enough.
        """
        most, table = int(held.lengths.max()), self.table(held)
        names = [name for name in self.pages.parts if name.startswith(f"{side}.")]
        codes = self._sides[side].decode(
            {name.removeprefix(f"{side}."): self.pages.read(name, table) for name in names}).flatten(1, 2)
        if self.residual is None:
            return codes[:, :most]
        lengths = held.lengths.tolist()
        if borders is None:
            borders = [self._codings.border(length) for length in lengths]
        residual = self.residual.read(f"{side}.values", self.table(held, "residual")).flatten(1, 2)
        return self._joined(held, codes, residual, borders)

    def _joined(self, held: LayerState, codes: torch.Tensor, residual: torch.Tensor,
                borders: Sequence[int]) -> torch.Tensor:
        """What lies in both kinds of pages, by slot: ``[Hkv, S, …]``."""
        first, most = self._codings.first, int(held.lengths.max())
        found = codes.new_zeros(self._heads, most, *codes.shape[2:],
                                dtype=torch.promote_types(codes.dtype, residual.dtype))
        heads = zip(borders, held.starts.tolist(), held.lengths.tolist())
        for head, (border, start, length) in enumerate(heads):
            found[head, :min(first, length)] = residual[head, :min(first, length)]
            if length > first:
                found[head, first:border] = codes[head, :border - first]
                found[head, border:length] = residual[head, first + border - start:first + length - start]
        return found

    def positions(self, held: LayerState) -> torch.Tensor:
        """Original positions int32 ``[Hkv, S]``; −1 beyond a head's length."""
        most = int(held.lengths.max())
        found = torch.arange(most, dtype=torch.int32, device=self._device).expand(self._heads, -1)
        ends = torch.tensor(held.lengths.tolist(), device=self._device)[:, None]
        behind = found >= ends
        if self._numbered:
            coded = self.pages.read("positions", self.table(held)).flatten(1, 2)
            if self.residual is None:
                found = coded[:, :most]
            else:
                residual = self.residual.read("positions", self.table(held, "residual")).flatten(1, 2)
                found = self._joined(held, coded, residual, held.starts.tolist())
        return found.masked_fill(behind, -1)

    def table(self, held: LayerState, name: str = "pages") -> torch.Tensor:
        """``pages`` or ``residual``, int64 ``[Hkv, n]``, filled up with 0."""
        if name not in held.tables:
            rows: list[list[int]] = getattr(held, name)
            most = max(map(len, rows))
            filled = [own + [0] * (most - len(own)) for own in rows]
            table = torch.tensor(filled, dtype=torch.int64, device=self._device)
            held.tables[name] = table.view(self._heads, most)  # which may be 0
        return held.tables[name]

    # -- dropping

    def keep(self, held: LayerState, kept: Sequence[torch.Tensor]) -> None:
        """Only these slots stay: of each head int64 ``[n]`` in rising order."""
        if held.sums is not None:
            new = held.sums.new_zeros(self._heads, max(map(len, kept)))
            for head, slots in enumerate(kept):
                new[head, :len(slots)] = held.sums[head, slots]
            held.sums = new
        if self.residual is None:
            self._keep_codes(held, kept)
        else:
            self._keep_vectors(held, kept)
        held.moved()

    def thin(self, held: LayerState, kept: Sequence[torch.Tensor], pages: int = 1) -> None:
        """Where vectors wait, give back pages of codes in which no slot is among these; all others stay as
        they are.

        Args:
            held: whose.
            kept: as for :meth:`keep`.
            pages: so many go at once, or none.
        """
        first = self._codings.first
        for head, slots in enumerate(kept):
            end = int(held.starts[head])
            wanted = set((slots[slots >= first] // PAGE - first // PAGE).tolist())
            gone = [at for at in range((end - first) // PAGE) if at not in wanted]
            del gone[len(gone) // pages * pages:]
            own = held.pages[head]
            self.pages.give([own[at] for at in gone])
            for at in reversed(gone):
                del own[at]
            held.lengths[head] -= PAGE * len(gone)
            held.starts[head] -= PAGE * len(gone)
        held.moved()

    def _keep_codes(self, held: LayerState, kept: Sequence[torch.Tensor]) -> None:
        """Pages before the first dropped slot stay, what follows moves together."""
        same = [_unmoved(slots) // PAGE for slots in kept]
        rest = [slots[count * PAGE:] for slots, count in zip(kept, same)]
        old = torch.cat([pages[slots // PAGE] * PAGE + slots % PAGE
                         for pages, slots in zip(self.table(held), rest)])
        values = {name: part.view(-1, *part.shape[2:]).index_select(0, old)
                  for name, part in self.pages.parts.items()}
        new, offsets = [], torch.arange(PAGE, device=self._device)
        for head, (own, slots, count) in enumerate(zip(held.pages, rest, same)):
            held.lengths[head] = len(kept[head])
            _replace(self.pages, own, count, -(-len(slots) // PAGE))
            pages = torch.tensor(own[count:], dtype=torch.int64, device=self._device)
            new.append((pages[:, None] * PAGE + offsets).flatten()[:len(slots)])
        self.pages.write(torch.cat(new), values)

    def _keep_vectors(self, held: LayerState, kept: Sequence[torch.Tensor]) -> None:
        """Pages of codes before the first dropped slot stay; what follows is encoded again, or residual."""
        assert self.residual is not None
        places = self.positions(held)
        sides = {side: self.read(held, side) for side in "kv"}
        fixed, target = self._codings.first, list[int]()
        coded = []
        for head, slots in enumerate(kept):
            count = len(slots)
            border = self._codings.border(count)
            begin = min(_unmoved(slots) & -PAGE, border, int(held.starts[head]))
            begin = max(fixed, begin)  # codes before it stay
            own, place = held.pages[head], (begin - fixed) // PAGE
            _replace(self.pages, own, place, (border - begin) // PAGE)
            target += own[place:]
            again, stay = slots[begin:border], torch.cat((slots[:fixed], slots[border:]))
            coded.append((sides["k"][head, again], sides["v"][head, again], places[head, again]))
            _replace(self.residual, held.residual[head], 0, -(-len(stay) // PAGE))
            held.lengths[head], held.starts[head] = count, border
            where = slots_of(held.residual[head], 0, len(stay))
            self.write(where, sides["k"][head, stay], sides["v"][head, stay], places[head, stay])
        if not target:
            return
        k, v, at = (torch.cat(parts) for parts in zip(*coded))
        k, v = (self._waitable(x).unflatten(0, (-1, PAGE)) for x in (k, v))
        values = self._encoded(k, v)
        if self._numbered:
            values["positions"] = at.view(-1, PAGE)
        self.pages.fill(torch.tensor(target, device=self._device), values)


def _grow(pages: PagePool, held: Sequence[list[int]], begins: Iterable[int], ends: Iterable[int]) -> bool:
    """Pages of each head for its slots before ``end``, its own from slot ``begin`` on; whether any is new."""
    missing = [max(0, -(-end // PAGE) - len(own)) for own, end in zip(held, ends)]
    new = iter(pages.take(sum(missing)))
    for own, more in zip(held, missing):
        own += itertools.islice(new, more)
    copied = [pages.own(own, begin // PAGE) for own, begin in zip(held, begins)]
    return any(missing) or any(copied)


def _replace(pages: PagePool, own: list[int], stay: int, more: int) -> None:
    """Of a head's pages the first stay, others are given back for so many new ones."""
    pages.give(own[stay:])
    own[stay:] = pages.take(more)


def _unmoved(slots: torch.Tensor) -> int:
    """How many of these slots, in rising order, keep their number when others are dropped."""
    other = (slots != torch.arange(len(slots), device=slots.device)).nonzero()
    return int(other[0]) if len(other) else len(slots)
