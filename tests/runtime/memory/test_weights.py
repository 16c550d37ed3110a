"""Bytes of weights are those that a loaded model holds, whatever its files have."""

from __future__ import annotations

import math

import pytest
import torch

from quantkit.capacity_search.search import by_recipe
from quantkit.checkpoint.open import open_checkpoint
from quantkit.kv.spec import KVSpec
from quantkit.ops.cpu_weight import CpuWeight
from quantkit.ops.dispatch import DECODE_ROWS
from quantkit.quantization.run import quantize
from quantkit.runtime.cpu.model import CpuModel, reason_against
from quantkit.runtime.loader import load
from quantkit.runtime.memory.kv import footprint
from quantkit.runtime.memory.scratch import CPU_ROWS, scratch_bytes
from quantkit.runtime.memory.weights import of_checkpoint, unquantized
from quantkit.sources.open import open_source
from quantkit.testing import tiny_model

GROUPS = "granularity: {strategy: group, size: 64}"


def held_by(model):
    """All weights of a loaded model, each once: packed ones, plain ones, as they lie in memory."""
    found = {}
    for one in (*model._model.linears().values(), model._model.head):
        found[id(one.weight)] = one.weight.nbytes
    table = model._model.embedding
    found[id(table)] = table.nbytes
    return sum(found.values())


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["int8", "int4-rtn", "nf4", "nf4-nested", "w8a8", "fp8",
                                  "{bits: 2, GROUPS}", "{bits: 3, symmetric: false, GROUPS}",
                                  "{bits: 6, GROUPS}"])
@pytest.mark.parametrize("model", ["tiny", "wide"])
def test_packed_bytes_are_those_of_the_loaded_model(request, name, model, tmp_path):
    source = request.getfixturevalue(model)
    if name.startswith("{"):  # by rounding: how codes are found doesn't matter here
        path = tmp_path / "mine.yaml"
        path.write_text(f"rules:\n  - {{match: lm_head, optional: true}}\n"
                        f"  - {{match: '*', method: rtn, spec: {name.replace('GROUPS', GROUPS)}}}\n")
        name = str(path)
    counted = by_recipe(name, open_source(str(source)))
    result = quantize(str(source), name, tmp_path / "out")
    loaded = load(str(tmp_path / "out"))
    assert isinstance(loaded.model, CpuModel) and counted.fallback_reason is None
    assert counted.file_bytes == result.plan.disk_bytes
    small = counted.bytes - held_by(loaded.model)  # norms
    assert 0 < small < 4096 and small == sum(
        2 * math.prod(t.shape) for n, t in open_source(str(source)).tensors().items() if "norm" in n)
    assert counted.read_bytes(1) == loaded.model.step_bytes
    with open_checkpoint(tmp_path / "out") as opened:
        again = of_checkpoint(opened, reason_against)
    assert (again.bytes, again.read_bytes(3)) == (counted.bytes, counted.read_bytes(3))
    assert again.recipe is None and counted.recipe == name


def test_two_bits_are_multiplied_from_two(wide):
    counted = by_recipe("int2", open_source(str(wide)))
    linears = [linear for linear in counted.multiplied if linear.row.spec is not None]
    assert 0.95 < sum(linear.row.bytes for linear in linears) / sum(linear.bytes for linear in linears) <= 1


@pytest.mark.parametrize("model", ["tiny", "wide"])
def test_weights_as_they_are(request, model):
    source = open_source(str(request.getfixturevalue(model)))
    counted, loaded = unquantized(source, reason_against), load(str(request.getfixturevalue(model)))
    assert counted.file_bytes == loaded.file_bytes and counted.read_bytes(1) == loaded.model.step_bytes
    assert counted.multiplications() == sum(math.prod(one.shape) for one in counted.multiplied)


def test_a_model_that_is_no_program_holds_packed_weights_alone(tmp_path):
    source = tiny_model(tmp_path / "gemma", "gemma2")
    counted = by_recipe("int4-rtn", open_source(str(source)))
    assert counted.fallback_reason is not None and "capped" in counted.fallback_reason
    quantize(str(source), "int4-rtn", tmp_path / "out")
    loaded = load(str(tmp_path / "out"))
    loaded.model.hidden(torch.tensor([[5, 6, 7]]))
    for one in loaded.model.linears().values():
        assert isinstance(one.weight, CpuWeight)
        (counting,) = [held for held in counted.layers if held.name == one.name]
        assert counting.bytes == one.weight.nbytes


def test_a_token_reads_the_experts_that_it_is_sent_to():
    source = open_source("synthetic:tiny-mixtral")  # two of four
    counted = unquantized(source, reason_against)
    experts = [one for one in counted.multiplied if ".experts." in one.name]
    plain = sum(one.read for one in counted.multiplied) - sum(one.read for one in experts)
    assert counted.read_bytes(1) == plain + sum(one.read for one in experts) / 2
    assert counted.read_bytes(2) == plain + 0.75 * sum(one.read for one in experts)
    assert counted.multiplications() < sum(math.prod(one.shape) for one in counted.multiplied)


@pytest.mark.parametrize(("family", "keys"), [
    ("llama", {}), ("phi3", {}), ("gemma3_text", {}), ("mixtral", {}), ("gpt_oss", {"head_dim": 32}),
    ("qwen3_moe", {"moe_intermediate_size": 96, "mlp_only_layers": [0]})])
def test_activations_are_those_of_the_program(tmp_path, family, keys):
    source = tiny_model(tmp_path / family, family, intermediate_size=192, **keys)
    loaded = load(str(source))
    assert loaded.fallback_reason is None
    program = loaded.model.program(None)
    rows = [program._hidden, program._mixed, *program._qkv, program._gate, program._up]
    rows += program._experts.tensors if program._experts else ()
    if loaded.config.sandwich_norms:
        rows.append(program._before_norm)
    made = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in rows}
    pairs = loaded.config.experts.chosen if loaded.config.experts else 1
    rooms = sum(CPU_ROWS * one.stride * (pairs if role in ("pairs", "opened") else 1)
                for (role, _), one in program._activations.items())
    counted = unquantized(open_source(str(source)), reason_against)
    found = footprint(loaded.config, KVSpec(), loaded.dtype, 300, 150, 512)
    scratch = scratch_bytes(counted, found, 300, 40)
    assert scratch["activations"] == sum(made.values()) + rooms
    assert scratch["logits"] == 2 * DECODE_ROWS * loaded.config.vocab_size * 4
    ropes = 2 if family == "gemma3_text" else 1
    assert scratch["cos and sin"] == ropes * 600 * loaded.config.head_dim * 4
