"""A prompt on its way through the model, chunk by chunk."""

from __future__ import annotations

import torch

from quantkit.kv.base import Phase
from quantkit.kv.cache import KVCache
from quantkit.ops import gpu
from quantkit.runtime.loader import LoadedModel
from quantkit.runtime.sequence import Ticket


def feed(loaded: LoadedModel, cache: KVCache, ticket: Ticket, size: int, chunk: int) -> torch.Tensor | None:
    """Take the next tokens of a request's prompt through the model.

    Args:
        loaded: the model.
        cache: holds the request's sequence.
        ticket: the request.
        size: so many tokens, at most ``chunk``; a policy that acts after every chunk does so after every
            ``chunk`` tokens whatever sizes come, so that a request's tokens don't depend on them.
        chunk: see there.

    Returns:
        At the prompt's end logits ``[1, vocab]`` after its last token, before that ``None``.
    """
    end = min(ticket.fed + size, len(ticket.prompt))
    if any(policy.on_prefill == "chunk" for policy in cache.policies):
        end = min(end, (ticket.fed // chunk + 1) * chunk)
    phase: Phase = ("prefill_end" if end == len(ticket.prompt) else "prefill" if end % chunk == 0 else
                    "prefill_part")
    ids = gpu.sent(torch.tensor([ticket.prompt[ticket.fed:end]]), loaded.model.device)
    batch = cache.batch([ticket.row], phase)
    ticket.fed, logits = end, None
    if ticket.wants_prompt_logprobs:
        logits = loaded.model(ids, cache=batch)[0]
        ticket.see_prompt(logits)
    elif phase == "prefill_end":
        logits = loaded.model(ids, cache=batch, last=torch.tensor([ids.shape[1] - 1]))
    else:  # nobody asks what follows: the head, a large part of a small model, is left out
        loaded.model.hidden(ids, cache=batch)
    return None if logits is None or phase != "prefill_end" else logits[-1:]
