"""``quantkit generate MODEL PROMPT``."""

from __future__ import annotations

import sys

import rich_click as click

from quantkit.cli.present import print_json


@click.command("generate")
@click.argument("model")
@click.argument("prompt")
@click.option("--chat", is_flag=True, help="Put the prompt into the model's chat template.")
@click.option("--system", metavar="TEXT", help="System message; implies --chat.")
@click.option("--max-tokens", "-n", type=int, default=128, show_default=True, help="Most new tokens.")
@click.option("--temperature", type=float, default=0.0, show_default=True, help="0 is greedy.")
@click.option("--top-k", type=int, default=0, help="Only the k likeliest tokens (0: all).")
@click.option("--top-p", type=float, default=1.0, help="Only the likeliest that together reach p.")
@click.option("--min-p", type=float, default=0.0, help="Only those at least p times as likely as the likeliest.")
@click.option("--repetition-penalty", type=float, default=1.0, help="Above 1: repeat less.")
@click.option("--seed", type=int, help="The same seed gives the same text.")
@click.option("--stop", multiple=True, metavar="TEXT", help="End before this text; may be given several times.")
@click.option("--revision", help="Branch, tag or commit of a model on the hub.")
@click.option("--dtype", type=click.Choice(["auto", "float32", "bfloat16", "float16"]), default="auto",
              help="Of activations; auto is the model's own.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object when done.")
def command(model: str, prompt: str, chat: bool, system: str | None, max_tokens: int, temperature: float,
            top_k: int, top_p: float, min_p: float, repetition_penalty: float, seed: int | None,
            stop: tuple[str, ...], revision: str | None, dtype: str, as_json: bool) -> None:
    """Generate text; it is printed as it comes.

    PROMPT `-` is read from standard input.
    """
    from quantkit.runtime.generate import Timing, generate
    from quantkit.runtime.loader import load
    from quantkit.runtime.sampler import Sampling

    sampling = Sampling(max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p,
                        repetition_penalty=repetition_penalty, seed=seed, stop=stop)
    text = sys.stdin.read() if prompt == "-" else prompt
    loaded = load(model, revision=revision, dtype=dtype)
    if chat or system is not None:
        messages = [{"role": "system", "content": system}] if system is not None else []
        ids = loaded.tokenizer.chat([*messages, {"role": "user", "content": text}])
    else:
        ids = loaded.tokenizer.encode(text)
    timings: list[Timing] = []

    def show(index: int, piece: str) -> None:
        click.echo(piece, nl=False)
        sys.stdout.flush()

    done = generate(loaded, [ids], sampling, None if as_json else show, timings.append)[0]
    if not as_json:
        click.echo()
        return
    speed = timings[0]
    print_json({
        "model": model, "method": loaded.label, "prompt_tokens": done.prompt_tokens,
        "completion_tokens": len(done.token_ids), "text": done.text, "finish_reason": done.finish_reason,
        "prefill_tok_s": speed.prefill_tokens / speed.prefill_s,
        "decode_tok_s": speed.decode_tokens / speed.decode_s if speed.decode_tokens else None,
        "sampling": {"max_tokens": max_tokens, "temperature": temperature, "top_k": top_k, "top_p": top_p,
                     "min_p": min_p, "repetition_penalty": repetition_penalty, "seed": seed,
                     "stop": list(stop)}})
