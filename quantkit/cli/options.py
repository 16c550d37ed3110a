"""Options that several commands have: one name, one meaning, one way to write the value."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

import rich_click as click
from click import get_current_context
from click.core import ParameterSource

from quantkit.support.errors import UsageError
from quantkit.support.units import tokens_of

if TYPE_CHECKING:
    from quantkit.kv.spec import KVSpec
    from quantkit.runtime.trace_file import TraceFile

LOADERS = ["vllm", "sglang", "transformers", "mlx"]
"""The engines whose loading rules we know (:mod:`quantkit.checkpoint.engines`)."""
LLAMA_CPP = "llama.cpp"
"""The engine that reads one GGUF file, which an export makes."""
device_option = click.option("--device", default="auto", show_default=True, metavar="NAME",
                             help="Device: cpu, cuda, cuda:1; auto takes a GPU if there is one.")
dtype_option = click.option("--dtype", type=click.Choice(["auto", "float32", "bfloat16", "float16"]),
                            default="auto", show_default=True,
                            help="Dtype of activations and unquantized weights; auto is the model's own.")
revision_option = click.option("--revision", metavar="REV",
                               help="Branch, tag or commit of a model on the hub.")
temperature_option = click.option("--temperature", "-t", type=float, default=0.0, show_default=True,
                                  help="0 always takes the most likely token (greedy); 1 samples from the "
                                       "model's own distribution.")
verify_option = click.option("--verify", is_flag=True,
                             help="First check every byte of a checkpoint against its hash; by default only "
                                  "a sample is checked.")
trace_option = click.option(
    "--trace", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
    help="Write when each request waited, was read and decoded, and all steps, to a file that "
         "ui.perfetto.dev and chrome://tracing open. It has no texts and no tokens.")
blocks_option = click.option(
    "--blocks", metavar="OPTIONS",
    help="How a model writes blocks of tokens, if it does: \"steps=2, confidence=0.9\". (A step for each "
         "token; what else is committed is the family's.)")
HOW = "k and m mean thousands and millions, K and M mean 1,024 and 1,048,576 (as in vLLM)"
LIMIT = 2**30
"""More tokens than any model reads; larger numbers are slips of the pen."""
_GIVEN = (ParameterSource.COMMANDLINE, ParameterSource.ENVIRONMENT)


class TokenCount(click.ParamType):
    """One number of tokens, an int.

    Args:
        least: the smallest that is allowed.
    """

    name = "tokens"

    def __init__(self, least: int = 1) -> None:
        self.least = least

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Raises UsageError: it is no number of tokens, or too small."""
        return value if isinstance(value, int) else self.parse(str(value), str(value), param)

    def parse(self, text: str, typed: str, param: click.Parameter | None) -> int:
        """``text``, which is ``typed`` or a part of it. Raises UsageError."""
        count = tokens_of(text)
        if count is not None and self.least <= count <= LIMIT:
            return count
        option = max(param.opts, key=len) if param else "a number of tokens"
        raise UsageError(f"{option} {typed[:80]} can't be read" if count is None else
                         f"{option} is {typed[:80]}", next=f"{option} 8192, 8k or 8K",
                         why=f"it must be whole numbers of tokens from {self.least} to {LIMIT:,}; {HOW}")


class TokenCounts(click.ParamType):
    """Numbers of tokens with commas between them, a tuple of int. Argument as for :class:`TokenCount`."""

    name = "list"

    def __init__(self, least: int = 1) -> None:
        self._count = TokenCount(least)

    def convert(self, value: Any, param: click.Parameter | None,
                ctx: click.Context | None) -> tuple[int, ...]:
        """Raises UsageError: one of them is no number of tokens, or too small."""
        if isinstance(value, tuple):
            return value
        return tuple(self._count.parse(part, str(value), param) for part in str(value).split(","))


def kv_option(help: str) -> Callable[[Any], Any]:
    """``--kv`` of a command: everywhere a list with commas, which may also be given in several options."""
    return click.option("--kv", multiple=True, metavar="LIST", help=help)


def read_kv(given: Sequence[str], limit: int | None = None) -> tuple[KVSpec, ...]:
    """The settings of ``--kv``, in their order. Commands call it before they load a model.

    Args:
        given: the option's values.
        limit: settings that the command takes.

    Raises:
        UsageError: one can't be read, is unknown, has options that it doesn't take, or there are too many.
    """
    from quantkit.kv.build import check_kv
    from quantkit.kv.spec import parse_kv, split_settings

    settings = tuple(parse_kv(setting) for text in given for setting in split_settings(text))
    if len({str(setting) for setting in settings}) < len(settings):
        raise UsageError("a KV setting is given twice", next="name each setting once")
    for setting in settings:
        check_kv(setting)
    if limit is not None and len(settings) > limit:
        raise UsageError(f"--kv names {len(settings)} settings", why="this command runs with one",
                         next=f'--kv "{settings[0]}"; quantkit eval compares several')
    return settings


def tokens_option(name: str, help: str, default: int | None = None, least: int = 1) -> Callable[[Any], Any]:
    """An option whose value is a number of tokens."""
    return click.option(name, type=TokenCount(least), default=default, show_default=default is not None,
                        help=help)


def layers_option(
        help: str = "Show one row per layer instead of one per kind of layer.") -> Callable[[Any], Any]:
    return click.option("--layers", is_flag=True, help=help)


def open_trace(path: Path | None) -> AbstractContextManager[TraceFile | None]:
    """The file of ``--trace``, if it was given. Raises UsageError on entering: it can't be written."""
    if path is None:
        return nullcontext()
    from quantkit.runtime.trace_file import TraceFile

    return TraceFile(path)


def command_line_again(*left_out: str) -> str:
    """``quantkit quantize SOURCE --recipe int4``: the running command with all that was given on its command
    line or by the environment, but for the parameters ``left_out`` and values that are the defaults."""
    context = get_current_context()
    words = ["quantkit", str(context.info_name)]
    for parameter in context.command.params:
        name = str(parameter.name)
        if name in left_out or name not in context.params or context.get_parameter_source(name) not in _GIVEN:
            continue
        value = context.params[name]
        if isinstance(parameter, click.Argument):
            words += [quote(str(item)) for item in (value if parameter.nargs != 1 else [value])]
            continue
        if value == parameter.get_default(context):
            continue
        option = max(parameter.opts, key=len)
        if isinstance(parameter, click.Option) and parameter.is_flag:
            words.append(option)
        else:
            words += [word for item in (value if parameter.multiple else [value])
                      for word in (option, quote(str(item)))]
    return " ".join(words)
