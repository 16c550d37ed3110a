"""``quantkit chat MODEL``: a conversation in the terminal."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import rich_click as click

from quantkit.cli.generate import StreamedText
from quantkit.cli.loading import import_large
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
    from quantkit.api.model import Chat

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
    import_large("quantkit.api.model")
    from quantkit.api.model import SamplingOptions, load, sampling_of

    (setting,) = read_kv(kv, limit=1) or (None,)
    options = SamplingOptions(max_tokens=max_tokens, temperature=temperature)
    sampling_of(options)  # what can't be used is refused before a model is loaded
    loaded = load(model, kv=setting, revision=revision, dtype=dtype, device=device, max_batch=1)
    conversation = loaded.chat(system, **options)
    note(f"Ctrl-C stops an answer; {CLEAR} begins anew; {LEAVE} or Ctrl-D leaves")
    while (text := _question()) != LEAVE:
        if text == CLEAR:
            conversation.clear()
        elif text:
            try:
                _answer(conversation, text)
            except QuantkitError as error:  # such as a conversation longer than the model's context
                show_error(error.what, error.why, f"{CLEAR} begins anew")


def _question() -> str:
    """What the user types; :data:`LEAVE` at the end of the input."""
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except (EOFError, KeyboardInterrupt):
        click.echo()
        return LEAVE


def _answer(conversation: Chat, text: str) -> None:
    """Stream an answer, until it ends or is interrupted."""
    show, pieces = StreamedText(), conversation.stream(text)
    try:
        for piece in pieces:
            show(piece)
    except KeyboardInterrupt:
        pieces.close()
    click.echo()
