"""A model on a GPU as kernels of our own; a step of decoding is one graph.

Decoding, prompts and scoring go through the same products, which give a row the same bits whatever other rows
are there: so a request's tokens depend on nothing but the request.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary, proxy

import torch

from quantkit.formats.base import QuantizedTensor
from quantkit.kv import gpu as kv_gpu
from quantkit.kv.batch import Batch
from quantkit.kv.cache import KVCache
from quantkit.kv.spec import KVSpec
from quantkit.memory.scratch import GPU_ROWS
from quantkit.models.config import ModelConfig
from quantkit.models.decoder import CausalLM, wanted_rows
from quantkit.models.interfaces import KVCacheProtocol
from quantkit.models.linear import Linear
from quantkit.ops import gpu
from quantkit.runtime.chunks import Chunk, chunks_of, join_rows, pad_rows, selected_rows, single_position
from quantkit.runtime.gpu import linears
from quantkit.runtime.gpu.graphs import BATCHES, GraphCache
from quantkit.runtime.gpu.program import GpuProgram
from quantkit.runtime.gpu.tables import DeviceTables
from quantkit.support.errors import UsageError

if TYPE_CHECKING:
    from quantkit_kernels.triton.cache import LayerPages, StepTokens

def declines(config: ModelConfig, dtype: torch.dtype, device: torch.device,
             quantized: Mapping[str, QuantizedTensor]) -> str | None:
    """Why a model isn't run by these kernels there; ``None`` if it is.

    Args:
        config: its shape.
        dtype: of activations and plain weights.
        device: where it is to run.
        quantized: its packed weights by name.
    """
    if (reason := gpu.unavailable(device.type, dtype)) is not None:
        return reason
    if device.type == "cuda" and dtype == torch.float32:
        return "takes 16-bit models, not float32"
    if (reason := other_maths(config) or kv_gpu.heads_decline(
            config.head_dim, config.num_heads // config.num_kv_heads)) is not None:
        return reason
    for name, weight in quantized.items():
        if (reason := linears.declines(weight, dtype, device)) is not None:
            return f"{name} {reason}"
    return None


def other_maths(config: ModelConfig) -> str | None:
    """What a model does that no kernel computes; ``None`` if there is nothing."""
    has = {"mixtures of experts": config.experts is not None,
           "attention sinks": config.attention_sinks,
           "clamped activations": config.activation == "clamped_silu",
           "a rotation that depends on the sequence's length": config.rope.kind == "longrope",
           "a rotation of parts of a head": config.rope.partial != 1.0}
    feature = next((name for name, used in has.items() if used), None)
    return None if feature is None else f"has no kernel for {feature}"


class _Running:
    """A cache that this model reads: its sequences on the device, and the graphs of its steps.

    It doesn't keep the cache alive.
    """

    def __init__(self, program: GpuProgram, cache: KVCache) -> None:
        self._program, self._cache = program, proxy(cache)
        self.tables = DeviceTables(self._cache)
        self._pages: list[LayerPages] = []
        self._pages_now = -1
        self._graphs = GraphCache(program.device, program.vocab, program.dtype,
                                  cache.config.max_position_embeddings)

    @property
    def pages(self) -> list[LayerPages]:
        if self._pages_now != self._cache.move_counter.count:
            self._pages, self._pages_now = self._program.pages(self._cache), self._cache.move_counter.count
        return self._pages

    def decode(self, batch: Batch, ids: torch.Tensor) -> torch.Tensor:
        """A token ``[B]`` of each sequence → logits ``[B, vocab]``."""
        rows = self.tables.place(batch, [1] * len(batch.sequences))
        position = max(int(state.seen[-1]) for state in batch.sequences)
        longest = 1 + (position if self._cache.keeps_all else max(
            int(state.lengths.max()) for state in batch.sequences))
        self._program.make_angles(position + 1)
        valid = self._cache.move_counter.count, self.tables.moves, self._program.moves
        logits = self._graphs(self._step, ids, rows, longest, valid)
        self.tables.counted(batch)
        return logits

    def _step(self, ids: torch.Tensor, step: StepTokens, out: torch.Tensor) -> None:
        from quantkit_kernels.triton.advance import advance

        tables = self.tables.tables
        x = self._program.run(ids, step, tables, self.pages, self._cache)
        advance(tables, step)
        self._program.logits(x, out)

    def prefill(self, batch: Batch, ids: torch.Tensor, chunks: Sequence[Chunk]) -> torch.Tensor:
        """Tokens of ``ids [B, T]`` → what the last layer leaves of them, ``[N, hidden]``."""
        from quantkit_kernels.triton.cache import StepTokens
        from quantkit_kernels.triton.prefill_attention import tiles_of

        part = Batch(batch.cache, [batch.numbers[chunk.sequence] for chunk in chunks],
                     [batch.phases[chunk.sequence] for chunk in chunks])
        counts = [chunk.count for chunk in chunks]
        rows = self.tables.place(part, counts)
        longest = max(int(state.lengths.max()) + count for state, count in zip(part.sequences, counts))
        self._program.make_angles(max(int(state.seen[-1]) + count
                                      for state, count in zip(part.sequences, counts)))
        device = self._program.device
        whose = gpu.sent(torch.tensor([(row, at) for row, count in zip(rows, counts) for at in range(count)],
                                      dtype=torch.int32), device)
        tiles = gpu.sent(torch.tensor(tiles_of(rows, counts, self._program.group), dtype=torch.int32), device)
        flat = torch.cat([ids[chunk.sequence, chunk.start:chunk.start + chunk.count] for chunk in chunks])
        query_rows: list[torch.Tensor] = []
        tracks = any(state.query_window is not None for state in part.sequences)
        x = self._program.run(flat, StepTokens(whose, longest), self.tables.tables, self.pages, self._cache,
                              tiles, query_rows if tracks else None)
        for state, count in zip(part.sequences, counts):
            self._cache.advance(state, count)
        for layer, q in enumerate(query_rows):
            layer_cache = self._cache.layers[layer]
            for sequence, phase, queries in zip(part.sequences, part.phases, q.split(counts)):
                if layer_cache.policy.tracks_queries(phase):
                    layer_cache.record_queries(sequence.layers[layer], queries.transpose(0, 1))
        return x


class GpuModel:
    """The same calls as :class:`~quantkit.models.decoder.CausalLM`.

    Args:
        model: built on the CPU, its weights as their files have them; they are moved and let go of.
        device: where it runs.
        done: called when some weights are on the device.

    Attributes:
        config, dtype, device: the model's.
        decode_rows, runs_ahead, mixes: see :class:`~quantkit.models.interfaces.LanguageModel`.
    """

    decode_rows, runs_ahead, mixes = BATCHES[-1], True, False
    decodes_as_it_reads = False  # decoding sums attention over splits, a prompt's chunk in one go

    def __init__(self, model: CausalLM, device: torch.device,
                 done: Callable[[], None] = lambda: None) -> None:
        self.config, self.dtype, self.device = model.config, model.dtype, device
        self._model = model
        with gpu.current(device):
            self._program = GpuProgram(model, device, done)
        self._running: WeakKeyDictionary[KVCache, _Running] = WeakKeyDictionary()

    def linears(self) -> dict[str, Linear]:
        """The Linears of the model: names, shapes, and the kernel that multiplies them."""
        return self._model.linears()

    @property
    def step_bytes(self) -> int:
        """Bytes of weights that a decode step reads."""
        return self._program.step_bytes

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights on the device but norms: those of :attr:`step_bytes`, and the embedding."""
        table = self._model.embedding
        return self._program.step_bytes + (0 if table is self._model.head.weight else table.nbytes)

    def declines(self, batch: Batch) -> str | None:
        """Why a step over these sequences can't be run."""
        return self._declines(batch.cache)

    def prepare(self, cache: KVCache) -> None:
        """See :class:`~quantkit.models.interfaces.LanguageModel`: kernels are compiled when they are first
        launched."""

    def chunk_invariant(self, cache: KVCacheProtocol) -> bool:
        """See :class:`~quantkit.models.interfaces.LanguageModel`."""
        return True

    def check_cache(self, cache: KVCache) -> None:
        """Raises UsageError: no kernel reads such a cache, and nothing else runs this model's weights, which
        lie in the kernels' order."""
        if (reason := self._declines(cache)) is not None:
            raise UsageError(f"the KV setting {cache.spec} isn't run on {self.device}",
                             why=f"the GPU runtime {reason}",
                             next="give --kv int8, or run the model with --device cpu")

    def _declines(self, cache: KVCache) -> str | None:
        config = self.config
        return kv_gpu.declines(cache.codecs, self.dtype, config.head_dim,
                               config.num_heads // config.num_kv_heads, self.device.type)

    def __call__(self, ids: torch.Tensor, positions: torch.Tensor | None = None,
                 cache: KVCacheProtocol | None = None, last: torch.Tensor | None = None) -> torch.Tensor:
        """See :meth:`CausalLM.__call__`. A decode step's logits are the next one's memory."""
        with gpu.current(self.device):
            return self._logits(ids, positions, cache, last)

    def _logits(self, ids: torch.Tensor, positions: torch.Tensor | None, cache: KVCacheProtocol | None,
                last: torch.Tensor | None) -> torch.Tensor:
        batch = self._batch(ids, cache)
        counts = batch.counts(ids.shape, positions)
        running = self._of(batch.cache)
        if self._decodes(batch, counts):
            rows = running.decode(batch, ids[:, 0])
        else:
            wanted = [range(count) for count in counts] if last is None else [
                single_position(int(at), count) for at, count in zip(last, counts, strict=True)]
            rows = join_rows([self._some(running.prefill(batch, ids, chunks), selected_rows(chunks, wanted))
                              for chunks in chunks_of(counts, GPU_ROWS, batch.block, batch.starts)],
                             self.config.vocab_size)
        batch.finish(counts)
        batch.done(self, ids, positions)
        return rows if last is not None else pad_rows(rows, counts, ids.shape[1])

    def forward(self, tokens: Sequence[Sequence[int]], batch: Batch, wanted: Sequence[int]) -> torch.Tensor:
        """See :class:`~quantkit.models.interfaces.LanguageModel`."""
        return wanted_rows(self, tokens, batch, wanted)

    def normalized(self, x: torch.Tensor) -> torch.Tensor:
        """See :class:`~quantkit.models.interfaces.LanguageModel`."""
        with gpu.current(self.device):
            return self._program.normalized(x.reshape(-1, x.shape[-1])).reshape(x.shape)

    def _some(self, x: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        """Logits of some rows."""
        all_rows = len(rows) == len(x)
        if not all_rows:
            x = x[gpu.sent(torch.tensor(rows, dtype=torch.int64), x.device)]
        return self._program.logits(x)

    def hidden(self, ids: torch.Tensor, positions: torch.Tensor | None = None,
               cache: KVCacheProtocol | None = None) -> torch.Tensor:
        """See :meth:`CausalLM.hidden`."""
        with gpu.current(self.device):
            batch = self._batch(ids, cache)
            counts = batch.counts(ids.shape, positions)
            running = self._of(batch.cache)
            parts = [running.prefill(batch, ids, chunks)
                     for chunks in chunks_of(counts, GPU_ROWS, batch.block, batch.starts)]
            batch.finish(counts)
            batch.done(self, ids, positions)
            return pad_rows(join_rows(parts, self.config.hidden_size), counts, ids.shape[1])

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """See :meth:`CausalLM.logits`."""
        rows = x.reshape(-1, x.shape[-1])
        with gpu.current(self.device):
            flat = join_rows([self._program.logits(part) for part in rows.split(GPU_ROWS)],
                             self.config.vocab_size)
        return flat.reshape(*x.shape[:-1], self.config.vocab_size)

    def _decodes(self, batch: Batch, counts: Sequence[int]) -> bool:
        """Whether this is a step for a graph: one token of each, and no query to keep."""
        return (set(batch.phases) == {"decode"} and len(counts) <= self.decode_rows and set(counts) == {1}
                and all(state.query_window is None for state in batch.sequences))

    def _of(self, cache: KVCache) -> _Running:
        if cache not in self._running:
            self.check_cache(cache)
            self._running[cache] = _Running(self._program, cache)
        return self._running[cache]

    def _batch(self, ids: torch.Tensor, cache: KVCacheProtocol | None) -> Batch:
        """The sequences as rows of pages."""
        if cache is None:
            cache_of_step = KVCache(self.config, KVSpec(), self.dtype, self.device)
            return Batch(cache_of_step, [cache_of_step.add() for _ in range(ids.shape[0])])
        assert isinstance(cache, Batch)
        return cache
