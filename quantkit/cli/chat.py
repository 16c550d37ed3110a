"""``quantkit chat MODEL``: a conversation in the terminal."""

from __future__ import annotations

import random
import signal
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import rich_click as click

from quantkit.cli.generate import StreamedText
from quantkit.cli.loading import import_large, load_model
from quantkit.cli.options import (
    TokenCount,
    device_option,
    dtype_option,
    kv_option,
    read_kv,
    revision_option,
    temperature_option,
)
from quantkit.cli.present import note, show_error
from quantkit.support.errors import QuantkitError

if TYPE_CHECKING:
    from quantkit.runtime.core import TokenInfo
    from quantkit.runtime.engine import Engine
    from quantkit.runtime.sampler import Sampling

LEAVE, CLEAR = "/exit", "/clear"


@click.command("chat")
@click.argument("model")
@click.option("--system", metavar="TEXT", help="System message before the conversation.")
@click.option("--max-tokens", "-n", type=TokenCount(), default=1024, show_default=True,
              help="Largest number of new tokens of an answer.")
@temperature_option
@kv_option("KV setting, one only: none, int8, int4, …. (The checkpoint's own.)")
@revision_option
@dtype_option
@device_option
def command(model: str, system: str | None, max_tokens: int, temperature: float, kv: tuple[str, ...],
            revision: str | None, dtype: str, device: str) -> None:
    """Chat with a model in the terminal.

    MODEL is a checkpoint's folder or anything that `quantkit quantize` takes. What was said before stays in
    the KV cache. Ctrl-C stops an answer; /clear begins anew; /exit or Ctrl-D leaves.
    """
    from quantkit.text import rendering

    rendering.start()
    import_large("quantkit.runtime.generate")
    from quantkit.runtime.engine import Engine
    from quantkit.runtime.sampler import Sampling

    (setting,) = read_kv(kv, limit=1) or (None,)
    sampling = Sampling(max_tokens=max_tokens, temperature=temperature)
    loaded = load_model(model, revision=revision, dtype=dtype, device=device)
    engine = Engine(loaded, kv=setting, max_batch=1, max_queue=1, prefix_cache=None)
    begin = [] if system is None else [{"role": "system", "content": system}]
    loaded.tokenizer.chat_text([*begin, {"role": "user", "content": ""}])  # tells of a missing template
    messages = list(begin)
    note(f"Ctrl-C stops an answer; {CLEAR} begins anew; {LEAVE} or Ctrl-D leaves")
    while (text := _question()) != LEAVE:
        if text == CLEAR:
            messages = list(begin)
        elif text:
            messages.append({"role": "user", "content": text})
            if not sampling.greedy:
                sampling = replace(sampling, seed=random.SystemRandom().getrandbits(31))
            try:
                answer = _answer(engine, loaded.tokenizer.chat(messages), sampling)
            except QuantkitError as error:  # such as a conversation longer than the model's context
                show_error(error.what, error.why, f"{CLEAR} begins anew")
                messages.pop()
                continue
            messages.append({"role": "assistant", "content": answer})


def _question() -> str:
    """What the user types; :data:`LEAVE` at the end of the input."""
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except (EOFError, KeyboardInterrupt):
        click.echo()
        return LEAVE


def _answer(engine: Engine, prompt: list[int], sampling: Sampling) -> str:
    """Stream an answer; what there is of it if it is interrupted."""
    show = StreamedText()

    def on_token(info: TokenInfo) -> None:
        if info.text:
            show(0, info.text)

    request = engine.submit(prompt, sampling, on_token=on_token)
    before = signal.signal(signal.SIGINT, lambda *_: request.cancel())  # a step is never cut in two
    try:
        while engine.step():
            pass
    finally:
        signal.signal(signal.SIGINT, before)
    click.echo()
    return request.result.text
