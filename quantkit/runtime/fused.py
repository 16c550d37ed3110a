"""A model on the CPU as one program: a step is one call into machine code, whatever its number of tokens.

Activations between operations are float32; products and attention are the kernels of
``quantkit_kernels.cpu``. Decoding, prefill and scoring go through the same operations, each of which gives
a row the same bits whatever other rows are there: so a request's tokens depend on nothing but the request.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from quantkit.formats.base import QuantizedTensor
from quantkit.kv.cache import Batch, KVCache
from quantkit.models.config import ModelConfig
from quantkit.models.decoder import CausalLM, DecoderLayer, KVCacheProtocol
from quantkit.models.linear import Linear
from quantkit.models.rope_frequencies import inverse_frequencies
from quantkit.ops import cpu_linear
from quantkit.ops.cpu_linear import Activations, Packed
from quantkit.ops.dispatch import choose
from quantkit.ops.linear import query_for
from quantkit.spec import KVSpec

if TYPE_CHECKING:
    from quantkit_kernels.cpu.program import Program

MOST_ROWS = 512
"""Tokens that go through the program at once."""
QUERIES = 48
"""Queries of a key head (rows times the heads that share it) in a unit of attention."""
UNBOUNDED = 2**31 - 1
CODECS = {"none": "bf16", "bf16": "bf16", "int8": "int8", "int4": "int4"}
"""KV codecs that kernels read, by the cache's name."""


def declines(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why a model isn't run as a program; ``None`` if it is."""
    if device.type != "cpu":
        return f"runs on cpu, not {device.type}"
    if dtype != torch.bfloat16:
        return f"takes bfloat16 models, not {str(dtype).removeprefix('torch.')}"
    if config.head_dim % 2:
        return f"takes even head dimensions, not {config.head_dim}"
    return cpu_linear.unavailable()


def pack(model: CausalLM) -> str | None:
    """Pack the weights of all Linears, one after another; each replaces what it was made from.

    Returns:
        Why a weight can't be packed (then none was), or ``None``.
    """
    linears = {**model.linears(), "lm_head": model.head}  # a tied head is no layer of its own
    chosen: dict[str, Any] = {}
    for name, one in linears.items():
        if isinstance(one.weight, QuantizedTensor):
            kernel = choose(query_for(one.weight, torch.bfloat16, model.device, "decode")).kernel
            if not isinstance(kernel, cpu_linear.CpuKernel):
                return f"{name} is multiplied by {kernel.name}"
            chosen[name] = kernel
    for name, one in linears.items():
        weight = one.weight
        one.weight = chosen[name].prepare(weight) if name in chosen else cpu_linear.pack_plain(weight)
    return None


class FusedModel:
    """The same calls as :class:`~quantkit.models.decoder.CausalLM`.

    Args:
        model: its Linears packed (:func:`pack`).
    """

    def __init__(self, model: CausalLM) -> None:
        self._model, self.config = model, model.config
        self.dtype, self.device = model.dtype, model.device
        self._programs: dict[str, _Program] = {}

    def linears(self) -> dict[str, Linear]:
        """As the model's."""
        return self._model.linears()

    def declines(self, batch: Batch) -> str | None:
        """Why a step over these sequences goes operation by operation instead."""
        policy, codec = batch.cache.policy, batch.cache.codec.name
        if codec not in CODECS:
            return f"reads the KV codecs {', '.join(CODECS)}, not {codec}"
        if policy.queries and not (batch.phase == "decode" and policy.every is None):
            return "keeps no queries for the KV policy"
        return None

    def __call__(self, ids: torch.Tensor, positions: torch.Tensor | None = None,
                 cache: KVCacheProtocol | None = None, last: torch.Tensor | None = None) -> torch.Tensor:
        """As the model's, but logits are float32."""
        if cache is None:
            own = KVCache(self.config, KVSpec(), self.dtype)
            cache = own.batch([own.add() for _ in range(ids.shape[0])])
            if positions is None:
                positions = cache.next_positions(ids.shape[1])
        elif positions is None:
            raise ValueError("with a cache, give the positions of ids")
        if not isinstance(cache, Batch) or self.declines(cache):
            return self._model(ids, positions, cache, last).float()
        name = CODECS[cache.cache.codec.name]
        if name not in self._programs:
            self._programs[name] = _Program(self._model, name)
        return self._programs[name](ids, cache, cache.counts(positions), last)


class _Program:
    """The program for one KV codec, and the memory between its operations."""

    def __init__(self, model: CausalLM, codec: str) -> None:
        from quantkit_kernels.cpu.attention import Attend, Combine, RopeStore, scratch_bytes
        from quantkit_kernels.cpu.embedding import Embed
        from quantkit_kernels.cpu.matmul import SUB
        from quantkit_kernels.cpu.matmul import scratch_bytes as product_bytes
        from quantkit_kernels.cpu.program import Program

        self._model, self.config = model, model.config
        self._pool, self._isa = cpu_linear.pool(), cpu_linear.isa()
        config, threads = self.config, self._pool.threads
        self.group = config.num_heads // config.num_kv_heads
        self._eps = struct.unpack("<i", struct.pack("<f", config.rms_norm_eps))[0]
        packed: list[Packed] = [one.weight for one in (*model.linears().values(), model.head)]  # type: ignore[misc]
        scratch = max(product_bytes(one.kernel, self._isa, one.columns // SUB) for one in packed)
        self._tile_rows = max(1, QUERIES // self.group)
        scratch = max(scratch, scratch_bytes(config.head_dim, self._tile_rows * self.group))
        scratch = -(-scratch // 64) * 64 + 64
        self._scratch = torch.empty(threads, scratch, dtype=torch.uint8)
        self._size = MOST_ROWS
        self._activations: dict[tuple[str, str, int], Activations] = {}
        self._ids = torch.zeros(self._size, dtype=torch.int64)
        self._rows = torch.zeros(self._size, 3, dtype=torch.int64)
        self._tiles = torch.zeros(self._size, 3, dtype=torch.int64)
        self._picked = torch.zeros(self._size, dtype=torch.int64)
        self._sequences = torch.zeros(self._size, 3, dtype=torch.int64)
        heads, dim = config.num_heads, config.head_dim
        layers = model.layers
        hidden = self._buffer("hidden", [*(one.o_proj for one in _attentions(layers)), *_downs(layers)],
                              [*(one.q_proj for one in _attentions(layers)), *_gates(layers), model.head])
        q, k, v = (self._buffer(name, [getattr(one, f"{name}_proj") for one in _attentions(layers)], [])
                   for name in "qkv")
        mixed = self._buffer("mixed", [], [one.o_proj for one in _attentions(layers)], heads * dim)
        gate = self._buffer("gate", _gates(layers), _downs(layers))
        up = self._buffer("up", _gates(layers), _downs(layers))
        self._partial = torch.empty(0)
        program = self._program = Program(self._isa)
        self._kept: list[torch.Tensor] = []
        program.add(Embed(0), ids=self._ids, table=model.embedding, out=hidden, size=config.hidden_size,
                    out_stride=_stride(hidden))
        self._layer_operations: list[tuple[int, int]] = []
        for index, layer in enumerate(layers):
            attention, mlp = layer.self_attn, layer.mlp
            self._norm(hidden, layer.before_attention.weight, [attention.q_proj, attention.k_proj, attention.v_proj])
            for linear, out in ((attention.q_proj, q), (attention.k_proj, k), (attention.v_proj, v)):
                self._multiply(linear, "hidden", out, barrier=out is v)
            where = {"rows": self._rows, "sequences": self._sequences, "layer": index, "heads": config.num_kv_heads}
            norms = {name: None if norm is None else self._float(norm.weight)
                     for name, norm in (("q_norm", attention.q_norm), ("k_norm", attention.k_norm))}
            store = program.add(RopeStore(codec, dim), **where, q=q, k=k, v=v, **norms, q_stride=_stride(q),
                                kv_stride=_stride(k), group=self.group, eps=self._eps)
            window = config.sliding_windows[index]
            attend = program.add(Attend(codec, dim), **where, q=q, out=mixed, tiles=self._tiles,
                                 scratch=self._scratch, q_stride=_stride(q), out_stride=_stride(mixed),
                                 group=self.group, window=UNBOUNDED if window is None else window,
                                 limit=UNBOUNDED, splits=1, scratch_private=scratch)
            self._layer_operations.append((store, attend))
            program.add(Combine(dim), 0, out=mixed, out_stride=_stride(mixed), query_heads=heads, splits=1)
            self._prepare("plain", "mixed", mixed, [attention.o_proj], size=heads * dim)
            self._multiply(attention.o_proj, "mixed", hidden, add=1)
            self._norm(hidden, layer.before_mlp.weight, [mlp.gate_proj, mlp.up_proj])
            self._multiply(mlp.gate_proj, "hidden", gate, barrier=False)
            self._multiply(mlp.up_proj, "hidden", up)
            self._prepare("silu", "gate", gate, [mlp.down_proj], second=up)
            self._multiply(mlp.down_proj, "gate", hidden, add=1)
        self._head_at = len(program.names)
        self._norm(hidden, model.norm.weight, [model.head], picked=self._picked)
        self._multiply(model.head, "hidden", None)
        program.finish()
        self._shape: tuple[int, int] = (0, 0)
        self._layout: tuple[int, int] = (0, 0)
        self._pages: object = None
        self._cos = self._sin = torch.empty(0, dim // 2)

    def _float(self, weight: torch.Tensor, size: int = 0) -> torch.Tensor:
        """float32, padded with 0, and kept."""
        wide = torch.zeros(max(weight.numel(), size))
        wide[:weight.numel()] = weight.float()
        self._kept.append(wide)
        return wide

    def _buffer(self, name: str, made_by: Iterable[Linear], read_by: Iterable[Linear], size: int = 0) -> torch.Tensor:
        """Rows of float32 that those Linears write and these read; what pads them stays 0."""
        from quantkit_kernels.cpu.matmul import STRIPE

        width = max([size, *(one.weight.stripes * STRIPE for one in made_by),  # type: ignore[union-attr]
                     *(one.weight.columns for one in read_by)])  # type: ignore[union-attr]
        return torch.zeros(self._size, -(-width // 16) * 16)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor, linears: list[Linear],
              picked: torch.Tensor | None = None) -> None:
        self._prepare("norm", "hidden", x, linears, size=self.config.hidden_size,
                      weight=self._float(weight, x.shape[1]), eps=self._eps, picked=picked)

    def _prepare(self, source: Any, role: str, x: torch.Tensor, linears: list[Linear], **values: Any) -> None:
        """Leave rows as these Linears want them, once for each family and width."""
        from quantkit_kernels.cpu.matmul import SUB
        from quantkit_kernels.cpu.rows import Rows

        for one in {_key(linear): linear for linear in linears}.values():
            family, columns = _key(one)
            key = (role, family, columns)
            if key not in self._activations:
                self._activations[key] = Activations(one.weight, max(self._size, self._pool.threads))  # type: ignore[arg-type]
            made = self._activations[key]
            self._program.add(Rows(source, family), x=x, x_stride=_stride(x), subgroups=columns // SUB,
                              **made.written, **values)

    def _multiply(self, linear: Linear, role: str, out: torch.Tensor | None, *, add: int = 0,
                  barrier: bool = True) -> None:
        from quantkit_kernels.cpu.matmul import STRIPE

        weight = linear.weight
        assert isinstance(weight, Packed)
        bias = None if linear.bias is None else self._float(linear.bias, weight.stripes * STRIPE)
        self._program.add(weight.kernel, **weight.arguments, **self._activations[role, *_key(linear)].read, out=out,
                          bias=bias, scratch=self._scratch, add=add, barrier=barrier,
                          out_stride=_stride(out) if out is not None else weight.stripes * STRIPE * 4,
                          scratch_private=self._scratch.shape[1])
        self._packed_at = getattr(self, "_packed_at", []) + [(len(self._program.names) - 1, weight,
                                                              self._activations[role, *_key(linear)].stride)]

    def __call__(self, ids: torch.Tensor, batch: Batch, counts: list[int],
                 last: torch.Tensor | None) -> torch.Tensor:
        wanted = ([[int(one)] for one in last] if last is not None
                  else [list(range(count)) for count in counts])
        vocab = self.config.vocab_size
        parts: list[list[torch.Tensor]] = [[] for _ in counts]
        for pieces in _pieces(counts):
            picked, owners = [], []
            row = 0
            for sequence, start, count in pieces:
                self._ids[row:row + count] = ids[sequence, start:start + count]
                inside = [at for at in wanted[sequence] if start <= at < start + count]
                picked += [row + at - start for at in inside]
                owners.append((sequence, len(inside)))
                row += count
            logits = self._step(batch, pieces, row, picked)
            begin = 0
            for sequence, count in owners:
                parts[sequence].append(logits[begin:begin + count, :vocab])
                begin += count
        batch.finish(counts)
        found = [torch.cat(part) if len(part) > 1 else part[0] for part in parts]
        if last is not None:
            return torch.cat(found) if len(found) > 1 else found[0]
        length = ids.shape[1]
        if len(found) == 1 and counts[0] == length:
            return found[0][None]
        return torch.stack([torch.nn.functional.pad(one, (0, 0, 0, length - one.shape[0])) for one in found])

    def _step(self, batch: Batch, pieces: Sequence[tuple[int, int, int]], count: int,
              picked: list[int]) -> torch.Tensor:
        """Run the program for these tokens: ``(sequence, first, how many)`` each."""
        cache = batch.cache
        rows, tiles, sequences = self._rows.numpy(), self._tiles.numpy(), self._sequences.numpy()
        row = tile = longest = 0
        for sequence, _, length in pieces:
            held = batch.sequences[sequence]
            table, start = cache.reserve(held, length), held.layers[-1].seen
            sequences[sequence] = table.ctypes.data, table.shape[2], held.lengths.ctypes.data
            rows[row:row + length, 0] = sequence
            rows[row:row + length, 1] = np.arange(length)
            rows[row:row + length, 2] = np.arange(start, start + length)
            for begin in range(0, length, self._tile_rows):
                tiles[tile] = row + begin, min(self._tile_rows, length - begin), sequence
                tile += 1
            longest = max(longest, int(held.lengths.max()) + length, start + length)
            row += length
        self._picked.numpy()[:len(picked)] = picked
        self._turn_to(longest)
        self._see(cache)
        logits = torch.empty(len(picked), self._head_width)
        self._shape_for(count, tile, len(picked), longest)
        self._program.set(len(self._program.names) - 1, out=logits)
        self._pool.run(self._program.records)
        for sequence, _, length in pieces:
            batch.sequences[sequence].advance(length)
        return logits

    @property
    def _head_width(self) -> int:
        from quantkit_kernels.cpu.matmul import STRIPE

        weight: Packed = self._model.head.weight  # type: ignore[assignment]
        return weight.stripes * STRIPE

    def _shape_for(self, count: int, tiles: int, picked: int, longest: int) -> None:
        """Units for so many rows, and who works alone."""
        from quantkit_kernels.cpu.attention import SPLIT

        program, threads, heads = self._program, self._pool.threads, self.config.num_kv_heads
        splits = -(-longest // SPLIT) if tiles * heads < 4 * threads else 1
        if (count, picked) != self._shape:
            self._shape = (count, picked)
            for index, weight, stride in self._packed_at:
                rows = picked if index > self._head_at else count
                units, stripes, each = weight.units(rows, threads) if rows else (0, 1, 1)
                program.set(index, units=units, rows=rows, stripes_a_unit=stripes, rows_a_unit=each,
                            x_private=stride if rows == 1 else 0)
            for index, name in enumerate(program.names):
                rows = picked if index >= self._head_at else count
                if name.startswith("rows_"):
                    stride = int(program.get(index, "out_stride"))
                    program.set(index, units=rows, out_private=stride if rows == 1 else 0)
                    program.alone(index, rows == 1)
                elif name.startswith(("embed", "rope")):
                    program.set(index, units=rows * (heads if name.startswith("rope") else 1))
            self._layout = (0, 0)
        if (tiles, splits) != self._layout:
            self._layout = (tiles, splits)
            if splits > 1:
                self._partial = torch.empty(count * self.config.num_heads * splits * (self.config.head_dim + 2))
            for index, name in enumerate(program.names):
                if name.startswith("attend"):
                    program.set(index, units=tiles * heads * splits, splits=splits, partial=self._partial)
                elif name.startswith("combine"):
                    program.set(index, units=count * self.config.num_heads if splits > 1 else 0, splits=splits,
                                partial=self._partial)

    def _turn_to(self, longest: int) -> None:
        """Angles for so many positions."""
        if longest <= self._cos.shape[0]:
            return
        size = max(512, 2 * self._cos.shape[0], longest)
        inverse = inverse_frequencies(self.config.rope, self.config.head_dim, torch.device("cpu"))
        angle = torch.arange(size)[:, None].float() * inverse
        factor = self.config.rope.attention_factor
        self._cos, self._sin = (angle.cos() * factor).contiguous(), (angle.sin() * factor).contiguous()
        for store, _ in self._layer_operations:
            self._program.set(store, cos=self._cos, sin=self._sin)

    def _see(self, cache: KVCache) -> None:
        """Point to the pages as they lie now."""
        now = (id(cache), cache.version)
        if now == self._pages:
            return
        self._pages = now
        from quantkit_kernels.cpu.kv_codecs import PARTS

        limit, sinks = cache.policy.visible or (UNBOUNDED, 0)
        for layer, operations in enumerate(self._layer_operations):
            parts = cache.pages[layer].parts
            values = {f"{side}_{name}": parts.get(f"{side}.{name}") for side in "kv" for name in PARTS}
            for index in operations:
                self._program.set(index, positions=parts.get("positions"), **values)
            self._program.set(operations[1], limit=limit, sinks=sinks)


def _attentions(layers: Sequence[DecoderLayer]) -> list[Any]:
    return [layer.self_attn for layer in layers]


def _gates(layers: Sequence[DecoderLayer]) -> list[Linear]:
    return [one for layer in layers for one in (layer.mlp.gate_proj, layer.mlp.up_proj)]


def _downs(layers: Sequence[DecoderLayer]) -> list[Linear]:
    return [layer.mlp.down_proj for layer in layers]


def _key(linear: Linear) -> tuple[Any, int]:
    weight = linear.weight
    assert isinstance(weight, Packed)
    return weight.kernel.decoder.family, weight.columns


def _stride(x: torch.Tensor) -> int:
    return x.stride(0) * x.element_size()


def _pieces(counts: Sequence[int]) -> Iterable[list[tuple[int, int, int]]]:
    """Sequences' tokens in portions of at most MOST_ROWS: ``(sequence, first, how many)``."""
    now: list[tuple[int, int, int]] = []
    room = MOST_ROWS
    for sequence, count in enumerate(counts):
        start = 0
        while start < count:
            take = min(room, count - start)
            now.append((sequence, start, take))
            start, room = start + take, room - take
            if not room:
                yield now
                now, room = [], MOST_ROWS
    if now:
        yield now
