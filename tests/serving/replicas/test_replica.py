"""A replica's own side, without a cluster: an application that does as it is told."""

from __future__ import annotations

import asyncio
import pickle
from types import SimpleNamespace

import pytest
import torch

from quantkit.executor.cluster import WorkerSetup
from quantkit.runtime.core import EngineDeadError
from quantkit.serving.replicas import replica as module
from quantkit.serving.replicas.replica import MAX_MESSAGES, REPORT, ForwardedRequest, Replica
from quantkit.serving.replicas.replica_set import ReplicaLostError, ReplicaSet
from quantkit.support.errors import QuantkitError, UsageError

REQUEST = ForwardedRequest({"type": "http", "method": "POST", "path": "/v1/completions", "headers": []},
                           b"{}")


def replica(api, *models):
    """One that isn't in a process of its own."""
    made = Replica("a", WorkerSetup.of_this_process(torch.get_num_threads()), locked=False)
    made._api = api
    made._models = models
    return made


async def everything(made):
    return [message async for batch in made.answer(REQUEST) for message in batch]


def reported(messages):
    return [(error.what, error.why, error.next) for message in messages if message["type"] == REPORT
            for error in message["errors"]]


def test_an_error_that_ends_several_requests_is_told_once():
    error = QuantkitError("the engine failed", why="it divides")

    async def api(scope, receive, send):
        raise error

    async def run():
        made = replica(api)
        return [await everything(made) for _ in range(3)]

    answers = asyncio.run(run())
    assert list(map(reported, answers)) == [[("the engine failed", "it divides", None)], [], []]
    for messages in answers:
        assert next(message for message in messages if "status" in message)["status"] == 500


def test_an_application_waits_for_a_slow_reader():
    sent = []

    async def api(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for number in range(4 * MAX_MESSAGES):
            sent.append(number)
            await send({"type": "http.response.body", "body": b"x", "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def run():
        batches = replica(api).answer(REQUEST)
        count = len(await anext(batches))
        for _ in range(10 * MAX_MESSAGES):  # turns of the loop in which it could send on
            await asyncio.sleep(0)
        waiting = len(sent)
        async for batch in batches:
            count += len(batch)
        return waiting, count

    waiting, count = asyncio.run(run())
    assert MAX_MESSAGES <= waiting <= 2 * MAX_MESSAGES + 1 and count == 4 * MAX_MESSAGES + 2


def test_a_replica_whose_engine_has_ended_isn_t_healthy(monkeypatch):
    monkeypatch.setattr(module, "CHECK_SECONDS", 0)

    def die():
        raise EngineDeadError(RuntimeError("no device"))

    well, dead = (SimpleNamespace(engine=SimpleNamespace(check_alive=check)) for check in (lambda: None, die))
    asyncio.run(replica(None, well, well).check())
    with pytest.raises(QuantkitError, match="the engine has stopped") as caught:
        asyncio.run(replica(None, well, dead).check())
    assert pickle.loads(pickle.dumps(caught.value)).why == "RuntimeError: no device"
    with pytest.raises(QuantkitError, match="the engine has stopped"):
        asyncio.run(everything(replica(None, well, dead)))


def test_a_replica_whose_engine_has_ended_gets_no_more_requests():
    """Not even the one that finds out: what reads the same beginnings would choose that replica again."""
    class RayError(Exception):
        pass

    class RayTaskError(RayError):
        cause = QuantkitError("the engine has stopped")

    class ActorDiedError(RayError):
        pass

    async def refuse(request):
        raise RayTaskError
        yield

    replicas = object.__new__(ReplicaSet)
    actor = SimpleNamespace(answer=SimpleNamespace(options=lambda **_: SimpleNamespace(remote=refuse)))
    errors = SimpleNamespace(RayError=RayError, RayTaskError=RayTaskError, ActorDiedError=ActorDiedError)
    vars(replicas).update(_ray=SimpleNamespace(exceptions=errors), _ready={"a": actor, "b": actor},
                          _answering=0)
    with pytest.raises(ReplicaLostError):
        asyncio.run(anext(replicas.answer("a", REQUEST)))
    assert replicas.running == ["b"]


def test_an_error_of_loading_arrives_with_all_its_parts():
    """Whatever its class is: the server's process may not have it."""
    class OfPluginError(UsageError):
        def __init__(self):
            super().__init__("the model isn't there", why=why, next="ls")

    why = "no such folder: \"ä\"\n"

    def load():
        raise OfPluginError

    with pytest.raises(QuantkitError) as caught:
        asyncio.run(replica(None).load(load))
    arrived = pickle.loads(pickle.dumps(caught.value))
    assert type(arrived) is QuantkitError and arrived.exit_code == UsageError.exit_code
    assert (arrived.what, arrived.why, arrived.next) == ("the model isn't there", why, "ls")
