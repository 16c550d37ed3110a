"""A model on a GPU as kernels of our own; a step of decoding is one graph, and so is a portion of a prompt.

Which products a row goes through depends on its phase alone: a decoded token's are kernels of ours, a
prompt's (and of texts that are scored) are a library's. Either give a row the same bits whatever other rows
are there: so a request's tokens depend on nothing but the request.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary, proxy

import numpy as np
import torch

from quantkit.formats.base import QuantizedTensor
from quantkit.kv import gpu as kv_gpu
from quantkit.kv.batch import Batch
from quantkit.kv.cache import KVCache
from quantkit.models.config import ModelConfig
from quantkit.models.decoder import CausalLM
from quantkit.ops import gpu
from quantkit.runtime.gpu import experts, linears
from quantkit.runtime.gpu.graphs import BATCHES, GraphCache, PromptGraphs
from quantkit.runtime.gpu.program import GpuProgram
from quantkit.runtime.gpu.tables import DeviceTables
from quantkit.runtime.memory.scratch import GPU_ROWS
from quantkit.runtime.program_model import (
    ProgramModel,
    RowSlice,
    reason_against_shape,
    selected_rows,
    slices_of,
)
from quantkit.support.errors import UsageError

if TYPE_CHECKING:
    from quantkit_kernels.triton.cache import LayerPages, StepTokens


MOST_ANGLES = 1 << 17
"""Positions whose rotation is worked out before any text is as long, at most."""


def reason_against(config: ModelConfig, dtype: torch.dtype, device: torch.device,
                   quantized: Mapping[str, QuantizedTensor]) -> str | None:
    """Why a model isn't run by these kernels there; ``None`` if it is.

    Args:
        dtype: the dtype of activations and plain weights.
        quantized: its packed weights by name.
    """
    if (reason := gpu.reason_against(device.type, dtype)) is not None:
        return reason
    if device.type == "cuda" and dtype == torch.float32:
        return "takes 16-bit models, not float32"
    if (reason := reason_against_shape(config) or kv_gpu.reason_against_heads(
            config.head_dim, config.num_heads // config.num_kv_heads)) is not None:
        return reason
    for name, weight in quantized.items():
        if (reason := linears.reason_against(weight, dtype, device)) is not None:
            return f"{name} {reason}"
    return experts.reason_against(config, quantized)


class _CacheOnDevice:
    """A cache that this model reads: its sequences on the device, and the graphs of its steps.

    It doesn't keep the cache alive.
    """

    def __init__(self, program: GpuProgram, cache: KVCache) -> None:
        self._program, self._cache = program, proxy(cache)
        self.tables = DeviceTables(self._cache)
        self._pages: list[LayerPages] = []
        self._pages_now = -1
        self.use_taps(())

    def use_taps(self, taps: tuple[int, ...]) -> None:
        """Graphs that hand out other layers' hidden states are others."""
        from quantkit_kernels.triton.prefill_attention import tokens

        program, config, self._taps = self._program, self._cache.config, taps
        self._graphs = GraphCache(program.device, program.vocab, program.dtype,
                                  config.max_position_embeddings, len(taps), config.hidden_size)
        self._prompt_graphs = PromptGraphs(program.device, config.hidden_size, program.dtype,
                                           tokens(program.group), len(taps))

    @property
    def pages(self) -> list[LayerPages]:
        if self._pages_now != self._cache.move_counter.count:
            self._pages, self._pages_now = self._program.pages(self._cache), self._cache.move_counter.count
        return self._pages

    def warm_up(self, sequences: int, tokens: int, rows: int) -> Iterator[None]:
        """Capture all graphs, one for each item that is taken, with tables that needn't move for
        ``sequences`` sequences of ``tokens`` tokens, of which a decoding step has up to ``rows`` of each."""
        self.tables.make_room(sequences, tokens)
        self._program.make_angles(min(tokens, MOST_ANGLES))
        yield from self._prompt_graphs.warm_up(self._prompt_step, self._valid)
        yield from self._graphs.warm_up(self._step, min(sequences * rows, BATCHES[-1]), tokens, self._valid)

    def decode(self, batch: Batch, ids: Sequence[torch.Tensor] | torch.Tensor,
               slices: Sequence[RowSlice]) -> torch.Tensor:
        """``ids`` of each row, int64 ``[T]`` → logits of the slices ``[N, vocab]``, valid until the next
        call. A token's bits are those that it has if it comes alone."""
        counts = [part.count for part in slices]
        states = [batch.sequences[part.sequence] for part in slices]
        rows = self.tables.place([batch.numbers[part.sequence] for part in slices], states, counts)
        ends = [int(state.seen[-1]) + count for state, count in zip(states, counts)]
        longest = max(ends) if self._cache.keeps_all else max(
            int(state.lengths.max()) + count for state, count in zip(states, counts))
        self._program.make_angles(max(ends))
        whose = [(row, place) for row, count in zip(rows, counts) for place in range(count)]
        if batch.taps and batch.taps != self._taps:
            self.use_taps(batch.taps)
        logits, hidden = self._graphs(self._step, _flat(ids, slices), whose, longest, self._valid)
        self.tables.counted(batch, slices)
        self._hand_out(batch, slices, hidden)
        return logits

    def _step(self, ids: torch.Tensor, step: StepTokens, out: torch.Tensor, hidden: torch.Tensor) -> None:
        from quantkit_kernels.triton.advance import advance

        tables = self.tables.tables
        x = self._program.run(ids, step, tables, self.pages, self._cache, taps=[*zip(self._taps, hidden)])
        advance(tables, step)
        self._program.logits(x, out)

    @property
    def _valid(self) -> tuple[int, int, int]:
        """Changes when something that a graph reads comes to lie elsewhere."""
        return self._cache.move_counter.count, self.tables.moves, self._program.moves

    def _prompt_step(self, ids: torch.Tensor, step: StepTokens, tiles: torch.Tensor, out: torch.Tensor,
                     hidden: torch.Tensor) -> None:
        out.copy_(self._program.run(ids, step, self.tables.tables, self.pages, self._cache, tiles,
                                    prompts=self._program.prompts, taps=[*zip(self._taps, hidden)]))

    def _hand_out(self, batch: Batch, slices: Sequence[RowSlice], hidden: torch.Tensor) -> None:
        """Hidden states ``[taps, n, hidden]`` of some slices, as :attr:`Batch.hidden`."""
        if batch.taps:
            rows = hidden.transpose(0, 1).to(torch.float32, copy=True)
            for part, states in zip(slices, rows.split([part.count for part in slices])):
                batch.hidden.setdefault(part.sequence, []).append(states)

    def prefill(self, batch: Batch, ids: Sequence[torch.Tensor] | torch.Tensor,
                slices: Sequence[RowSlice]) -> torch.Tensor:
        """``ids`` of each row, int64 ``[T]`` → what the last layer leaves of the slices, ``[N, hidden]``,
        valid until the next call. Raises ValueError: some decode, and others are read."""
        from quantkit_kernels.triton.cache import StepTokens
        from quantkit_kernels.triton.prefill_attention import tiles_of

        counts = [part.count for part in slices]
        states = [batch.sequences[part.sequence] for part in slices]
        rows = self.tables.place([batch.numbers[part.sequence] for part in slices], states, counts)
        self._program.make_angles(max(int(state.seen[-1]) + count for state, count in zip(states, counts)))
        whose = np.concatenate([np.stack([np.full(count, row, np.int32), np.arange(count, dtype=np.int32)], 1)
                                for row, count in zip(rows, counts)])
        tiles = np.array(tiles_of(rows, counts, self._program.group), np.int32)
        flat = _flat(ids, slices)
        phases = [batch.phases[part.sequence] for part in slices]
        decodes = "decode" in phases
        if decodes and set(phases) != {"decode"}:
            raise ValueError("decoded tokens are multiplied by other kernels than a prompt's")
        tracks = any(state.query_window is not None for state in states)
        query_rows: list[torch.Tensor] = []
        x = None
        if batch.taps and batch.taps != self._taps:
            self.use_taps(batch.taps)
        if not tracks and not decodes:
            captured = self._prompt_graphs(self._prompt_step, flat, whose, tiles, self._valid)
            if captured is not None:
                x, hidden = captured
        if x is None:
            device = self._program.device
            longest = max(int(state.lengths.max()) + count for state, count in zip(states, counts))
            step = StepTokens(gpu.sent(torch.from_numpy(whose), device), longest)
            hidden = torch.empty(len(self._taps), len(flat), batch.cache.config.hidden_size,
                                 dtype=self._program.dtype, device=device)
            x = self._program.run(flat, step, self.tables.tables, self.pages, self._cache,
                                  gpu.sent(torch.from_numpy(tiles), device), query_rows if tracks else None,
                                  None if decodes else self._program.prompts, [*zip(self._taps, hidden)])
        self._hand_out(batch, slices, hidden)
        for part in slices:
            batch.advance(part.sequence, part.count)
        for layer, q in enumerate(query_rows):
            layer_cache = self._cache.layers[layer]
            for state, phase, queries in zip(states, phases, q.split(counts)):
                if layer_cache.policy.tracks_queries(phase):
                    layer_cache.scores.record_queries(state.layers[layer], queries.transpose(0, 1))
        return x


class GpuModel(ProgramModel):
    """A model on a GPU. A decode step's logits are the next one's memory.

    Args:
        model: built on the CPU, its weights as their files have them; they are moved and let go of.
        done: called when some weights are on the device.

    Attributes:
        weight_bytes: bytes of all weights on the device but norms.
    """

    max_rows = GPU_ROWS
    decode_rows = BATCHES[-1]
    runs_ahead = True
    supports_mixed_batches = False
    supports_batched_prefill = supports_drafts = True
    decode_matches_prefill = False  # decoding sums attention over splits, a prompt's chunk in one go

    def __init__(self, model: CausalLM, device: torch.device,
                 done: Callable[[], None] = lambda: None) -> None:
        super().__init__(model, device)
        with gpu.current(device):
            self._program = GpuProgram(model, device, done)
        self._caches: WeakKeyDictionary[KVCache, _CacheOnDevice] = WeakKeyDictionary()
        table = model.embedding
        self.weight_bytes = self._program.weight_bytes + (0 if table is model.head.weight else table.nbytes)

    @property
    def step_bytes(self) -> int:
        """Bytes of weights that a token's decode step reads."""
        return self._program.step_bytes

    def head_alone(self) -> GpuModel:
        alone = copy.copy(self)
        alone._model, alone._program = self._model.head_alone(), self._program.head_alone()
        alone._caches = WeakKeyDictionary()
        return alone

    def on_device(self) -> AbstractContextManager[object]:
        return gpu.current(self.device)

    def reason_against(self, cache: KVCache) -> str | None:
        """A cache that is on the device already isn't looked at again."""
        if cache in self._caches:
            return None
        config = self.config
        return kv_gpu.reason_against_cache(cache.codecs, self.dtype, config.head_dim,
                                           config.num_heads // config.num_kv_heads, self.device.type)

    def check_cache(self, cache: KVCache) -> None:
        """Raises UsageError: no kernel reads such a cache, and nothing else runs this model's weights, which
        lie in the kernels' order."""
        if (reason := self.reason_against(cache)) is not None:
            raise UsageError(f"the KV setting {cache.spec} isn't run on {self.device}",
                             why=f"the GPU runtime {reason}",
                             next="give --kv int8, or run the model with --device cpu")

    def prepare(self, cache: KVCache) -> None:
        """Kernels are compiled, and steps captured, by the thread that runs the model."""

    def warm_up(self, cache: KVCache, sequences: int, tokens: int, rows: int = 1,
                taps: tuple[int, ...] = ()) -> Iterator[None]:
        """Capture the graphs of all steps, which compiles their kernels. The interpreter has none, and where
        there is no memory for all of them each is captured when it is first needed."""
        if self.device.type != "cuda" or self.reason_against(cache) is not None:
            return
        with self.on_device():
            try:
                on_device = self._on_device(cache)
                on_device.use_taps(taps)
                yield from on_device.warm_up(sequences, tokens, rows)
            except torch.OutOfMemoryError:
                self._caches.pop(cache, None)

    def chunk_invariant(self, cache: KVCache) -> bool:
        return True

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        with self.on_device():
            return self._program.embed(ids)

    def head(self, x: torch.Tensor) -> torch.Tensor:
        with self.on_device():
            return self._program.head(x)

    def normalized(self, x: torch.Tensor) -> torch.Tensor:
        with self.on_device():
            return self._program.normalized(x.reshape(-1, x.shape[-1])).reshape(x.shape)

    def token_rows(self, tokens: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        flat = gpu.sent(torch.tensor([token for row in tokens for token in row]), self.device)
        return list(flat.split([*map(len, tokens)]))

    def step_logits(self, batch: Batch, ids: Sequence[torch.Tensor] | torch.Tensor, counts: Sequence[int],
                    wanted: Sequence[range]) -> list[torch.Tensor]:
        on_device = self._on_device(batch.cache)
        if self._decodes(batch):
            steps = [*slices_of(counts, self.decode_rows)]
            return [_picked(on_device.decode(batch, ids, slices), selected_rows(slices, wanted),
                            copies=len(steps) > 1) for slices in steps]
        return [self._selected(on_device.prefill(batch, ids, slices), selected_rows(slices, wanted))
                for slices in self.slices(batch, counts)]

    def step_hidden(self, batch: Batch, ids: Sequence[torch.Tensor] | torch.Tensor,
                    counts: Sequence[int]) -> list[torch.Tensor]:
        on_device = self._on_device(batch.cache)
        return [on_device.prefill(batch, ids, slices).clone() for slices in self.slices(batch, counts)]

    def head_logits(self, x: torch.Tensor) -> torch.Tensor:
        return self._program.logits(x)

    def _selected(self, x: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        """Logits of some rows."""
        if len(rows) != len(x):
            x = x[gpu.sent(torch.tensor(rows, dtype=torch.int64), x.device)]
        return self._program.logits(x)

    def _decodes(self, batch: Batch) -> bool:
        """Whether this is a step for a graph: there is no query to keep."""
        return set(batch.phases) == {"decode"} and all(
            state.query_window is None for state in batch.sequences)

    def _on_device(self, cache: KVCache) -> _CacheOnDevice:
        if cache not in self._caches:
            self._caches[cache] = _CacheOnDevice(self._program, cache)
        return self._caches[cache]


def _flat(ids: Sequence[torch.Tensor] | torch.Tensor, slices: Sequence[RowSlice]) -> torch.Tensor:
    """The ids of some slices, one after another."""
    if isinstance(ids, torch.Tensor) and ids.shape == (len(slices), 1):
        return ids[:, 0]
    return torch.cat([ids[part.sequence][part.start:part.start + part.count] for part in slices])


def _picked(rows: torch.Tensor, indices: Sequence[int], copies: bool) -> torch.Tensor:
    """Some of the rows; a copy of them if there are less, or if it ``copies``."""
    if len(indices) == len(rows):
        return rows.clone() if copies else rows
    return rows[gpu.sent(torch.tensor(indices, dtype=torch.int64), rows.device)]
