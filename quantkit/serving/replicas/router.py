"""The balancer as Ray Serve asks it. The router lives in the server's process, beside the handle.

Ray Serve imports a router by its path. ``PrefixRouter`` here is made when somebody asks for it, so that this
module can be imported without Ray.
"""

from __future__ import annotations

from typing import Any

from quantkit.serving.replicas.balance import PrefixBalancer

PATH = f"{__name__}.PrefixRouter"


def __getattr__(name: str) -> Any:
    if name == "PrefixRouter":
        return _router_class()
    raise AttributeError(name)


def _router_class() -> Any:
    """The class of Ray Serve's router that sends a request to the replica that its balancer names.

    A request has the names of its prompt's blocks as the argument ``blocks``. The deployment's
    ``request_router_kwargs`` are the balancer's arguments.
    """
    from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

    class PrefixRouter(RequestRouter):
        def initialize_state(self, **options: Any) -> None:
            self._balancer = PrefixBalancer(**options)

        async def choose_replicas(
                self, candidate_replicas: list[RunningReplica],
                pending_request: PendingRequest | None = None) -> list[list[RunningReplica]]:
            by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
            if not by_name:
                return []
            if pending_request is None:
                return [list(candidate_replicas)]
            request = pending_request.metadata.internal_request_id
            blocks = pending_request.kwargs.get("blocks", ())
            first = by_name.pop(self._balancer.choose(request, blocks, by_name.keys()))
            # Ray doesn't tell of the end of a request that is cancelled before it is sent
            pending_request.future.add_done_callback(
                lambda chosen: self._balancer.ended(request) if chosen.cancelled() else None)
            return [[first], *([replica] for replica in by_name.values())]

        def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID,
                              result: Any) -> None:
            self._balancer.sent(pending_request.metadata.internal_request_id, replica_id.unique_id)

        def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
            self._balancer.ended(internal_request_id)

        def update_replicas(self, replicas: list[Any]) -> None:
            super().update_replicas(replicas)
            self._balancer.keep({replica.replica_id.unique_id for replica in replicas})

    return PrefixRouter
