"""What a replica gets of a cluster, and errors on their way from a replica."""

from __future__ import annotations

import pytest

from quantkit.errors import QuantkitError, SourceError, UsageError
from quantkit.serve.replicas.failure import LoadFailure, carried_error
from quantkit.serve.replicas.resources import takes_gpu, threads_each


@pytest.mark.parametrize(("cpus", "replicas", "threads"), [
    ([8], 2, 4), ([8, 8], 3, 4), ([8, 8, 8], 2, 8), ([2], 2, 1), ([4, 16], 3, 5), ([3, 1], 3, 1)])
def test_every_replica_has_its_threads_on_one_machine(cpus, replicas, threads):
    assert threads_each(cpus, replicas) == threads
    assert sum(number // threads for number in cpus) >= replicas


def test_fewer_cpus_than_replicas_are_refused():
    with pytest.raises(QuantkitError, match="3 replicas need as many CPUs, and the cluster has 2") as caught:
        threads_each([1, 1], 3)
    assert caught.value.next == "--replicas 2"


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
