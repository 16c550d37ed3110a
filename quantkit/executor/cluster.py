"""The Ray cluster that work runs on, https://www.ray.io: one that is named, or one of this machine.

A cluster of this machine listens on its loopback address alone, without dashboard or usage statistics.
"""

from __future__ import annotations

import os
import warnings
from typing import Any

from quantkit.support.errors import QuantkitError

LOOPBACK, LOCAL = "127.0.0.1", "local"
ALONE = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Ray's variable that keeps it to this machine, on every system; read when Ray is imported."""
AUTO_CONNECT = "RAY_ENABLE_AUTO_CONNECT"
"""Ray's variable; with 0 a call after the end starts no cluster anew. Read when Ray is imported."""
CARRIED = ("QUANTKIT_PLUGINS", "QUANTKIT_ISA", "QUANTKIT_TASK_DATA", "GOMP_SPINCOUNT")
"""Variables that workers have as this process has them."""


def named_address() -> str:
    """The address of the cluster that ``RAY_ADDRESS`` names; ``local`` for one that is started here."""
    return os.environ.get("RAY_ADDRESS") or LOCAL


def import_ray(address: str, option: str) -> Any:
    """The package, told to stay on this machine if that is where the cluster at ``address`` is started. The
    first import decides, so that whoever needs Ray imports it here.

    Args:
        address: of the cluster.
        option: what needs Ray, as the command line has it.

    Raises:
        QuantkitError: it isn't installed.
    """
    if address == LOCAL:
        os.environ.setdefault(ALONE, "0")
    os.environ.setdefault(AUTO_CONNECT, "0")
    try:
        import ray
        import ray.exceptions
    except ImportError as error:
        raise QuantkitError(f"{option} needs Ray", why=str(error),
                            next='pip install "ray[serve]"') from error
    return ray


def connect(ray: Any, address: str, *, next: str, **local: Any) -> None:
    """Connect to a cluster, or start one.

    Args:
        ray: the package, of :func:`import_ray`.
        address: of the cluster.
        next: what a user can do where that fails.
        local: options of a cluster that is started here.

    Raises:
        QuantkitError: the cluster can't be reached or started.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    options: dict[str, Any] = {"address": address, "log_to_driver": False, "logging_level": "error"}
    if address == LOCAL:
        options |= {"include_dashboard": False, **local}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ray.init(**options)
    except Exception as error:  # of many kinds, by what is wrong with the cluster
        where = "started" if address == LOCAL else f"reached at {address}"
        raise QuantkitError(f"a Ray cluster can't be {where}", why=str(error).strip()[:300] or None,
                            next=next) from error
    if address == LOCAL and ray.util.get_node_ip_address() != LOOPBACK:
        ray.shutdown()
        raise QuantkitError("Ray would listen on the network",
                            why="it was imported before it could be told to stay on this machine",
                            next=f"set {ALONE}=0, or start a cluster of your own and set RAY_ADDRESS")


def carried_environment() -> dict[str, str]:
    """The variables that workers get from this process."""
    return {name: os.environ[name] for name in CARRIED if name in os.environ}
