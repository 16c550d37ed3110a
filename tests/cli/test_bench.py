"""``quantkit bench``: what is measured is named, adds up, and every refusal is in words."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from quantkit.evaluation.bench import decode as module
from quantkit.evaluation.bench.kernels import SPECS
from quantkit.evaluation.speed.decoding import step_bytes
from quantkit.evaluation.speed.results import DecodeSpeed
from quantkit.ops import cpu_linear, cpu_machine
from quantkit.quantization.run import quantize
from quantkit.runtime.loader import load
from quantkit_kernels import tuned
from quantkit_kernels.cpu.isa import ALL
from quantkit_kernels.cpu.kv_codecs import CODECS
from quantkit_kernels.tools.aot import AotRow

QUICK = ("--prefill", 40, "--max-tokens", 4, "--repeats", 2, "-q")


@pytest.fixture(scope="module")
def odd(tiny, tmp_path_factory):
    """In a format that the program of a step doesn't know: groups of 8."""
    out = tmp_path_factory.mktemp("odd") / "narrow"
    recipe = out.parent / "recipe.yaml"
    recipe.write_text("""\
name: narrow
rules:
  - match: lm_head
    optional: true
  - match: "*"
    method: rtn
    spec: {bits: 8, granularity: {strategy: group, size: 8}}
""", encoding="utf-8")
    quantize(str(tiny), str(recipe), out)
    return out


def test_decode_measures_every_case(cli_json, checkpoint):
    found = cli_json("bench", "decode", checkpoint, *QUICK, "--batch", "1,3", "--context", "0,70",
                     "--kv", "none,int8")
    assert [(one["kv"], one["context"], one["batch"]) for one in found["cases"]] == [
        (kv, context, batch) for kv in ("none", "int8") for context in (0, 70) for batch in (1, 3)]
    assert [(one["kv"], one["tokens"]) for one in found["prefill"]] == [("none", 40), ("int8", 40)]
    for one in found["cases"] + found["prefill"]:
        assert 0 < one["tok_s"]["low"] <= one["tok_s"]["median"] <= one["tok_s"]["high"]
    for one in found["cases"]:
        assert one["of_read"] == one["bytes_s"]["median"] / one["read_bytes_s"]["median"]
    assert set(found["kernels"].values()) == {"cpu-int8"} and found["unfused"] is None
    assert found["bytes"] == step_bytes(load(str(checkpoint)))
    assert found["machine"]["isa"] in [isa.name for isa in ALL] and found["machine"]["date"]


def test_the_bytes_of_a_step_are_the_weights_and_what_every_sequence_holds(cli_json, checkpoint):
    """By batch and context; a byte a second times seconds a step gives the bytes back."""
    found = cli_json("bench", "decode", checkpoint, *QUICK, "--repeats", 1, "--batch", "1,2",
                     "--context", "70")
    config, tokens = load(str(checkpoint)).config, 4
    token = 2 * 2 * config.num_layers * config.num_kv_heads * config.head_dim
    for one in found["cases"]:
        a_step = one["bytes_s"]["median"] / one["tok_s"]["median"] * one["batch"]
        held = 70 + 2 + tokens
        assert one["kv_bytes"] == token * 128, "two pages in each head"
        assert a_step == pytest.approx(found["bytes"] + one["batch"] * token * (held - tokens / 2))


def test_the_table_fits_a_terminal_and_names_the_kernels(cli, checkpoint, tmp_path):
    out = tmp_path / "bench.json"
    result = cli("bench", "decode", checkpoint, *QUICK, "--out", out)
    assert result.exit_code == 0, result.stderr
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert "Linears by kernel: 14 cpu-int8" in result.stdout
    assert json.loads(out.read_text(encoding="utf-8"))["cases"][0]["batch"] == 1


def test_a_model_that_runs_operation_by_operation_says_why_and_by_which_kernels(cli, cli_json, odd):
    found = cli_json("bench", "decode", odd, *QUICK)
    assert found["unfused"] and set(found["kernels"].values()).isdisjoint({"torch", "cpu-int8"})
    refused = cli("bench", "decode", odd, *QUICK, "--no-fallback")
    assert refused.exit_code == 2 and found["unfused"] in refused.stderr and "falls back" in refused.stderr


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kv", ["none", "window(16, sinks=4)+int8", "snapkv(32)"])
def test_no_fallback_asks_the_kv_setting_too(cli, checkpoint, monkeypatch, kv):
    result = cli("bench", "decode", checkpoint, *QUICK, "--kv", kv, "--no-fallback")
    assert result.exit_code == 0, result.stderr
    monkeypatch.delitem(CODECS, "int8")  # as of a codec of a plugin, which has no kernel
    result = cli("bench", "decode", checkpoint, *QUICK, "--kv", kv, "--no-fallback")
    assert (result.exit_code == 2) == ("int8" in kv), result.stderr
    if "int8" in kv:
        assert f"--kv {kv}" in result.stderr.replace("\n", " ") and result.stdout == ""


@pytest.mark.parametrize("arguments, said", [
    (("--batch", "0"), "--batch is '0'"), (("--batch", "1,,2"), "--batch is '1,,2'"),
    (("--context", "-1"), "--context -1 can't be read"), (("--kv", "banana"), "no KV policy or codec"),
    (("--context", "600"), "was made for 512"),
    (("--max-tokens", "510", "--prefill", "8"), "was made for 512"),
])
def test_what_cannot_be_measured_is_refused_at_once(cli, tiny, monkeypatch, arguments, said):
    monkeypatch.setattr(module, "DecodeRunner", None)
    result = cli("bench", "decode", tiny, *QUICK, *arguments)
    assert result.exit_code == 2 and said in result.stderr and result.stdout == ""


def test_every_case_is_on_disk_as_soon_as_it_is_measured(cli, tiny, monkeypatch, tmp_path):
    out, seen = tmp_path / "found.json", []

    def decode(self, kv, batches, context):
        seen.append(json.loads(out.read_text())["cases"] if out.exists() else None)
        if len(seen) == 3:
            raise KeyboardInterrupt
        yield DecodeSpeed(batch=batches[0], context=context, left_out="it is a test")

    monkeypatch.setattr(module.DecodeRunner, "decode", decode)
    cli("bench", "decode", tiny, *QUICK, "--prefill", 0, "--context", "8,16,24", "--out", out)
    assert seen[0] is None and [len(cases) for cases in seen[1:]] == [1, 2]
    assert [case["context"] for case in json.loads(out.read_text())["cases"]] == [8, 16]
    assert [file.name for file in tmp_path.iterdir()] == ["found.json"]


@pytest.mark.parametrize("pdl", [False, True])
def test_programmatic_dependent_launch_is_asked_for(cli_json, tiny, monkeypatch, pdl):
    def decode(self, kv, batches, context):
        asked = tuned.lookup(torch.device("cpu"), "int8 row", 64, 64, 0, 1)
        yield DecodeSpeed(batch=batches[0], context=context, left_out=str(asked))

    monkeypatch.setattr(module.DecodeRunner, "decode", decode)
    found = cli_json("bench", "decode", tiny, *QUICK, *(["--pdl"] if pdl else []))
    assert found["pdl"] == pdl
    assert [case["left_out"] for case in found["cases"]] == ["{'pdl': 1}" if pdl else "None"]


def test_a_file_that_cannot_be_written(cli, tiny, tmp_path):
    result = cli("bench", "decode", tiny, *QUICK, "--out", tmp_path / "nowhere" / "bench.json")
    assert result.exit_code == 2 and "can't be written" in result.stderr


@pytest.mark.slow
def test_kernels_measures_every_format_and_says_what_it_leaves_out(cli, cli_json):
    arguments = ("bench", "kernels", "--shape", "64x96", "--shape", "70x256", "--rows", "1,5",
                 "--repeats", 1, "-q")
    found = cli_json(*arguments)
    whole = [case["format"] for case in found["cases"] if case["shape"] == [70, 256] and case["rows"] == 5]
    assert whole == list(SPECS)
    assert [one["format"] for one in found["cases"] if one["shape"] == [64, 96] and one["rows"] == 1] == [
        "bf16", "int8", "int8 a8", "fp8", "fp8 a8", "int4 g32", "nvfp4", "mxfp4", "iq4_nl", "fp8 tiles"]
    assert [one["format"] for one in found["left_out"]] == [
        "int4 g64", "int4 g64 asym", "int4 g128", "nf4 b64", "q4_k", "q6_k", "mlx g64"]
    for one in found["cases"]:
        assert one["mac_s"] == pytest.approx(one["rows"] * one["shape"][0] * one["shape"][1] / one["seconds"])
    result = cli(*arguments)
    assert "left out: int4 g128 64x96, group size 128 doesn't divide in_features 96" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80


@pytest.mark.parametrize("shape", ["64", "0x64", "axb", "64x"])
def test_a_shape_is_two_numbers(cli, shape):
    result = cli("bench", "kernels", "--shape", shape)
    assert result.exit_code == 2 and "--shape is" in result.stderr


def test_without_kernels_the_next_command_is_given(cli, tiny, monkeypatch):
    for place in (cpu_linear, cpu_machine):
        monkeypatch.setattr(place, "reason_against_kernels", lambda: "llvmlite isn't installed")
    result = cli("bench", "kernels", "-q")
    assert result.exit_code == 2 and "pip install llvmlite" in result.stderr
    result = cli("bench", "decode", tiny, *QUICK, "--no-fallback")
    assert result.exit_code == 2 and "llvmlite isn't installed" in result.stderr
    assert "bf16: " in cli("bench", "decode", tiny, *QUICK).stdout


@pytest.fixture
def compiled(monkeypatch):
    """``compiled(*rows)``: what compiling all GPU kernels is taken to give."""
    from quantkit_kernels.tools import aot

    def put(*rows):
        def compile_all(targets, report):
            chosen = [row for row in rows if row.target in targets]
            for done, row in enumerate(chosen):
                report(done + 1, len(chosen), row.kernel)
            return chosen

        monkeypatch.setattr(aot, "compile_all", compile_all)

    return put


def test_kernels_are_compiled_without_a_gpu(cli, cli_json, compiled, tmp_path):
    good = AotRow("w4a16 g128", "sm_90", 128, 0, 65536, 128, True, 2.5, ())
    compiled(good)
    result = cli("bench", "kernels", "--aot", "--out", tmp_path / "aot.json")
    assert result.exit_code == 0 and "1 compiled, 0 with faults" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80 and "compiling: 1 of 1" in result.stderr
    assert json.loads((tmp_path / "aot.json").read_text())["rows"][0]["registers"] == 128
    compiled(good, replace(good, spills=3, faults=("3 spills",)))
    refused = cli("bench", "kernels", "--aot", "-q")
    assert refused.exit_code == 1 and "! 3 spills" in refused.stdout and not refused.stderr
    assert json.loads(cli("bench", "kernels", "--aot", "-q", "--json").stdout)["faults"] == 1
    other = cli("bench", "kernels", "--aot", "-q", "--target", "sm_86", "--target", "gfx942")
    assert other.exit_code == 0 and "0 compiled" in other.stdout
    wrong = cli("bench", "kernels", "--aot", "--target", "sm_75")
    assert wrong.exit_code == 2 and "sm_80, sm_86" in wrong.stderr
    assert cli("bench", "kernels", "--target", "sm_90").exit_code == 2


@pytest.mark.parametrize("arguments", [("kernels", "--aot"), ("tune",)])
def test_without_triton_it_says_what_is_missing(cli, monkeypatch, arguments):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    result = cli("bench", *arguments)
    assert result.exit_code == 1 and "triton is not installed" in result.stderr


def test_tuning_needs_a_gpu_and_passes_everything_on(cli, monkeypatch, tmp_path):
    import torch

    from quantkit_kernels.tools import tune

    if not torch.cuda.is_available():
        result = cli("bench", "tune")
        assert result.exit_code == 1 and "no GPU" in result.stderr and "--aot" in result.stderr
    given = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(tune, "main", lambda arguments: given.append(arguments) or 130)
    stopped = cli("bench", "tune", "--folder", tmp_path, "--only", "o m1", "--minutes", 2, "--fresh")
    assert stopped.exit_code == 130
    assert given == [["--folder", str(tmp_path), "--only", "o m1", "--minutes", "2.0", "--fresh"]]
