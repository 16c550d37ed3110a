"""``quantkit inspect``: models and checkpoints, layer by layer, with their kernels."""

from quantkit.cli.inspect import inspect_facts


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


def test_a_row_a_layer(cli, checkpoint):
    result = cli("inspect", checkpoint, "--layers")
    assert sum("_proj" in line for line in result.stdout.splitlines()) == 14


def test_json_has_kernels_and_reasons(cli_json, checkpoint):
    facts = cli_json("inspect", checkpoint)
    assert facts["kind"] == "checkpoint" and len(facts["layers"]) == 14
    for row in facts["layers"]:
        for phase in ("decode", "prefill"):
            choice = row["kernels"][phase]
            assert choice["kernel"]
            assert all(entry["reason"] for entry in choice["declined"])
    assert facts["bytes"] == (checkpoint / "model.safetensors").stat().st_size
    assert facts["source"]["files"], "the source's hashes"


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
