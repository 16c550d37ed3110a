"""Options that several commands have: one name, one meaning, one way to write the value."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import rich_click as click

from quantkit.cli.tokens import TokenCount
from quantkit.support.errors import UsageError

if TYPE_CHECKING:
    from quantkit.kv.spec import KVSpec

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
    from quantkit.kv.build import build_kv_codecs, build_policy
    from quantkit.kv.spec import parse_kv, split_settings

    settings = tuple(parse_kv(setting) for text in given for setting in split_settings(text))
    if len({str(setting) for setting in settings}) < len(settings):
        raise UsageError("a KV setting is given twice", next="name each setting once")
    for setting in settings:
        build_policy(setting)
        build_kv_codecs(setting)
    if limit is not None and len(settings) > limit:
        raise UsageError(f"--kv names {len(settings)} settings", why="this command runs with one",
                         next=f'--kv "{settings[0]}"; quantkit eval compares several')
    return settings


def prompt_tokens_option(help: str, default: int | None = None) -> Callable[[Any], Any]:
    """``--prompt-tokens`` of a command: how long prompts are."""
    return click.option("--prompt-tokens", type=TokenCount(), default=default,
                        show_default=default is not None, help=help)


def prefill_option(help: str, least: int = 1, default: int | None = None) -> Callable[[Any], Any]:
    """``--prefill`` of a command: how long the prompts are whose reading is timed."""
    return click.option("--prefill", type=TokenCount(least), default=default,
                        show_default=default is not None, help=help)
