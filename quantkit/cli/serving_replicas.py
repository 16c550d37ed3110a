"""Starts the replicas of a server and says what they loaded."""

from __future__ import annotations

import contextlib
import functools
from dataclasses import asdict, replace
from typing import Any

from quantkit.cli.imports import import_large
from quantkit.cli.present import note
from quantkit.cli.serving_models import Served, ServingOptions, load_served
from quantkit.support.paths import local_path


def serve_replicas(options: ServingOptions, replicas: int, **access: Any) -> Served:
    """Start replicas, each of which loads the models.

    Args:
        options: what is served.
        replicas: how many.
        access: who may come in, as :func:`quantkit.serving.app.create_app` takes it.

    Raises:
        QuantkitError: the cluster can't be used, or a replica can't load a model.
    """
    import_large("quantkit.serving.replicas.replica_set", "quantkit.serving.replicas.forward")
    from quantkit.executor.cluster import LOCAL, named_address
    from quantkit.serving.replicas.forward import create_replicated_app
    from quantkit.serving.replicas.replica_set import ReplicaSet

    if named_address() == LOCAL and options.device != "cuda":
        options = replace(options, sharing=replicas)
    # replicas may have another working folder
    options = replace(options, models=tuple(map(absolute_model, options.models)))
    with contextlib.ExitStack() as stack:
        started = ReplicaSet(functools.partial(load_served, options), replicas, device=options.device,
                             locked=bool(access["keys"]), tell=note)
        stack.callback(started.close)
        first = started.infos[0]
        note(first.notes.rstrip())
        threads = f"{started.threads} thread{'s' if started.threads > 1 else ''}"
        for info in started.infos:
            note(f"replica {info.id}: process {info.pid} on {info.node}, {threads}")
        announced = [{key: value for key, value in asdict(info).items() if key in ("id", "pid", "node")}
                     for info in started.infos]
        application = create_replicated_app(started, slack=max(1, options.max_batch // 2), on_ignored=note,
                                            **access)
        served = Served(application, first.chat, {"replicas": announced})
        stack.pop_all()  # from now on the application ends them
    return served


def absolute_model(model: str) -> str:
    """A local model's absolute path; another model's name as it is, even if a folder has that name."""
    from quantkit.sources.open import kind_of

    path = local_path(model)
    local = path is not None and path.exists() and kind_of(model) in ("local", "gguf")
    return str(path.absolute()) if path is not None and local else model
