"""Bytes and operations of an operator, and which of them bounds it."""

from __future__ import annotations

import pytest
import torch

from quantkit.evaluation.bench.kernels import SPECS
from quantkit.evaluation.roofline.cost import OperatorCost, arithmetic_of, attention_cost, linear_cost
from quantkit.evaluation.roofline.random_weight import packed_weight
from quantkit.evaluation.roofline.result import MachineCeilings
from quantkit.ops import cpu_weight
from quantkit.runtime.cpu.program_variants import LinearOperator

CEILINGS = MachineCeilings(read_bytes_s=100.0, operations_s={"int8": 1000.0, "float32": 250.0})


def test_the_longer_one_is_the_prediction():
    cost = OperatorCost(1000, 10, {"int8": 200})
    assert (cost.bytes(3), cost.operations(3)) == (1030, 600)
    assert cost.predicted_s(3, CEILINGS) == 10.3 and cost.bound(3, CEILINGS) == "memory"
    assert cost.predicted_s(200, CEILINGS) == 40.0 and cost.bound(200, CEILINGS) == "compute"


def test_operations_of_two_kinds_take_their_times_one_after_the_other():
    cost = OperatorCost(0, 1, {"int8": 200, "float32": 100})
    assert cost.compute_s(2, CEILINGS) == pytest.approx(2 * (0.2 + 0.4)) and cost.arithmetic == "int8"
    assert cost.operations(2) == 600


@pytest.mark.parametrize(("fixed", "row", "operations"), [
    (1000, 10, 200), (0, 10, 200), (1, 0, 1), (999, 7, 71), (12345, 1, 11), (100, 0, 1000), (30, 9, 100)])
def test_it_is_bound_by_compute_from_there_on_and_by_memory_before(fixed, row, operations):
    cost = OperatorCost(fixed, row, {"int8": operations})
    first = cost.bound_from(CEILINGS)
    assert cost.bound(first, CEILINGS) == cost.bound(10 * first, CEILINGS) == "compute"
    assert first == 1 or cost.bound(first - 1, CEILINGS) == "memory"


def test_where_a_rows_own_bytes_take_longer_there_is_no_such_number():
    assert OperatorCost(1000, 10, {"int8": 100}).bound_from(CEILINGS) is None
    assert OperatorCost(0, 11, {"int8": 100}).bound_from(CEILINGS) is None


@pytest.mark.parametrize(("label", "arithmetic"), [
    ("bf16", "float32"), ("int8", "int16"), ("int8 a8", "int8"), ("fp8", "float32"), ("fp8 a8", "float32"),
    ("int4 g32", "int8"), ("nf4 b64", "int16")])
def test_what_a_format_is_multiplied_in(label, arithmetic):
    assert arithmetic_of(packed_weight((64, 128), SPECS[label])) == arithmetic


def test_a_product_moves_its_weights_once_and_each_row_in_and_out():
    weights = tuple(cpu_weight.pack_plain(torch.ones(rows, 64, dtype=torch.bfloat16)) for rows in (96, 32))
    cost = linear_cost(LinearOperator("q+k+v", (3, 5), weights, 300, 4 * 128))
    assert cost.fixed_bytes == 2 * 64 * (96 + 32) and cost.row_bytes == 300 + 512
    assert cost.row_operations == {"float32": 2 * 64 * (96 + 32)}


def test_attention_reads_keys_and_values_once_and_uses_them_for_every_query_head(loaded):
    config = loaded.config
    slots, kv_bytes = 70 * config.num_kv_heads, 70 * config.num_kv_heads * config.head_dim * 2 * 2
    cost = attention_cost(config, kv_bytes, slots)
    heads = config.num_heads * config.head_dim
    assert cost.row_operations == {"float32": 4 * heads * 70}
    assert cost.bytes(3) == 3 * (kv_bytes + 8 * heads) and cost.fixed_bytes == 0
