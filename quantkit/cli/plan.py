"""``quantkit plan MODEL --context N --concurrency C --memory SIZE``."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import rich_click as click

from quantkit.cli.options import (
    TokenCount,
    command_line_again,
    kv_option,
    read_kv,
    revision_option,
    tokens_option,
)
from quantkit.cli.present import print_json
from quantkit.support.errors import UsageError

if TYPE_CHECKING:
    from quantkit.api.plan import NothingFits
    from quantkit.capacity_search.roofline import Ceilings
    from quantkit.capacity_search.search import Combination

_FLOPS = re.compile(r"(\d{1,15}(?:\.\d{1,15})?)\s*([gtp])(?:flop/?s)?", re.ASCII | re.IGNORECASE)
_POWERS = {"g": 1e9, "t": 1e12, "p": 1e15}


@click.command("plan")
@click.argument("model")
@click.option("--context", type=TokenCount(), required=True, metavar="TOKENS",
              help="Tokens of each sequence, prompt and answer together: 8192, 8k (8,000), 8K (8,192).")
@click.option("--concurrency", type=click.IntRange(min=1), default=1, show_default=True, metavar="N",
              help="Number of sequences that run at once.")
@click.option("--memory", required=True, metavar="SIZE", help="Total memory for weights, KV cache and "
                                                              "runtime: 16GB, 24GiB.")
@click.option("--recipe", "-r", "recipes", multiple=True, metavar="LIST",
              help="Consider only these recipes: int8,int4; `none` leaves the weights as they are. (All "
                   "recipes.)")
@kv_option('Consider only these KV settings: int8,"window(1024, sinks=4)+int8". (All measured codecs; '
           "nothing is dropped.)")
@tokens_option("--prompt-tokens", "Prompt tokens within --context, at whose end policies drop what they "
                                  "drop. (Half.)")
@click.option("--bandwidth", metavar="RATE", help="Memory bandwidth: 200GB/s. (Measured on this CPU.)")
@click.option("--flops", metavar="RATE", help="Operations a second: 40T. (Measured on this CPU.)")
@revision_option
@click.option("--json", "as_json", is_flag=True, help="Print everything, every combination too, as JSON.")
def command(model: str, context: int, concurrency: int, memory: str, recipes: tuple[str, ...],
            kv: tuple[str, ...], prompt_tokens: int | None, bandwidth: str | None, flops: str | None,
            revision: str | None, as_json: bool) -> None:
    """Choose weights and KV cache together for an amount of memory, and show the arithmetic.

    MODEL is anything that `quantkit quantize` takes. For a checkpoint only the KV cache is chosen. No weight
    is read. The plan counts what this package's runtime holds on a CPU, and chooses, among the combinations
    that fit, the one with the smallest expected loss. Losses were measured on one small model.
    """
    from quantkit.quantization.budget.amount import parse_bytes

    size = parse_bytes(memory, "--memory")
    rates = (None if bandwidth is None else
             float(parse_bytes(bandwidth.strip().removesuffix("/s"), "--bandwidth", "200GB/s")),
             None if flops is None else _flops(flops))
    if prompt_tokens is not None and prompt_tokens > context:
        raise UsageError(f"--prompt-tokens is {prompt_tokens:,}", why=f"a sequence has {context:,} tokens",
                         next=f"--prompt-tokens {context}")
    from quantkit.api.plan import NothingFits, plan

    settings, named = read_kv(kv), [name.strip() for text in recipes for name in text.split(",")]
    made = plan(model, context=context, memory=size, concurrency=concurrency, recipes=named, kv=settings,
                prompt_tokens=prompt_tokens, revision=revision)
    try:
        chosen, combinations = made.chosen, made.combinations
    except NothingFits as error:
        raise nothing_fits(error) from None
    ceilings = ceilings_of(chosen, *rates)
    from quantkit.cli.plan_output import facts, lines

    if as_json:
        print_json({"model": model, **facts(chosen, combinations, ceilings), "left_out": made.left_out,
                    "next": made.commands})
        return
    for line in lines(model, chosen, combinations, ceilings, made.left_out):
        click.echo(line)
    for label, text in zip(("next", *[""] * len(made.commands)), made.commands):
        click.echo(f"{label:<14}{text}")  # not folded: it is there to be copied


def nothing_fits(error: NothingFits) -> UsageError:
    """The same error with commands that fit."""
    closest = error.closest
    context, count = closest.most_context(), closest.most_sequences()
    ways = [f"{command_line_again('memory')} --memory {-(-closest.total // 10**6)}MB"]
    if context:
        ways.append(f"{command_line_again('context', 'prompt_tokens')} --context {context}")
    if count:
        ways.append(f"{command_line_again('concurrency')} --concurrency {count}")
    return UsageError(error.what, why=error.why, next="\n".join(ways))


def ceilings_of(chosen: Combination, bandwidth: float | None, flops: float | None) -> Ceilings | str:
    """The given ceilings, or this machine's; or why there are none."""
    from quantkit.capacity_search.roofline import Ceilings
    from quantkit.evaluation.roofline import ceilings

    whose = {name: "measured on this CPU now" if rate is None else "given"
             for name, rate in (("bandwidth", bandwidth), ("flops", flops))}
    if bandwidth and flops:
        return Ceilings(bandwidth, flops, whose)
    try:
        machine = ceilings.cpu_ceilings()
    except UsageError as error:
        return error.why or error.what
    packed = max(chosen.weights.multiplied, key=lambda layer: layer.read).packed
    arithmetic = "float32" if packed is None else ceilings.arithmetic_of(packed)
    return Ceilings(bandwidth or machine.bandwidth(), flops or 2 * machine.products(arithmetic), whose)


def _flops(text: str) -> float:
    match = _FLOPS.fullmatch(text.strip())
    if match is None or not (rate := float(match[1]) * _POWERS[match[2].lower()]):
        raise UsageError(f"--flops {text!r} is no rate", next="--flops 40T",
                         why="it is a number above 0 and G, T or P: 10⁹, 10¹², 10¹⁵ operations a second")
    return rate
