"""``quantkit serve-local MODEL``."""

from __future__ import annotations

import gc
import json
import os
import shlex
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rich_click as click

from quantkit.cli.options import (
    blocks_option,
    device_option,
    dtype_option,
    kv_option,
    open_trace,
    read_kv,
    revision_option,
    trace_option,
    verify_option,
)
from quantkit.cli.present import note, show_error
from quantkit.cli.serve.memory import overcommit_option
from quantkit.cli.serve.models import ServingOptions, serve_here, serve_replicas
from quantkit.support.errors import QuantkitError, UsageError
from quantkit.support.units import bytes_of

if TYPE_CHECKING:
    from quantkit.serving.models import SchedulingPolicy

KEY_VARIABLE = "QUANTKIT_API_KEY"
MAX_KEYS = 2**16
"""Bytes of all keys."""


@click.command("serve-local")
@click.argument("models", metavar="MODEL...", nargs=-1, required=True)
@click.option("--host", default="127.0.0.1", show_default=True, metavar="ADDRESS",
              help="Address to listen on; one that other machines can reach needs a key.")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True,
              help="Port to listen on; 0 takes a free one.")
@click.option("--allow-host", "hosts", multiple=True, metavar="NAME",
              help="Another host name that clients may use for this server; may be repeated.")
@click.option("--api-key-file", type=click.Path(dir_okay=False, path_type=Path),
              help="File with the keys that clients may send, one a line; or set "
                   f"{KEY_VARIABLE}. Clients with different keys share no cached prefixes.")
@click.option("--name", "names", multiple=True,
              help="Name of the model in requests; by default the last part of MODEL. For several models "
                   "it is given for each, in their order.")
@kv_option("KV settings: int8,\"window(1024, sinks=4)+int8\"; by default the checkpoint's. The first is the "
           "default, and where the memory is fixed requests may choose only among these, each with an even "
           "part of it.")
@click.option("--kv-memory", metavar="SIZE",
              help="Memory that the KV cache of each model reserves at the start, 8GB or 500MiB; requests "
                   "wait for free pages. By default it grows; on a GPU it takes what is left.")
@click.option("--prefix-cache", metavar="SIZE",
              help="Memory for keys and values of texts that later prompts may begin with, 2GB or 500MiB; 0 "
                   "keeps none. By default a sixteenth of the machine's memory, at most 4 GiB, or the pages "
                   "that are free where --kv-memory is given.")
@click.option("--draft", metavar="DRAFTER", default="none", show_default=True,
              help="Guess tokens that a step confirms: ngram, \"self(CHECKPOINT)\"; answers stay the same. "
                   "Below break-even nothing is drafted.")
@blocks_option
@click.option("--replicas", type=click.IntRange(min=1), metavar="N",
              help="Run N copies of the models on Ray: on the cluster that RAY_ADDRESS names, else on "
                   "this machine, whose cores they share; on GPUs one each. A conversation stays with the "
                   "replica that has read it.")
@overcommit_option
@click.option("--max-batch", type=click.IntRange(min=1), default=None,
              help="Largest number of sequences side by side: 16, on a GPU 64 (16 with --replicas).")
@click.option("--max-queue", type=click.IntRange(min=1), default=64, show_default=True,
              help="Largest number of waiting requests; others are told to try again.")
@click.option("--scheduling-policy", type=click.Choice(["fcfs", "priority"]), default="fcfs",
              show_default=True,
              help="Order of requests: fcfs runs them as they come and refuses the parameter priority; "
                   "priority lets those with a lower priority go first.")
@click.option("--max-itl", type=click.FloatRange(min=0), default=50.0, show_default=True, metavar="MS",
              help="Inter-token latency while a long prompt is read: its chunks are sized so that the time "
                   "between two tokens of other requests stays below this, or below three times the usual "
                   "one, whichever is more. Not with models whose results depend on the cut.")
@click.option("--drain-timeout", type=click.FloatRange(min=0), default=60.0, show_default=True,
              metavar="SECONDS", help="Time for running answers to finish after SIGTERM or Ctrl-C.")
@click.option("--parse-special-tokens", "parse_special", is_flag=True,
              help="Control tokens written out in chat messages (<|im_end|>) become control tokens: "
                   "whoever writes a message can then open a role. By default they are plain text.")
@click.option("--strict-requests", is_flag=True,
              help="Refuse requests that ask for what the server doesn't do. By default such keys, tools and "
                   "hints are ignored, and the header quantkit-ignored names them.")
@click.option("--json-calls/--no-json-calls", "bare_json_calls", default=True, show_default=True,
              help="A whole message that is JSON, names one of the request's tools and fits its schema is a "
                   "tool call, even if the model's template writes calls in another way.")
@click.option("--chat-template", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
              help="Jinja template that chats are written by, in place of the model's own: for base models "
                   "and files that have lost theirs.")
@click.option("--random", metavar="RECIPE",
              help="Serve random weights in the formats of this recipe, to measure speed; `none`: "
                   "unquantized ones.")
@trace_option
@revision_option
@dtype_option
@device_option
@verify_option
@click.option("--json", "as_json", is_flag=True,
              help="Print one JSON object when the server listens: url, model, models, pid.")
def command(models: tuple[str, ...], host: str, port: int, hosts: tuple[str, ...], api_key_file: Path | None,
            names: tuple[str, ...], kv: tuple[str, ...], kv_memory: str | None, prefix_cache: str | None,
            draft: str, blocks: str | None, replicas: int | None, overcommit: bool, max_batch: int | None,
            max_queue: int, scheduling_policy: SchedulingPolicy, max_itl: float, drain_timeout: float,
            parse_special: bool, strict_requests: bool, bare_json_calls: bool, chat_template: Path | None,
            random: str | None, trace: Path | None, revision: str | None, dtype: str, device: str,
            verify: bool, as_json: bool) -> None:
    """Serve models on this machine with the APIs of OpenAI and Anthropic and a chat page.

    MODEL is a checkpoint's folder or anything that `quantkit quantize` takes. Concurrent requests are
    batched. Of several models, requests choose one by its name. SIGTERM or Ctrl-C lets running answers
    finish; a second one stops at once.
    """
    keys = _keys(api_key_file)
    called = _names(models, names)
    if revision is not None and len(models) > 1:
        raise UsageError("--revision with several models", why="it is a revision of one of them",
                         next="write it behind each model: NAME@REVISION")
    if random is not None and (revision is not None or verify):
        raise UsageError("--random doesn't go with --revision and --verify", why="no weights are read",
                         next="leave out one of them")
    from quantkit.quantization.recipe import load_recipe
    from quantkit.runtime.denoising import parse_denoising
    from quantkit.runtime.drafting.base import parse_drafter
    from quantkit.serving.address import bind, is_loopback, url
    from quantkit.support.device import find_device

    # everything that can be refused is refused before a model is loaded
    if trace is not None and replicas is not None:
        raise UsageError("--trace doesn't go with --replicas", why="each replica has a trace of its own",
                         next="leave out one of them")
    kvs = read_kv(kv)
    parse_drafter(draft)
    parse_denoising(blocks)
    if random not in (None, "none"):
        load_recipe(random)
    on_gpu = replicas is None and find_device(device).type == "cuda"
    max_batch = max_batch or (64 if on_gpu else 16)
    options = ServingOptions(models, tuple(called), kvs, _bytes("--kv-memory", kv_memory),
                             _bytes("--prefix-cache", prefix_cache), draft, blocks, overcommit, max_batch,
                             max_queue, scheduling_policy, max_itl, parse_special, revision, dtype, device,
                             verify, None if chat_template is None else _template(chat_template),
                             strict_requests, bare_json_calls, random)
    with bind(host, port, has_key=bool(keys)) as bound, open_trace(trace) as trace_file:
        note(f"loading {', '.join(models)}")
        loopback = is_loopback(bound)
        access = {"loopback": loopback, "hosts": (*hosts, host), "keys": keys, "on_error": _failed}
        served = serve_here(options, trace_file, **access) if replicas is None else serve_replicas(
            options, replicas, **access)
        try:
            from quantkit.serving.server import Server

            address = url(bound)

            def ready() -> None:
                if as_json:
                    announced = {"url": address, "model": called[0], "models": called, "pid": os.getpid(),
                                 **served.announced}
                    click.echo(json.dumps(announced))  # a line, so that a program reads it while this runs
                where = "" if loopback else f", and on {host} for other machines"
                note(f"listening on {address}{where}; open it to chat, Ctrl-C to end")
                note(f"next: {_curl(address, called[0], served.chat, bool(keys))}")

            server = Server(served.application, drain_timeout=drain_timeout, on_ready=ready, on_drain=_drain)
            gc.freeze()  # what is there stays: collections needn't look through it while answers wait
            server.run(sockets=[bound])
        finally:
            served.application.close()
    if server.outcome == "forced":
        raise KeyboardInterrupt
    if server.outcome == "cut":
        raise QuantkitError(f"answers were cut off after {drain_timeout:g} seconds",
                            why="they weren't finished", next="give a longer --drain-timeout")
    note("all answers are complete")


def _keys(file: Path | None) -> list[str]:
    """The keys of which clients need one, if any. Raises UsageError: one can't be sent in a header."""
    from quantkit.serving.address import check_keys

    if file is not None:
        where = str(file)
        with file.open("rb") as stream:
            raw = stream.read(MAX_KEYS + 1)
    elif KEY_VARIABLE in os.environ:
        where, raw = KEY_VARIABLE, os.environb[KEY_VARIABLE.encode()] if os.supports_bytes_environ else \
            os.environ[KEY_VARIABLE].encode()
    else:
        return []
    if len(raw) > MAX_KEYS:
        raise UsageError(f"the API key in {where} can't be used", why=f"they are more than {MAX_KEYS} bytes",
                         next="keep fewer keys there")
    keys = [key for line in raw.decode("latin-1").split("\n") if (key := line.strip())]
    check_keys(keys, where)
    return keys


def _template(file: Path) -> str:
    """The text of a chat template. Raises UsageError: it is none."""
    from quantkit.text.chat import MAX_TEMPLATE, ChatTemplate, TemplateError

    with file.open("rb") as stream:
        text = stream.read(4 * MAX_TEMPLATE + 1).decode("utf-8", "replace")
    try:
        return ChatTemplate(text).source
    except TemplateError as error:
        raise UsageError(f"{file} can't be a chat template", why=error.why or str(error),
                         next="give a file such as a model's chat_template.jinja") from None


def _bytes(option: str, size: str | None) -> int | None:
    """What an option's size is. Raises UsageError: it is none."""
    if size is None or size == "0":
        return None if size is None else 0
    if (value := bytes_of(size)) is None:
        raise UsageError(f"{option} is {size!r}", why="it must be a number and a unit: 8GB, 500MiB")
    return value


def _names(models: tuple[str, ...], names: tuple[str, ...]) -> list[str]:
    """The models' names in requests. Raises UsageError: not one for each, or two are the same."""
    if names and len(names) != len(models):
        raise UsageError(f"{len(models)} models and {len(names)} names", why="each model has one name",
                         next="give --name for each model, in their order, or leave all out")
    from quantkit.serving.address import model_name

    called = [model_name(model, name)
              for model, name in zip(models, names or [None] * len(models), strict=True)]
    if len(set(called)) < len(called):
        raise UsageError("two models have the same name", why="requests choose a model by its name",
                         next="give --name for each model, in their order")
    return called


def _curl(address: str, name: str, chat: bool, has_key: bool) -> str:
    """A request that can be pasted."""
    body: dict[str, Any] = {"model": name, "max_tokens": 64}
    body |= {"messages": [{"role": "user", "content": "Hello"}]} if chat else {"prompt": "Hello"}
    path = "/v1/chat/completions" if chat else "/v1/completions"
    key = f' -H "Authorization: Bearer ${KEY_VARIABLE}"' if has_key else ""
    return (f"curl {address}{path}{key} -H 'Content-Type: application/json' "
            f"-d {shlex.quote(json.dumps(body, ensure_ascii=False))}")


def _drain(active: int) -> None:
    if active:
        note(f"finishing {active} answer{'s' if active > 1 else ''}; the same again stops at once")


def _failed(error: BaseException) -> None:
    """A request failed for no fault of its own: say so, and serve on."""
    from quantkit.cli.main import debugging
    from quantkit.serving.errors import reported

    failure = reported(error)
    show_error(failure.what, failure.why, failure.next)
    if debugging():
        traceback.print_exception(error)
