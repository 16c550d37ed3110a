"""The benchmark: both sides of every row compute the same, and what goes wrong is said and kept."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import numpy
import pytest
import torch

from quantkit_kernels.tools import bench, cases
from quantkit_kernels.tools.bench_peers import PeerKernel, Peers, PeerWeight
from quantkit_kernels.tools.cases.case import BenchSetup, ModelShapes
from quantkit_kernels.triton.read import BLOCK, read

TINY = ModelShapes((("o", 200, 128), ("head", 130, 128)), (1, 20, 65), ((1, 70), (2, 130)), 4, 2, 32,
                   flush=40000)


ABOUT = {"gpu": "none", "date": "2030-01-01T00", "torch": "2", "triton": "3", "copy_bytes_per_second": 1e12,
         "read_bytes_per_second": 2e12, "matmul_flops": 3e14}
CEILINGS = bench.GpuCeilings(read=2e12, copy=1e12)


def fixed(seconds):
    """A timer by which everything takes so long; it runs every copy once."""
    def timer(run, copies, calls):
        assert calls >= copies and calls % copies == 0
        for at in range(1, copies):
            run(at)
        return lambda: seconds

    return timer


ONCE = pytest.mark.parametrize("on", [
    "interpreter-float32", pytest.param("cuda-bfloat16", marks=pytest.mark.gpu)], indirect=True)
"""For what doesn't depend on the dtype."""


@pytest.fixture
def small(on):
    """``small(kinds=module)``: the cases of that module alone, which spares making the others."""
    return lambda kinds=cases, **change: kinds.bench_cases(BenchSetup(replace(TINY, **change), *on))


@pytest.mark.slow
def test_both_sides_compute_the_same(small, on):
    if on[1] == torch.float16 and on[0].type == "cpu":
        pytest.skip("once is enough in the interpreter, where it takes a minute")
    found = [bench.measure(case, fixed(1e-6), CEILINGS, 3) for case in small()
             if (case.kernel, case.shape) != ("sample", "m20")]  # takes long in the interpreter
    assert [row.fault for row in found] == [None] * len(found)
    assert {row.kernel for row in found} == {
        "w16a16", "w4a16 g128", "w4a16 g64", "w4a16 g128 zp", "w8a16", "fp8", "nf4 b64", "w8a8", "fp8 by fp8",
        "rms_norm add", "rms_norm int8", "quantize int8", "hadamard", "rope", "rope int8", "close int4",
        "attention", "attention int8", "attention fp8", "attention int4", "attention hadamard4", "prefill",
        "prefill int8", "argmax", "sample", "gptq", "iq4 g32", "mxfp4 g32", "mxfp4 by mxfp4", "nvfp4 g16",
            "nvfp4 by nvfp4", "trellis4", "trellis3", "trellis2"}
    assert all(row.speedup == (1, 1, 1) for row in found)
    assert "head m65" not in {row.shape for row in found} and "o m65" in {row.shape for row in found}


def test_bytes_that_must_be_read(small):
    sizes = {(case.kernel, case.shape): (case.bytes, case.their_bytes) for case in small(rows=(1,))}
    half = next(small()).ours(0).element_size()
    moved = (128 + 200) * half
    assert sizes["w8a8", "o m1"][0] == 256 * 128 + 4 * 256 + 128 + 200 * half
    assert sizes["w4a16 g128", "o m1"] == (256 * 64 + 4 * 256 + moved, 200 * 128 * half + moved)
    assert sizes["attention int8", "b2 130"] == (2 * 2 * 130 * 2 * 34 + 2 * 2 * 128 * half,
                                                 2 * 2 * 130 * 2 * 32 * half + 2 * 2 * 128 * half)


@ONCE
def test_a_wrong_or_failing_kernel_is_said_and_the_others_go_on(small, tmp_path, capsys):
    first, second, third = (case for case in small(kinds=cases.rows) if case.kernel == "rms_norm add")

    def fails(at):
        raise RuntimeError("out of memory\nmore")

    every = [replace(first, ours=lambda at: first.ours(at) * 1.1), replace(second, ours=fails), third]
    file = tmp_path / "found.json"
    rows = bench.bench(every, fixed(1e-6), CEILINGS, 3, bench.BenchReport(ABOUT, file, tmp_path / "found.md"))
    assert [row.fault is None for row in rows] == [False, False, True]
    assert "differs from torch's by 0.1" in rows[0].fault and rows[1].fault == "RuntimeError: out of memory"
    text = capsys.readouterr().out
    assert "RuntimeError: out of memory" in text and len(text.splitlines()) == 5
    found = json.loads(file.read_text())
    assert found["gpu"] == "none" and [row["fault"] for row in found["rows"]] == [row.fault for row in rows]
    assert {one.name for one in tmp_path.iterdir()} == {"found.json", "found.md"}
    table = (tmp_path / "found.md").read_text()
    assert table.startswith("none, 2030-01-01") and table.count("\n| ") == 4 and "read: 2.00 TB/s" in table


@ONCE
def test_what_is_written_to_pages_is_compared(small):
    case = next(case for case in small(kinds=cases.kv_write) if case.kernel == "rope int8")
    mine, other = case.check()
    row = bench.measure(replace(case, check=lambda: (mine * 1.1, other)), fixed(1), CEILINGS, 1)
    assert len(other) > case.ours(0).numel() and "differs" in row.fault


@ONCE
def test_a_case_that_cannot_be_made_ends_it_with_a_fault(small):
    def every():
        yield next(case for case in small(kinds=cases.rows) if case.kernel == "rms_norm add")
        raise torch.OutOfMemoryError("no memory")

    rows = bench.bench(every(), fixed(1), CEILINGS, 1, bench.BenchReport(ABOUT))
    assert [row.fault for row in rows] == [None, "not measured: OutOfMemoryError: no memory"]
    assert rows[0].of_read is rows[0].of_copy is None and "cached" in bench.line(rows[0])


@ONCE
def test_each_row_is_kept_as_soon_as_it_is_measured(small, tmp_path):
    file = tmp_path / "found.json"

    def stopped():
        yield next(case for case in small(kinds=cases.rows) if case.kernel == "rms_norm add")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bench.bench(stopped(), fixed(1), CEILINGS, 1, bench.BenchReport(ABOUT, file))
    assert len(json.loads(file.read_text())["rows"]) == 1


@ONCE
def test_the_most_important_rows_are_first(small):
    found = [f"{case.kernel} {case.shape}" for case in small(rows=(2, 1, 300, 16))]
    wanted = ["w4a16 g128 o m1", "attention b1 70", "nf4 b64 o m16", "w8a16 o m2", "rms_norm add m300",
              "w4a16 g128 o m300"]
    assert [one for one in found if one in wanted] == wanted


def test_it_stops_in_time(small, tmp_path, capsys):
    report = bench.BenchReport(ABOUT, tmp_path / "found.json")
    assert bench.bench(small(), fixed(1), CEILINGS, 1, report, deadline=0) == []
    assert "out of time: w16a16 o m1" in json.loads(report.file.read_text())["notes"][0]


def peers_of(on, weight=None, **change):
    """One that is there, and whose weights are torch's; one that isn't."""
    def dense(setup, n, k):
        made = setup.normal(n, k)
        return PeerWeight(made.clone, made, 4000, torch.nn.functional.linear)

    there = PeerKernel("there", "w8a16", (1, 20), "torch", weight or dense)
    return Peers(BenchSetup(TINY, *on), (replace(there, **change),
                             PeerKernel("gone", "w8a16", (1,), "no_such_module", dense)))


@ONCE
def test_peers_take_turns_too(small, on, tmp_path):
    peers = peers_of(on)
    report = bench.BenchReport(ABOUT, tmp_path / "found.json", tmp_path / "found.md", peers)
    rows = bench.bench((case for case in small(kinds=cases.products) if case.kernel == "w8a16"),
                       fixed(1e-6), CEILINGS, 3, report)
    assert {row.shape: set(row.peers) for row in rows} == {
        "o m1": {"there"}, "o m20": {"there"}, "o m65": set(), "head m1": {"there"}, "head m20": {"there"}}
    assert rows[0].peers["there"] == (pytest.approx(1), 1) and "there 1 |" in bench.line(rows[0])
    assert json.loads(report.file.read_text())["notes"] == ["gone left out: no_such_module is not installed"]
    assert "- gone left out" in report.markdown.read_text()


@ONCE
def test_a_peer_that_fails_is_no_fault(small, on):
    def broken(setup, n, k):
        raise RuntimeError("not on this GPU\nmore")

    def wrong(setup, n, k):
        made = setup.normal(n, k)
        return PeerWeight(made.clone, 2 * made, 4000, torch.nn.functional.linear)

    for weight, why in ((broken, "o m1: RuntimeError: not on this GPU"), (wrong, "differs from torch's")):
        peers = peers_of(on, weight)
        found = [bench.measure(case, fixed(1), CEILINGS, 1, peers)
                 for case in small(kinds=cases.products, rows=(1,)) if case.kernel == "w8a16"]
        assert all(row.fault is None and not row.peers for row in found) and why in peers.left_out["there"]


def test_the_copy_counts_both_ways(on):
    assert bench.copy_bandwidth(fixed(0.5), 3, on[0], size=100) == 400
    assert bench.read_bandwidth(fixed(0.5), 3, on[0], size=100) == 200
    assert bench.matmul_flops(fixed(0.5), 3, BenchSetup(TINY, *on), size=10) == 4000


def test_the_read_reaches_every_word(on):
    words = torch.randint(-2**31, 2**31 - 1, (BLOCK + 70,), device=on[0]).to(torch.int32)
    wanted = [int(numpy.bitwise_xor.reduce(part.cpu().numpy())) for part in words.split(BLOCK)]
    assert read(words).tolist() == wanted


def test_it_needs_torch_and_triton_only():
    """In a process where nothing else of what quantkit installs can be imported."""
    missing = ("quantkit", "pydantic", "ruamel", "rich", "rich_click", "gguf", "fastapi", "scipy", "llvmlite",
               "huggingface_hub", "jinja2", "transformers")
    code = (f"import sys; sys.modules.update(dict.fromkeys({missing}))\n"
            "import pkgutil, importlib\n"
            "for name in ('tools', 'tools.cases', 'triton'):\n"
            "    whole = importlib.import_module('quantkit_kernels.' + name)\n"
            "    for one in pkgutil.iter_modules(whole.__path__, whole.__name__ + '.'):\n"
            "        importlib.import_module(one.name)")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_what_it_needs(capsys):
    assert bench.main([]) == 2
    assert "CUDA and ROCm" in (err := capsys.readouterr().err) and "quantkit_kernels.tools.aot" in err


@pytest.mark.gpu
def test_on_a_gpu(tmp_path, capsys):
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    assert bench.main(["--quick", "--only", "o m1", "--json", str(tmp_path / "found.json")]) == 0
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["copy_bytes_per_second"] > 1e11 and all(row["ours_us"] > 0 for row in found["rows"])
    assert bench.main(["--json", str(tmp_path / "no" / "found.json")]) == 2
