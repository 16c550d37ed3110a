"""The balancer as Ray Serve asks it. The router lives in the server's process, beside the handle."""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from quantkit.serve.replicas.balance import PrefixBalancer


class PrefixRouter(RequestRouter):
    """Sends a request to the replica that its balancer names.

    A request has the names of its prompt's blocks as the argument ``blocks``.
    """

    def initialize_state(self, **options: Any) -> None:
        """Called by Ray Serve with the deployment's ``request_router_kwargs``: the balancer's arguments."""
        self._balancer = PrefixBalancer(**options)

    async def choose_replicas(self, candidate_replicas: list[RunningReplica],
                              pending_request: PendingRequest | None = None) -> list[list[RunningReplica]]:
        """The replicas to try, in ranks of one: the balancer's, then all others."""
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        blocks = () if pending_request is None else pending_request.kwargs.get("blocks", ())
        if not by_name:
            return []
        first = by_name.pop(self._balancer.choose(blocks, by_name.keys()))
        return [[first], *([replica] for replica in by_name.values())]

    def on_send_request(self, replica_id: ReplicaID) -> None:
        """A request goes to a replica."""
        super().on_send_request(replica_id)
        self._balancer.began(replica_id.unique_id)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """A request is over, however it ended."""
        self._balancer.ended(replica_id.unique_id)

    def update_replicas(self, replicas: list[Any]) -> None:
        """These are the replicas from now on."""
        super().update_replicas(replicas)
        self._balancer.keep({replica.replica_id.unique_id for replica in replicas})
