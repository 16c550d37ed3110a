"""``quantkit quantize``: the plan, the run, what it prints, and what it refuses."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from quantkit.checkpoint.reader import Checkpoint
from quantkit.runtime.verify import verify
from quantkit.testing import tiny_model


def test_dry_run_prints_a_row_a_kind_of_layer_and_makes_nothing(cli, tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = cli("quantize", tiny, "--recipe", "int4-asym", "--dry-run")
    assert result.exit_code == 0, result.stderr
    lines = result.stdout.splitlines()
    table = [line.split() for line in lines if "_proj" in line]
    assert len(table) == 7 and all(line[1] == "2" for line in table), "both layers, counted"
    assert table[-1][0] == "*.mlp.down_proj" and "gptq" in result.stdout
    for word in ("method", "format", "bits", "before", "after", "peak memory", "disk"):
        assert word in result.stdout
    assert max(map(len, lines)) <= 80 + len(str(tiny))
    assert list(tmp_path.iterdir()) == []


def test_dry_run_ends_with_the_sums_and_the_next_command(cli, tiny):
    lines = cli("quantize", tiny, "--recipe", "int4-asym", "--dry-run").stdout.splitlines()
    heads = [line[:14].strip() for line in lines if line[:1].strip()]
    assert heads[-9:] == ["calibration", "bits/weight", "size", "peak memory", "disk needed", "engines",
                          "with --for", "time", "next"]
    assert lines[-1] == f"next          quantkit quantize {tiny} --recipe int4-asym --out OUT"
    cluster = cli("quantize", tiny, "--recipe", "int4-asym", "--dry-run", "--executor", "ray").stdout
    assert "peak memory" in cluster and "on this CPU" not in cluster, "a cluster's speed isn't known"


def test_dry_run_with_a_row_a_layer(cli, tiny):
    lines = cli("quantize", tiny, "--recipe", "int4-asym", "--dry-run", "--layers").stdout.splitlines()
    assert sum("_proj" in line for line in lines) == 14
    assert any(line.startswith("1.mlp.down_proj") for line in lines)
    assert "--layers" not in lines[-1]
    refused(cli("quantize", tiny, "-r", "int8", "-o", "OUT", "--layers"), 2, "--layers is given without")


def test_layers_of_one_kind_with_different_specs_are_different_rows(cli, tiny, tmp_path):
    recipe = tmp_path / "own.yaml"
    recipe.write_text('rules:\n  - match: "model.layers.0.mlp.down_proj"\n  - match: "*"\n    method: rtn\n'
                      "    spec: {bits: 8, granularity: {strategy: channel}}\n")
    lines = cli("quantize", tiny, "--recipe", recipe, "--dry-run").stdout.splitlines()
    down = [line.split()[:3] for line in lines if "down_proj" in line]
    assert down == [["*.mlp.down_proj", "1", "kept"], ["*.mlp.down_proj", "1", "rtn"]]


def test_dry_run_as_json(cli_json, tiny):
    plan = cli_json("quantize", tiny, "--recipe", "nf4", "--dry-run")
    assert len(plan["rows"]) == 1 + 14
    embedding, row = plan["rows"][:2]
    assert (embedding["name"], embedding["format"]) == ("model.embed_tokens", "pack-quantized")
    assert row["name"] == "model.layers.0.self_attn.q_proj"
    assert (row["method"], row["format"], row["shape"]) == ("nf4", "bnb-nf4", [64, 64])
    assert row["bytes_before"] == 64 * 64 * 2 > row["bytes_after"]
    assert plan["peak_bytes"] > 0 and plan["disk_bytes"] > 0
    assert plan["disk_bytes_for"].keys() == {"sglang", "transformers"}
    assert min(plan["disk_bytes_for"].values()) > plan["disk_bytes"], "16 bits for the embedding"


@pytest.mark.parametrize(("engine", "engines"), [
    ("quantkit", "quantkit; not vllm, sglang, transformers, mlx, see below"),
    ("transformers", "quantkit, vllm, transformers; not sglang, mlx, see below")])
def test_a_run_makes_what_the_plan_said(cli, cli_json, tiny, tmp_path, engine, engines):
    out = tmp_path / "OUT"
    command = ["quantize", tiny, "--recipe", "int8", "--for", engine]
    plan = cli_json(*command, "--dry-run")
    result = cli(*command, "--out", out)
    assert result.exit_code == 0, result.stderr
    assert f"quantkit eval {tiny} {out}" in result.stdout
    assert "fallbacks     none" in result.stdout
    assert f"engines       {engines}" in result.stdout
    refusing = engines.partition("; not ")[2].partition(",")[0]
    assert result.stdout.splitlines()[-1].strip() == f"quantkit verify {out} --for {refusing}"
    told = [line.partition(": ")[2] for line in result.stderr.splitlines()]
    assert told[0] == "phase 1 of 2, quantizing layers", "progress belongs on stderr"
    assert told[-1] == "phase 2 of 2, assembling and rereading"
    with Checkpoint.open(out) as made:
        assert made.manifest.bits_per_weight == pytest.approx(plan["bits_per_weight"])
        assert sum(row.bytes for row in made.manifest.layers) == sum(r["bytes_after"] for r in plan["rows"])
    assert verify(out).ok


def test_a_checkpoint_for_gguf_is_to_be_exported(cli, tmp_path):
    source, out = tiny_model(tmp_path / "plain", hidden_size=64, intermediate_size=128), tmp_path / "OUT"
    result = cli("quantize", source, "--recipe", "gguf-q8_0", "--out", out, "-q")
    assert "engines       quantkit, llama.cpp once exported, see below" in result.stdout
    assert result.stdout.splitlines()[-1].strip() == f"quantkit export {out} --to gguf {out}.gguf"
    assert cli("export", out, "--to", "gguf", f"{out}.gguf").exit_code == 0
    unknown, out = tiny_model(tmp_path / "blocks", "sdar"), tmp_path / "UNKNOWN"
    result = cli("quantize", unknown, "--recipe", "gguf-q8_0", "--out", out, "-q")
    assert result.exit_code == 0 and "llama.cpp" not in result.stdout and "--to gguf" not in result.stdout


def test_json_result(cli_json, tiny, tmp_path):
    result = cli_json("quantize", tiny, "--recipe", "int8", "--out", tmp_path / "OUT", "--quiet")
    assert len(result["layers"]) == 1 + 14 and result["fallbacks"] == []
    assert result["out"] == str(tmp_path / "OUT")


def test_quiet_says_nothing_on_stderr(cli, tiny, tmp_path):
    assert cli("quantize", tiny, "-r", "int8", "-o", tmp_path / "OUT", "-q").stderr == ""


def test_calibration_options_reach_the_manifest(cli, tiny, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("It was the best of times, it was the worst of times. " * 200, encoding="utf-8")
    result = cli("quantize", tiny, "-r", "int4", "-o", tmp_path / "OUT", "--calibration", text,
                 "--windows", 3, "--window", 40, "--seed", 5, "--packing", "stream", "-q")
    assert result.exit_code == 0, result.stderr
    with Checkpoint.open(tmp_path / "OUT") as made:
        facts = made.manifest.calibration
    assert (facts.text, facts.windows, facts.window, facts.seed) == ("text.txt", 3, 40, 5)
    assert facts.packing == "stream" and facts.coverage.documents == 1
    assert "calibration   3 windows of 40 tokens of text.txt" in result.stdout
    assert "warning: 120 calibration tokens are fewer than the 128 inputs" in result.stderr
    assert "120 calibration tokens are fewer" in (tmp_path / "OUT" / "README.md").read_text()


def chats(path, *contents):
    path.write_text("".join(json.dumps({"messages": [{"role": "user", "content": content}]}) + "\n"
                            for content in contents), encoding="utf-8")
    return path


def test_dry_run_reports_on_the_calibration_data(cli, cli_json, tiny, tmp_path):
    data = chats(tmp_path / "chats.jsonl", *["What is the time, and where is it?"] * 30)
    exam = tmp_path / "exam.txt"
    exam.write_text("Whatever will be asked.", encoding="utf-8")
    options = ("-r", "int4", "--dry-run", "--calibration", data, "--avoid", exam, "--windows", 4,
               "--window", 64)
    result = cli("quantize", tiny, *options)
    assert result.exit_code == 0, result.stderr
    assert "calibration   4 windows of 64 tokens of chats.jsonl" in result.stdout
    assert "30 documents (30" in result.stdout and "exam.txt" in result.stdout
    assert "3 are equal to an earlier one" in result.stderr
    facts = cli_json("quantize", tiny, *options)["calibration"]
    assert facts["packing"] == "documents" and facts["coverage"]["same"] == 3
    assert [file["name"] for file in facts["files"]] == ["chats.jsonl"]
    assert cli_json("quantize", tiny, "-r", "int8", "--dry-run")["calibration"] is None


def test_calibration_without_a_method_that_calibrates(cli, tiny, tmp_path):
    for more in (("--dry-run",), ("-o", tmp_path / "OUT", "-q")):
        result = cli("quantize", tiny, "-r", "int8", "--windows", 3, *more)
        assert result.exit_code == 0
        assert "warning: options of calibration have no effect: recipe 'int8'" in result.stderr


def test_several_sources_of_calibration_text(cli_json, tiny, tmp_path):
    (tmp_path / "a.txt").write_text("Once upon a time. " * 50, encoding="utf-8")
    facts = cli_json("quantize", tiny, "-r", "int4", "--dry-run", "--calibration", tmp_path / "a.txt",
                     "--calibration", "builtin", "--windows", 2, "--window", 32)["calibration"]
    assert facts["text"] == "a.txt, builtin" and facts["coverage"]["documents"] > 20


def refused(result, code, *said):
    assert result.exit_code == code, result.stderr
    assert result.stdout == ""
    assert "Traceback" not in result.stderr and "internal error" not in result.stderr
    assert result.stderr.startswith("error: ")
    for words in said:
        assert words in result.stderr


def test_out_is_needed(cli, tiny):
    refused(cli("quantize", tiny, "-r", "int8"), 2, "--out is missing", "--dry-run")


def test_an_out_folder_that_exists_is_left_alone(cli, tiny, tmp_path):
    (tmp_path / "OUT").mkdir()
    (tmp_path / "OUT" / "mine.txt").write_text("precious")
    result = cli("quantize", tiny, "-r", "int8", "-o", tmp_path / "OUT")
    assert result.exit_code in (1, 2) and "OUT" in result.stderr and "exist" in result.stderr
    assert (tmp_path / "OUT" / "mine.txt").read_text() == "precious"


def test_an_unknown_recipe_gets_the_nearest(cli, tiny, tmp_path):
    refused(cli("quantize", tiny, "-r", "int44", "-o", tmp_path / "OUT"), 2, "'int44'", "int4")


def test_an_unknown_key_in_a_recipe_gets_the_nearest(cli, tiny, tmp_path):
    recipe = tmp_path / "bad.yaml"
    recipe.write_text("rules:\n  - match: '*'\n    methd: rtn\n", encoding="utf-8")
    refused(cli("quantize", tiny, "-r", recipe, "-o", tmp_path / "OUT"), 2, "methd", "did you mean 'method'")


def test_a_group_that_does_not_divide_is_found_before_any_work(cli, tiny, tmp_path):
    recipe = tmp_path / "odd.yaml"
    recipe.write_text("rules:\n  - match: '*'\n    method: rtn\n"
                      "    spec: {bits: 4, granularity: {strategy: group, size: 48}}\n", encoding="utf-8")
    refused(cli("quantize", tiny, "-r", recipe, "-o", tmp_path / "OUT"), 2, "14 of 14 layers", "48")
    assert not (tmp_path / "OUT").exists() and not (tmp_path / "OUT.partial").exists()


def test_no_such_model(cli, tmp_path):
    refused(cli("quantize", tmp_path / "nope", "-r", "int8", "-o", tmp_path / "OUT"), 1, "nope", "next: ")


def test_a_folder_that_is_no_model(cli, tmp_path):
    (tmp_path / "folder").mkdir()
    refused(cli("quantize", tmp_path / "folder", "-r", "int8", "--dry-run"), 1, "folder is empty", "next: ")
    (tmp_path / "folder" / "notes.txt").write_text("no model", encoding="utf-8")
    refused(cli("quantize", tmp_path / "folder", "-r", "int8", "--dry-run"), 1, "config.json", "next: ")


def test_an_unknown_architecture(cli, tiny, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    config = json.loads((tiny / "config.json").read_text()) | {"model_type": "lama"}
    (other / "config.json").write_text(json.dumps(config))
    (other / "model.safetensors").write_bytes((tiny / "model.safetensors").read_bytes())
    refused(cli("quantize", other, "-r", "int8", "--dry-run"), 1, "'lama'", "did you mean 'llama'")


@pytest.mark.parametrize("cut", [0, 4, 100, -1])
def test_a_truncated_model(cli, tiny, tmp_path, cut):
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_bytes((tiny / "config.json").read_bytes())
    (other / "model.safetensors").write_bytes((tiny / "model.safetensors").read_bytes()[:cut])
    refused(cli("quantize", other, "-r", "int8", "--dry-run"), 1, "model.safetensors")


def test_a_truncated_gguf(cli, tmp_path):
    (tmp_path / "bad.gguf").write_bytes(b"GGUF\x03\0\0\0" + b"\xff" * 16)
    refused(cli("quantize", tmp_path / "bad.gguf", "-r", "int8", "--dry-run"), 1, "bad.gguf")


def test_calibration_text_that_is_not_there(cli, tiny):
    result = cli("quantize", tiny, "-r", "int4", "--dry-run", "--calibration", "/no/such.txt")
    refused(result, 1, "/no/such.txt", "No such file", "next: give a text file, a folder")


def test_calibration_data_that_is_broken(cli, tiny, tmp_path):
    data = chats(tmp_path / "chats.jsonl", "Hi?")
    data.write_text(data.read_text() + '{"messages": [{"role": "assistant", "content": "Ho."}]}\n')
    refused(cli("quantize", tiny, "-r", "int4", "--dry-run", "--calibration", data), 1,
            "rows that can't be used: 1, the first: chats.jsonl line 2", "next: ")
    refused(cli("quantize", tiny, "-r", "int4", "--dry-run", "--calibration", data, "--strict"), 1,
            "chats.jsonl line 2", "without a user's turn", "next: ")
    data.write_text("Once upon a time.")
    refused(cli("quantize", tiny, "-r", "int4", "-o", tmp_path / "OUT", "--calibration", data), 1,
            "chats.jsonl line 1 is not JSON", "next: ")
    refused(cli("quantize", tiny, "-r", "int4", "--dry-run", "--calibration", "hub:owner"), 1,
            "next: hub:OWNER/NAME")
    both = ("--calibration", "self", "--calibration", "builtin")
    refused(cli("quantize", tiny, "-r", "int4", "--dry-run", *both), 2, "can't be mixed", "next: ")
    assert not (tmp_path / "OUT.partial").exists()


@pytest.mark.skipif(os.name != "posix", reason="signals")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_is_resumable_and_the_same_command_finishes(cli, tiny, tmp_path, number):
    # a shell's background job ignores SIGINT, and so would its child
    slow = ("import signal, time, quantkit.quantization.methods.base as base, quantkit.cli.main as cli\n"
            "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
            "run, waits = base.Method.run, [0, 60, 60, 60]\n"
            "def slowly(self, *a):\n    time.sleep(waits.pop(0))\n    return run(self, *a)\n"
            "base.Method.run = slowly\ncli.main()")
    command = ["quantize", str(tiny), "-r", "int8", "-o", str(tmp_path / "OUT")]
    running = subprocess.Popen([sys.executable, "-c", slow, *command], stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 60
        while not list((tmp_path / "OUT.partial").glob("*")) and time.monotonic() < deadline:
            time.sleep(0.02)
        time.sleep(0.3)
        running.send_signal(number)
        _, err = running.communicate(timeout=60)
    finally:
        running.kill()
    assert running.returncode == 75, err
    assert "same command again" in err and "Traceback" not in err
    assert not (tmp_path / "OUT").exists()
    again = cli(*command)
    assert again.exit_code == 0, again.stderr
    assert verify(tmp_path / "OUT").ok


def test_a_quantized_gguf_file_is_warned_of_and_never_called_smaller(cli, cli_json, gguf, tmp_path):
    plan = cli("quantize", gguf, "--recipe", "int8", "--dry-run")
    assert plan.exit_code == 0, plan.stderr
    assert plan.stderr.count("is quantized already (Q4_0") == 1
    assert "times larger as a file; in memory" in " ".join(plan.stdout.split())
    done = cli("quantize", gguf, "--recipe", "int8", "--out", tmp_path / "int8")
    assert done.exit_code == 0 and done.stderr.count("is quantized already") == 1
    assert "times larger" in done.stdout
    plan = cli_json("quantize", gguf, "--recipe", "int8", "--dry-run")
    assert plan["source_bytes"] == gguf.stat().st_size < plan["disk_bytes"]


def test_a_model_in_16_bits_is_not_warned_of(cli, tiny):
    plan = cli("quantize", tiny, "--recipe", "int8", "--dry-run")
    assert "quantized already" not in plan.stderr and "times smaller" in plan.stdout


def test_a_kept_head_counts_among_what_stays(cli, cli_json, tmp_path):
    source = tiny_model(tmp_path / "own-head", tie_word_embeddings=False)
    plan = cli_json("quantize", source, "--recipe", "w8a8", "--dry-run")
    head = next(row for row in plan["rows"] if row["name"] == "lm_head")
    assert head["method"] is None and plan["kept_bytes"] == plan["other_bytes"] + head["bytes_after"]
    for recipe, engine, kept in (("int8", "quantkit", "norms"), ("int8", "transformers", "embedding, norms"),
                                 ("w8a8", "quantkit", "embedding, head, norms")):
        told = cli("quantize", source, "--recipe", recipe, "--for", engine, "--dry-run").stdout
        assert f"stay as they are ({kept})" in " ".join(told.split())
