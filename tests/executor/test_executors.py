"""Executors: the same bytes wherever layers are solved, and errors that say where."""

from __future__ import annotations

import os
import shutil
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from quantkit.executor import ray as module
from quantkit.executor.base import Executor, Task, TaskNeeds
from quantkit.executor.ray import make_executor
from quantkit.quantization.recipe import CalibrationSpec
from quantkit.quantization.run import quantize
from quantkit.support.errors import QuantkitError, SourceError, SpecError, Stopped, UsageError
from quantkit.testing import tiny_model
from tests.helpers.folders import contents
from tests.helpers.processes import LOOPBACK, listening, marked

MARK = "QUANTKIT_TEST_CLUSTER"
"""What the processes of this test's cluster have in their environment."""
SMALL = CalibrationSpec(windows=4, window=32)
MIXED = """
rules:
  - {match: "*.v_proj"}
  - {match: lm_head, method: rtn, spec: {bits: 8, granularity: {strategy: channel}}}
  - {match: "*", method: rtn, spec: {bits: 4, granularity: {strategy: group, size: 32}}}
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(tiny_model(tmp_path_factory.mktemp("model") / "llama", num_hidden_layers=4))


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    path = tmp_path_factory.mktemp("recipe") / "mixed.yaml"
    path.write_text(MIXED)
    return str(path)


@pytest.fixture(scope="module")
def two():
    """A cluster of two workers on this machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    os.environ[MARK] = str(os.getpid())
    executor = module.RayExecutor(address="local", workers=2)
    yield executor
    executor.close()
    del os.environ[MARK]
    torch.set_num_threads(threads)


def fails(number: int) -> int:
    if number == 3:
        raise SpecError("layer 3 can't be", why="it is the third", next="another")
    if number == 5:
        raise ZeroDivisionError("by nothing")
    if number == 7:
        os._exit(1)
    return number * 2


def seen(name: str) -> tuple[int, str | None, bool, bool]:
    value = os.environ.get("QUANTKIT_PLUGINS")
    return torch.get_num_threads(), value, name in sys.path, os.getpid() != os.getppid()


def both(shared: torch.Tensor, own: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return own, shared


def numbers(*values: int):
    return ((f"layer {value}", (value,)) for value in values)


def test_local_work_is_done_when_its_result_is_wanted():
    taken = []
    results = Executor().map(fails, ((str(i), (taken.append(i) or i,)) for i in range(3)))
    assert taken == [] and next(results) == 0 and taken == [0]
    assert list(results) == [2, 4]


def test_an_executor_of_another_name_is_refused(model, tmp_path):
    with pytest.raises(UsageError, match="no executor is called 'rai'") as caught:
        quantize(model, "int8", tmp_path / "out", executor="rai")
    assert "'ray'" in caught.value.why and not (tmp_path / "out.partial").exists()
    assert type(make_executor("local", torch.device("cpu"))) is Executor


def test_a_cluster_and_a_gpu_are_refused_together():
    with pytest.raises(UsageError, match="--executor ray doesn't go with --device cuda"):
        make_executor("ray", torch.device("cuda"))


def test_without_ray_the_remedy_is_named(model, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(QuantkitError, match="needs Ray") as caught:
        quantize(model, "int8", tmp_path / "out", executor="ray")
    assert caught.value.next == 'pip install ray' and not (tmp_path / "out.partial").exists()


@pytest.mark.skipif(not Path("/proc/net/tcp6").exists(), reason="sockets are read from Linux's /proc")
def test_a_cluster_of_this_machine_listens_on_its_loopback_address_only(two):
    addresses = listening(marked(MARK, str(os.getpid())))
    assert len(addresses) > 3 and set(addresses) <= LOOPBACK


def test_results_come_in_order_and_only_some_work_is_taken_ahead(two):
    taken = []
    results = two.map(fails, ((str(i), (taken.append(i) or i,)) for i in range(0, 40, 2)))
    assert next(results) == 0 and len(taken) <= 3
    assert list(results) == [2 * i for i in range(2, 40, 2)]


def test_tensors_travel_as_they_are(two):
    values = torch.randn(300, 200, generator=torch.Generator().manual_seed(0))
    for given in (values, values.to(torch.bfloat16), values.to(torch.float8_e4m3fn), values.T):
        shared = two.put(given)
        results = two.map(both, ((str(i), (shared, torch.tensor(i))) for i in range(3)))
        for i, (own, found) in enumerate(results):
            assert int(own) == i and own.shape == ()
            assert (found.dtype, found.shape) == (given.dtype, given.shape)
            assert torch.equal(found.float(), given.float())
    (empty, _), = two.map(both, [("none", (shared, torch.empty(0, 3)))])
    assert empty.shape == (0, 3)


def test_workers_are_set_up_as_the_driver_is(two):
    found = set(two.map(seen, [("a", (sys.path[0],)), ("b", (sys.path[0],))]))
    assert found == {(1, "", True, True)}


def test_an_error_of_the_work_is_raised_here_as_it_is(two):
    with pytest.raises(SpecError, match="layer 3 can't be") as caught:
        list(two.map(fails, numbers(1, 2, 3, 4)))
    assert (caught.value.why, caught.value.next) == ("it is the third", "another")
    with pytest.raises(QuantkitError, match="layer 5 failed on a worker") as caught:
        list(two.map(fails, numbers(4, 5, 6)))
    assert caught.value.why == "ZeroDivisionError: by nothing"


def test_a_worker_that_dies_names_the_layer(two):
    with pytest.raises(QuantkitError, match="layer 7: its worker ended") as caught:
        list(two.map(fails, numbers(6, 7, 8)))
    assert "resumes" in caught.value.next
    assert list(two.map(fails, numbers(8))) == [16], "the cluster goes on"


def test_more_threads_than_any_worker_has_are_refused(two, monkeypatch):
    monkeypatch.setattr(two, "_threads", 64)
    with pytest.raises(QuantkitError, match="no worker of the cluster has 64 CPUs") as caught:
        list(two.map(fails, numbers(1)))
    assert "OMP_NUM_THREADS=2 " in caught.value.next


def dies_once(folder: str, number: int) -> int:
    """The process of the first attempt at task 1 ends as if it had been killed."""
    tried = Path(folder) / "tried"
    if number == 1 and not tried.exists():
        tried.touch()
        os._exit(9)
    return 10 * number


def test_a_task_whose_worker_is_lost_is_done_again(two, tmp_path):
    tasks = [Task(f"task {number}", (str(tmp_path), number)) for number in range(4)]
    assert dict(two.as_completed(dies_once, tasks)) == {0: 0, 1: 10, 2: 20, 3: 30}
    assert (tmp_path / "tried").exists()


def waits_for(path):
    for _ in range(1200):
        if not path or Path(path).exists():
            return True
        time.sleep(0.05)
    return False


def test_tasks_come_as_they_are_done_and_know_their_numbers(two, tmp_path):
    results = two.as_completed(waits_for, [Task("first", (str(tmp_path / "go"),)), Task("second", ("",))])
    assert next(results) == (1, True)
    (tmp_path / "go").touch()
    assert list(results) == [(0, True)]
    assert [number for number, _ in Executor().as_completed(sleeps, [Task("", (0.0,))] * 2)] == [0, 1]


def test_what_is_timed_is_alone(two):
    """Two tasks with a CPU each run beside each other; two that must be alone don't."""
    def spans(alone):
        tasks = [Task(str(number), (0.6,), TaskNeeds(alone=alone)) for number in range(2)]
        (first, second) = sorted(span for _, span in two.as_completed(sleeps, tasks))
        return second[0] < first[1]

    assert spans(False) and not spans(True)


def sleeps(seconds: float) -> tuple[float, float]:
    begin = time.time()
    time.sleep(seconds)
    return begin, time.time()


def test_a_task_that_cannot_be_done_is_named(two):
    with pytest.raises(SpecError, match="layer 3"):
        list(two.as_completed(fails, [Task("task 3", (3,))]))


def test_a_data_free_run_gives_the_same_bytes(two, model, mixed, tmp_path):
    for name in (mixed, "nf4"):
        here = quantize(model, name, tmp_path / f"here-{Path(name).stem}")
        there = quantize(model, name, tmp_path / f"there-{Path(name).stem}", executor=two)
        assert contents(here.out) == contents(there.out) and there.rows == here.rows


@pytest.mark.parametrize("importance", ["gradient", "equal"])
def test_a_calibrated_run_gives_the_same_bytes(two, model, tmp_path, importance):
    spec = SMALL.model_copy(update={"importance": importance})
    here = quantize(model, "int4", tmp_path / "here", calibration=spec)
    there = quantize(model, "int4", tmp_path / "there", calibration=spec, executor=two)
    assert contents(here.out) == contents(there.out)


def test_a_stopped_run_goes_on_with_another_executor(two, model, mixed, tmp_path):
    whole = contents(quantize(model, mixed, tmp_path / "whole").out)

    def stop(event):
        if event.label == "layer 2":
            raise KeyboardInterrupt

    with pytest.raises(Stopped, match="2 of 5 units are kept"):
        quantize(model, mixed, tmp_path / "out", progress=stop, executor=two)
    result = quantize(model, mixed, tmp_path / "out", executor=two)
    assert result.resumed == 2 and contents(result.out) == whole


def test_a_worker_opens_a_model_again_that_has_changed_since(two, mixed, tmp_path):
    folder = tmp_path / "model"
    for seed in (0, 1):
        tiny_model(folder, seed=seed)
        here = quantize(str(folder), mixed, tmp_path / f"here{seed}")
        there = quantize(str(folder), mixed, tmp_path / f"there{seed}", executor=two)
        assert contents(there.out) == contents(here.out)
        shutil.rmtree(folder)


def test_a_piece_needs_one_machine_with_all_its_cpus():
    """Four machines of two don't make one of four: the piece would wait for ever."""
    executor = object.__new__(module.RayExecutor)
    executor._threads, node = 4, {"Alive": True, "Resources": {"CPU": 2.0}}
    executor._ray = SimpleNamespace(cluster_resources=lambda: {"CPU": 8.0}, nodes=lambda: [node] * 4)
    with pytest.raises(QuantkitError, match="no worker of the cluster has 4 CPUs") as caught:
        list(executor.map(print, []))
    assert caught.value.next.startswith("OMP_NUM_THREADS=2 ")


def test_a_model_that_changes_under_a_worker_is_refused(two, mixed, tmp_path, monkeypatch):
    first, second = (tiny_model(tmp_path / name, seed=seed) for name, seed in (("first", 0), ("second", 1)))
    link = tmp_path / "model"
    link.symlink_to(first)

    def switch(event):
        if event.label == "layer 0":
            link.unlink()
            link.symlink_to(second)

    monkeypatch.setattr(two, "map", _after(two.map, switch, type("E", (), {"label": "layer 0"})))
    with pytest.raises(QuantkitError, match="has another model where a worker opened it"):
        quantize(str(link), mixed, tmp_path / "out", executor=two)


def _after(map_, change, event):
    def mapped(work, items):
        change(event)
        return map_(work, items)

    return mapped


def test_a_layer_that_cannot_be_solved_is_named(two, tmp_path):
    from safetensors.torch import load_file, save_file

    folder = tiny_model(tmp_path / "model", num_hidden_layers=4)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.2.mlp.up_proj.weight"][0, 0] = float("nan")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    for recipe in ("int8", "int4"):
        with pytest.raises(SourceError, match=r"model\.layers\.2\.mlp\.up_proj"):
            quantize(str(folder), recipe, tmp_path / "out", calibration=SMALL, executor=two)
        assert not (tmp_path / "out").exists()
        for path in sorted((tmp_path / "out.partial").glob("*")):
            path.unlink()
        (tmp_path / "out.partial").rmdir()


def test_a_cluster_that_is_not_there_is_named(monkeypatch):
    import ray

    monkeypatch.setattr(ray, "is_initialized", lambda: False)

    def refuse(**options):
        assert options["address"] == "10.0.0.1:6379"
        raise ConnectionError("nobody answers")

    monkeypatch.setattr(ray, "init", refuse)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    with pytest.raises(QuantkitError, match=r"can't be reached at 10\.0\.0\.1:6379") as caught:
        module.RayExecutor()
    assert caught.value.why == "nobody answers" and "--executor local" in caught.value.next
