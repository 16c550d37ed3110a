"""The program of one step: all operations of a model over the pages of two KV codecs, and their buffers."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from quantkit.kv.batch import Batch
from quantkit.kv.cache import KVCache
from quantkit.kv.store import PageStore
from quantkit.models.decoder import CausalLM, DecoderLayer
from quantkit.models.layers import MLP, MixtureOfExperts, RMSNorm
from quantkit.models.linear import Linear
from quantkit.ops import cpu_machine, cpu_weight
from quantkit.ops.attention import block_ends
from quantkit.ops.cpu_machine import lazy_zeros
from quantkit.ops.cpu_weight import Activations, CpuWeight, InputKey, widened
from quantkit.ops.hadamard import hadamard_factors
from quantkit.ops.linear_weight import LinearWeight
from quantkit.ops.rows import capped_rows
from quantkit.ops.stored_weight import PlainWeight
from quantkit.runtime.cpu.experts import ExpertBuffers, ExpertTable
from quantkit.runtime.memory.scratch import CPU_ROWS as MAX_ROWS
from quantkit.runtime.memory.scratch import MIN_POSITIONS, buffer_width, packed_of, result_widths
from quantkit.runtime.program_model import RowSlice, rope_tables
from quantkit.support.progress import tell_compiling

if TYPE_CHECKING:
    from quantkit_kernels.cpu.kv_pages import PageCodecs

QUERIES = 48
"""Queries of a KV head (rows times the heads that share it) in a unit of attention."""
GATES = {"silu": "silu", "gelu_tanh": "gelu", "clamped_silu": "clamped"}
"""Row kernels by a config's activation."""
TokenIds = Sequence[npt.NDArray[np.int64]] | npt.NDArray[np.int64]  # of each sequence of a batch


class AttentionOperations(NamedTuple):
    """Where a layer's attention is in a program: what stores keys and values, attends, and adds up splits."""

    store: int
    attend: int
    reduce: int


class CpuProgram:
    """A model's operations in order. Rows of activations lie one after another, by sequence.

    Args:
        model: with packed Linears.
        high: read only the high halves of weights that have two.

    Attributes:
        encodes: whether a kernel encodes what is older than the residual window.
    """

    encodes = True

    def __init__(self, model: CausalLM, codecs: PageCodecs, high: bool = False) -> None:
        from quantkit_kernels.cpu.attention import scratch_bytes
        from quantkit_kernels.cpu.hadamard import room_bytes as hadamard_bytes
        from quantkit_kernels.cpu.kv_pages import SEQUENCE
        from quantkit_kernels.cpu.kv_write import encode_bytes
        from quantkit_kernels.cpu.matmul import scratch_bytes as product_bytes
        from quantkit_kernels.cpu.program import Program
        from quantkit_kernels.cpu.weight_decoder import STRIPE, SUB

        self._model = model
        self._codecs = codecs
        self._high = high
        config = self._config = model.config
        self._pool = cpu_machine.pool()
        isa, threads = cpu_machine.isa(), self._pool.threads
        self._group = config.num_heads // config.num_kv_heads
        self._eps, self._limit = (struct.unpack("<i", struct.pack("<f", number))[0] for number in (
            config.rms_norm_eps, config.activation_limit))
        self._tile = max(1, QUERIES // self._group)
        self._mixtures = [layer.mlp for layer in model.layers if isinstance(layer.mlp, MixtureOfExperts)]
        routers = [router for mixture in self._mixtures for router in _routers(mixture)]
        packed = [packed_of(linear, high) for linear in (*model.linears().values(), *routers, model.head)]
        scratch = max(scratch_bytes(config.head_dim, self._tile * self._group), encode_bytes(config.head_dim),
                      *(product_bytes(weight.kernel, isa, weight.columns // SUB) for weight in packed),
                      *(hadamard_bytes(weight.shape[1]) for weight in packed if weight.rotated))
        self._scratch = torch.empty(threads, -(-scratch // 64) * 64, dtype=torch.uint8)
        self._ids, self._selected = (torch.zeros(MAX_ROWS, dtype=torch.int64) for _ in range(2))
        self._rows, self._tiles = (torch.zeros(MAX_ROWS, 3, dtype=torch.int64) for _ in range(2))
        self._diffusion = config.diffusion
        self._sees = None if config.diffusion is None else torch.zeros(MAX_ROWS, dtype=torch.int64)
        records = np.zeros(MAX_ROWS, SEQUENCE)
        self._sequences = torch.from_numpy(records.view(np.int64))
        self._views = (self._ids.numpy(), self._rows.numpy(), self._tiles.numpy(), records)
        self._selected_view = self._selected.numpy()
        self._partial = torch.empty(0)
        self._width = packed[-1].stripes * STRIPE
        self._activations: dict[tuple[str, InputKey], Activations] = {}
        self._packed: dict[int, tuple[CpuWeight, int]] = {}
        self._tables: dict[int, ExpertTable] = {}
        self._ordered: list[int] = []  # operations that order pairs of rows and experts
        self._prepared: set[int] = set()  # operations that prepare rows for products
        self._attention: list[AttentionOperations] = []  # by layer
        self._encode: list[int] = []  # by layer, if there is a residual
        self._record_queries: list[int] = []  # by layer
        self._program = Program(isa)
        self._build(model)
        self._program.finish(tell_compiling)
        self._rope_positions = 0
        self._current_tiles = self._current_pages = (-1, -1)
        self._current_rows = self._current_selected = self._current_blocks = self._recorded_rows = -1

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the rows between operations and of the threads' scratch memory."""
        parts = (self._scratch, self._partial, self._hidden, *self._qkv, self._before_norm, self._mixed,
                 self._gate, self._up, *(() if self._experts is None else self._experts.tensors),
                 *(room.written["out"] for room in self._activations.values()))
        return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in parts}.values())

    def _build(self, model: CausalLM) -> None:
        from quantkit_kernels.cpu.embedding import Embed

        config, layers = self._config, model.layers
        attentions = [layer.self_attn for layer in layers]
        mixtures = self._mixtures
        mlps = [*(layer.mlp for layer in layers if isinstance(layer.mlp, MLP)),
                *(mixture.shared for mixture in mixtures if mixture.shared is not None)]
        routed = [linear for mixture in mixtures for linear in (
            *_routers(mixture), *(linear for expert in mixture.experts for linear in expert.inputs))]
        gates = [linear for mlp in mlps for linear in mlp.inputs]
        downs = [mlp.down_proj for mlp in mlps]
        outs = [attention.o_proj for attention in attentions]
        ins = [linear for attention in attentions for linear in attention.inputs]
        self._hidden = buffer([*outs, *downs], [*ins, *gates, *routed, model.head])
        self._qkv = buffers([attention.inputs for attention in attentions], [], attentions[0].sizes)
        self._before_norm = buffer([*outs, *downs], [])  # what is normalized before it is added
        self._mixed = buffer([], outs, config.num_heads * config.head_dim)
        self._gate, self._up = buffers([mlp.inputs for mlp in mlps], downs, mlps[0].sizes) if mlps else (
            torch.empty(0), torch.empty(0))
        self._experts = ExpertBuffers(config.experts, mixtures) if config.experts and mixtures else None
        table = model.embedding
        scale = float(torch.tensor(config.embedding_scale, dtype=model.dtype))
        kernel, parts = (table.kernel, table.table) if isinstance(table, CpuWeight) else (
            None, {"table": plain_of(table)})
        self._program.add(Embed(kernel, scale, cpu_weight.PLAIN[model.dtype]), units_per_row=1,
                          ids=self._ids, out=self._hidden, size=config.hidden_size,
                          out_stride=stride_of(self._hidden), padded=self._hidden.shape[1], **parts)
        for index, layer in enumerate(layers):
            self._layer(index, layer)
        self._head_at = len(self._program)
        self._norm(model.norm.weight, [model.head], selected=self._selected)
        self._multiply(model.head, "hidden", None, self._width * 4)

    def _layer(self, index: int, layer: DecoderLayer) -> None:
        from quantkit_kernels.cpu.attention import UNBOUNDED, Attend, ReduceSplits
        from quantkit_kernels.cpu.kv_write import EncodePages, KeepQueries, RopeStore, UndoHadamard

        config, program, attention = self._config, self._program, layer.self_attn
        dim, (q, k, v), mixed = config.head_dim, self._qkv, self._mixed
        self._norm(layer.before_attention.weight, attention.inputs)
        self._project(attention.inputs, (q, k, v))
        where: dict[str, Any] = {"rows": self._rows, "sequences": self._sequences, "layer": index,
                                 "heads": config.num_kv_heads}
        q_norm, k_norm = (None if norm is None else widened(norm.weight)
                          for norm in (attention.q_norm, attention.k_norm))
        window = config.sliding_windows[index]
        scratch: dict[str, Any] = {"scratch": self._scratch, "scratch_private": self._scratch.shape[1]}
        hadamard_arguments: dict[str, Any] = dict(zip(("signs", "mix"), hadamard_factors(dim)))
        store = program.add(RopeStore(self._codecs, dim), units_per_row=config.num_kv_heads, **where,
                            **hadamard_arguments, q=q, k=k, v=v, q_norm=q_norm, k_norm=k_norm,
                            q_stride=stride_of(q), kv_stride=stride_of(k),
                            group=self._group, eps=self._eps)
        self._record_queries.append(program.add(
            KeepQueries(dim), 0, rows=self._rows, sequences=self._sequences, layer=index, q=q,
            q_stride=stride_of(q), query_heads=config.num_heads))
        if self._codecs.residual and self.encodes:
            self._encode.append(program.add(EncodePages(self._codecs, dim), 0, **where, **scratch))
        self._attention.append(AttentionOperations(
            store,
            program.add(Attend(self._codecs, dim), **where, **scratch, q=q, out=mixed, tiles=self._tiles,
                        q_stride=stride_of(q), out_stride=stride_of(mixed), group=self._group,
                        window=UNBOUNDED if window is None else window, sink_scores=attention.sinks,
                        sees=self._sees),
            program.add(ReduceSplits(dim), out=mixed, out_stride=stride_of(mixed),
                        query_heads=config.num_heads, sink_scores=attention.sinks)))
        if self._codecs.side("v").hadamard:
            program.add(UndoHadamard(dim), units_per_row=1, **hadamard_arguments, x=mixed,
                        x_stride=stride_of(mixed), heads=config.num_heads)
        self._prepare("plain", "mixed", mixed, [attention.o_proj])
        self._add(attention.o_proj, "mixed", layer.after_attention)
        if isinstance(layer.mlp, MixtureOfExperts):
            self._mixture(layer, layer.mlp)
            return
        mlp = layer.mlp
        self._norm(layer.before_mlp.weight, mlp.inputs)
        self._project(mlp.inputs, (self._gate, self._up))
        self._prepare(GATES[config.activation], "gate", self._gate, [mlp.down_proj], second=self._up,
                      limit=self._limit)
        self._add(mlp.down_proj, "gate", layer.after_mlp)

    def _mixture(self, layer: DecoderLayer, mixture: MixtureOfExperts) -> None:
        """A layer's experts: a router's scores choose some for each row, and each multiplies its rows."""
        from quantkit_kernels.cpu.experts import AddShared, OrderPairs, Route, SumExperts

        program, buffers, weight = self._program, self._experts, layer.before_mlp.weight
        assert buffers is not None
        gates, ups, downs = ([expert.linears()[part] for expert in mixture.experts] for part in range(3))
        shared, gates_of_shared = mixture.shared, _routers(mixture)[1:]
        self._norm(weight, [*_routers(mixture), *([] if shared is None else shared.inputs)])
        self._multiply(mixture.router, "hidden", buffers.scores)
        if shared is not None:
            self._multiply(gates_of_shared[0], "hidden", buffers.shared_scores)
            self._project(shared.inputs, (self._gate, self._up))
            self._prepare(GATES[self._config.activation], "gate", self._gate, [shared.down_proj],
                          second=self._up, limit=self._limit)
            self._multiply(shared.down_proj, "gate", buffers.shared_result)
        program.add(Route(), units_per_row=1, **buffers.route)
        self._ordered.append(program.add(OrderPairs(), **buffers.order))
        self._norm(weight, [gates[0], ups[0]], buffers.rows, "pairs", buffers.chosen)
        self._multiply_experts(gates, "pairs", buffers.gate, barrier=False)
        self._multiply_experts(ups, "pairs", buffers.up)
        self._prepare(GATES[self._config.activation], "opened", buffers.gate, [downs[0]], buffers.chosen,
                      second=buffers.up, limit=self._limit)
        self._multiply_experts(downs, "opened", buffers.result)
        out = self._before_norm if isinstance(layer.after_mlp, RMSNorm) else self._hidden
        program.add(SumExperts(), units_per_row=1, **buffers.sum, out=out, out_stride=stride_of(out),
                    size=self._config.hidden_size, residual=None if out is self._before_norm else out)
        if shared is not None:
            program.add(AddShared(), units_per_row=1, **buffers.shared, out=out, out_stride=stride_of(out),
                        size=self._config.hidden_size)
        self._add_normed(layer.after_mlp)

    def _norm(self, weight: torch.Tensor, linears: Sequence[Linear], selected: torch.Tensor | None = None,
              role: str = "hidden", pairs: int = 0) -> None:
        self._prepare("norm", role, self._hidden, linears, pairs, size=self._config.hidden_size,
                      picked=selected, weight=widened(weight, self._hidden.shape[1]), eps=self._eps)

    def _prepare(self, source: Any, role: str, x: torch.Tensor, linears: Sequence[Linear], pairs: int = 0,
                 **values: Any) -> None:
        """Prepare rows of activations for these Linears, once for each kind of kernel and width; with
        ``pairs`` as many pairs a row."""
        from quantkit_kernels.cpu.rows import RowKernel
        from quantkit_kernels.cpu.weight_decoder import SUB

        weights = (packed_of(linear, self._high) for linear in linears)
        for weight in {weight.input_key: weight for weight in weights}.values():
            key = weight.input_key
            if (rows := self._activations.get((role, key))) is None:
                rows = Activations(weight, MAX_ROWS * pairs or max(MAX_ROWS, self._pool.threads))
                self._activations[role, key] = rows
            index = self._program.add(
                RowKernel(source, key.family, key.rotated), units_per_row=pairs or 1, x=x,
                x_stride=stride_of(x), subgroups=key.columns // SUB, **rows.written,
                **self._hadamard(key.rotated), **values)
            if not pairs:
                self._prepared.add(index)

    def _hadamard(self, width: int) -> dict[str, Any]:
        """The arguments with which a row operation rotates rows of this width; none if it is 0."""
        return {**dict(zip(("signs", "mix"), hadamard_factors(width))), "room": self._scratch,
                "room_private": self._scratch.shape[1]} if width else {}

    def _project(self, linears: Sequence[Linear], outs: Sequence[torch.Tensor]) -> None:
        """Multiply by Linears that read the same rows. Where one computes all outs, they are parts of a
        buffer."""
        for linear, out in zip(linears, outs):
            self._multiply(linear, "hidden", out, barrier=linear is linears[-1])

    def _add(self, linear: Linear, role: str, norm: object) -> None:
        """Add a Linear's result to the hidden states, after a norm if the model has one there."""
        normed = isinstance(norm, RMSNorm)
        self._multiply(linear, role, self._before_norm if normed else self._hidden, add=int(not normed))
        self._add_normed(norm)

    def _add_normed(self, norm: object) -> None:
        """Add what waits for a norm to the hidden states; if the model has none there, they have it."""
        from quantkit_kernels.cpu.rows import NormAdd

        if not isinstance(norm, RMSNorm):
            return
        self._program.add(NormAdd(), units_per_row=1, x=self._before_norm,
                          x_stride=stride_of(self._before_norm), out=self._hidden,
                          out_stride=stride_of(self._hidden), size=self._config.hidden_size, eps=self._eps,
                          weight=widened(norm.weight, self._before_norm.shape[1]))

    def _multiply(self, linear: Linear, role: str, out: torch.Tensor | None, stride: int = 0, *, add: int = 0,
                  barrier: bool = True) -> None:
        from quantkit_kernels.cpu.weight_decoder import STRIPE

        weight = packed_of(linear, self._high)
        activations = self._activations[role, weight.input_key]
        bias = None if linear.bias is None else widened(linear.bias, weight.stripes * STRIPE)
        index = self._program.add(weight.kernel, **weight.arguments, **activations.read, out=out, bias=bias,
                                  add=add, scratch=self._scratch,
                                  out_stride=stride if out is None else stride_of(out),
                                  scratch_private=self._scratch.shape[1], barrier=barrier)
        self._packed[index] = weight, activations.stride

    def _multiply_experts(self, linears: Sequence[Linear], role: str, out: torch.Tensor,
                          barrier: bool = True) -> None:
        from quantkit_kernels.cpu.experts import ExpertProduct
        from quantkit_kernels.cpu.weight_decoder import SUB

        assert self._experts is not None
        table = ExpertTable(linears, self._high)
        weight = table.weight
        index = self._program.add(
            ExpertProduct(weight.kernel), **self._experts.product,
            **self._activations[role, weight.input_key].read, table=table.addresses, out=out,
            out_stride=stride_of(out), stripes=weight.stripes, subgroups=weight.columns // SUB,
            scratch=self._scratch, scratch_private=self._scratch.shape[1], barrier=barrier)
        self._tables[index] = table

    def run(self, batch: Batch, ids: TokenIds, slices: Sequence[RowSlice]) -> torch.Tensor:
        """Take tokens through all layers, which leaves their keys and values in the pages.

        Args:
            batch, ids: the sequences that the slices belong to, and their token ids, int64.
            slices: at most MAX_ROWS tokens in all; in this order they are the rows of the result.

        Returns:
            float32 ``[n, hidden]``, valid until the next call.
        """
        self._place(batch, ids, slices)
        self._run(batch, slices, self._head_at)
        self._done(batch, slices)
        return self._hidden[:sum(part.count for part in slices), :self._config.hidden_size]

    def step(self, batch: Batch, ids: TokenIds, slices: Sequence[RowSlice],
             selected: Sequence[int]) -> torch.Tensor:
        """:meth:`run`, then final norm and head over some of its rows, in one call into machine code.

        Args:
            batch, ids, slices: as for :meth:`run`.
            selected: rows of its result.

        Returns:
            float32 ``[len(selected), vocab]``.
        """
        self._place(batch, ids, slices)
        logits = self._select(selected)
        self._run(batch, slices, len(self._program) if selected else self._head_at)
        self._done(batch, slices)
        return capped_rows(logits[:, :self._config.vocab_size], self._config.logit_softcap)

    def _run(self, batch: Batch, slices: Sequence[RowSlice], end: int) -> None:
        """Run the operations before ``end``."""
        self._pool.run(self._program.records[:end])

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Final norm and head over float32 ``[n, hidden]``: float32 ``[n, vocab]``."""
        self._hidden[:len(x), :x.shape[1]] = x
        logits = self._select(range(len(x)))
        if len(x):
            self._pool.run(self._program.records[self._head_at:])
        return capped_rows(logits[:, :self._config.vocab_size], self._config.logit_softcap)

    def _place(self, batch: Batch, ids: TokenIds, slices: Sequence[RowSlice]) -> None:
        """Write into the program which tokens belong to which sequence, and where their keys and values
        go."""
        cache = batch.cache
        tokens, rows, tiles, sequences = self._views
        row = tile = longest = 0
        for number, part in enumerate(slices):
            start, count, sequence = part.start, part.count, batch.sequences[part.sequence]
            cache.reserve(sequence, count)
            seen = sequence.layers[-1].seen
            sequences[number] = sequence.record
            sequences["count"][number] = count
            tokens[row:row + count] = ids[part.sequence][start:start + count]
            if count == 1:
                rows[row] = number, 0, seen
            else:
                rows[row:row + count, 0] = number
                rows[row:row + count, 1] = np.arange(count)
                rows[row:row + count, 2] = np.arange(seen, seen + count)
            for begin, end in self._spans(seen, count):
                tiles[tile] = row + begin, end - begin, number
                tile += 1
            if self._sees is not None and self._diffusion is not None:
                ends = block_ends(torch.arange(seen, seen + count), self._diffusion.block_size) - seen
                self._sees[row:row + count] = ends.clamp(max=count - 1)
            longest, row = max(longest, seen + count), row + count
        if row and tokens[:row].view(np.uint64).max() >= self._config.vocab_size:  # or negative
            raise IndexError(f"a token id isn't in 0 … {self._config.vocab_size - 1}")
        self._angles(longest)
        self._pages(cache)
        self._shape(row, tile, longest)
        self._set_encoded(batch, slices)
        queries = row if any(batch.sequences[part.sequence].query_window for part in slices) else 0
        if queries != self._recorded_rows:
            self._recorded_rows = queries
            for index in self._record_queries:
                self._program.set(index, units=queries)

    def _spans(self, seen: int, count: int) -> Iterator[tuple[int, int]]:
        """Tiles of a sequence's next tokens; where tokens see all of their block, a tile is of one block."""
        cuts = [0, count]
        if self._diffusion is not None:
            size = self._diffusion.block_size
            cuts[1:1] = range(size - seen % size, count, size)
        for start, stop in itertools.pairwise(cuts):
            for begin in range(start, stop, self._tile):
                yield begin, min(begin + self._tile, stop)

    def _set_encoded(self, batch: Batch, slices: Sequence[RowSlice]) -> None:
        """Write how many pages of the residual are encoded at this step's end."""
        if not self._encode:
            return
        codecs = batch.cache.codecs
        blocks = max(batch.sequences[part.sequence].pages_to_encode(codecs, part.count) for part in slices)
        if blocks or self._current_blocks:
            units = len(slices) * self._config.num_kv_heads * blocks
            for index in self._encode:
                self._program.set(index, units=units, blocks=blocks)
        self._current_blocks = blocks

    def _done(self, batch: Batch, slices: Sequence[RowSlice]) -> None:
        for part in slices:
            batch.advance(part.sequence, part.count)

    def _select(self, selected: Sequence[int]) -> torch.Tensor:
        """Allocate these rows' logits and point the head to them."""
        count = len(selected)
        self._selected_view[:count] = selected
        if count and count != self._current_selected:
            self._current_selected = count
            self._units(range(self._head_at, len(self._program)), count)
        rows = torch.empty(count, self._width)
        self._program.set(len(self._program) - 1, out=rows.data_ptr())
        return rows

    def _shape(self, count: int, tiles: int, longest: int) -> None:
        """Write the numbers of units for ``count`` rows and ``tiles`` tiles."""
        from quantkit_kernels.cpu.attention import SPLIT

        program, heads = self._program, self._config.num_kv_heads
        # long contexts of few sequences are shared out by splits, so that no thread is idle
        splits = -(-longest // SPLIT) if tiles * heads < 4 * self._pool.threads else 1
        if count != self._current_rows:
            self._current_rows, self._current_tiles = -1, (-1, -1)
            self._units(range(self._head_at), count)
            self._current_rows = count
        if (tiles, splits) == self._current_tiles:
            return
        if splits > 1:
            self._partial = torch.empty(count * self._config.num_heads * splits * (self._config.head_dim + 2))
        for layer in self._attention:
            program.set(layer.attend, units=tiles * heads * splits, splits=splits, partial=self._partial)
            units = count * self._config.num_heads if splits > 1 else 0
            program.set(layer.reduce, units=units, splits=splits, partial=self._partial)
        self._current_tiles = (tiles, splits)

    def _units(self, operations: range, rows: int) -> None:
        """Share out ``rows`` rows among an operation's units."""
        self._program.change((operations, rows), lambda: self._share_out(operations, rows))

    def _share_out(self, operations: range, rows: int) -> None:
        """One row is prepared by every thread for itself; more rows are shared out."""
        from quantkit_kernels.cpu.product_spec import MOST_ROWS

        program = self._program
        for index in operations:
            if index in self._packed:
                weight, stride = self._packed[index]
                cut = weight.units(rows, self._pool.threads)
                program.set(index, units=cut.units, rows=rows, stripes_a_unit=cut.stripes,
                            rows_a_unit=cut.rows, x_private=stride if rows == 1 else 0)
            elif index in self._tables:
                assert self._experts is not None
                weight = self._tables[index].weight
                cut = weight.units(min(rows, MOST_ROWS), self._pool.threads, self._experts.chosen)
                program.set(index, units=cut.units, stripes_a_unit=cut.stripes)
            elif index in self._ordered:
                assert self._experts is not None
                program.set(index, pairs=rows * self._experts.chosen)
            elif per_row := program.units_per_row[index]:
                program.set(index, units=rows * per_row)
            if index in self._prepared:
                stride = program.get(index, "out_stride")
                program.set(index, out_private=stride if rows == 1 else 0)
                program.alone(index, rows == 1)

    def _angles(self, longest: int) -> None:
        """Make the RoPE tables of at least ``longest`` positions."""
        if longest <= self._rope_positions:
            return
        size = max(MIN_POSITIONS, 2 * self._rope_positions, longest)
        for layer, (cos, sin) in zip(self._attention, rope_tables(self._config, size)):
            self._program.set(layer.store, cos=cos, sin=sin)
        self._rope_positions = size

    def _pages(self, cache: KVCache) -> None:
        """Point the program to the cache's pages where they are now."""
        from quantkit_kernels.cpu.attention import UNBOUNDED

        now = (cache.number, cache.move_counter.count)
        if now == self._current_pages:
            return
        rule = {"residual_length": cache.codecs.residual_length, "first": cache.codecs.first}
        closes = self._encode or itertools.repeat(None)
        for layer, (operations, close) in enumerate(zip(self._attention, closes)):
            parts, visible = self._addresses(cache, layer), cache.layers[layer].policy.visible
            limit, sinks = visible or (UNBOUNDED, 0)
            for index in (operations.store, operations.attend, close):
                if index is not None:
                    self._program.set(index, **parts, **rule)
            self._program.set(operations.attend, limit=limit, sinks=sinks)
            cache.layers[layer].scores.sinks = self._model.layers[layer].self_attn.sinks
        self._current_pages = now

    def _addresses(self, cache: KVCache, layer: int) -> dict[str, int]:
        """Where a layer's pages lie, by the name of a kernel's argument."""
        return page_addresses(cache.layers[layer].store)


def page_addresses(store: PageStore) -> dict[str, int]:
    """The addresses of a layer's pages, by the name of a kernel's argument; 0: there are none.

    They are plain addresses: the memory belongs to the cache and ends with it.
    """
    from quantkit_kernels.cpu.kv_codecs import PARTS

    addresses = {name.replace(".", "_"): part.data_ptr() for name, part in store.pages.parts.items()}
    if store.residual is not None:
        residual = store.residual.parts
        addresses |= {f"{side}_residual": residual[f"{side}.values"].data_ptr() for side in "kv"}
        addresses["residual_positions"] = residual["positions"].data_ptr() if "positions" in residual else 0
    return {name: addresses.get(name, 0) for name in (
        "positions", "residual_positions", "k_residual", "v_residual",
        *(f"{side}_{part}" for side in "kv" for part in PARTS))}


def plain_of(table: LinearWeight) -> torch.Tensor:
    """An embedding's tensor. Raises TypeError if it isn't plain."""
    if not isinstance(table, PlainWeight):
        raise TypeError("the embedding is neither plain nor packed")
    return table.tensor


def stride_of(x: torch.Tensor) -> int:
    """Bytes from row to row."""
    return x.stride(0) * x.element_size()


def buffers(writers: Sequence[Sequence[Linear]], readers: Sequence[Linear],
            sizes: Sequence[int]) -> list[torch.Tensor]:
    """A buffer for each result of the Linears that read the same input.

    Where one Linear computes all results side by side, the buffers are parts of one.

    Args:
        writers: for every layer, a Linear for each result, or one for all of them.
        readers: the Linears that read any of the buffers.

    Returns:
        float32 ``[MAX_ROWS, …]`` each.
    """
    widths = result_widths(writers, readers, sizes)
    if len(widths) == len(sizes):
        return [lazy_zeros(MAX_ROWS, width) for width in widths]
    joined = lazy_zeros(MAX_ROWS, widths[0])
    return [joined[:, start:] for start in itertools.accumulate(sizes[:-1], initial=0)]


def buffer(writers: Sequence[Linear], readers: Sequence[Linear], size: int = 0) -> torch.Tensor:
    """float32 ``[MAX_ROWS, …]``, wide enough for these Linears; the padding of a row stays 0."""
    return lazy_zeros(MAX_ROWS, buffer_width(writers, readers, size))


def _routers(mixture: MixtureOfExperts) -> list[Linear]:
    """What says how much of each expert a row gets."""
    return [mixture.router, *([] if mixture.shared_gate is None else [mixture.shared_gate])]
