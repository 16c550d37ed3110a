"""Measures the operators of a model's decode step one by one, and what the machine allows."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from quantkit.evaluation.roofline.ceilings import arithmetic_of
from quantkit.evaluation.roofline.cost import (
    OperatorCost,
    attention_cost,
    linear_cost,
    rest_cost,
)
from quantkit.evaluation.roofline.result import MachineCeilings, OperatorSpeed, Roofline
from quantkit.evaluation.speed.decoding import DecodeRunner
from quantkit.evaluation.speed.results import Spread
from quantkit.kv.batch import Batch
from quantkit.kv.cache import KVCache
from quantkit.kv.spec import KVSpec
from quantkit.ops.dispatch import DECODE_ROWS
from quantkit.runtime.cpu.model import CpuModel
from quantkit.runtime.cpu.program import MAX_ROWS
from quantkit.runtime.cpu.program_variants import HEAD, LinearOperator, OperatorProgram
from quantkit.runtime.loader import LoadedModel
from quantkit.support.errors import UsageError
from quantkit.support.progress import Listener, ProgressEvent, silent

if TYPE_CHECKING:
    from quantkit_kernels.cpu.ceilings import Operands

ROWS, CONTEXTS = (1, 2, 4, 8, 16, 64, 512), (256, 1024, 4096)
BUDGET = 1 << 28
"""Bytes of weights that a timed run reads, at most: more than caches have."""
RUN_S = 0.15
"""Seconds that a timed run is predicted to take, at most; one layer is always run."""
CASE_S = 1.0
"""Seconds after which no further run of an operator begins."""
REPEATS, TOKENS = 5, 8
"""Timed runs, and tokens of a timed run of whole steps."""
REST, ATTENTION = "rest", "attention"
FLOAT32: Operands = "float32"
"""The arithmetic of attention."""


def measure_roofline(loaded: LoadedModel, rows: Sequence[int] = ROWS, contexts: Sequence[int] = CONTEXTS, *,
                     kv: KVSpec | None = None, progress: Listener = silent) -> Roofline:
    """Measure a model.

    Products run as the program of a step has them, layer after layer, so that their weights come from memory;
    before each timed run other memory is read, which gives the bandwidth and empties the caches. Attention
    reads the pages of real sequences: of one with each context, and with the shortest context of as many as
    ``rows`` says, up to 16. For those the time of a whole step is measured too; what is left of it is
    ``rest``: norms, RoPE, the activation, the choice of a token, and the calls between them.

    Args:
        loaded: a model that runs on the CPU as one program.
        rows: tokens that go through the products at once.
        contexts: tokens in the cache; those that the model is too short for are passed over.
        kv: the KV setting; ``None``: the model's own.
        progress: told of every operator.

    Raises:
        UsageError: the model isn't run as one program on a CPU, or has experts, no context or number of rows
            is left, or no kernel reads the KV setting.
    """
    routed = loaded.config.experts is not None
    if routed or not isinstance(loaded.model, CpuModel):
        reason = "what a product with experts reads depends on the tokens" if routed else (
            loaded.fallback_reason or f"it runs on {loaded.model.device.type}")
        raise UsageError(f"the operators of {loaded.uri} can't be measured one by one", why=reason,
                         next="quantkit bench decode measures whole steps")
    limit = loaded.config.max_position_embeddings
    lengths = sorted({context for context in contexts if 0 < context <= limit - 2 * TOKENS})
    counts = sorted({count for count in rows if 0 < count <= min(limit, MAX_ROWS)})
    if not lengths or not counts:
        raise UsageError(f"there is nothing to measure of {loaded.uri}",
                         why=f"rows {tuple(rows)} and contexts {tuple(contexts)}; the model was made for "
                             f"{limit} tokens, and {MAX_ROWS} rows go through it at once")
    return _Measurement(loaded, loaded.model, kv or loaded.kv, progress).run(counts, lengths)


class _Measurement:
    def __init__(self, loaded: LoadedModel, model: CpuModel, kv: KVSpec, progress: Listener) -> None:
        self._loaded = loaded
        self._model = model
        self._kv = kv
        self._progress = progress
        self._config = loaded.config
        self._runner = DecodeRunner(loaded, [0], tokens=TOKENS, repeats=REPEATS, case_s=CASE_S)
        assert self._runner.ceilings.cpu is not None
        self._machine = self._runner.ceilings.cpu
        self._results: list[tuple[str, int, int, int, OperatorCost, Spread]] = []

    def run(self, rows: Sequence[int], contexts: Sequence[int]) -> Roofline:
        few = [count for count in rows if count <= DECODE_ROWS]
        program = self._model.operator_program(self._cache(KVSpec()))
        over_pages = self._model.operator_program(self._cache(self._kv))
        groups = _distinct(program.linears())
        tell = self._teller(sum(_runs(name, count) for name in groups for count in rows) + len(contexts) + 1)
        weights = (weight for operator in program.linears() for weight in operator.weights)
        arithmetic: list[Operands] = sorted({FLOAT32, *map(arithmetic_of, weights)})
        for count in rows:
            guess = self._ceilings(arithmetic)
            for name, (cost, seconds, layers) in self._linears(program, groups, count, guess).items():
                self._results.append((name, count, 0, layers, cost, seconds))
                tell(f"{name}, {count} rows")
        for context in contexts:
            self._attention(over_pages, dict.fromkeys([1, *few] if context == contexts[0] else [1]), context)
            tell(f"attention, context {context}")
        self._rest(program.linears(), few, contexts[0])
        tell("whole steps")
        ceilings = self._ceilings(arithmetic)
        return Roofline(model=self._loaded.uri, label=self._loaded.label, ceilings=ceilings, operators=tuple(
            _speed(ceilings, *result) for result in self._results))

    def _teller(self, total: int) -> Callable[[str], None]:
        done = 0

        def tell(label: str) -> None:
            nonlocal done
            done += 1
            self._progress(ProgressEvent(done, total, label))

        return tell

    def _cache(self, kv: KVSpec) -> KVCache:
        return KVCache(self._config, kv, self._loaded.dtype, self._model.device)

    def _ceilings(self, arithmetic: Sequence[Operands]) -> MachineCeilings:
        """As they are known now; another measurement of each arithmetic is made."""
        for name in arithmetic:
            self._machine.multiply(name)
        return MachineCeilings(read_bytes_s=self._machine.bandwidth(), operations_s={
            name: 2 * self._machine.products(name) for name in arithmetic})

    def _linears(self, program: OperatorProgram, groups: dict[str, list[LinearOperator]], rows: int,
                 guess: MachineCeilings) -> dict[str, tuple[OperatorCost, Spread, int]]:
        """For each operator its cost, its seconds in one layer, and how many layers have it."""
        cache = self._cache(KVSpec())
        with torch.inference_mode():
            program.step_rows(Batch(cache, [cache.add(rows)]), [[0] * rows], min(rows, DECODE_ROWS))
        results = {}
        for name, operators in groups.items():
            if not _runs(name, rows):
                continue
            cost = linear_cost(operators[0])
            layers = min(BUDGET // max(cost.fixed_bytes, 1), int(RUN_S / cost.predicted_s(rows, guess)))
            timed = operators[:max(1, layers)]
            records = program.records_of(operator.operations for operator in timed)
            seconds = self._time(program, records, len(timed))
            results[name] = cost, seconds, len(operators)
        return results

    def _time(self, program: OperatorProgram, records: npt.NDArray[np.int64], parts: int) -> Spread:
        """Seconds of one of ``parts`` equal parts of a run. Caches have something else before each."""
        seconds, started = list[float](), time.perf_counter()
        while len(seconds) < REPEATS and (not seconds or time.perf_counter() - started < CASE_S):
            self._machine.read()
            begin = time.perf_counter()
            program.run_records(records)
            seconds.append((time.perf_counter() - begin) / parts)
        return Spread.of(seconds)

    def _attention(self, program: OperatorProgram, rows: Iterable[int], context: int) -> None:
        """Of as many sequences with this context, one token each; by layers that see as much."""
        cache = self._cache(self._kv)
        first = cache.add(context + 1)
        self._runner.feed(cache, first, context)
        windows = self._config.sliding_windows
        for count in rows:
            numbers = [cache.fork(first, shared=False) for _ in range(count)]
            with torch.inference_mode():
                program.step_rows(Batch(cache, numbers, "decode"), [[0]] * count)
            spans = program.attention()
            for window in dict.fromkeys(windows):
                layers = [index for index, width in enumerate(windows) if width == window]
                slots = int(cache.sequence(numbers[0]).layers[layers[0]].lengths.sum())
                if window is not None:
                    slots = min(slots, window * self._config.num_kv_heads)
                cost = attention_cost(self._config, cache.step_bytes(numbers[0], layers[0]), slots)
                records = program.records_of(spans[layer] for layer in layers)
                seconds = self._time(program, records, len(layers))
                name = ATTENTION if window is None else f"{ATTENTION}, window {window}"
                self._results.append((name, count, context, len(layers), cost, seconds))
            cache.free(numbers)

    def _rest(self, linears: Sequence[LinearOperator], rows: Sequence[int], context: int) -> None:
        """What is left of whole steps. Where the parts took longer alone than together, nothing is."""
        cost = rest_cost(self._config, linears)
        for case in self._runner.decode(self._kv, rows, context):
            if case.tok_s is None:
                continue
            parts = sum(layers * seconds.median for _, count, length, layers, _, seconds in self._results
                        if count == case.batch and length in (0, context))
            step = [case.batch / rate for rate in (case.tok_s.median, case.tok_s.high, case.tok_s.low)]
            middle, low, high = (max(0.0, seconds - parts) for seconds in step)
            self._results.append((REST, case.batch, context, 1, cost,
                                  Spread(median=middle, low=low, high=high)))


def _runs(name: str, rows: int) -> bool:
    """Whether an operator ever has this number of rows: only the last token of a prompt reaches the head."""
    return name != HEAD or rows <= DECODE_ROWS


def _distinct(linears: Sequence[LinearOperator]) -> dict[str, list[LinearOperator]]:
    """Operators that differ in nothing but their numbers, by name; with their formats where layers differ."""
    by_key: dict[tuple[object, ...], list[LinearOperator]] = {}
    for operator in linears:
        key = operator.name, *((weight.kernel.name, weight.shape) for weight in operator.weights)
        by_key.setdefault(key, []).append(operator)
    names = [operators[0].name for operators in by_key.values()]
    return {operators[0].name if names.count(operators[0].name) == 1 else _named(operators[0]): operators
            for operators in by_key.values()}


def _named(operator: LinearOperator) -> str:
    formats = dict.fromkeys(weight.kernel.name.removeprefix("matmul_") for weight in operator.weights)
    shapes = dict.fromkeys(f"{weight.shape[0]}x{weight.shape[1]}" for weight in operator.weights)
    return f"{operator.name} {'+'.join(formats)} {'+'.join(shapes)}"


def _speed(ceilings: MachineCeilings, name: str, rows: int, context: int, layers: int, cost: OperatorCost,
           seconds: Spread) -> OperatorSpeed:
    return OperatorSpeed(
        operator=name, arithmetic=cost.arithmetic, rows=rows, context=context, bytes=cost.bytes(rows),
        operations=cost.operations(rows), seconds=seconds, predicted_s=cost.predicted_s(rows, ceilings),
        bound=cost.bound(rows, ceilings), bound_from=cost.bound_from(ceilings), layers=layers)

