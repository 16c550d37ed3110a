"""Loads the models of a server, in this process or in that of a replica."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from quantkit.cli.imports import collector_paused, import_large
from quantkit.cli.loading import load_model
from quantkit.cli.present import note, show_warning
from quantkit.cli.serving_plan import MemoryPlan
from quantkit.support.errors import QuantkitError
from quantkit.support.units import human_bytes

if TYPE_CHECKING:
    from quantkit.kv.spec import KVSpec
    from quantkit.runtime.engine import Engine
    from quantkit.runtime.loader import LoadedModel
    from quantkit.runtime.trace_file import TraceFile
    from quantkit.serving.app import Application
    from quantkit.serving.models import SchedulingPolicy, ServedEngine
    from quantkit.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class ServingOptions:
    """The options of ``quantkit serve-local`` that say what is served.

    Attributes:
        models, names: what is loaded, and what requests call it.
        kvs: KV settings; the first is the default.
        kv_memory, prefix_cache: bytes; ``None``: the default.
        max_itl: milliseconds.
        chat_template: Jinja text that replaces the models' own.
        strict_requests: whether requests that ask for what the server doesn't do are refused.
        bare_json_calls: whether a message that is a call as plain JSON is one.
        sharing: replicas that share the memory of this machine's CPU.
    """

    models: tuple[str, ...]
    names: tuple[str, ...]
    kvs: tuple[KVSpec, ...]
    kv_memory: int | None
    prefix_cache: int | None
    draft: str
    overcommit: bool
    max_batch: int
    max_queue: int
    scheduling_policy: SchedulingPolicy
    max_itl: float
    parse_special: bool
    revision: str | None
    dtype: str
    device: str
    verify: bool
    chat_template: str | None = None
    strict_requests: bool = False
    bare_json_calls: bool = True
    sharing: int = 1


def load_served(options: ServingOptions) -> list[ServedEngine]:
    """Load all models, with notes on stderr. The engines aren't started.

    Raises:
        QuantkitError: a model can't be loaded or doesn't fit.
    """
    from quantkit.text import rendering

    rendering.start()
    import_large("quantkit.runtime.loader")
    from quantkit.cli.serving_start import ServingStart
    from quantkit.runtime.drafting.base import parse_drafter
    from quantkit.runtime.engine import Engine, FairLock

    def take_tokenizer(start: ServingStart, tokenizer: Tokenizer) -> None:
        if options.chat_template is not None:
            tokenizer.use_template(options.chat_template)
        start.take_tokenizer(tokenizer)

    spec, drafter = options.kvs[0] if options.kvs else None, parse_drafter(options.draft)
    made = []
    with collector_paused():
        lock = FairLock()
        plan = MemoryPlan(len(options.models), kv=spec, dtype=options.dtype, max_batch=options.max_batch,
                          kv_memory=options.kv_memory, prefix_cache=options.prefix_cache,
                          overcommit=options.overcommit, sharing=options.sharing)
        for model in options.models:
            with ServingStart() as start:
                loaded = load_model(model, revision=options.revision, dtype=options.dtype,
                                    device=options.device, verify=options.verify,
                                    on_open=functools.partial(plan.add, model),
                                    on_tokenizer=functools.partial(take_tokenizer, start))
                engine = Engine(loaded, kv=spec, more_kv=options.kvs[1:], max_batch=options.max_batch,
                                max_queue=options.max_queue, memory=options.kv_memory,
                                max_itl=options.max_itl / 1000, prefix_cache=options.prefix_cache,
                                drafter=drafter, lock=lock)
                start.take_engine(engine)
                _tell(loaded, engine, drafter is not None)
            made.append((engine, loaded))
        from quantkit.serving.models import ServedEngine

        return [ServedEngine(engine, loaded, name, options.parse_special, options.scheduling_policy,
                             options.strict_requests, options.bare_json_calls)
                for (engine, loaded), name in zip(made, options.names, strict=True)]


@dataclass(frozen=True)
class Served:
    """What a server answers with.

    Attributes:
        application: over engines that run.
        chat: whether the first model has a chat template.
        announced: what ``--json`` says beside the address and the models.
    """

    application: Application
    chat: bool
    announced: dict[str, Any] = field(default_factory=dict)


def serve_here(options: ServingOptions, trace_file: TraceFile | None, **access: Any) -> Served:
    """Load the models in this process and start their engines, whose traces go to ``trace_file``.
    ``access``: who may come in, as :func:`quantkit.serving.app.create_app` takes it."""
    with collector_paused():
        models = load_served(options)
        from quantkit.serving.app import create_app
    application = create_app(models, on_ignored=note, **access)
    for model in models:
        if trace_file is not None:
            trace_file.add(model.name, model.engine)
        model.engine.start()
    return Served(application, has_chat(models[0]))


def has_chat(model: ServedEngine) -> bool:
    """Whether a model has a chat template; with a warning if it has one that can't be used."""
    try:
        return model.loaded.tokenizer.has_chat
    except QuantkitError as error:
        show_warning(f"no chat: {error.what}: {error.why}")
        return False


def _tell(loaded: LoadedModel, engine: Engine, drafts: bool) -> None:
    """Say what was loaded, and what doesn't apply to it."""
    from quantkit.runtime.engine import PREFILL_CHUNK

    note(_about(loaded, engine))
    if engine.max_itl is None:
        note(f"--max-itl doesn't apply: prompts are read {PREFILL_CHUNK} tokens at a time, because this "
             "model's results depend on how a prompt is cut")
    if engine.speculator is not None:
        note(f"drafts take {human_bytes(engine.speculator.nbytes)} beside the model")
    elif drafts:
        note("--draft doesn't apply: this model's results depend on how many tokens go through it at once")


def _about(loaded: LoadedModel, engine: Engine) -> str:
    dtype = str(loaded.dtype).removeprefix("torch.")
    cache = engine.cache
    waits = cache.residual_bytes_per_token
    return (f"loaded {loaded.label}: {human_bytes(loaded.weight_bytes)} of weights, {dtype} activations; "
            f"KV cache {cache.spec}: {human_bytes(cache.bytes_per_token)} a token, "
            f"{f'{human_bytes(waits)} until it is encoded, ' if waits else ''}"
            f"context {loaded.config.max_position_embeddings}"
            + (f"; {human_bytes(cache.allocated_bytes)} taken, for {engine.reservation.tokens:,} tokens"
               if engine.reservation is not None else ""))
