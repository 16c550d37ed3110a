"""Generates completions for prompts: runs the engine until all are finished."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from quantkit.kv.spec import KVSpec
from quantkit.ops.dispatch import DECODE_ROWS
from quantkit.runtime.core import Completion, Request, TokenInfo, check_request
from quantkit.runtime.drafting.base import Drafter
from quantkit.runtime.engine import Engine
from quantkit.runtime.loader import LoadedModel
from quantkit.runtime.sampler import Sampling
from quantkit.runtime.trace import Timing
from quantkit.runtime.trace_file import TraceFile
from quantkit.support.errors import UsageError


def generate(loaded: LoadedModel, prompts: Sequence[Sequence[int]], sampling: Sampling | Sequence[Sampling],
             on_text: Callable[[int, str], None] | None = None,
             on_done: Callable[[Timing], None] | None = None, *,
             kv: KVSpec | None = None, drafter: Drafter | None = None,
             trace: TraceFile | None = None) -> list[Completion]:
    """Continue every prompt.

    Args:
        prompts: token ids, one list a prompt; lengths may differ.
        sampling: for all, or one a prompt.
        on_text: called with a prompt's index and a piece of its text as soon as it is certain.
        on_done: called once with what the call took.
        kv: how keys and values are kept; by default as the model's checkpoint says.
        drafter: guesses tokens; what is generated doesn't depend on it.
        trace: gets what was done when.

    Returns:
        One completion a prompt, in the prompts' order. A sequence's tokens depend on its prompt and
        its sampling only.

    Raises:
        UsageError: a prompt is empty, has an id out of range, or is too long for the model.
        QuantkitError: the model's output is not finite.
    """
    settings = [sampling] * len(prompts) if isinstance(sampling, Sampling) else list(sampling)
    if len(settings) != len(prompts):
        raise UsageError(f"{len(prompts)} prompts have {len(settings)} sampling settings")
    if not prompts:
        return []
    for prompt, sampling in zip(prompts, settings):
        check_request(loaded, prompt, sampling)
    longest = max(len(prompt) + sampling.max_tokens for prompt, sampling in zip(prompts, settings))
    engine = Engine(loaded, kv=kv, max_batch=min(DECODE_ROWS, len(prompts)), max_queue=len(prompts),
                    context=longest, drafter=drafter)
    if trace is not None:
        trace.add(loaded.uri, engine)
    submitted: list[Request] = []
    for index, (prompt, sampling) in enumerate(zip(prompts, settings)):
        def show(info: TokenInfo, index: int = index) -> None:
            if info.text and on_text is not None:
                on_text(index, info.text)

        submitted.append(engine.submit(prompt, sampling, on_token=show))
    while engine.step():
        pass
    if on_done is not None:
        on_done(engine.timing)
    return [request.result for request in submitted]
