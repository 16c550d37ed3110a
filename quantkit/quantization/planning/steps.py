"""What the steps of a run cost in arithmetic, on which its estimate and the progress within a layer rest.

Costs are operations, at the speed of a large product in float32. The constants were measured on a model of
1.5B parameters on 2 cores of an AMD EPYC with AVX-512 and its bfloat16, on 28 November 2026.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from quantkit.ops.reference import has_tiles, native_bf16
from quantkit.quantization.calibration.runner import WIDE
from quantkit.quantization.memory import PlanRow
from quantkit.quantization.planning.plan import Plan

if TYPE_CHECKING:
    from quantkit.quantization.solve import Solved

ROUNDED = 6e3
"""Operations a weight of reading, rounding, packing, writing and rereading."""
TRELLIS = 34
"""Operations a weight and state of searching a trellis."""
TRELLIS_SOLVED = 32.0
"""Products of a weight with its Hessian that solving it in a trellis is as long as."""
SOLVED = 0.5
"""Products of a weight with its Hessian that solving the columns is as long as."""
COMPARED = 1.2
"""The same of comparing with plain rounding."""
SOLVED_WEIGHT = 1.2e4
"""Operations a weight that descent and comparing take beside products."""
FACTORED = 1.2
"""Operations of factorizing a Hessian, over the cube of its side."""
OBSERVED = 0.6
OBSERVED_TILES = 0.25
"""Products of the calibration tokens with themselves that summing up a Hessian is as long as; where a CPU has
tiles for bfloat16, those of an Intel Xeon with AMX, 29 November 2026."""
TOUCHED = 2e3
"""Operations that a number of a Linear's input takes beside products."""
WALKED = 1.1
WALKED_BF16 = 0.75
"""Products of the calibration tokens with all weights that a walk through a model is as long as."""


def walk_operations(weights: int, tokens: int) -> float:
    """Operations of sending ``tokens`` tokens through Linears that have ``weights`` weights in all."""
    return 2 * (WALKED_BF16 if native_bf16() else WALKED) * weights * tokens


def measure_operations(size: int, tokens: int, drift: bool) -> float:
    """Operations of summing up the Hessian of an input of ``size`` channels, and its drift."""
    share = OBSERVED_TILES if has_tiles() and size >= WIDE else OBSERVED
    return tokens * size * (2 * (share + drift) * size + TOUCHED)


def solve_operations(row: PlanRow, plan: Plan) -> float:
    """Operations of solving a Linear. A Hessian that several Linears share is counted for each of them."""
    weights, size = row.shape[0] * row.shape[1], row.shape[1]
    if row.spec is not None and row.spec.window is not None:
        products = TRELLIS_SOLVED * (row.name in plan.measured)
        return (TRELLIS * 2**row.spec.window + 2 * products * size) * weights
    operations = 0.0
    if row.method == "gptq" and row.name in plan.measured:
        options = row.options
        passes = max(options["descent_passes"], options["refit"])
        products = (SOLVED + passes + (passes > 0) + COMPARED * options["compare"]
                    + (row.name in plan.drift and options["drift"] > 0))
        operations = 2 * products * weights * size + FACTORED * size ** 3
    return operations


def handle_operations(row: PlanRow) -> float:
    """Operations of what goes through a Linear's weights one by one, whose time memory decides."""
    return (ROUNDED + SOLVED_WEIGHT * bool(row.options.get("compare"))) * row.shape[0] * row.shape[1]


class LayerProgress:
    """How far the work on one decoder layer is.

    Args:
        rows: the plan's rows of the layer.
        tell: called at each step with the share of the layer that is done, and with what is being done.
    """

    def __init__(self, plan: Plan, rows: Sequence[PlanRow], tell: Callable[[float, str], None]) -> None:
        self._tell, self._plan = tell, plan
        self._rows = {row.name: row for row in rows if row.method}
        spec = plan.calibration
        self._tokens = 0 if spec is None else spec.windows * spec.window
        self._done, self._solved = 0.0, 0
        self._total = self._measure(self._rows) + self._walk(self._rows) + sum(map(self._solve, self._rows))

    def measuring(self, names: Sequence[str]) -> None:
        """What enters these Linears is about to be measured."""
        self._say("measuring the input of", next(iter(names), ""))

    def measured(self, names: Sequence[str]) -> None:
        """That is done, and the original model's tokens have gone through them where drift is measured."""
        self._done += self._measure(names)

    def solving(self, solved: Iterable[Solved], names: Sequence[str]) -> Iterator[Solved]:
        """The same solved Linears; each one's name is told before it is asked for."""
        results = iter(solved)
        for name in names:
            self._say("solving", name)
            yield next(results)
            self._solved += 1
            self._done += self._solve(name)

    def walked(self, names: Sequence[str]) -> None:
        """The tokens have gone through these Linears."""
        self._done += self._walk(names)

    def _say(self, verb: str, name: str) -> None:
        if name:
            self._tell(min(1.0, self._done / max(self._total, 1.0)),
                       f"{verb} {_short(name)}, {self._solved} of {len(self._rows)} Linears done")

    def _solve(self, name: str) -> float:
        return solve_operations(self._rows[name], self._plan) + handle_operations(self._rows[name])

    def _walk(self, names: Iterable[str]) -> float:
        shapes = [self._rows[name].shape for name in names]
        return walk_operations(sum(rows * columns for rows, columns in shapes), self._tokens)

    def _measure(self, names: Iterable[str]) -> float:
        plan, operations = self._plan, self._walk(names) if self._plan.drift else 0.0
        inputs = {self._rows[name].shares: self._rows[name] for name in names
                  if "hessian" in plan.measured.get(name, ())}
        return operations + sum(measure_operations(row.shape[1], self._tokens, row.name in plan.drift)
                                for row in inputs.values())


def _short(name: str) -> str:
    """``mlp.down_proj`` of ``model.layers.3.mlp.down_proj``."""
    return name.split(".", 3)[-1]
