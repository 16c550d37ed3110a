"""Waits until a cluster has started all replicas of an application."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from quantkit.serving.replicas.failure import carried_error
from quantkit.support.errors import QuantkitError

LIMIT = 300.0
"""Seconds that replicas may wait for a place on the cluster while no other one becomes ready."""
POLL = 0.2
"""Seconds between two looks."""
NO_PLACE = "to be scheduled"
"""In Ray Serve's message about replicas that have no place; those that load their models say another."""


def wait_until_running(status: Callable[[], Any], needs: str, option: str, tell: Callable[[str], None],
                       check: Callable[[], None], *, clock: Callable[[], float] = time.monotonic,
                       pause: Callable[[float], None] = time.sleep) -> None:
    """Wait until an application runs. Loading may take as long as it does, waiting for a place may not.

    Args:
        status: of the application, as Ray Serve tells it.
        needs: what each replica needs, in words.
        option: that asks for replicas.
        tell: is told what is waited for.
        check: raises what is to end the wait.
        clock, pause: tell seconds and let them pass.

    Raises:
        QuantkitError: a replica can't be started, or there is no place for it.
    """
    ready, since = 0, None
    while True:
        check()
        application = status()
        state = str(getattr(application.status, "value", application.status))
        if state == "RUNNING":
            return
        deployments = application.deployments.values()
        messages = "\n".join(each.message for each in deployments)
        if state != "DEPLOYING":
            raise carried_error(messages) or QuantkitError(
                "a replica can't be started", why=last_line(messages or application.message),
                next=f"the same command without {option} shows more")
        running = sum(each.replica_states.get("RUNNING", 0) for each in deployments)
        if NO_PLACE not in messages or running > ready:
            since = None
        elif since is None:
            since = clock()
            tell(f"waiting for {needs}: the cluster has no place for some replicas; ready: {running}")
        elif clock() - since > LIMIT:
            raise QuantkitError(f"some replicas found no place within {LIMIT / 60:g} minutes",
                                why=f"each needs {needs}, and others use the cluster",
                                next=f"ray status\nor fewer {option}")
        ready = running
        pause(POLL)


def last_line(text: str) -> str | None:
    """The last line of a message, shortened."""
    return text.strip().rpartition("\n")[2][:300] or None
