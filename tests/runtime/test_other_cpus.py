"""The promises of equal bits on CPUs that this machine can imitate: smaller ones than its own.

Libraries choose their kernels by what the CPU has, and by these variables when they are loaded: so each
imitation is a process of its own, which runs the tests of the promises. What a CPU doesn't have can't be
imitated: a library then takes the best that is there.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys

import pytest

from quantkit_kernels.cpu import isa as isas

ISA = ("plain", "avx2", "avx512-vnni", "avx512-vbmi", "avx512-bf16")
ATEN = ("default", "avx2", "avx512")
ONEDNN = ("SSE41", "AVX2", "AVX512_CORE", "AVX512_CORE_VNNI", "AVX512_CORE_BF16", "AVX512_CORE_FP16",
          "AVX512_CORE_AMX")
OPENBLAS = ("Nehalem", "Haswell", "Zen", "SkylakeX", "Cooperlake", "Sapphirerapids")
"""Values of QUANTKIT_ISA, ATEN_CPU_CAPABILITY, ONEDNN_MAX_CPU_ISA and OPENBLAS_CORETYPE, least first."""
COMPANY = "tests/runtime/test_engine_company.py"
ROWS = "tests/ops/test_linear.py"
PROMISES = (COMPANY, ROWS, "tests/ops/test_attention.py", "tests/ops/test_rotation.py",
            "tests/kernels/cpu/test_matmul.py", "tests/kernels/cpu/test_attention.py",
            "tests/kernels/cpu/test_waiting.py", "tests/kernels/cpu/test_rows.py")
TILES = ("tests/kernels/test_w8a16.py", "tests/kernels/test_fp8.py", "tests/kernels/test_w16a16.py",
         "tests/kernels/test_batch_invariance.py", "tests/kernels/test_prefill_attention.py")
"""Where Triton's interpreter multiplies by NumPy's library."""


def imitate(root, tests, isa="", aten="", onednn="", openblas="", only=""):
    """Run tests in a process that takes this machine for another; ``""``: as it is."""
    known = {one.name: one for one in isas.ALL}
    if isa and (lacking := isas.missing(known[isa], isas.host_features())):
        pytest.skip(f"this CPU lacks {', '.join(lacking)}")
    variables = {"QUANTKIT_ISA": isa, "ATEN_CPU_CAPABILITY": aten, "ONEDNN_MAX_CPU_ISA": onednn,
                 "OPENBLAS_CORETYPE": openblas}
    environment = {name: value for name, value in os.environ.items()
                   if name not in variables and not name.startswith("PYTEST_")}
    environment |= {name: value for name, value in variables.items() if value} | {"OMP_NUM_THREADS": "2"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "not slow and not gpu",
         *(["-k", only] if only else []), *tests],
        cwd=root, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "passed" in done.stdout or "[100%]" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(("isa", "aten", "onednn", "openblas"), [
    ("plain", "default", "SSE41", "Nehalem"), ("avx2", "avx2", "AVX2", "Haswell"),
    ("avx512-vnni", "avx512", "AVX512_CORE", "SkylakeX")], ids=["sse4", "avx2", "avx512"])
def test_a_request_and_a_row_get_their_bits_on_a_smaller_cpu(root, isa, aten, onednn, openblas):
    imitate(root, (COMPANY, ROWS), isa, aten, onednn, openblas,
            "(any_company and (qwen3_moe or gemma2) and fp16) or (plain_product and 51-36)")


@pytest.mark.slow
@pytest.mark.parametrize(("isa", "aten"), [*itertools.product(ISA, ATEN)])
def test_every_promise_with_every_kernel_of_ours_and_of_torch(root, isa, aten):
    imitate(root, PROMISES, isa, aten)


@pytest.mark.slow
@pytest.mark.parametrize(("onednn", "aten"), [*itertools.product(ONEDNN, ATEN)])
def test_every_promise_with_every_kernel_of_onednn(root, onednn, aten):
    imitate(root, (COMPANY, ROWS), aten=aten, onednn=onednn)


@pytest.mark.slow
@pytest.mark.parametrize("openblas", OPENBLAS)
def test_the_interpreters_products_with_every_kernel_of_openblas(root, openblas):
    imitate(root, TILES, openblas=openblas)
