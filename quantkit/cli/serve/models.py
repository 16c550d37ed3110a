"""Loads the models of a server, in this process or in those of replicas."""

from __future__ import annotations

import contextlib
import functools
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from quantkit.cli.loading import collector_paused, import_large, load_model
from quantkit.cli.present import note, show_warning
from quantkit.cli.serve.memory import MemoryForecast
from quantkit.support.errors import QuantkitError, UsageError
from quantkit.support.paths import local_path
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
        max_itl: the bound of the inter-token latency, in milliseconds.
        chat_template: Jinja text that replaces the models' own.
        strict_requests: whether requests that ask for what the server doesn't do are refused.
        bare_json_calls: whether a message that is a call as plain JSON is one.
        random: the recipe whose formats random weights have; ``None``: the models' own weights are loaded.
        sharing: replicas that share the memory of this machine's CPU.
    """

    models: tuple[str, ...]
    names: tuple[str, ...]
    kvs: tuple[KVSpec, ...]
    kv_memory: int | None
    prefix_cache: int | None
    draft: str
    blocks: str | None
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
    random: str | None = None
    sharing: int = 1


class ServingStart:
    """Begin it as early as possible, but after the runtime is imported: two threads that import the same
    modules would wait for each other.

    It is a context manager. At the end of its block all of it is done, or what went wrong first is raised.
    After an error nothing more is begun, and nothing is waited for.
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(2, "start")
        # what goes wrong is raised by whoever imports it next
        self._import = self._threads.submit(import_large, "quantkit.serving.app")
        self._work: list[Future[None]] = []

    def take_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Work out what the first conversation would otherwise wait for."""
        self._work.append(self._threads.submit(tokenizer.prepare))

    def take_engine(self, engine: Engine) -> None:
        """Load the machine code of the kernels that run a model, or compile it."""
        self._work.append(self._threads.submit(_load_program, engine))

    def __enter__(self) -> ServingStart:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                for work in as_completed(self._work):
                    work.result()
                self._import.exception()
        finally:
            self._threads.shutdown(wait=False, cancel_futures=True)


def _load_program(engine: Engine) -> None:
    from quantkit.runtime.cpu.model import CpuModel, codecs_of, has_kernels

    model = engine.loaded.model
    if isinstance(model, CpuModel) and model.reason_against(engine.cache) is None:
        model.program(codecs_of(engine.cache), not has_kernels(engine.cache))


def load_served(options: ServingOptions) -> list[ServedEngine]:
    """Load all models, with notes on stderr. The engines aren't started.

    Raises:
        QuantkitError: a model can't be loaded or doesn't fit.
    """
    from quantkit.text import rendering

    rendering.start()
    import_large("quantkit.runtime.loader")
    from quantkit.runtime.denoising import parse_denoising
    from quantkit.runtime.drafting.base import parse_drafter
    from quantkit.runtime.engine import Engine, FairLock
    from quantkit.support.device import find_device

    def take_tokenizer(start: ServingStart, tokenizer: Tokenizer) -> None:
        if options.chat_template is not None:
            tokenizer.use_template(options.chat_template)
        start.take_tokenizer(tokenizer)

    spec, drafter = options.kvs[0] if options.kvs else None, parse_drafter(options.draft)
    denoising = parse_denoising(options.blocks)
    engines = []
    with collector_paused():
        lock = FairLock()
        forecast = MemoryForecast(len(options.models), kv=spec, dtype=options.dtype,
                                  max_batch=options.max_batch, kv_memory=options.kv_memory,
                                  prefix_cache=options.prefix_cache, overcommit=options.overcommit,
                                  sharing=options.sharing)
        for model in options.models:
            with ServingStart() as start:
                if options.random is None:
                    loaded = load_model(model, revision=options.revision, dtype=options.dtype,
                                        device=options.device, verify=options.verify,
                                        on_open=functools.partial(forecast.add, model),
                                        on_tokenizer=functools.partial(take_tokenizer, start))
                else:
                    from quantkit.evaluation.bench.random_model import random_model

                    loaded = random_model(model, options.random, find_device(options.device), options.dtype)
                    take_tokenizer(start, loaded.tokenizer)
                ordinary = loaded.config.diffusion is None and len(options.models) > 1
                engine = Engine(loaded, kv=spec, more_kv=options.kvs[1:], max_batch=options.max_batch,
                                max_queue=options.max_queue, memory=options.kv_memory,
                                max_itl=options.max_itl / 1000, prefix_cache=options.prefix_cache,
                                drafter=drafter, denoising=None if ordinary else denoising, lock=lock)
                start.take_engine(engine)
                _tell(loaded, engine, drafter is not None)
            engines.append(engine)
        if denoising is not None and all(engine.denoiser is None for engine in engines):
            raise UsageError("none of these models writes blocks", next="leave out --blocks")
        from quantkit.serving.models import ServedEngine

        return [ServedEngine(engine, engine.loaded, name, options.parse_special, options.scheduling_policy,
                             options.strict_requests, options.bare_json_calls)
                for engine, name in zip(engines, options.names, strict=True)]


@dataclass(frozen=True)
class Served:
    """What a server answers with.

    Attributes:
        application: over engines that run.
        chat: whether the first model has a chat template.
        announced: the values that ``--json`` prints beside the address and the models.
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
        model.engine.start(access["on_error"])
    return Served(application, has_chat(models[0]))


def serve_replicas(options: ServingOptions, replicas: int, **access: Any) -> Served:
    """Start replicas, each of which loads the models.

    Args:
        options: the models and how they are served.
        replicas: the number of replicas.
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


def has_chat(model: ServedEngine) -> bool:
    """Whether a model has a chat template; with a warning if it has one that can't be used."""
    try:
        return model.loaded.tokenizer.has_chat
    except QuantkitError as error:
        show_warning(f"no chat: {error.what}: {error.why}")
        return False


def _tell(loaded: LoadedModel, engine: Engine, drafts: bool) -> None:
    """Say what was loaded, and what doesn't apply to it."""
    from quantkit.runtime.memory.scratch import PREFILL_CHUNK

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
