"""W8A8 and fp8 from the first command to the last: quantize, verify, inspect, generate, evaluate."""

from __future__ import annotations

import json

import pytest

from quantkit.quantization.run import quantize

KERNELS = {"w8a8": "cpu-w8a8", "fp8": "cpu-fp8"}
LABELS = {"w8a8": "int8 channel sym a8", "fp8": "fp8 channel a8"}


@pytest.fixture(params=KERNELS, scope="module")
def made(request, tiny, tmp_path_factory):
    """The recipe's name and the checkpoint."""
    out = tmp_path_factory.mktemp("eight") / request.param
    quantize(str(tiny), request.param, out)
    return request.param, out


def test_planned_written_verified(cli, cli_json, made, tiny):
    recipe, out = made
    plan = cli_json("quantize", tiny, "--recipe", recipe, "--out", out.parent / "no", "--dry-run")
    stored = json.loads((out / "quantkit.json").read_text())["layers"]
    assert [row["bytes_after"] for row in plan["rows"]] == [row["bytes"] for row in stored]
    assert cli("verify", out).exit_code == 0


def test_inspected(cli, cli_json, made):
    recipe, out = made
    found = cli_json("inspect", out)
    layers = [layer for layer in found["layers"] if layer["method"]]
    assert {layer["spec"]["activations"] for layer in layers} == {"token"}
    assert {layer["kernels"]["decode"]["kernel"] for layer in layers} == {KERNELS[recipe]}
    shown = cli("inspect", out)
    assert LABELS[recipe] in shown.output and max(map(len, shown.output.splitlines())) <= 80


def test_generated_and_measured(cli_json, made, tiny):
    recipe, out = made
    text = cli_json("generate", out, "The", "--max-tokens", 5, "--ignore-eos")
    assert text["completion_tokens"] == len(text["token_ids"]) == 5
    rows = cli_json("eval", tiny, out, "--window", 32, "--windows", 4, "--no-speed")["results"]
    assert rows[1]["method"].endswith(LABELS[recipe])
    assert 0 < rows[1]["kl_mean"] < {"w8a8": 0.01, "fp8": 0.1}[recipe] and rows[1]["top1"] > 0.8
