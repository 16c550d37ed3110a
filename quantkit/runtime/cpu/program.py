"""The program of one step: all operations of a model over the pages of two KV codecs, and their memory."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from quantkit.kv.cache import Batch, KVCache
from quantkit.models.decoder import CausalLM, DecoderLayer
from quantkit.models.layers import RMSNorm
from quantkit.models.linear import Linear
from quantkit.ops import cpu_linear
from quantkit.ops.cpu_linear import Activations, CpuWeight
from quantkit.ops.hadamard import hadamard_factors
from quantkit.ops.sampling import one_thread
from quantkit.progress import tell_compiling
from quantkit.runtime.chunks import Chunk
from quantkit.runtime.cpu.buffers import MOST_ROWS, buffer, buffers, key_of, mlp_of, packed_of, stride_of
from quantkit.runtime.cpu.tables import page_addresses, rope_tables

if TYPE_CHECKING:
    from quantkit_kernels.cpu.kv_pages import PageCodecs

QUERIES = 48
"""Queries of a key head (rows times the heads that share it) in a unit of attention."""
ANGLES = 512
"""Positions whose rotation is worked out at once, at least."""


class CpuProgram:
    """A model's operations in order. Rows of activations lie one after another, sequence by sequence.

    Args:
        model: its Linears packed.
        codecs: of the pages.
    """

    def __init__(self, model: CausalLM, codecs: PageCodecs) -> None:
        from quantkit_kernels.cpu.attention import scratch_bytes
        from quantkit_kernels.cpu.hadamard import room_bytes as hadamard_bytes
        from quantkit_kernels.cpu.kv_pages import SEQUENCE
        from quantkit_kernels.cpu.kv_write import close_bytes
        from quantkit_kernels.cpu.matmul import STRIPE, SUB
        from quantkit_kernels.cpu.matmul import scratch_bytes as product_bytes
        from quantkit_kernels.cpu.program import Program

        self._model, self._codecs = model, codecs
        config = self._config = model.config
        self._pool = cpu_linear.pool()
        isa, threads = cpu_linear.isa(), self._pool.threads
        self._group = config.num_heads // config.num_kv_heads
        self._eps = struct.unpack("<i", struct.pack("<f", config.rms_norm_eps))[0]
        self._tile = max(1, QUERIES // self._group)
        packed = [packed_of(one) for one in (*model.linears().values(), model.head)]
        room = max(scratch_bytes(config.head_dim, self._tile * self._group), close_bytes(config.head_dim),
                   *(product_bytes(one.kernel, isa, one.columns // SUB) for one in packed),
                   *(hadamard_bytes(one.shape[1]) for one in packed if one.rotated))
        self._scratch = torch.empty(threads, -(-room // 64) * 64, dtype=torch.uint8)
        self._ids = torch.zeros(MOST_ROWS, dtype=torch.int64)
        self._picked = torch.zeros(MOST_ROWS, dtype=torch.int64)
        self._rows, self._tiles, self._sequences = (
            torch.zeros(MOST_ROWS, width, dtype=torch.int64) for width in (3, 3, SEQUENCE))
        self._views = tuple(t.numpy() for t in (self._ids, self._rows, self._tiles, self._sequences))
        self._picked_view = self._picked.numpy()
        self._partial = torch.empty(0)
        self._width = packed[-1].stripes * STRIPE
        self._activations: dict[tuple[str, str, int, int], Activations] = {}
        self._kept: list[torch.Tensor] = []
        self._packed: dict[int, tuple[CpuWeight, int]] = {}
        self._attention: list[tuple[int, int, int]] = []  # store, attend, combine: by layer
        self._closes: list[int] = []  # by layer, where vectors wait
        self._keeps: list[int] = []  # by layer
        self._program = Program(isa)
        self._build(model)
        self._program.finish(tell_compiling)
        self._names = self._program.names
        self._rows_now = self._picked_now = -1
        self._angles_now = 0
        self._tiles_now: tuple[int, int] = (-1, -1)
        self._pages_now: tuple[int, int] = (-1, -1)
        self._closing_now = self._asked_now = -1

    # -- building

    def _build(self, model: CausalLM) -> None:
        from quantkit_kernels.cpu.embedding import Embed

        config, layers = self._config, model.layers
        attentions, mlps = [one.self_attn for one in layers], [mlp_of(one) for one in layers]
        gates = [one for mlp in mlps for one in mlp.inputs]
        downs = [mlp.down_proj for mlp in mlps]
        outs = [one.o_proj for one in attentions]
        ins = [one for a in attentions for one in a.inputs]
        self._hidden = buffer([*outs, *downs], [*ins, *gates, model.head])
        self._qkv = buffers([one.inputs for one in attentions], [], attentions[0].sizes)
        self._aside = buffer([*outs, *downs], [])  # what is normalized before it is added
        self._mixed = buffer([], outs, config.num_heads * config.head_dim)
        self._gate, self._up = buffers([one.inputs for one in mlps], downs, mlps[0].sizes)
        table = model.embedding
        scale = float(torch.tensor(config.embedding_scale, dtype=model.dtype))
        kernel, parts = (table.kernel, table.table) if isinstance(table, CpuWeight) else (None,
                                                                                          {"table": table})
        self._program.add(Embed(kernel, scale, cpu_linear.PLAIN[model.dtype]), ids=self._ids,
                          out=self._hidden, size=config.hidden_size, out_stride=stride_of(self._hidden),
                          padded=self._hidden.shape[1], **parts)
        for index, layer in enumerate(layers):
            self._layer(index, layer)
        self._head_at = len(self._program.names)
        self._norm(model.norm.weight, [model.head], picked=self._picked)
        self._multiply(model.head, "hidden", None, self._width * 4)

    def _layer(self, index: int, layer: DecoderLayer) -> None:
        from quantkit_kernels.cpu.attention import UNBOUNDED, Attend, ReduceSplits
        from quantkit_kernels.cpu.kv_write import EncodePages, KeepQueries, RopeStore, UndoHadamard

        config, program, attention, mlp = self._config, self._program, layer.self_attn, mlp_of(layer)
        dim, (q, k, v), mixed = config.head_dim, self._qkv, self._mixed
        self._norm(layer.before_attention.weight, attention.inputs)
        self._project(attention.inputs, (q, k, v))
        where: dict[str, Any] = {"rows": self._rows, "sequences": self._sequences, "layer": index,
                                 "heads": config.num_kv_heads}
        q_norm, k_norm = (None if one is None else self._float(one.weight)
                          for one in (attention.q_norm, attention.k_norm))
        window = config.sliding_windows[index]
        scratch: dict[str, Any] = {"scratch": self._scratch, "scratch_private": self._scratch.shape[1]}
        hadamard_arguments: dict[str, Any] = dict(zip(("signs", "mix"), hadamard_factors(dim)))
        store = program.add(RopeStore(self._codecs, dim), **where, **hadamard_arguments, q=q, k=k, v=v,
                            q_norm=q_norm, k_norm=k_norm, q_stride=stride_of(q), kv_stride=stride_of(k),
                            group=self._group, eps=self._eps)
        self._keeps.append(program.add(
            KeepQueries(dim), 0, rows=self._rows, sequences=self._sequences, layer=index, q=q,
            q_stride=stride_of(q), query_heads=config.num_heads))
        if self._codecs.residual:
            self._closes.append(program.add(EncodePages(self._codecs, dim), 0, **where, **scratch))
        self._attention.append((
            store,
            program.add(Attend(self._codecs, dim), **where, **scratch, q=q, out=mixed, tiles=self._tiles,
                        q_stride=stride_of(q), out_stride=stride_of(mixed), group=self._group,
                        window=UNBOUNDED if window is None else window),
            program.add(ReduceSplits(dim), out=mixed, out_stride=stride_of(mixed),
                        query_heads=config.num_heads)))
        if self._codecs.side("v").hadamard:
            program.add(UndoHadamard(dim), **hadamard_arguments, x=mixed, x_stride=stride_of(mixed),
                        heads=config.num_heads)
        self._prepare("plain", "mixed", mixed, [attention.o_proj])
        self._add(attention.o_proj, "mixed", layer.after_attention)
        self._norm(layer.before_mlp.weight, mlp.inputs)
        self._project(mlp.inputs, (self._gate, self._up))
        gated = {"silu": "silu", "gelu_tanh": "gelu"}[config.activation]
        self._prepare(gated, "gate", self._gate, [mlp.down_proj], second=self._up)
        self._add(mlp.down_proj, "gate", layer.after_mlp)

    def _float(self, weight: torch.Tensor, size: int = 0) -> torch.Tensor:
        """float32, padded with 0."""
        wide = torch.zeros(max(weight.numel(), size))
        wide[:weight.numel()] = weight.float()
        return wide

    def _norm(self, weight: torch.Tensor, linears: Sequence[Linear],
              picked: torch.Tensor | None = None) -> None:
        self._prepare("norm", "hidden", self._hidden, linears, size=self._config.hidden_size, picked=picked,
                      weight=self._float(weight, self._hidden.shape[1]), eps=self._eps)

    def _prepare(self, source: Any, role: str, x: torch.Tensor, linears: Sequence[Linear],
                 **values: Any) -> None:
        """Leave rows as these Linears want them, once for each way and width."""
        from quantkit_kernels.cpu.matmul import SUB
        from quantkit_kernels.cpu.rows import RowKernel

        for weight in {key_of(packed_of(one)): packed_of(one) for one in linears}.values():
            family, columns, rotated = key = key_of(weight)
            made = self._activations.setdefault((role, *key),
                                                Activations(weight, max(MOST_ROWS, self._pool.threads)))
            self._program.add(RowKernel(source, family, rotated), x=x, x_stride=stride_of(x),
                              subgroups=columns // SUB, **made.written, **self._hadamard(rotated), **values)

    def _hadamard(self, width: int) -> dict[str, Any]:
        """What a row operation needs to rotate rows of this width, if it is not 0."""
        return {**dict(zip(("signs", "mix"), hadamard_factors(width))), "room": self._scratch,
                "room_private": self._scratch.shape[1]} if width else {}

    def _project(self, linears: Sequence[Linear], outs: Sequence[torch.Tensor]) -> None:
        """Linears that read the same rows; if one makes all outs, they are parts of its buffer's rows."""
        for linear, out in zip(linears, outs):
            self._multiply(linear, "hidden", out, barrier=linear is linears[-1])

    def _add(self, linear: Linear, role: str, norm: object) -> None:
        """Onto the hidden states, after a norm if the model has one there."""
        from quantkit_kernels.cpu.rows import NormAdd

        if not isinstance(norm, RMSNorm):
            self._multiply(linear, role, self._hidden, add=1)
            return
        self._multiply(linear, role, self._aside)
        self._program.add(NormAdd(), x=self._aside, x_stride=stride_of(self._aside), out=self._hidden,
                          out_stride=stride_of(self._hidden), size=self._config.hidden_size, eps=self._eps,
                          weight=self._float(norm.weight, self._aside.shape[1]))

    def _multiply(self, linear: Linear, role: str, out: torch.Tensor | None, stride: int = 0, *, add: int = 0,
                  barrier: bool = True) -> None:
        from quantkit_kernels.cpu.matmul import STRIPE

        weight = packed_of(linear)
        made = self._activations[role, *key_of(weight)]
        bias = None if linear.bias is None else self._float(linear.bias, weight.stripes * STRIPE)
        index = self._program.add(weight.kernel, **weight.arguments, **made.read, out=out, bias=bias, add=add,
                                  scratch=self._scratch, out_stride=stride if out is None else stride_of(out),
                                  scratch_private=self._scratch.shape[1], barrier=barrier)
        self._packed[index] = weight, made.stride

    # -- running

    def run(self, batch: Batch, ids: torch.Tensor, pieces: Sequence[Chunk]) -> torch.Tensor:
        """Take tokens through all layers; their keys and values are in the pages then.

        Args:
            batch: whose rows the pieces are of.
            ids: int64 ``[B, T]``.
            pieces: at most MOST_ROWS tokens in all; together they are the rows of the result.

        Returns:
            float32 ``[n, hidden]``, valid until the next call.
        """
        self._place(batch, ids, pieces)
        self._pool.run(self._program.records[:self._head_at])
        self._done(batch, pieces)
        return self._hidden[:sum(piece.count for piece in pieces), :self._config.hidden_size]

    def step(self, batch: Batch, ids: torch.Tensor, pieces: Sequence[Chunk],
             picked: Sequence[int]) -> torch.Tensor:
        """:meth:`run`, then final norm and head over some of its rows, in one call into machine code.

        Args:
            batch, ids, pieces: as for :meth:`run`.
            picked: rows of its result.

        Returns:
            float32 ``[len(picked), vocab]``.
        """
        self._place(batch, ids, pieces)
        found = self._pick(picked)
        self._pool.run(self._program.records if picked else self._program.records[:self._head_at])
        self._done(batch, pieces)
        return self._capped(found[:, :self._config.vocab_size])

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Final norm and head over float32 ``[n, hidden]``: float32 ``[n, vocab]``."""
        self._hidden[:len(x), :x.shape[1]] = x
        found = self._pick(range(len(x)))
        if len(x):
            self._pool.run(self._program.records[self._head_at:])
        return self._capped(found[:, :self._config.vocab_size])

    def _capped(self, logits: torch.Tensor) -> torch.Tensor:
        if (cap := self._config.logit_softcap) is None:
            return logits
        with one_thread():
            for row in logits:  # alone: tanh may be another function at the end of a tensor
                row.div_(cap).tanh_().mul_(cap)
        return logits

    def _place(self, batch: Batch, ids: torch.Tensor, pieces: Sequence[Chunk]) -> None:
        """Say which tokens are whose, and where their keys and values go."""
        cache, given = batch.cache, ids.numpy()
        tokens, rows, tiles, sequences = self._views
        row = tile = longest = 0
        for number, piece in enumerate(pieces):
            start, count, held = piece.start, piece.count, batch.sequences[piece.sequence]
            cache.reserve(held, count)
            seen, sequences[number] = held.layers[-1].seen, (*held.where, count)
            tokens[row:row + count] = given[piece.sequence, start:start + count]
            if count == 1:
                rows[row] = number, 0, seen
            else:
                rows[row:row + count, 0] = number
                rows[row:row + count, 1] = np.arange(count)
                rows[row:row + count, 2] = np.arange(seen, seen + count)
            for begin in range(0, count, self._tile):
                tiles[tile] = row + begin, min(self._tile, count - begin), number
                tile += 1
            longest, row = max(longest, seen + count), row + count
        if row and tokens[:row].view(np.uint64).max() >= self._config.vocab_size:  # or negative
            raise IndexError(f"a token id isn't in 0 … {self._config.vocab_size - 1}")
        self._angles(longest)
        self._pages(cache)
        self._shape(row, tile, longest)
        self._close(batch, pieces)
        asked = row if any(batch.sequences[one.sequence].asked for one in pieces) else 0
        if asked != self._asked_now:
            self._asked_now = asked
            for index in self._keeps:
                self._program.set(index, units=asked)

    def _close(self, batch: Batch, pieces: Sequence[Chunk]) -> None:
        """Encode what will have waited long enough at this step's end."""
        if not self._closes:
            return
        codings = batch.cache.codings
        blocks = max(batch.sequences[one.sequence].closing(codings, one.count) for one in pieces)
        if blocks or self._closing_now:
            units = len(pieces) * self._config.num_kv_heads * blocks
            for index in self._closes:
                self._program.set(index, units=units, blocks=blocks)
        self._closing_now = blocks

    def _done(self, batch: Batch, pieces: Sequence[Chunk]) -> None:
        for piece in pieces:
            batch.cache.settle(batch.sequences[piece.sequence], piece.count)

    def _pick(self, picked: Sequence[int]) -> torch.Tensor:
        """Memory for these rows' logits, where the head writes them."""
        count = len(picked)
        self._picked_view[:count] = picked
        if count and count != self._picked_now:
            self._picked_now = count
            self._units(range(self._head_at, len(self._names)), count)
        found = torch.empty(count, self._width)
        self._program.set(len(self._names) - 1, out=found.data_ptr())
        return found

    def _shape(self, count: int, tiles: int, longest: int) -> None:
        """Units for so many rows and tiles."""
        from quantkit_kernels.cpu.attention import SPLIT

        program, heads = self._program, self._config.num_kv_heads
        # long contexts of few sequences are shared out by splits, so that no thread is idle
        splits = -(-longest // SPLIT) if tiles * heads < 4 * self._pool.threads else 1
        if count != self._rows_now:
            self._rows_now, self._tiles_now = -1, (-1, -1)
            self._units(range(self._head_at), count)
            self._rows_now = count
        if (tiles, splits) == self._tiles_now:
            return
        if splits > 1:
            self._partial = torch.empty(count * self._config.num_heads * splits * (self._config.head_dim + 2))
        for _, attend, combine in self._attention:
            program.set(attend, units=tiles * heads * splits, splits=splits, partial=self._partial)
            program.set(combine, units=count * self._config.num_heads if splits > 1 else 0, splits=splits,
                        partial=self._partial)
        self._tiles_now = (tiles, splits)

    def _units(self, operations: range, rows: int) -> None:
        """Share out so many rows."""
        self._program.change((operations, rows), lambda: self._share_out(operations, rows))

    def _share_out(self, operations: range, rows: int) -> None:
        """One row is left as products want it by every thread for itself; more are shared out."""
        program = self._program
        for index in operations:
            name = self._names[index]
            if index in self._packed:
                weight, stride = self._packed[index]
                units, stripes, each = weight.units(rows, self._pool.threads)
                program.set(index, units=units, rows=rows, stripes_a_unit=stripes, rows_a_unit=each,
                            x_private=stride if rows == 1 else 0)
            elif name.startswith("rows"):
                stride = program.get(index, "out_stride")
                program.set(index, units=rows, out_private=stride if rows == 1 else 0)
                program.alone(index, rows == 1)
            elif name.startswith(("embed", "norm_add", "unturn")):
                program.set(index, units=rows)
            elif name.startswith("rope"):
                program.set(index, units=rows * self._config.num_kv_heads)

    def _angles(self, longest: int) -> None:
        """Cosines and sines of so many positions."""
        if longest <= self._angles_now:
            return
        size = max(ANGLES, 2 * self._angles_now, longest)
        for (store, _, _), (cos, sin) in zip(self._attention, rope_tables(self._config, size)):
            self._program.set(store, cos=cos, sin=sin)
        self._angles_now = size

    def _pages(self, cache: KVCache) -> None:
        """Point to the cache's pages as they lie now."""
        from quantkit_kernels.cpu.attention import UNBOUNDED

        now = (cache.number, cache.moves.count)
        if now == self._pages_now:
            return
        rule = {"residual_length": cache.codings.residual_length, "first": cache.codings.first}
        closes = self._closes or itertools.repeat(None)
        for (store, attend, _), close, layer, policy in zip(
                self._attention, closes, cache.stores, cache.policies):
            parts, (limit, sinks) = page_addresses(layer), policy.visible or (UNBOUNDED, 0)
            for index in (store, attend, close):
                if index is not None:
                    self._program.set(index, **parts, **rule)
            self._program.set(attend, limit=limit, sinks=sinks)
        self._pages_now = now
