"""``quantkit inspect``: models and checkpoints, layer by layer, with their kernels."""

import json

import pytest
import torch
from safetensors.torch import save_file

from quantkit.cli.inspect import inspect_facts
from quantkit.kv.cache import KVCache
from quantkit.quantization.run import quantize
from quantkit.runtime.loader import load
from quantkit.testing import tiny_model

NARROW = """rules:
  - match: "*.down_proj"
  - match: "*"
    method: rtn
    spec: {bits: 8, granularity: {strategy: group, size: 8}}
"""


def test_a_source(cli, tiny):
    result = cli("inspect", tiny)
    assert result.exit_code == 0, result.stderr
    assert "llama: 2 layers, hidden 64" in result.stdout
    assert "93,248" in result.stdout and "20 bfloat16" in result.stdout
    assert "kept bfloat16" in result.stdout


def test_a_checkpoint(cli, checkpoint):
    result = cli("inspect", checkpoint)
    assert result.exit_code == 0, result.stderr
    assert "93,248" in result.stdout, "parameters are those of the model, not of its packed tensors"
    assert "recipe int8" in result.stdout
    assert "14 layers by rtn, int8 channel sym, pack-quantized" in result.stdout
    table = [line for line in result.stdout.splitlines() if line.startswith("*.")]
    assert len(table) == 7 and max(map(len, table)) <= 80


def test_a_gguf_file_has_its_own_types_bits_and_bytes(cli, cli_json, gguf):
    facts = cli_json("inspect", gguf)
    assert facts["bytes"] == gguf.stat().st_size > facts["bytes_as_run"] and not facts["decoded"]
    assert {row["dtype"] for row in facts["layers"]} == {"Q4_0"} and facts["bits_per_weight"] == 4.5
    text = cli("inspect", gguf).stdout
    assert "Q4_0" in text and "4.50 over all Linear layers" in text and "kept bfloat16" not in text
    assert "runs as       the file's own blocks" in text and max(map(len, text.splitlines())) <= 80


def test_a_row_a_layer(cli, checkpoint):
    result = cli("inspect", checkpoint, "--layers")
    assert sum("_proj" in line for line in result.stdout.splitlines()) == 14


def test_what_declined_is_shown_on_demand(cli, checkpoint):
    short, long = cli("inspect", checkpoint).stdout, cli("inspect", checkpoint, "--declined").stdout
    assert "cpu-int8" in short and "cpu-int4: " not in short
    assert "--declined shows" in short and "--declined" not in long
    assert "cpu-int4: multiplies integers of at most 4 bits, not int8 (15 layers)" in long
    head, _, reasons = long.partition("\nkernels that declined\n")
    assert "other operations" in head, "what runs comes first"
    assert "_proj" not in reasons


def test_json_has_kernels_and_reasons(cli_json, checkpoint):
    facts = cli_json("inspect", checkpoint)
    assert facts["kind"] == "checkpoint" and len(facts["layers"]) == 1 + 14
    for row in facts["layers"]:
        for phase in ("decode", "prefill"):
            choice = row["kernels"][phase]
            assert choice["kernel"]
            assert all(entry["reason"] for entry in choice["declined"])
    assert facts["bytes"] == (checkpoint / "model.safetensors").stat().st_size
    assert facts["source"]["files"], "the source's hashes"


@pytest.mark.parametrize(("family", "dtype", "recipe", "plain"), [
    ("llama", "bfloat16", None, "cpu-bf16"), ("llama", "float32", None, None),
    ("llama", "float16", None, None), ("gemma2", "bfloat16", None, None),
    ("mixtral", "bfloat16", "int8", None),
    ("llama", "bfloat16", "int8-kv8", None), ("llama", "float32", "int8", None),
    ("phi3", "bfloat16", "nf4", None), ("llama", "bfloat16", NARROW, None)])
def test_the_kernels_that_are_named_are_those_that_run(tmp_path, family, dtype, recipe, plain):
    model = tiny_model(tmp_path / "model", family, dtype=dtype, tie_word_embeddings=False)
    if recipe is not None:
        if "\n" in recipe:
            (tmp_path / "own.yaml").write_text(recipe)
            recipe = str(tmp_path / "own.yaml")
        model = quantize(str(model), recipe, tmp_path / "out").out
    facts, loaded = inspect_facts(str(model)), load(str(model))
    linears = loaded.model.linears()
    named = {row["name"]: row["kernels"] for row in facts["layers"]}
    assert linears.keys() <= named.keys()
    for name, linear in linears.items():
        for phase in ("decode", "prefill"):
            runs = linear.weight.kernel_name(loaded.dtype, loaded.model.device, phase)
            assert named[name][phase]["kernel"] == runs, (name, phase)
            if plain is not None and name.endswith("down_proj"):
                assert runs == plain
    program = getattr(loaded.model, "reason_against", lambda cache: loaded.fallback_reason)
    declined = program(KVCache(loaded.config, loaded.kv, loaded.dtype))
    assert {(one["kernel"], one["reason"]) for one in facts["operations"]} == {
        ("torch" if declined else "cpu", declined)}


def test_parameters_agree_between_a_model_and_its_checkpoint(tiny, checkpoint):
    assert inspect_facts(str(tiny))["parameters"] == inspect_facts(str(checkpoint))["parameters"]


def test_no_such_model(cli, tmp_path):
    result = cli("inspect", tmp_path / "nope")
    assert result.exit_code == 1 and result.stderr.startswith("error: ") and "Traceback" not in result.stderr


def test_an_unfinished_checkpoint(cli, checkpoint, tmp_path):
    half = tmp_path / "OUT.partial"
    half.mkdir()
    (half / "state.json").write_text("{}")
    result = cli("inspect", half)
    assert result.exit_code == 1 and "unfinished" in result.stderr and "next: " in result.stderr


@pytest.mark.parametrize("command", ["inspect", "generate", "serve-local", "eval", "verify"])
def test_a_folder_whose_run_is_not_finished(cli, tmp_path, command):
    half = tmp_path / "OUT.partial"
    half.mkdir()
    (half / "state.json").write_text(
        '{"identity": {"source": {"uri": "smollm2"}, "recipe": {"name": "int4"}}}')
    more = {"generate": ["Once"], "serve-local": ["--port", "0"]}.get(command, [])
    result = cli(command, tmp_path / "OUT", *more)
    assert result.exit_code == 1, result.stderr
    assert f"error: {tmp_path / 'OUT'} isn't finished\n" in result.stderr
    assert "of smollm2 by recipe int4" in result.stderr
    assert f"quantkit quantize smollm2 … --out {tmp_path / 'OUT'}" in result.stderr


def test_another_tools_checkpoint(cli, cli_json, checkpoint, tmp_path):
    import shutil

    folder = tmp_path / "theirs"
    shutil.copytree(checkpoint, folder)
    (folder / "quantkit.json").unlink()
    facts, ours = cli_json("inspect", folder), cli_json("inspect", checkpoint)
    assert facts["kind"] == "another tool's checkpoint"
    assert facts["source"] is None and facts["recipe"] is None
    assert {row["method"] for row in facts["layers"] if row["format"]} == {"compressed-tensors"}
    for key in ("parameters", "bits_per_weight", "tensors", "dtypes", "bytes"):
        assert facts[key] == ours[key], key
    assert "another tool's checkpoint" in cli("inspect", folder).stdout
    said = cli("generate", folder, "Once", "-n", "4")
    assert said.exit_code == 0 and said.stdout == cli("generate", checkpoint, "Once", "-n", "4").stdout


@pytest.mark.parametrize(("model_type", "calibrated"), [("olmo2", "through transformers"),
                                                        ("brandnew", "no: ")])
def test_what_works_with_a_family_that_is_not_known(cli, cli_json, tmp_path, monkeypatch,
                                                    model_type, calibrated):
    if model_type == "olmo2":
        pytest.importorskip("transformers", reason="its modules are transformers' (extra: transformers)")
    (tmp_path / "config.json").write_text(json.dumps({
        "model_type": model_type, "num_hidden_layers": 1, "hidden_size": 64, "vocab_size": 50}))
    save_file({"model.layers.0.self_attn.q_proj.weight": torch.zeros(64, 64),
               "model.embed_tokens.weight": torch.zeros(50, 64)}, tmp_path / "model.safetensors")
    monkeypatch.chdir(tmp_path)  # its path is as long as the machine makes it, and no line breaks a path
    works = cli_json("inspect", ".")["works"]
    assert works["calibrated"].startswith(calibrated)
    assert works["data-free"] == "yes" and "vLLM" in works["run"]
    result = cli("inspect", ".")
    assert all(name in result.stdout for name in works) and not result.stderr
    assert max(map(len, result.stdout.splitlines())) <= 80
