"""Every kernel compiled for every target, without a GPU: no spills, wide loads, tensor cores."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from quantkit_kernels.tools import aot
from quantkit_kernels.tools.cases import aot_cases
from quantkit_kernels.tools.cases.case import FAMILIES


def run(*arguments):
    """In a process of its own: in this one kernels are interpreted."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    return subprocess.run([sys.executable, "-m", "quantkit_kernels.tools.aot", *arguments], env=environment,
                          capture_output=True, text=True, timeout=3600)


@pytest.mark.slow
@pytest.mark.parametrize("only", [  # `make aot` compiles all
    "rope int8 d128 n1", "argmax peak fp16",
    *(pytest.param(only, marks=pytest.mark.slow)
      for only in ("w4a16 g128 m16", "nf4 m64", "decode d64 int4", "fp4 a4 m16"))])
def test_some_kernels_on_all_targets(only):
    done = run("--json", "--only", only)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert {row["target"] for row in json.loads(done.stdout)} == set(FAMILIES)


@pytest.mark.slow
def test_all_kernels_on_all_targets():
    done = run("--json")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    rows = json.loads(done.stdout)
    assert len(rows) == sum(len(list(aot_cases(target))) for target in FAMILIES) > 150
    assert all(row["spills"] == 0 and not row["faults"] for row in rows)
    assert all(row["matrix"] and row["widest"] == 128 for row in rows
               if "a16" in row["kernel"] and row["kernel"].split()[0] not in ("embed", "dequantize"))


@pytest.mark.parametrize("target", FAMILIES)
def test_a_case_gives_a_kernel_all_of_its_arguments(target):
    for case in aot_cases(target):
        assert {*case.signature, *case.constants} == set(case.kernel.arg_names), case.name


@pytest.mark.parametrize("target", FAMILIES)
def test_names_are_unique_and_short(target):
    names = [case.name for case in aot_cases(target)]
    assert len(set(names)) == len(names) and max(map(len, names)) <= 28


def test_the_table_is_narrow_and_shows_faults():
    good = aot.AotRow("w4a16 g128 zp m2048 fp16", "gfx942", 255, 1000, 232448, 128, True, 10.25, (),
                      (125, 24))
    bad = aot.AotRow("x" * 28, "sm_100", None, None, None, None, None, None, ("Error: " + "long " * 40,))
    text = aot.table([good, bad])
    assert max(map(len, text.splitlines())) <= 80
    assert "10.25 125+24" in text and "failed" in text and "! Error: long" in text


def test_nothing_to_compile_is_a_failure(monkeypatch, capsys):
    assert aot.main(["--only", "no such kernel"]) == 1
    assert capsys.readouterr().out.startswith("kernel")
