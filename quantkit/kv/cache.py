"""The KV cache: a policy × a codec over pages, a page table for every sequence, layer and key head."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import torch

from quantkit.kv import gpu
from quantkit.kv.base import Held, Layout, Phase
from quantkit.kv.build import build_codec, build_policy
from quantkit.kv.held import HeldLayer, HeldSequence
from quantkit.kv.pages import PAGE, Moves, Pages, slots_of
from quantkit.kv.read import Rows, attend
from quantkit.models.config import ModelConfig
from quantkit.models.layers import Step
from quantkit.ops.attention import attention_weights
from quantkit.ops.rope import rotate
from quantkit.spec import KVSpec

_numbers = itertools.count()


class KVCache:
    """Keys and values of any number of sequences of any lengths.

    What a query reads is what is stored: its own token's codes too. So a result doesn't depend on
    how a prompt was cut into chunks, nor on what other sequences are there.

    Args:
        config: gives layers, key heads and head dimension.
        spec: policy and codec.
        dtype: in which the model computes keys and values.
        device: where pages lie.

    Raises:
        UsageError: the policy's options or the head dimension don't fit.
    """

    def __init__(self, config: ModelConfig, spec: KVSpec | None = None, dtype: torch.dtype = torch.bfloat16,
                 device: torch.device | str = "cpu") -> None:
        self.spec = spec or KVSpec()
        self.policy, self.codec = build_policy(self.spec), build_codec(self.spec)
        self.heads, self._layers = config.num_kv_heads, config.num_layers
        self.scale, self.softcap = config.attention_scale, config.attention_softcap
        self.plain = config.plain_attention
        self._device = torch.device(device)
        one = self.codec.layout(config.head_dim, dtype)
        layout: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            f"{side}.{name}": what for side in "kv" for name, what in one.items()}
        self.bytes_per_token = sum(map(_bytes, layout.values())) * self.heads * self._layers
        if not self.policy.keeps_all:  # else a slot's number is its position
            layout["positions"] = ((), torch.int32)
        self.moves = Moves()
        self.pages = [Pages(layout, self._device, self.moves) for _ in range(self._layers)]
        self.number = next(_numbers)
        self._sequences: dict[int, HeldSequence] = {}
        self._ids = itertools.count()

    @property
    def allocated_bytes(self) -> int:
        """Bytes of all pages that exist, free ones included."""
        return sum(pages.allocated_bytes for pages in self.pages)

    @property
    def used_bytes(self) -> int:
        """Bytes of the pages that belong to a sequence."""
        return sum(pages.used * pages.page_bytes for pages in self.pages)

    def add(self, extent: int = 0) -> int:
        """Begin a sequence; returns its id.

        Args:
            extent: how many tokens it will have in the end at most. Only a model whose rotation depends on
                that (longrope) asks; 0 means few.
        """
        number = next(self._ids)
        self._sequences[number] = HeldSequence(self._layers, self.heads, extent)
        return number

    def fork(self, number: int) -> int:
        """Begin a sequence that holds what another does; from then on each goes its own way.

        Returns:
            The new one's id. Its pages are its own.

        Raises:
            KeyError: ``number`` is unknown.
        """
        old = self._sequences[number]
        copy = self.add(old.extent)
        for pages, held, own in zip(self.pages, old.layers, self._sequences[copy].layers):
            own.pages = [pages.take(len(one)) for one in held.pages]
            source, target = ([page for one in side.pages for page in one] for side in (held, own))
            for part in pages.parts.values():
                part[target] = part[source]
            own.lengths[:], own.seen, own.steps = held.lengths, held.seen, held.steps
            own.queries = held.queries  # replaced by every step, never written to
        return copy

    def free(self, ids: Iterable[int]) -> None:
        """End sequences and give back their memory. Raises KeyError for an unknown one."""
        for number in ids:
            for pages, held in zip(self.pages, self._sequences.pop(number).layers):
                for own in held.pages:
                    pages.give(own)
        for layer in range(self._layers):
            self._shrink(layer)

    def batch(self, ids: Sequence[int], phase: Phase = "prefill") -> Batch:
        """These sequences as rows of one step of the model, in this order.

        Args:
            ids: of :meth:`add`, each once.
            phase: ``prefill_end`` for the prompt's last chunk, after which policies act.
        """
        return Batch(self, [self._sequences[number] for number in ids], phase)

    def seen(self, number: int) -> int:
        """Tokens that a sequence had: the position of its next one."""
        return self._sequences[number].layers[-1].seen

    def held(self, number: int) -> list[tuple[int, ...]]:
        """Slots that each layer's heads hold of a sequence."""
        return [tuple(row) for row in self._sequences[number].lengths.tolist()]

    def positions(self, number: int, layer: int) -> torch.Tensor:
        """Original positions int32 ``[Hkv, S]`` of what a layer holds; −1 beyond a head's length."""
        return self._positions(layer, self._sequences[number].layers[layer])

    def reserve(self, held: HeldSequence, count: int) -> None:
        """Pages for so many more tokens in every layer, laid out as a table of all."""
        if held.table is None or held.room < count:
            for index, layer in enumerate(held.layers):
                self._reserve(index, layer, count)
            held.lay_out()

    def _allocate(self, layer: int, rows: Rows) -> list[int]:
        """Slots for the step's tokens, padding left out: by row, then head, then token."""
        slots: list[int] = []
        for held, count in rows:
            self._reserve(layer, held, count)
            for own, length in zip(held.pages, held.lengths.tolist()):
                slots += slots_of(own, length, count)
            held.advance(count)
        return slots

    def _reserve(self, layer: int, held: HeldLayer, count: int) -> None:
        """Pages for so many more tokens."""
        missing = [max(0, -(-(length + count) // PAGE) - len(own))
                   for own, length in zip(held.pages, held.lengths.tolist())]
        if any(missing):
            new = iter(self.pages[layer].take(sum(missing)))
            for own, more in zip(held.pages, missing):
                own += itertools.islice(new, more)
            held.moved()

    def _store(self, layer: int, rows: Rows, k: torch.Tensor, v: torch.Tensor,
               positions: torch.Tensor) -> None:
        """Write ``k, v [B, Hkv, T, D]``, rotated; padding is left out."""
        slots = self._allocate(layer, rows)
        if not slots:
            return
        where = torch.tensor(slots, dtype=torch.int64, device=self._device)
        values = {f"{side}.{name}": part for side, x in (("k", k), ("v", v))
                  for name, part in self.codec.encode(rows.flat(x)).items()}
        if not self.policy.keeps_all:
            spread = positions[:, None, :, None].expand(-1, self.heads, -1, 1)
            values["positions"] = rows.flat(spread)[:, 0].to(torch.int32)
        self.pages[layer].write(where, values)

    def _table(self, held: HeldLayer) -> torch.Tensor:
        if held.table is None:
            most = max(map(len, held.pages))
            held.table = torch.tensor([own + [0] * (most - len(own)) for own in held.pages],
                                      dtype=torch.int64, device=self._device)
        return held.table

    def _read(self, layer: int, held: HeldLayer, side: str) -> torch.Tensor:
        """``[Hkv, S, D]``, decoded."""
        pages, table, most = self.pages[layer], self._table(held), int(held.lengths.max())
        return self.codec.decode({name.removeprefix(f"{side}."): pages.read(name, table)[:, :most]
                                  for name in pages.parts if name.startswith(f"{side}.")})

    def _positions(self, layer: int, held: HeldLayer) -> torch.Tensor:
        most = int(held.lengths.max())
        slots = torch.arange(most, dtype=torch.int32, device=self._device).expand(self.heads, -1)
        found = slots if self.policy.keeps_all else self.pages[layer].read(
            "positions", self._table(held))[:, :most]
        if int(held.lengths.min()) == most:
            return found
        ends = torch.tensor(held.lengths.tolist(), device=self._device)
        return torch.where(slots < ends[:, None], found, -1)

    def _act(self, layer: int, held: HeldLayer) -> None:
        """Let the policy drop what it will, and give back the pages."""
        def weights() -> torch.Tensor:
            assert held.queries is not None
            return attention_weights(held.queries, self._read(layer, held, "k"),
                                     self._positions(layer, held), held.seen, self.scale, self.softcap)

        kept = self.policy.keep(Held(
            tuple(held.lengths.tolist()), held.seen, lambda: self._positions(layer, held),
            lambda: self._read(layer, held, "k"), weights))
        if kept is None:
            return
        pages, table = self.pages[layer], self._table(held)
        old = (table.gather(1, kept // PAGE) * PAGE + kept % PAGE).reshape(-1)
        values = {name: part.view(-1, *part.shape[2:]).index_select(0, old)
                  for name, part in pages.parts.items()}
        count = kept.shape[1]
        slots: list[int] = []
        for own in held.pages:
            spare = own[-(-count // PAGE):]
            del own[len(own) - len(spare):]
            pages.give(spare)
            slots += slots_of(own, 0, count)
        pages.write(torch.tensor(slots, dtype=torch.int64, device=self._device), values)
        held.lengths[:] = count
        held.moved()
        self._shrink(layer)

    def _shrink(self, layer: int) -> None:
        moved = self.pages[layer].shrink()
        if moved is None:
            return
        for sequence in self._sequences.values():
            held = sequence.layers[layer]
            held.pages = [[moved.get(page, page) for page in own] for own in held.pages]
            held.moved()


class Batch:
    """Sequences of a cache as the rows of one step; see
    :class:`~quantkit.models.decoder.KVCacheProtocol`."""

    def __init__(self, cache: KVCache, rows: list[HeldSequence], phase: Phase) -> None:
        self.cache, self.sequences, self.phase = cache, rows, phase
        self._counts: list[int] | None = None
        self._starts = [sequence.layers[-1].seen for sequence in rows]
        self._shared: dict[object, object] = {}

    def next_positions(self, count: int = 1) -> torch.Tensor:
        """Positions int64 ``[B, count]`` that follow what each sequence had."""
        starts = torch.tensor(self._starts, dtype=torch.int64, device=self.cache._device)[:, None]
        return starts if count == 1 else starts + torch.arange(count, device=self.cache._device)

    def extents(self) -> torch.Tensor:
        """How many tokens each sequence was announced to have in the end, int64 ``[B]``."""
        return torch.tensor([one.extent for one in self.sequences], dtype=torch.int64)

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, step: Step,
               window: int | None) -> torch.Tensor:
        """Rotate, store, attend, and let the policy act.

        Raises:
            ValueError: the batch differs, or positions aren't those that follow.
        """
        if self._counts is None:
            self._counts = self.counts((q.shape[0], q.shape[2]), step.positions)
        cache = self.cache
        rows = Rows([sequence.layers[layer] for sequence in self.sequences], self._counts)
        cos, sin = step.rotation(window)
        if (on_gpu := gpu.fits(cache, q)):
            q = gpu.rotate_and_store(cache, layer, rows, q, k, v, step, cos, sin)
        else:
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
            cache._store(layer, rows, k, v, step.positions)
        if on_gpu and gpu.decodes(cache, rows, q, window):
            out = gpu.decode_attention(cache, layer, rows, q, step.positions)
        else:
            out = attend(cache, layer, rows, q, step.positions, window, self._shared)
        for row, (held, count) in enumerate(rows):
            self._end(layer, held, q[row, :, :count], count)
        return out

    def _end(self, layer: int, held: HeldLayer, q: torch.Tensor | None, count: int) -> None:
        policy = self.cache.policy
        if not count:
            return
        if self.phase == "decode" and policy.every is None:
            held.queries = None  # it doesn't act before another prompt, whose queries it will ask
        elif policy.queries and q is not None:
            last = q if held.queries is None else torch.cat((held.queries, q), 1)
            held.queries = last[:, -policy.queries:].clone()
        acts = policy.acts(self.phase)
        if self.phase == "decode" and policy.every is not None:
            before, held.steps = held.steps, held.steps + count
            acts = held.steps // policy.every > before // policy.every
        if acts:
            self.cache._act(layer, held)

    def finish(self, counts: Sequence[int]) -> None:
        """Let the policy act on sequences that got so many tokens, in all layers."""
        if self.cache.policy.keeps_all:
            return
        for held, count in zip(self.sequences, counts, strict=True):
            for index, layer in enumerate(held.layers):
                self._end(index, layer, None, count)

    def counts(self, shape: Sequence[int], positions: torch.Tensor | None) -> list[int]:
        """Tokens of each row.

        Args:
            shape: B, T.
            positions: int64 ``[B, T]``, −1: padding; ``None``: those that follow, everywhere.

        Raises:
            ValueError: they aren't those that follow.
        """
        if shape[0] != len(self.sequences):
            raise ValueError(f"{shape[0]} rows for {len(self.sequences)} sequences")
        if positions is None:
            return [shape[1]] * shape[0]
        valid = positions >= 0
        counts: list[int] = valid.sum(1).tolist()
        expected = self.next_positions(positions.shape[1])
        inside = torch.arange(positions.shape[1], device=positions.device) < valid.sum(1, keepdim=True)
        if bool((torch.where(inside, expected, -1) != positions).any()):
            raise ValueError("positions must follow what a sequence holds; padding (−1) stands after them")
        return counts


def _bytes(what: tuple[tuple[int, ...], torch.dtype]) -> int:
    shape, dtype = what
    size = dtype.itemsize
    for extent in shape:
        size *= extent
    return size


__all__ = ["Batch", "HeldLayer", "KVCache", "Layout"]
