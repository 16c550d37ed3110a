"""``quantkit generate MODEL PROMPT``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import rich_click as click

from quantkit.cli.loading import import_large, load_model
from quantkit.cli.options import (
    TokenCount,
    blocks_option,
    device_option,
    dtype_option,
    kv_option,
    open_trace,
    read_kv,
    revision_option,
    temperature_option,
    trace_option,
    verify_option,
)
from quantkit.cli.present import note, print_json, show_warning
from quantkit.support.errors import UsageError

if TYPE_CHECKING:
    from quantkit.api.model import SamplingOptions
    from quantkit.runtime.core import Completion
    from quantkit.runtime.loader import LoadedModel
    from quantkit.runtime.trace import Timing

MAX_PROMPT = 64 * 2**20
_NEEDS_CHANCE = ("top_k", "top_p", "min_p", "seed")
# a terminal obeys control characters; a model has no business giving it orders
_CONTROLS = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


@click.command("generate")
@click.argument("model")
@click.argument("prompt")
@click.option("--chat", is_flag=True, help="Send the prompt as a user's message, with the model's chat "
                                           "template.")
@click.option("--system", metavar="TEXT", help="System message before the prompt; needs --chat.")
@click.option("--parse-special-tokens", "parse_special", is_flag=True,
              help="With --chat: control tokens written out in the messages (<|im_end|>) become control "
                   "tokens. By default they are plain text.")
@click.option("--max-tokens", "-n", type=TokenCount(), default=128, show_default=True,
              help="Largest number of new tokens.")
@temperature_option
@click.option("--top-k", type=click.IntRange(min=0), default=0, help="Sample among the k most likely "
                                                                     "tokens (0: all).")
@click.option("--top-p", type=float, default=1.0, help="Sample among the most likely tokens that together "
                                                       "reach p.")
@click.option("--min-p", type=float, default=0.0, help="Sample among tokens at least p times as likely as "
                                                       "the first.")
@click.option("--repetition-penalty", type=float, default=1.0, help="Above 1: make tokens that came before"
                                                                    " less likely.")
@click.option("--seed", type=click.IntRange(min=0), help="Seed of a random text, to repeat it; drawn if "
                                                         "not given.")
@click.option("--stop", multiple=True, metavar="TEXT", help="Stop before this text; may be repeated.")
@click.option("--ignore-eos", is_flag=True, help="Continue when the model ends its answer.")
@kv_option("KV setting, one only: none, int8, int4, snapkv(0.5), \"window(1024, sinks=4)+int8\", …. (The "
           "checkpoint's own.)")
@click.option("--draft", metavar="DRAFTER", default="none", show_default=True,
              help="Guess tokens that a step confirms: ngram, \"self(CHECKPOINT)\"; the text stays the same.")
@blocks_option
@trace_option
@revision_option
@dtype_option
@device_option
@verify_option
@click.option("--quiet", "-q", is_flag=True, help="No figures on stderr.")
@click.option("--json", "as_json", is_flag=True, help="Print text, token counts and speed as JSON.")
@click.pass_context
def command(ctx: click.Context, model: str, prompt: str, chat: bool, system: str | None, parse_special: bool,
            kv: tuple[str, ...], draft: str, blocks: str | None, trace: Path | None, revision: str | None,
            dtype: str, device: str, verify: bool, quiet: bool, as_json: bool, **options: Any) -> None:
    """Generate text from a model or a checkpoint.

    MODEL is a checkpoint's folder or anything that `quantkit quantize` takes. The model continues PROMPT, or
    answers it with --chat. `-` reads the prompt from standard input, without its last line end. The text is
    streamed to stdout, everything else goes to stderr.
    """
    if system is not None and not chat:
        raise UsageError("--system is given without --chat", why="only a chat template has a place for it",
                         next="add --chat")
    if parse_special and not chat:
        raise UsageError("--parse-special-tokens is given without --chat", next="leave it out, or add --chat",
                         why="in a prompt that is continued as it stands, control tokens always are")
    if chat:
        from quantkit.text import rendering

        rendering.start()
    import_large("quantkit.api.model")
    from quantkit.api.model import Model, sampling_of
    from quantkit.runtime.core import check_request
    from quantkit.runtime.denoising import parse_denoising
    from quantkit.runtime.drafting.base import parse_drafter
    from quantkit.runtime.engine import Engine

    sampling, text = _sampling(ctx, cast("SamplingOptions", options)), _prompt(prompt)
    (setting,) = read_kv(kv, limit=1) or (None,)
    drafter, denoising = parse_drafter(draft), parse_denoising(blocks)
    with open_trace(trace) as trace_file:  # what can't be written is refused before a model is loaded
        loaded = load_model(model, revision=revision, dtype=dtype, device=device, verify=verify, quiet=quiet)
        ids = _ids(loaded, text, system, parse_special) if chat else loaded.tokenizer.encode(text)
        check_request(loaded, ids, sampling_of(sampling))
        engine = Engine(loaded, kv=setting, max_batch=1, max_queue=1, drafter=drafter, denoising=denoising,
                        context=len(ids) + sampling["max_tokens"])
        if trace_file is not None:
            trace_file.add(model, engine)
        stream = Model(loaded, engine).stream(ids, **sampling)
        show = StreamedText()
        try:
            for piece in stream:
                if not as_json:
                    show(piece)
        except BaseException:
            if show.begun:  # an interruption's message starts on a line of its own
                click.echo()
            raise
    done, timing = stream.result, engine.timing
    if not as_json:
        click.echo()
    else:
        print_json(_report(loaded, done, timing, sampling, chat) | {"kv": str(engine.cache.spec)})
        return
    if not quiet:
        note(_figures(done, timing, sampling))


def _sampling(ctx: click.Context, options: SamplingOptions) -> SamplingOptions:
    """The options, with a seed when chance plays a part. Raises UsageError: one is out of range."""
    import random

    from click.core import ParameterSource

    from quantkit.api.model import sampling_of

    if not sampling_of(options).greedy:
        drawn = random.SystemRandom().getrandbits(31)
        return options if options["seed"] is not None else {**options, "seed": drawn}
    given = [name for name in _NEEDS_CHANCE
             if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE]
    if given:
        names = ", ".join("--" + name.replace("_", "-") for name in given)
        show_warning(f"{names} changes nothing at temperature 0; give --temperature too")
    return options


def _prompt(prompt: str) -> str:
    if prompt != "-":
        return prompt
    raw = sys.stdin.buffer.read(MAX_PROMPT + 1)
    if len(raw) > MAX_PROMPT:
        raise UsageError(f"the prompt on standard input is larger than {MAX_PROMPT} bytes")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError("the prompt on standard input is not UTF-8", why=f"byte {error.start} can't be read",
                         next="convert it, with iconv for instance") from None
    return text.removesuffix("\n").removesuffix("\r")


def _ids(loaded: LoadedModel, text: str, system: str | None, parse_special: bool) -> list[int]:
    messages = [] if system is None else [{"role": "system", "content": system}]
    return loaded.tokenizer.chat([*messages, {"role": "user", "content": text}], parse_special=parse_special)


class StreamedText:
    """Writes pieces to stdout as they come, made harmless where that is a terminal."""

    def __init__(self) -> None:
        self._terminal = sys.stdout.isatty()
        self.begun = False

    def __call__(self, text: str) -> None:
        self.begun = True
        # color: a file gets every byte of the text, also what looks like a color
        click.echo(text.translate(_CONTROLS) if self._terminal else text, nl=False, color=True)


def _figures(done: Completion, timing: Timing, sampling: SamplingOptions) -> str:
    rate = _decode_rate(timing)
    read = f" ({timing.prefill_tokens / timing.prefill_s:.0f} a second)" if timing.prefill_s else ""
    speed = [f"{done.prompt_tokens} tokens in{read}",
             f"{len(done.token_ids)} out" + (f" ({rate:.1f} a second)" if rate else "")]
    if done.denoising_steps:
        speed.append(f"{len(done.token_ids) / done.denoising_steps:.1f} tokens a step")
    elif done.drafted_tokens:
        speed.append(f"{done.accepted_tokens} of {done.drafted_tokens} drafted tokens right")
    why = {"stop": "the model ended it", "length": "--max-tokens reached", "stop_string": "a stop text came",
           "cancelled": "it was cancelled"}
    seed = f"; seed {sampling['seed']}" if sampling["temperature"] else ""
    return f"{', '.join(speed)}; {why[done.finish_reason]}{seed}"


def _decode_rate(timing: Timing) -> float | None:
    return timing.decode_tokens / timing.decode_s if timing.decode_tokens and timing.decode_s else None


def _report(loaded: LoadedModel, done: Completion, timing: Timing, sampling: SamplingOptions,
            chat: bool) -> dict[str, Any]:
    import dataclasses

    import torch

    from quantkit.api.model import sampling_of

    return {"model": loaded.uri, "method": loaded.label, "text": done.text, "token_ids": done.token_ids,
            "finish_reason": done.finish_reason, "prompt_tokens": done.prompt_tokens,
            "completion_tokens": len(done.token_ids), "drafted_tokens": done.drafted_tokens,
            "accepted_tokens": done.accepted_tokens,
            "denoising_steps": done.denoising_steps,
            "prefill_tok_s": timing.prefill_tokens / timing.prefill_s if timing.prefill_s else None,
            "decode_tok_s": _decode_rate(timing),
            "sampling": dataclasses.asdict(sampling_of(sampling)),
            "protocol": {"chat": chat, "dtype": str(loaded.dtype).removeprefix("torch."),
                         "device": str(loaded.model.device), "threads": torch.get_num_threads(),
                         "torch": torch.__version__}}
