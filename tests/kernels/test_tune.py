"""Tuned launch parameters: what is written is read, what is odd is refused, only what is faster counts."""

from __future__ import annotations

import json
import time
from dataclasses import replace

import pytest
import torch

from quantkit_kernels import tuned
from quantkit_kernels.tools import tune
from quantkit_kernels.tools.cases import product_cases
from quantkit_kernels.tools.cases.case import REHEARSAL, BenchCase, BenchSetup
from quantkit_kernels.tuned import ProductKey, TunedEntry

KEY = ProductKey("int4 symmetric", 4096, 4096, 128)
GPU = "NVIDIA H200"
CUDA = torch.device("cuda", 0)


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """Where files are looked for; the GPU is an H200."""
    monkeypatch.setenv(tuned.VARIABLE, str(tmp_path))
    monkeypatch.setattr(tuned, "_name", lambda index: GPU)
    tuned._load.cache_clear()
    yield tmp_path
    tuned._load.cache_clear()


def test_what_is_written_is_found(folder):
    assert tuned.lookup(CUDA, *vars(KEY).values(), 1) is None
    tuned._load.cache_clear()
    table = {KEY: TunedEntry(4, {16: {"bm": 16, "warps": 4, "stages": 5}, 64: {"stages": 2}}),
             ProductKey("int8 row", 128, 64, 0): TunedEntry(None, {16: {}})}
    tuned.write(folder / "h200.json", GPU, {"torch": "2"}, table)
    assert tuned.read(folder / "h200.json", GPU) == table and len(list(folder.iterdir())) == 1

    def found(m, key=KEY):
        return tuned.lookup(CUDA, key.kernel, key.n, key.k, key.group, m)

    assert found(1) == found(16) == {"segments": 4, "bm": 16, "warps": 4, "stages": 5}
    assert found(33) == found(64) == {"segments": 4, "stages": 2}
    assert found(17) == found(9999) == {"segments": 4}
    assert found(1, ProductKey("int8 row", 128, 64, 0)) == {} and found(1,
                                                                        ProductKey("int8 row", 128, 65,
                                                                                   0)) is None
    assert tuned.lookup(torch.device("cpu"), *vars(KEY).values(), 1) is None


def test_names():
    assert tuned.file_name(GPU) == "h200.json"
    assert tuned.file_name("NVIDIA A100-SXM4-80GB") == "a100_sxm4_80gb.json"
    assert tuned.file_name("AMD Instinct MI300X") == "instinct_mi300x.json"
    assert "/" not in tuned.file_name("../../x")

    def decode_int4():
        pass

    assert tuned.kernel_name(decode_int4, "symmetric") == KEY.kernel
    assert [tuned.bucket(m) for m in (1, 16, 17, 256, 257, 5000)] == [16, 16, 32, 256, 2048, 2048]


def test_files_that_ship_are_read():
    for file in next(reversed(list(tuned.folders()))).glob("*.json"):
        device = json.loads(file.read_text())["device"]
        assert tuned.file_name(device) == file.name and tuned.read(file, device)


GOOD = {"kernel": "a", "n": 1, "k": 2, "group": 0, "segments": 1, "rows": {"16": {"bm": 16}}}


@pytest.mark.parametrize(("change", "why"), [
    ({"segments": 0}, "segments is 0"), ({"segments": True}, "segments is True"), ({"n": 1.5}, "n is 1.5"),
    ({"kernel": 3}, "name"), ({"rows": {"17": {}}}, "'17' rows"), ({"rows": {"16": {"bm": 17}}}, "bm is 17"),
    ({"rows": {"16": {"threads": 1}}}, "nothing else"), ({"more": 1}, "nothing else"),
    ({"rows": []}, "object")])
def test_what_is_odd_is_refused(folder, change, why):
    file = folder / "h200.json"

    def put(products, device=GPU):
        file.write_text(json.dumps({"device": device, "made": {}, "products": products}))

    put([GOOD])
    assert len(tuned.read(file, GPU)) == 1
    put([GOOD | change])
    with pytest.raises(ValueError, match=rf"h200\.json: .*{why}"):
        tuned.lookup(CUDA, *vars(KEY).values(), 1)
    put([GOOD, GOOD])
    with pytest.raises(ValueError, match="twice"):
        tuned.read(file, GPU)
    put([GOOD], "NVIDIA H100")
    with pytest.raises(ValueError, match="'NVIDIA H100'"):
        tuned.read(file, GPU)
    file.write_text("{")
    with pytest.raises(ValueError, match="h200"):
        tuned.read(file, GPU)


class Kernel:
    """A product whose time is a function of its parameters, and some of which can't be had."""

    def __init__(self):
        self.spilled = 0
        self.now = {}

    def case(self, m, **about):
        def ours(at):
            self.now = tuned.lookup(CUDA, *vars(KEY).values(), m)
            if self.now.get("stages") == 6:
                raise RuntimeError("out of resource")
            self.spilled += self.now.get("warps") == 8
            wrong = 1.0 * (self.now.get("bm") == 32) + 1e-3 * self.now.get("segments", 1)
            return torch.ones(3) + wrong

        return BenchCase(**{"kernel": "w4a16", "shape": f"o m{m}", "ours": ours, "theirs": ours,
                            "baseline": "", "bytes": 1, "their_bytes": 1, "flops": 1, "copies": 2,
                            "their_copies": 2, "tolerance": 0.02} | about)

    def timer(self, run, copies, calls):
        run(1)
        now = dict(self.now)
        seconds = 8.0 / min(now.get("segments", 2), 4) + (now.get("stages", 4) - 3) ** 2
        return lambda: seconds - 0.5 * (now.get("warps") == 8) - 0.5 * (now.get("bm", 16) > 16)

    def spills(self):
        found, self.spilled = self.spilled, 0
        return found


@pytest.mark.parametrize("content,why", [
    ("[" * 100_000, "recursion"), ("{}" + " " * 17 * 2**20, "bytes"),
    ('{"device": 1e999, "made": {}, "products": []}', "it is of inf"),
])
def test_a_hostile_file_is_named(folder, content, why):
    (folder / "h200.json").write_text(content)
    with pytest.raises(ValueError, match=why) as caught:
        tuned.read(folder / "h200.json", GPU)
    assert str(folder / "h200.json") in str(caught.value)


def test_only_what_is_faster_equal_and_without_spills_counts():
    kernel, table = Kernel(), {}
    lines = list(tune.tune([kernel.case(1), kernel.case(64)], table, kernel.timer, kernel.spills,
                           time.monotonic() + 60))
    assert table == {KEY: TunedEntry(4, {16: {"stages": 3}, 64: {"bm": 64, "warps": 4, "stages": 3}})}
    assert len(lines) == 2 and "segments 4" in lines[0] and lines[0].endswith(" x")
    assert list(tune.tune([kernel.case(1)], table, kernel.timer, kernel.spills, time.monotonic() + 60)) == []


def test_it_stops_in_time_and_keeps_what_is_whole():
    kernel, table = Kernel(), {}
    assert list(tune.tune([kernel.case(1)], table, kernel.timer, kernel.spills, 0)) == [] and not table
    silent = kernel.case(1, ours=lambda at: torch.ones(1))
    assert "asks for no" in next(tune.tune([silent], table, kernel.timer, kernel.spills, 0))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(capsys):
    assert tune.main([]) == 2 and "No GPU" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(tune, "machine", lambda device: {"gpu": GPU})
    assert tune.main(["--folder", str(tmp_path / "no")]) == 2
    assert tuned.VARIABLE in capsys.readouterr().err


def test_what_was_measured_is_kept_when_it_is_stopped(monkeypatch, capsys, tmp_path):
    kernel = Kernel()

    def cases(*given):
        yield kernel.case(1)
        raise KeyboardInterrupt

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    about = dict.fromkeys(("date", "torch", "triton"), "1") | {"gpu": GPU}
    monkeypatch.setattr(tune, "machine", lambda device: about)
    monkeypatch.setattr(tune, "graph_timer", kernel.timer)
    monkeypatch.setattr(tune, "spills_of", lambda kernels: kernel.spills)
    monkeypatch.setattr(tune, "product_cases", cases)
    assert tune.main(["--folder", str(tmp_path)]) == 130
    assert tuned.read(tmp_path / "h200.json", GPU) == {KEY: TunedEntry(4, {16: {"stages": 3}})}
    assert "Stopped" in (said := capsys.readouterr()).err and "segments 4" in said.out


def test_one_row_of_every_product_comes_first():
    """A run that is stopped has measured decoding for all shapes, not all rows of one."""
    shapes = replace(REHEARSAL, linears=(("o", 200, 128), ("down", 130, 128)), rows=(1, 16), flush=1)
    found = [case.shape for case in product_cases(
        BenchSetup(shapes, torch.device("cpu"), torch.float16))]
    half = len(found) // 2
    assert set(found[:half]) == {"o m1", "down m1"} and set(found[half:]) == {"o m16", "down m16"}


def test_segments_are_kept_of_a_product_that_time_runs_out_on(monkeypatch, tmp_path, capsys):
    def late(cases, table, *rest):
        table[KEY] = TunedEntry(4)
        yield from ()

    monkeypatch.setattr(tune, "tune", late)
    assert tune.main(["--rehearse", "--folder", str(tmp_path)]) == 0
    assert "1 products in" in capsys.readouterr().out
    assert tuned.read(tmp_path / "no_gpu.json", "no GPU") == {KEY: TunedEntry(4)}
