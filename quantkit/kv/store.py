"""Storage of one layer's keys and values: pages of codes, and pages of the residual.

A codec that encodes each token alone writes its codes at once. Where 64 tokens are encoded together, or the
newest tokens stay unencoded, vectors are first written to the *residual*: pages of their own, in the dtype in
which they were computed. Of the n slots that a query sees it reads those below ``border(n)`` as codes,
however the text was cut into steps.

Decoding a whole cache in each step takes far longer than attention. So for codecs without a kernel a page may
keep what it decodes to beside its codes: it is decoded once, when it is written, and moves with its codes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy

import torch

from quantkit.kv.base import PAGE, KVCodecs, Layout, SideCodec, is_ours
from quantkit.kv.page_pool import MoveCounter, PagePool, slots_of
from quantkit.kv.sequence import LayerState

DECODED = {"k": "k.decoded", "v": "v.decoded"}
"""Names of the parts that hold a page's keys and values decoded."""


class PageStore:
    """The pages of one layer, for all sequences.

    Args:
        heads, dim: KV heads and head dimension.
        dtype: in which keys and values are computed.
        numbered: whether each slot stores its original position; otherwise a slot's number is its position.
        move_counter: counts how often the pages' memory moved.

    Attributes:
        residual: the pages of unencoded vectors; ``None`` if the codecs need none.

    Raises:
        UsageError: the codecs don't support the head dimension.
    """

    def __init__(self, codecs: KVCodecs, heads: int, dim: int, dtype: torch.dtype, numbered: bool,
                 device: torch.device, move_counter: MoveCounter) -> None:
        self._codecs = codecs
        self._heads = heads
        self._dim = dim
        self._device = device
        self._numbered = numbered
        self._sides = {"k": codecs.keys, "v": codecs.values}
        self._alike = codecs.keys.name == codecs.values.name  # which says everything about the bytes
        self._wide = not (is_ours(codecs.keys) and is_ours(codecs.values))
        places = {"positions": ((), torch.int32)} if numbered else {}
        layout: Layout = {**self._by_side(lambda codec: codec.layout(dim, dtype)), **places}
        self.pages = PagePool(layout, device, move_counter,
                              self._by_side(lambda codec: codec.shared(dim, dtype)))
        self._names = {side: [name for name in self.pages.parts if name.startswith(f"{side}.")]
                       for side in self._sides}
        self.residual: PagePool | None = None
        if codecs.has_residual(dim, dtype):
            vectors: Layout = {f"{side}.values": ((dim,), dtype) for side in self._sides}
            self.residual = PagePool({**vectors, **places}, device, move_counter)

    def _by_side(self, layout_of: Callable[[SideCodec], Layout]) -> dict[str, tuple[tuple[int, ...],
                                                                                    torch.dtype]]:
        return {f"{side}.{name}": shape for side, codec in self._sides.items()
                for name, shape in layout_of(codec).items()}

    @property
    def all(self) -> tuple[PagePool, ...]:
        return (self.pages,) if self.residual is None else (self.pages, self.residual)

    @property
    def page_bytes(self) -> tuple[int, int]:
        """Bytes of a page of codes, and of a page of the residual (0 if there is none)."""
        return self.pages.page_bytes, 0 if self.residual is None else self.residual.page_bytes

    # -- taking and giving

    def reserve(self, state: LayerState, count: int) -> None:
        """Take pages for ``count`` more tokens, which no other sequence holds."""
        lengths, first = state.lengths.tolist(), self._codecs.first
        ends = [length + count for length in lengths]
        if self.residual is None:
            moved = _grow(self.pages, state.pages, lengths, ends)
        else:
            starts = state.starts.tolist()
            moved = _grow(self.pages, state.pages, [start - first for start in starts],
                          [self._codecs.border(end) - first for end in ends])
            begins, ends = ([first + at - start for at, start in zip(ats, starts)] for ats in (lengths, ends))
            moved = _grow(self.residual, state.residual, begins, ends) or moved
        if moved:
            state.pages_changed()

    def allocate(self, state: LayerState, count: int) -> list[int]:
        """Take slots for ``count`` tokens, by head, then token: of the residual if there is one."""
        self.reserve(state, count)
        pages, skips = (state.pages, [0] * self._heads) if self.residual is None else (
            state.residual, [start - self._codecs.first for start in state.starts.tolist()])
        slots = [slot for head_pages, length, skipped in zip(pages, state.lengths.tolist(), skips)
                 for slot in slots_of(head_pages, length - skipped, count)]
        state.advance(count)
        return slots

    def free_encoded_residual(self, state: LayerState) -> bool:
        """Give back residual pages whose vectors have been encoded; returns whether there were any."""
        if self.residual is None:
            return False
        before = self.residual.used
        for head, length in enumerate(state.lengths.tolist()):
            start = int(state.starts[head])
            count = (self._codecs.border(length) - start) // PAGE
            if count > 0:
                encoded = self._next_pages(count)
                self.residual.free(state.residual[head][encoded])
                del state.residual[head][encoded]
                state.starts[head] = start + count * PAGE
                state.pages_changed()
        return self.residual.used < before

    def free(self, state: LayerState) -> None:
        self.pages.free(itertools.chain.from_iterable(state.pages))
        if self.residual is not None:
            self.residual.free(itertools.chain.from_iterable(state.residual))

    def fork(self, state: LayerState, copy: LayerState, shared: bool) -> None:
        """Give the empty ``copy`` what ``state`` holds: the same pages if ``shared``, else copies of them."""
        self._copy_pages(state, copy, shared)
        copy.lengths[:], copy.starts[:] = state.lengths, state.starts
        copy.seen = state.seen
        copy.steps = state.steps
        copy.prompt = state.prompt
        copy.accumulated = state.accumulated
        copy.attention_received = state.attention_received  # a new tensor replaces it
        copy.query_moments = deepcopy(state.query_moments)
        state.pages_changed()  # its next token is written to a page that is shared now
        copy.pages_changed()

    def fork_pages(self, parts: Sequence[tuple[LayerState, slice]], copy: LayerState) -> None:
        """Give the empty ``copy`` these pages of each part's heads, shared. Nothing was dropped
        from those states, and they have no residual."""
        copy.pages = [[page for state, span in parts for page in state.pages[head][span]]
                      for head in range(len(copy.pages))]
        self.pages.share(itertools.chain.from_iterable(copy.pages))
        copy.lengths[:] = copy.seen = PAGE * len(copy.pages[0])
        copy.pages_changed()

    def truncate(self, state: LayerState, pages: int) -> None:
        """Give back all but the first ``pages`` pages of each head; as :meth:`fork_pages`."""
        for head in state.pages:
            self.pages.free(head[pages:])
            del head[pages:]
        state.lengths[:] = state.seen = pages * PAGE
        state.pages_changed()

    def _copy_pages(self, state: LayerState, copy: LayerState, shared: bool) -> None:
        for pool, name in zip(self.all, ("pages", "residual")):
            heads = [list(pages) for pages in getattr(state, name)]
            pool.share(itertools.chain.from_iterable(heads))
            for pages in () if shared else heads:
                pool.unshare(pages, 0)
            setattr(copy, name, heads)

    def shrink(self, holders: Callable[[], Iterable[LayerState]]) -> None:
        """Give memory back if a quarter of it is free, and correct the page numbers of its holders."""
        for pool, name in zip(self.all, ("pages", "residual")):
            moved = pool.shrink()
            if moved is None:
                continue
            for state in holders():
                heads = getattr(state, name)
                setattr(state, name, [[moved.get(page, page) for page in pages] for pages in heads])
                state.pages_changed()

    # -- writing

    def write(self, slots: Sequence[int], k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor) -> None:
        """Store ``k, v [n, D]`` at the slots that :meth:`allocate` gave, and ``positions [n]``."""
        if not slots:
            return
        where = torch.tensor(slots, dtype=torch.int64, device=self._device)
        pages, values = self.pages, {"k.values": k, "v.values": v}
        if self.residual is None:
            values = self.encode(k, v)
        else:
            pages, values = self.residual, {name: self._clamped(x) for name, x in values.items()}
        if self._numbered:
            values["positions"] = positions.to(torch.int32)
        pages.write(where, values)

    def _clamped(self, x: torch.Tensor) -> torch.Tensor:
        """Vectors as the residual stores them: nothing is infinite."""
        assert self.residual is not None
        dtype = self.residual.parts["k.values"].dtype
        largest = torch.finfo(dtype).max
        return x.clamp(-largest, largest).to(dtype)

    def encode_full_pages(self, state: LayerState, count: int = 0) -> None:
        """Encode the vectors that are older than the residual window. They stay there until
        :meth:`free_encoded_residual`.

        Args:
            count: tokens of this step that the residual holds beyond the state's lengths.
        """
        if self.residual is None:
            return
        source: list[int] = []
        target: list[int] = []
        for head, length in enumerate(state.lengths.tolist()):
            start = int(state.starts[head])
            blocks = (self._codecs.border(length + count) - start) // PAGE
            page = (start - self._codecs.first) // PAGE
            source += state.residual[head][self._next_pages(blocks)]
            target += state.pages[head][page:page + blocks] if blocks > 0 else []
        if not source:
            return
        pages = torch.tensor(source, device=self._device)
        k, v = (self.residual.parts[f"{side}.values"][pages] for side in "kv")
        values = self.encode(k, v)
        if self._numbered:
            values["positions"] = self.residual.parts["positions"][pages]
        self.pages.write_pages(torch.tensor(target, device=self._device), values)

    def _next_pages(self, count: int) -> slice:
        """Where in a head's residual the next ``count`` pages to be encoded are."""
        kept = self._codecs.first // PAGE
        return slice(kept, kept + max(0, count))

    # -- codes

    def encode(self, k: torch.Tensor, v: torch.Tensor) -> dict[str, torch.Tensor]:
        """What pages hold of ``k, v [..., n, D]``, by name: codes, and what they decode to where that is
        kept."""
        if self._alike:  # one call for both: a token's few numbers cost less than the calls
            both = self._encode_side("k", torch.stack((k, v)))
            return {f"{side}.{name}": part[i] for name, part in both.items()
                    for i, side in enumerate(self._sides)}
        return {f"{side}.{name}": part for side, x in (("k", k), ("v", v))
                for name, part in self._encode_side(side, x).items()}

    def _encode_side(self, side: str, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """What a side's codec stores of ``x``, and ``decoded`` where that is kept."""
        parts = dict(self._sides[side].encode(x))
        return parts | {"decoded": self._sides[side].decode(parts)} if self.has_decoded_pages else parts

    def read_pages(self, side: str, table: torch.Tensor) -> torch.Tensor:
        """Pages int64 ``[..., n]`` of one side (``k`` or ``v``) as vectors: ``[..., n, PAGE, D]``."""
        if self.has_decoded_pages:
            return self.pages.read(DECODED[side], table)
        return self.decode_pages(side, table)

    def decode_pages(self, side: str, table: torch.Tensor) -> torch.Tensor:
        """The same from codes in any case; float32, as decoded pages are, if a codec is a plugin's."""
        if self._wide and not table.numel():
            return torch.zeros(*table.shape, PAGE, self._dim, device=table.device)
        vectors = self._sides[side].decode({name.removeprefix(f"{side}."): self.pages.read(name, table)
                                            for name in self._names[side]})
        return vectors.float() if self._wide else vectors

    def stored_finite(self, side: str, table: torch.Tensor) -> bool:
        """Whether all that pages store in floating point is finite."""
        parts = (self.pages.read(name, table) for name in self._names[side])
        return all(bool(torch.isfinite(part).all()) for part in parts if part.dtype.is_floating_point)

    # -- reading

    def read(self, state: LayerState, side: str, borders: Sequence[int] | None = None) -> torch.Tensor:
        """All vectors of one side, decoded: ``[Hkv, S, D]``; beyond a head's length anything finite.

        Args:
            side: ``k`` or ``v``.
            borders: with a residual, how many slots of each head to read as codes; by default all that are
                older than the residual window.
        """
        longest, table = int(state.lengths.max()), self.table(state)
        codes = self.read_pages(side, table).flatten(1, 2)
        if self.residual is None:
            return codes[:, :longest]
        lengths = state.lengths.tolist()
        if borders is None:
            borders = [self._codecs.border(length) for length in lengths]
        residual = self.residual.read(f"{side}.values", self.table(state, "residual")).flatten(1, 2)
        return self._joined(state, codes, residual, borders)

    def _joined(self, state: LayerState, codes: torch.Tensor, residual: torch.Tensor,
                borders: Sequence[int]) -> torch.Tensor:
        """Join what both kinds of pages hold, by slot: ``[Hkv, S, …]``."""
        first, longest = self._codecs.first, int(state.lengths.max())
        joined = codes.new_zeros(self._heads, longest, *codes.shape[2:],
                                 dtype=torch.promote_types(codes.dtype, residual.dtype))
        heads = zip(borders, state.starts.tolist(), state.lengths.tolist())
        for head, (border, start, length) in enumerate(heads):
            joined[head, :min(first, length)] = residual[head, :min(first, length)]
            if length > first:
                joined[head, first:border] = codes[head, :border - first]
                joined[head, border:length] = residual[head, first + border - start:first + length - start]
        return joined

    def positions(self, state: LayerState) -> torch.Tensor:
        """Original positions int32 ``[Hkv, S]``; −1 beyond a head's length."""
        longest = int(state.lengths.max())
        positions = torch.arange(longest, dtype=torch.int32, device=self._device).expand(self._heads, -1)
        ends = torch.tensor(state.lengths.tolist(), device=self._device)[:, None]
        beyond = positions >= ends
        if self._numbered:
            coded = self.pages.read("positions", self.table(state)).flatten(1, 2)
            if self.residual is None:
                positions = coded[:, :longest]
            else:
                residual = self.residual.read("positions", self.table(state, "residual")).flatten(1, 2)
                positions = self._joined(state, coded, residual, state.starts.tolist())
        return positions.masked_fill(beyond, -1)

    def table(self, state: LayerState, name: str = "pages") -> torch.Tensor:
        """A state's ``pages`` or ``residual`` as int64 ``[Hkv, n]``, padded up with 0."""
        if name not in state.tables:
            rows: list[list[int]] = getattr(state, name)
            width = max(map(len, rows))
            padded = [pages + [0] * (width - len(pages)) for pages in rows]
            table = torch.tensor(padded, dtype=torch.int64, device=self._device)
            state.tables[name] = table.view(self._heads, width)  # which may be 0
        return state.tables[name]

    # -- decoded pages

    @property
    def has_decoded_pages(self) -> bool:
        """Whether each page is also there as float32 vectors."""
        return DECODED["k"] in self.pages.parts

    @property
    def decoded_bytes(self) -> int:
        """Bytes of float32 vectors of all pages that exist."""
        return 2 * 4 * self.pages.total * PAGE * self._dim

    def decoded(self, side: str) -> torch.Tensor:
        """Decoded pages float32 ``[pages, PAGE, D]``. Raises KeyError if they aren't kept."""
        return self.pages.parts[DECODED[side]]

    def keep_decoded(self) -> None:
        """From now on keep each page decoded too. Those that belong to somebody are decoded now."""
        self.pages.add_derived(dict.fromkeys(DECODED.values(), ((self._dim,), torch.float32)))
        pages = torch.tensor(self.pages.pages_in_use(), dtype=torch.int64)
        for side in DECODED:
            self.decoded(side)[pages] = self.decode_pages(side, pages).float()

    def encode_decoded(self, slots: Sequence[int], vectors: dict[str, torch.Tensor]) -> None:
        """Encode tokens whose vectors a kernel has left in decoded pages.

        Args:
            slots: the tokens' slots, by head, then token.
            vectors: decoded pages of each side, float32 ``[pages, PAGE, D]``; only kept ones are decoded
                into.
        """
        where = torch.tensor(slots, dtype=torch.int64)
        k, v = (vectors[side].view(-1, self._dim).index_select(0, where).view(self._heads, -1, self._dim)
                for side in DECODED)
        self.pages.write(where, {name: part.flatten(0, 1) for name, part in self.encode(k, v).items()})

    # -- dropping

    def keep_slots(self, state: LayerState, kept: Sequence[torch.Tensor]) -> None:
        """Drop all slots but these: of each head int64 ``[n]`` in rising order."""
        if state.attention_received is not None:
            new = state.attention_received.new_zeros(self._heads, max(map(len, kept)))
            for head, slots in enumerate(kept):
                new[head, :len(slots)] = state.attention_received[head, slots]
            state.attention_received = new
        if self.residual is None:
            self._keep_codes(state, kept)
        else:
            self._keep_vectors(state, kept)
        state.pages_changed()

    def free_unneeded_pages(self, state: LayerState, kept: Sequence[torch.Tensor],
                            pages: int = 1) -> None:
        """With a residual: give back pages of codes of which no slot is kept, without moving the others.

        Args:
            kept: the argument of :meth:`keep_slots`.
            pages: give back multiples of this many pages only.
        """
        first = self._codecs.first
        for head, slots in enumerate(kept):
            end = int(state.starts[head])
            needed = set((slots[slots >= first] // PAGE - first // PAGE).tolist())
            released = [page for page in range((end - first) // PAGE) if page not in needed]
            del released[len(released) // pages * pages:]
            head_pages = state.pages[head]
            self.pages.free([head_pages[page] for page in released])
            for page in reversed(released):
                del head_pages[page]
            state.lengths[head] -= PAGE * len(released)
            state.starts[head] -= PAGE * len(released)
        state.pages_changed()

    def _keep_codes(self, state: LayerState, kept: Sequence[torch.Tensor]) -> None:
        """Leave the pages before the first dropped slot as they are; move what follows together."""
        unmoved = [_unmoved(slots) // PAGE for slots in kept]
        rest = [slots[count * PAGE:] for slots, count in zip(kept, unmoved)]
        old = torch.cat([pages[slots // PAGE] * PAGE + slots % PAGE
                         for pages, slots in zip(self.table(state), rest)])
        values = {name: part.view(-1, *part.shape[2:]).index_select(0, old)
                  for name, part in self.pages.parts.items()}
        new, offsets = [], torch.arange(PAGE, device=self._device)
        for head, (head_pages, slots, count) in enumerate(zip(state.pages, rest, unmoved)):
            state.lengths[head] = len(kept[head])
            _replace(self.pages, head_pages, count, -(-len(slots) // PAGE))
            pages = torch.tensor(head_pages[count:], dtype=torch.int64, device=self._device)
            new.append((pages[:, None] * PAGE + offsets).flatten()[:len(slots)])
        self.pages.write(torch.cat(new), values)

    def _keep_vectors(self, state: LayerState, kept: Sequence[torch.Tensor]) -> None:
        """Leave the pages of codes before the first dropped slot; encode what follows anew, or keep it in the
        residual."""
        assert self.residual is not None
        positions = self.positions(state)
        sides = {side: self.read(state, side) for side in "kv"}
        first, target = self._codecs.first, list[int]()
        coded = []
        for head, slots in enumerate(kept):
            count = len(slots)
            border = self._codecs.border(count)
            begin = min(_unmoved(slots) & -PAGE, border, int(state.starts[head]))
            begin = max(first, begin)  # codes before it stay
            head_pages, page = state.pages[head], (begin - first) // PAGE
            _replace(self.pages, head_pages, page, (border - begin) // PAGE)
            target += head_pages[page:]
            recoded, stay = slots[begin:border], torch.cat((slots[:first], slots[border:]))
            coded.append((sides["k"][head, recoded], sides["v"][head, recoded], positions[head, recoded]))
            _replace(self.residual, state.residual[head], 0, -(-len(stay) // PAGE))
            state.lengths[head], state.starts[head] = count, border
            where = slots_of(state.residual[head], 0, len(stay))
            self.write(where, sides["k"][head, stay], sides["v"][head, stay], positions[head, stay])
        if not target:
            return
        k, v, at = (torch.cat(parts) for parts in zip(*coded))
        k, v = (self._clamped(x).unflatten(0, (-1, PAGE)) for x in (k, v))
        values = self.encode(k, v)
        if self._numbered:
            values["positions"] = at.view(-1, PAGE)
        self.pages.write_pages(torch.tensor(target, device=self._device), values)


def _grow(pool: PagePool, heads: Sequence[list[int]], begins: Iterable[int], ends: Iterable[int]) -> bool:
    """Take the pages that each head lacks for its slots before ``end``, unshared from slot ``begin`` on.

    Returns:
        Whether any page is new.
    """
    missing = [max(0, -(-end // PAGE) - len(head_pages)) for head_pages, end in zip(heads, ends)]
    new = iter(pool.allocate(sum(missing)))
    for head_pages, more in zip(heads, missing):
        head_pages += itertools.islice(new, more)
    copied = [pool.unshare(head_pages, begin // PAGE) for head_pages, begin in zip(heads, begins)]
    return any(missing) or any(copied)


def _replace(pool: PagePool, head_pages: list[int], stay: int, more: int) -> None:
    """Keep the first ``stay`` of a head's pages; exchange the others for ``more`` new ones."""
    pool.free(head_pages[stay:])
    head_pages[stay:] = pool.allocate(more)


def _unmoved(slots: torch.Tensor) -> int:
    """How many of these slots, in rising order, keep their number when all others are dropped."""
    other = (slots != torch.arange(len(slots), device=slots.device)).nonzero()
    return int(other[0]) if len(other) else len(slots)
