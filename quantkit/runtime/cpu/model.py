"""A model on the CPU as one program: a step is one call into machine code, whatever its number of tokens.

Activations between operations are float32; products and attention are the kernels of
``quantkit_kernels.cpu``. Decoding, prefill and scoring go through the same operations, each of which gives
a row the same bits whatever other rows are there: so a request's tokens depend on nothing but the request.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from quantkit.formats.base import QuantizedTensor
from quantkit.kv.batch import Batch
from quantkit.kv.cache import KVCache
from quantkit.models.config import ModelConfig
from quantkit.models.decoder import CausalLM
from quantkit.ops import cpu_linear, cpu_machine, cpu_weight
from quantkit.ops.dispatch import DECODE_ROWS, choose, query_for
from quantkit.runtime.cpu.program import MAX_ROWS, CpuProgram, TokenIds
from quantkit.runtime.cpu.program_variants import DecodedCpuProgram, OperatorProgram, TappedCpuProgram
from quantkit.runtime.memory.scratch import packed_of
from quantkit.runtime.program_model import (
    ProgramModel,
    reason_against_experts,
    reason_against_shape,
    selected_rows,
)
from quantkit.support.errors import UsageError

if TYPE_CHECKING:
    from quantkit_kernels.cpu.kv_pages import PageCodecs

MAX_PROGRAMS = 12
"""Programs that are kept; the oldest make room for others."""
SUBGROUP = 64
"""Activations that are quantized together, at most; a packed Linear's columns are a multiple of it."""


def reason_against(config: ModelConfig, dtype: torch.dtype, device: torch.device,
                   quantized: Mapping[str, QuantizedTensor]) -> str | None:
    """Why a model isn't run as a program; ``None`` if it is.

    Args:
        dtype, device: of its plain weights.
        quantized: its packed weights by name.
    """
    if device.type != "cpu":
        return f"runs on cpu, not {device.type}"
    if dtype not in cpu_weight.PLAIN:
        return f"takes models in {_listed(cpu_weight.PLAIN)}, not {_listed([dtype])}"
    reason = reason_against_shape(config, {"scaled scores": config.attention_scale is not None,
                                           "capped scores": config.attention_softcap is not None})
    if reason is not None or (reason := reason_against_experts(config, quantized)) is not None:
        return reason
    # gate and up are parts of one row: what pads the first to whole subgroups would be the second's
    if config.fused_projections and config.intermediate_size % SUBGROUP:
        return f"takes fused MLPs whose size {SUBGROUP} divides, not {config.intermediate_size}"
    if (reason := cpu_machine.reason_against_kernels()) is not None:
        return reason
    from quantkit_kernels.cpu.hadamard import reason_against as reason_against_rotation

    queries = {name: query_for(weight, dtype, device, "decode") for name, weight in quantized.items()}
    kernels = {query: choose(query).kernel for query in dict.fromkeys(queries.values())}  # most are alike
    for name, weight in quantized.items():
        kernel = kernels[queries[name]]
        if not isinstance(kernel, cpu_linear.CpuKernel):
            return f"{name} is multiplied by {kernel.name}"
        if weight.spec.rotation and (reason := reason_against_rotation(weight.shape[1])) is not None:
            return f"{name}: {reason}"
    return None


def _listed(dtypes: Iterable[torch.dtype]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


class CpuModel(ProgramModel):
    """A model on the CPU; logits and hidden states are float32. Where no program reads a cache,
    operations run one after another.

    Args:
        model: its Linears and its head packed.
        high: read only the high halves of weights that have two.
    """

    max_rows = MAX_ROWS
    decode_rows = DECODE_ROWS
    runs_ahead = False
    supports_mixed_batches = supports_batched_prefill = supports_drafts = True
    decode_matches_prefill = True

    def __init__(self, model: CausalLM, high: bool = False) -> None:
        super().__init__(model, model.device)
        self._high = high
        self._programs: dict[tuple[PageCodecs, bool, tuple[int, ...]], CpuProgram] = {}
        self._making = threading.Lock()
        self._running = threading.Lock()  # engines over one model share its programs' buffers
        cpu_machine.pool()  # of as many threads as torch has now

    @property
    def step_bytes(self) -> int:
        """Bytes of weights that a decode step of one token reads."""
        experts, linears = self.config.experts, (*self.linears().values(), self._model.head)
        sizes = {id(linear.weight): packed_of(linear, self._high).nbytes for linear in linears}
        if experts is None:
            return sum(sizes.values())
        shared = {id(linear.weight) for linear in linears if ".experts." not in linear.name}
        total = sum(size for weight, size in sizes.items() if weight in shared)
        return total + (sum(sizes.values()) - total) * experts.chosen // experts.count

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights in memory: those of :attr:`step_bytes`, and the embedding. Norms
        and routers, which are small, aren't counted."""
        linears = (*self.linears().values(), self._model.head)
        weights = {id(weight): weight.nbytes for weight in (*(linear.weight for linear in linears),
                                                            self._model.embedding)}
        return sum(weights.values())

    @property
    def workspace_bytes(self) -> int:
        """Bytes of the buffers of all programs that were made. Those of rows that no step had yet take no
        memory so far."""
        return sum(program.buffer_bytes for program in list(self._programs.values()))

    def high_halves(self) -> CpuModel | None:
        """The same model in 4 bits where it has 8, which reads only the high half of every int8 weight. They
        are put into planes for that, in as much memory, which changes no result.

        Returns:
            A model over the same memory and KV caches; ``None``: no weight is int8 without zero points.
        """
        with self._making:
            self._programs.clear()  # which read them as they are
            for linear in (*self.linears().values(), self._model.head):
                if linear.weight is not self._model.embedding:  # whose rows are read by themselves
                    linear.weight = packed_of(linear).in_planes()
            cpu_machine.trim_heap()
        weights = [packed_of(linear) for linear in (*self.linears().values(), self._model.head)]
        return CpuModel(self._model, high=True) if any(weight.has_planes for weight in weights) else None

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        return self._model.embed(ids)

    def head(self, x: torch.Tensor) -> torch.Tensor:
        return self._model.head(x)

    def head_alone(self) -> CausalLM:
        return self._model.head_alone()

    def reason_against(self, cache: KVCache) -> str | None:
        return reason_against_cache(cache)

    def check_cache(self, cache: KVCache) -> None:
        """There is a way to run every cache."""

    def prepare(self, cache: KVCache) -> None:
        """Build the program that reads such pages."""
        if reason_against_cache(cache) is None:
            self.program(codecs_of(cache), not has_kernels(cache))

    def chunk_invariant(self, cache: KVCache) -> bool:
        """Operation by operation it isn't, nor where torch encodes a chunk's keys and
        values."""
        return reason_against_cache(cache) is None and has_kernels(cache)

    def normalized(self, x: torch.Tensor) -> torch.Tensor:
        return self._model.normalized(x)

    def token_rows(self, tokens: Sequence[Sequence[int]]) -> list[npt.NDArray[np.int64]]:
        return [np.array(row, np.int64) for row in tokens]

    def step_logits(self, batch: Batch, ids: TokenIds, counts: Sequence[int],
                    wanted: Sequence[range]) -> list[torch.Tensor]:
        program = self._program_of(batch)
        with self._running:
            return [program.step(batch, ids, slices, selected_rows(slices, wanted))
                    for slices in self.slices(batch, counts)]

    def step_hidden(self, batch: Batch, ids: TokenIds, counts: Sequence[int]) -> list[torch.Tensor]:
        program = self._program_of(batch)
        with self._running:
            return [program.run(batch, ids, slices).clone() for slices in self.slices(batch, counts)]

    def head_logits(self, x: torch.Tensor) -> torch.Tensor:
        program = self.program(None)
        with self._running:
            return program.logits(x)

    def _rows(self, ids: torch.Tensor) -> TokenIds:
        return ids.numpy()

    def _program_of(self, batch: Batch) -> CpuProgram:
        return self.program(codecs_of(batch.cache), not has_kernels(batch.cache), batch.taps)

    def program(self, codecs: PageCodecs | None, decoded: bool = False, taps: tuple[int, ...] = ()
                ) -> CpuProgram:
        """The program that reads these codecs of the cache, or any; made when it is first asked for.

        Args:
            codecs: the codecs of the pages that attention reads; ``None``: any.
            decoded: whether these are decoded pages.
            taps: layers to hand out, see :attr:`Batch.taps`.
        """
        from quantkit_kernels.cpu.kv_pages import PageCodecs

        key = (codecs, decoded, taps) if codecs is not None else next(
            iter(list(self._programs)), (PageCodecs("bf16", "bf16"), False, ()))
        if (program := self._programs.get(key)) is not None:  # steps don't wait for one that is being made
            return program
        with self._making:
            if (program := self._programs.get(key)) is None:
                with torch.inference_mode(False):  # else its memory couldn't be written to outside of it
                    program = self._make(*key)
                # the settings of requests come and go; the first one is the default
                for other in list(self._programs)[1:len(self._programs) + 2 - MAX_PROGRAMS]:
                    del self._programs[other]
                self._programs[key] = program
        return program

    def operator_program(self, cache: KVCache) -> OperatorProgram:
        """A program of its own that reads this cache, and whose operators can be run alone.

        Raises:
            UsageError: no kernel reads the cache.
        """
        if (reason := reason_against_cache(cache)) is None and not has_kernels(cache):
            reason = "no kernel reads its codec"
        if reason is not None:
            raise UsageError(f"the operators of a step with --kv {cache.spec} can't be run alone", why=reason,
                             next="--kv none")
        with torch.inference_mode(False):
            return OperatorProgram(self._model, codecs_of(cache), self._high)

    def _make(self, codecs: PageCodecs, decoded: bool, taps: tuple[int, ...]) -> CpuProgram:
        if decoded:
            return DecodedCpuProgram(self._model, codecs, self._high)
        if taps:
            return TappedCpuProgram(self._model, codecs, self._high, taps)
        return CpuProgram(self._model, codecs, self._high)


def reason_against_cache(cache: KVCache) -> str | None:
    """Why a program doesn't read this cache; ``None`` if it does."""
    if cache.dtype not in cpu_weight.PLAIN:
        return f"reads pages in {_listed(cpu_weight.PLAIN)}, not {_listed([cache.dtype])}"
    return None


def has_kernels(cache: KVCache) -> bool:
    """Whether kernels read both codecs of a cache; else its pages are decoded by the codecs themselves."""
    from quantkit_kernels.cpu.kv_codecs import CODECS

    return all(codec.name == "none" or codec.name in CODECS for codec in (cache.codecs.keys,
                                                                          cache.codecs.values))


def codecs_of(cache: KVCache) -> PageCodecs:
    """Of the pages that attention reads, as kernels name them: what is stored as it was computed has the
    cache's dtype, and decoded pages are float32."""
    from quantkit_kernels.cpu.kv_pages import PageCodecs

    plain, sides = cpu_weight.PLAIN[cache.dtype], (cache.codecs.keys, cache.codecs.values)
    if has_kernels(cache):
        keys, values = (plain if codec.name == "none" else codec.name for codec in sides)
    else:
        keys, values = ("f32_hadamard" if codec.hadamard else "f32" for codec in sides)
    return PageCodecs(keys, values, None if cache.layers[0].store.residual is None else plain)
