"""``quantkit plan``: the arithmetic, the choice, and what to type next."""

from __future__ import annotations

import json
import shlex
from types import SimpleNamespace

import pytest

from quantkit.cli.main import main
from quantkit.testing import tiny_model

RATES = ("--bandwidth", "20GB/s", "--flops", "200G")
GIVEN = {"--context": 8192, "--memory": "16GB", "--bandwidth": "20GB", "--flops": "1T"}
BIG = ("plan", "synthetic:llama-8b", "--context", 8192, "--concurrency", 4)


@pytest.fixture(scope="module")
def heads(tmp_path_factory):
    """Heads of 32, which every codec takes."""
    return tiny_model(tmp_path_factory.mktemp("models") / "heads", "qwen3")


def test_half_a_megabyte_a_token(cli_json, tmp_path):
    """32 layers, 4,096 wide, no shared key heads, 16 bits: 262,144 numbers, a gigabyte at 2,000 tokens."""
    source = tiny_model(tmp_path / "wide", num_hidden_layers=32, num_attention_heads=32,
                        num_key_value_heads=32, head_dim=128, hidden_size=64, intermediate_size=64,
                        max_position_embeddings=4096, dtype="float16")
    plan = cli_json("plan", source, "--context", 2000, "--memory", "4GB", "--kv", "none",
                     "--recipe", "none", *RATES)
    assert plan["kv"]["numbers_per_token"] == 262_144
    assert plan["kv"]["bytes_per_token"] == 524_288
    assert plan["kv"]["sequence_bytes"] == 2048 * 524_288 == 1_073_741_824
    assert 0.97e9 < 2000 * plan["kv"]["bytes_per_token"] < 1.05e9
    assert plan["chosen"]["kv_bytes"] == 1_073_741_824


def test_every_term_is_shown_in_80_columns(cli):
    result = cli(*BIG, "--memory", "16GB", *RATES)
    assert result.exit_code == 0, result.stderr
    lines = result.stdout.splitlines()
    assert max(map(len, lines[:-2])) <= 80, "but for the commands, which are there to be copied"
    assert "planning for synthetic:llama-8b: " in result.stderr, "it says that it works, on a pipe too"
    text = " ".join(result.stdout.split())
    for words in ("4 sequences of 8,192 tokens in 16 GB", "chosen weights int8-datafree", "KV cache none",
                  "weights int8-datafree; 8.2 GB in files 8,249.1 MB",
                  "KV a token 32 layers × 8 key heads × 2 × 128 × 16 bits 131,072 B",
                  "KV a sequence 8,192 tokens at most, in pages of 64 1,073.7 MB", "4,295.0 MB",
                  "KV to spare", "activations", "logits", "runtime", "total of 16,000.0 MB", "left",
                  "1 sequence more of that length, or 4 sequences of up to 8,192", "(the model's own limit)",
                  "bound by memory: a step of 4 sequences reads 7.7 GB of weights and 4.3 GB of KV, 601 ms "
                  "at 20 GB/s (given), and computes 77.2 GFLOP, 386 ms at 200 GFLOP/s (given); "
                  "from 10 sequences on by compute",
                  "→ int8-datafree none", "measured on SmolLM2-135M-Instruct; on another model the order",
                  "Never measured, and taken last: "):
        assert words in text, words
    assert lines[-2:] == ["next          quantkit quantize synthetic:llama-8b --recipe int8-datafree "
                          "--out OUT",
                          "              quantkit serve-local OUT --kv none --max-batch 4"]


def test_codes_that_wait_are_told_apart(cli):
    result = cli(*BIG, "--memory", "16GB", "--recipe", "int4", "--kv", "int4", *RATES)
    text = " ".join(result.stdout.split())
    assert "× 2 × 128 × 5 bits 40,960 B as computed the newest 64 to 127, the first 64 131,072 B" in text


def test_json_has_every_combination_and_adds_up(cli_json):
    plan = cli_json(*BIG, "--memory", "16GB", *RATES)
    assert plan["asked"] == {"context": 8192, "concurrency": 4, "memory_bytes": 16 * 10**9, "prompt": 4096}
    chosen, others = plan["chosen"], plan["combinations"]
    assert len(others) > 150 and (chosen["weights"], chosen["kv"]) == ("int8-datafree", "none")
    assert chosen["expected_kl"] == 0.000674 == min(one["expected_kl"] for one in others
                                                   if one["fits"] and one["expected_kl"] is not None)
    assert plan["room"] == {"sequences": 5, "context": 8192}
    assert plan["decoding"]["bound_by"] == "memory"
    assert plan["decoding"]["bound_by_compute_from_batch"] == 10
    assert plan["losses"]["model"] == "SmolLM2-135M-Instruct"


def test_what_is_named_is_all_there_is_to_choose_from(cli_json):
    plan = cli_json(*BIG, "--memory", "16GB", "--recipe", "int4", "--recipe", "trellis4",
                     "--kv", "int8", "--kv", "window(1024, sinks=4)+int8", *RATES)
    pairs = {(one["weights"], one["kv"]) for one in plan["combinations"]}
    assert pairs == {(w, kv) for w in ("int4", "trellis4") for kv in ("int8", "window(1024, sinks=4)+int8")}
    assert (plan["chosen"]["weights"], plan["chosen"]["kv"]) == ("int4", "int8")
    dropping = next(one for one in plan["combinations"] if "window" in one["kv"])
    assert dropping["expected_kl"] is None and dropping["kv_bytes"] < plan["chosen"]["kv_bytes"] / 4


def test_a_policy_says_for_which_prompt(cli):
    result = cli(*BIG, "--memory", "16GB", "--recipe", "int4", "--kv", "snapkv(0.5)", "--prompt-tokens", 6000,
                 *RATES)
    text = " ".join(result.stdout.split())
    assert "what snapkv drops is counted for a prompt of 6,000 of the 8,192 tokens (--prompt-tokens)" in text
    assert max(map(len, result.stdout.splitlines()[:-2])) <= 80
    # half of the prompt and what comes behind it
    assert f"{3000 + 2192:,} tokens at most" in text


def test_a_checkpoint_needs_no_recipe(cli, cli_json, checkpoint):
    result = cli("plan", checkpoint, "--context", 500, "--memory", "600MB", *RATES)
    assert result.exit_code == 0, result.stderr
    assert result.stdout.splitlines()[-1] == (
        f"next          quantkit serve-local {checkpoint} --kv none --max-batch 1")
    assert "quantkit quantize" not in result.stdout
    plan = cli_json("plan", checkpoint, "--context", 500, "--memory", "600MB", *RATES)
    assert {one["weights"] for one in plan["combinations"]} == {"int8"}
    assert "head dimension" in plan["left_out"]["int4"] or "has 16" in plan["left_out"]["int4"]


def test_weights_as_they_are_need_no_quantizing(cli, heads):
    result = cli("plan", heads, "--context", 100, "--memory", "4GB", *RATES)
    assert result.stdout.splitlines()[-1] == (
        f"next          quantkit serve-local {heads} --kv none --max-batch 1")


def test_a_recipe_of_ones_own_is_named_as_it_was_given(cli, heads, tmp_path):
    path = tmp_path / "mine.yaml"
    spec = "{bits: 5, granularity: {strategy: channel}}"
    path.write_text(f"rules:\n  - {{match: '*', method: rtn, spec: {spec}}}\n")
    result = cli("plan", heads, "--context", 100, "--memory", "4GB", "--recipe", path, *RATES)
    assert f"quantkit quantize {heads} --recipe {path} --out OUT" in result.stdout
    assert "Never measured, and taken last: mine" in result.stdout


def test_the_next_commands_have_real_options(cli):
    result = cli(*BIG, "--memory", "9GB", *RATES)
    commands = [line[14:] for line in result.stdout.splitlines()[-2:]]
    for words in map(shlex.split, commands):
        command = main.resolve_command(None, [words[1]])[1]
        options = {name for parameter in command.params for name in parameter.opts}
        assert words[0] == "quantkit" and {word for word in words if word.startswith("--")} <= options


def test_when_nothing_fits_the_closest_is_named_and_every_way_out_works(cli):
    result = cli(*BIG, "--memory", "4.5GB", *RATES, "--recipe", "int4", "--kv", "none", "--kv", "int8")
    assert result.exit_code == 2 and result.stdout == ""
    text = " ".join(result.stderr.split())
    assert "nothing fits: 4 sequences of 8,192 tokens in 4.5 GB" in text
    assert "closest are weights int4 (5.1 GB) with a KV cache int8 (2.5 GB)" in text and "too much" in text
    (way,) = [line[6:] for line in result.stderr.splitlines() if "quantkit plan" in line]
    again = cli(*shlex.split(way)[1:])
    assert again.exit_code == 0, again.stderr

    result = cli(*BIG, "--memory", "8.5GB", *RATES, "--recipe", "int4", "--kv", "none")
    ways = [line[6:] for line in result.stderr.splitlines() if "quantkit plan" in line]
    assert [way.split()[-2] for way in ways] == ["--memory", "--context", "--concurrency"]
    for way in ways:
        again = cli(*shlex.split(way)[1:])
        assert again.exit_code == 0, again.stderr


@pytest.mark.sampled(3)
@pytest.mark.parametrize("arguments, words", [
    (("--context", 0), "--context"),
    (("--context", -5), "--context"),
    (("--context", 10**12), "whole numbers of tokens from 1 to"),
    (("--context", 10**9), "the model was made for 8,192"),
    (("--concurrency", 0), "--concurrency"),
    (("--memory", "16"), "--memory '16' is no size"),
    (("--memory", "0GB"), "--memory '0GB' is no size"),
    (("--memory", "-4GB"), "--memory '-4GB' is no size"),
    (("--bandwidth", "fast"), "--bandwidth 'fast' is no size"),
    (("--flops", "0T"), "--flops '0T' is no rate"),
    (("--flops", "12"), "--flops '12' is no rate"),
    (("--prompt-tokens", 8193), "--prompt-tokens is 8,193"),
    (("--kv", "int9"), "no KV policy or codec is called 'int9'"),
    (("--recipe", "int5"), "no recipe is called 'int5'"),
    (("--recipe", "mixed"), "recipe 'mixed' leaves a choice"),
    (("--contxt", 5), "no such option: --contxt"),
    (("--revision", "main"), "--revision"),
])
def test_what_can_not_be_is_said(cli, arguments, words):
    given = GIVEN | dict([arguments])
    result = cli("plan", "synthetic:llama-8b", *(word for pair in given.items() for word in pair))
    assert result.exit_code == 2 and words in result.stderr + str(result.exception), result.stderr


@pytest.mark.parametrize("arguments", [("--concurrency", 10**12), ("--memory", "999999999999999TB"),
                                       ("--bandwidth", "1b"), ("--flops", "999999999999999P")])
def test_absurd_numbers_are_answered_all_the_same(cli, arguments):
    given = GIVEN | dict([arguments])
    result = cli("plan", "synthetic:llama-8b", "--recipe", "int4", "--kv", "int8",
                 *(word for pair in given.items() for word in pair))
    assert result.exit_code in (0, 2) and "Traceback" not in result.stderr
    assert result.exit_code == 0 or "nothing fits" in result.stderr + str(result.exception)


def test_this_machine_is_measured_where_nothing_is_given(cli_json, heads, monkeypatch):
    from quantkit.evaluation.roofline import ceilings

    machine = SimpleNamespace(bandwidth=lambda: 5e9, products=lambda arithmetic: 7e9)
    monkeypatch.setattr(ceilings, "cpu_ceilings", lambda: machine)
    plan = cli_json("plan", heads, "--context", 100, "--memory", "4GB", "--recipe", "int8")["decoding"]
    assert plan["bandwidth"] == 5e9 and plan["flops"] == 14e9
    assert set(plan["ceilings"].values()) == {"measured on this CPU now"}


def test_where_nothing_can_be_measured_it_says_what_to_give(cli, heads, monkeypatch):
    from quantkit.ops import cpu_linear, cpu_machine

    for module in (cpu_linear, cpu_machine):
        monkeypatch.setattr(module, "reason_against_kernels", lambda: "llvmlite is not installed")
    result = cli("plan", heads, "--context", 100, "--memory", "4GB", "--recipe", "int8", "--kv", "none")
    assert result.exit_code == 0, result.stderr
    assert "llvmlite is not installed; give --bandwidth and --flops" in " ".join(result.stdout.split())


@pytest.mark.sampled(2)
@pytest.mark.parametrize("uri, words", [
    ("synthetic:gemma3-1b", "22 of 26 layers see 512 tokens only, and hold not many more"),
    ("synthetic:gemma2-2b", "activations are an estimate"),
])
def test_what_a_family_does_otherwise_is_said(cli, uri, words):
    result = cli("plan", uri, "--context", 4096, "--memory", "24GB", "--recipe", "int8", *RATES)
    assert result.exit_code == 0, result.stderr
    assert words in " ".join(result.stdout.split())
    assert max(map(len, result.stdout.splitlines()[:-2])) <= 80


def test_a_long_setting_leaves_names_readable(cli, checkpoint):
    result = cli("plan", checkpoint, "--context", 500, "--memory", "600MB", *RATES,
                 "--kv", "snapkv(0.25, kernel=7, window=64)+int8(residual_length=128, sinks=64)")
    (row,) = [line for line in result.stdout.splitlines() if line.startswith("→")]
    assert len(row) <= 80 and row.split()[1] == "int8" and "sinks=64)" in row


def test_json_is_one_value_with_nothing_beside_it(cli):
    result = cli(*BIG, "--memory", "16GB", *RATES, "--json", "--recipe", "none", "--recipe", "int8")
    assert json.loads(result.stdout)["model"] == "synthetic:llama-8b" and result.stderr == ""


def test_it_recommends_what_the_readme_recommends(cli_json):
    """4 bits is what fits: the recipe that README and docs/recipes.md name for most uses."""
    plan = cli_json("plan", "synthetic:llama-8b", "--context", 4096, "--memory", "7.5GB", *RATES)
    chosen = plan["chosen"]
    known = [one for one in plan["combinations"] if one["fits"] and one["expected_kl"] is not None]
    assert min(known, key=lambda one: one["expected_kl"])["weights"] == chosen["weights"]
    assert {"int4-asym", "int5-asym", "int8-gptq"} <= {one["weights"] for one in plan["combinations"]
                                                     if one["weights_kl"] is not None}
    only = cli_json("plan", "synthetic:llama-8b", "--context", 4096, "--memory", "7.5GB", *RATES,
                    "--recipe", "int4", "--recipe", "int4-asym", "--recipe", "nf4")
    assert only["chosen"]["weights"] == "int4"
