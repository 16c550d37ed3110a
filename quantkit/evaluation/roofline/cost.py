"""What an operator costs by its number of rows, and what bounds it then.

https://doi.org/10.1145/1498765.1498785
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from quantkit.evaluation.roofline.ceilings import arithmetic_of
from quantkit.evaluation.roofline.result import MachineCeilings
from quantkit.models.config import ModelConfig
from quantkit.runtime.cpu.program_variants import LinearOperator

FLOAT = 4


@dataclass(frozen=True)
class OperatorCost:
    """Bytes and operations of one operator.

    Attributes:
        fixed_bytes: bytes that it reads whatever the number of rows: weights.
        row_bytes: for each row: inputs, outputs, and in attention the keys and values of its sequence.
        row_operations: arithmetic → operations for each row; a multiplication with an addition is two.
    """

    fixed_bytes: int
    row_bytes: int
    row_operations: Mapping[str, int]

    @property
    def arithmetic(self) -> str:
        """That of most operations."""
        return max(self.row_operations, key=lambda name: self.row_operations[name])

    def bytes(self, rows: int) -> int:
        """Bytes that it moves."""
        return self.fixed_bytes + rows * self.row_bytes

    def operations(self, rows: int) -> int:
        """Operations that it does."""
        return rows * sum(self.row_operations.values())

    def memory_s(self, rows: int, ceilings: MachineCeilings) -> float:
        """Seconds for its bytes at the ceiling."""
        return self.bytes(rows) / ceilings.read_bytes_s

    def compute_s(self, rows: int, ceilings: MachineCeilings) -> float:
        """Seconds for its operations at the ceilings."""
        return rows * sum(count / ceilings.operations_s[name] for name, count in self.row_operations.items())

    def predicted_s(self, rows: int, ceilings: MachineCeilings) -> float:
        """The longer one of the two: the least time that it can take."""
        return max(self.memory_s(rows, ceilings), self.compute_s(rows, ceilings))

    def bound(self, rows: int, ceilings: MachineCeilings) -> Literal["memory", "compute"]:
        """Which of the two is longer."""
        longer = self.compute_s(rows, ceilings) > self.memory_s(rows, ceilings)
        return "compute" if longer else "memory"

    def bound_from(self, ceilings: MachineCeilings) -> int | None:
        """The smallest number of rows that is bound by compute; ``None``: none is, because a row's own bytes
        take longer than its operations."""
        gain = self.compute_s(1, ceilings) - self.row_bytes / ceilings.read_bytes_s
        if gain <= 0:
            return None
        rows = max(1, math.floor(self.fixed_bytes / ceilings.read_bytes_s / gain) - 1)
        while self.bound(rows, ceilings) == "memory":
            rows += 1
        return rows


def linear_cost(operator: LinearOperator) -> OperatorCost:
    """Of products: every number of a weight is one multiplication and addition for each row."""
    operations: dict[str, int] = {}
    for weight in operator.weights:
        name = arithmetic_of(weight)
        operations[name] = operations.get(name, 0) + 2 * math.prod(weight.shape)
    return OperatorCost(operator.weight_bytes, operator.input_bytes + operator.output_bytes, operations)


def attention_cost(config: ModelConfig, kv_bytes: int, slots: int) -> OperatorCost:
    """Of one layer's attention of one token of every sequence: each query head with each key, and each weight
    with each value.

    Args:
        config: the shape of the model.
        kv_bytes: the bytes that it reads of one sequence.
        slots: keys that it sees, all KV heads together.
    """
    heads = config.num_heads * config.head_dim
    group = config.num_heads // config.num_kv_heads
    return OperatorCost(0, kv_bytes + 2 * FLOAT * heads, {"float32": 4 * group * config.head_dim * slots})


def rest_cost(config: ModelConfig, linears: Sequence[LinearOperator]) -> OperatorCost:
    """Of a step's other operations, roughly: the rows that go in and come out between products (norms, RoPE,
    the activation, the residual, the choice of a token), and two operations for each number that goes in."""
    layers, heads = config.num_layers, config.num_heads * config.head_dim
    numbers = layers * (2 * config.hidden_size + 2 * heads + 2 * config.num_kv_heads * config.head_dim
                        + 2 * config.intermediate_size) + config.hidden_size + config.vocab_size
    written = sum(operator.input_bytes for operator in linears)
    return OperatorCost(0, FLOAT * numbers + written, {"float32": 2 * numbers})
