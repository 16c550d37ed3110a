"""The contract of drafters: ``quantkit.runtime.drafting.base``."""

from __future__ import annotations

import tempfile
import warnings
from typing import Any

import torch
from pydantic import ValidationError

from quantkit.kv.batch import Batch
from quantkit.kv.cache import KVCache
from quantkit.kv.spec import parse_kv
from quantkit.runtime.core import Completion
from quantkit.runtime.drafting.base import MAX_DRAFT, DraftedText, Drafter, DraftSource
from quantkit.runtime.engine import Engine
from quantkit.runtime.loader import LoadedModel, load
from quantkit.runtime.sampler import Sampling
from quantkit.testing.contract import Contract, named_class
from quantkit.testing.tiny import VOCAB, tiny_model

ANSWER = 48


def check_drafter(kind: type[Drafter], model: str | None = None, **options: Any) -> None:
    """Let a drafter draft for texts that repeat themselves and for such that don't, alone and side by side.

    Checked are that drafts are lists of the model's token ids within their limits, that a text's tokens and
    its sequence in the KV cache are as they were before, that it drafts again after a text has ended, and
    that an engine generates the same with it as without, greedily and by chance.

    Args:
        kind: the class that is registered.
        model: the model that is drafted for; by default a tiny one.
        options: of the drafter.

    Raises:
        PluginError: a promise is broken.
    """
    name = named_class(kind, Drafter, "drafter")
    contract = Contract(f"drafter {name!r}", "quantkit.runtime.drafting.base")
    try:
        drafter = kind.model_validate(options)
    except ValidationError as error:
        first = error.errors()[0]
        raise contract.error(f"it can't be made with {options or 'its defaults'}: "
                             f"{'.'.join(map(str, first['loc']))}: {first['msg']}",
                             "give an option a default, or give it to check_drafter") from None
    contract.must(drafter.first in kind.model_fields, f"first is {drafter.first!r}, which is no option of it")
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        loaded = load(model or str(tiny_model(folder, "mistral", head_dim=32)))
        source = contract.call("start", drafter.start, loaded)
        contract.must(isinstance(source, DraftSource), f"start returns {source!r:.80}, no DraftSource")
        contract.must(type(source.nbytes) is int and source.nbytes >= 0,
                      f"nbytes is {source.nbytes!r:.80}, not a number of bytes")
        texts = _texts()
        for limits in ((1,), (drafter.max_tokens,), (MAX_DRAFT, 1, 3)):
            _check_proposals(source, loaded, texts[:len(limits)], limits, contract.at(f"limits {limits}"))
        for kv in ("none", "int8", "int4"):
            _check_answers(drafter, loaded, texts, kv, contract.at(f"with --kv {kv}"))


def _texts() -> list[list[int]]:
    random = torch.randint(4, VOCAB, (60,), generator=torch.Generator().manual_seed(0)).tolist()
    return [random[:20] * 3, random, [random[0]] * 30]


def _check_proposals(source: DraftSource, loaded: LoadedModel, texts: list[list[int]],
                     limits: tuple[int, ...], contract: Contract) -> None:
    cache = KVCache(loaded.config, dtype=loaded.dtype)
    drafted = []
    for tokens in texts:
        number = cache.add()
        loaded.model.forward([tokens[:-1]], Batch(cache, [number], "prefill_end"), [0])
        drafted.append(DraftedText(list(tokens), cache, number, lambda logits: int(logits.argmax())))
    for text in drafted:
        contract.call("begin", source.begin, text)
    for _ in range(2):
        seen = [cache.seen(text.sequence) for text in drafted]
        drafts = contract.call("propose", source.propose, drafted, limits)
        contract.must(isinstance(drafts, list) and len(drafts) == len(limits),
                      f"propose returns {drafts!r:.80} for {len(limits)} texts, not a list for each")
        for draft, limit in zip(drafts, limits):
            contract.must(isinstance(draft, list) and all(
                type(token) is int and 0 <= token < loaded.config.vocab_size for token in draft),
                f"a draft is {draft!r:.80}, not a list of the model's token ids")
            contract.must(len(draft) <= limit, f"a draft has {len(draft)} tokens where {limit} are allowed")
        contract.must([text.tokens for text in drafted] == texts, "propose changes a text's tokens")
        contract.must([cache.seen(text.sequence) for text in drafted] == seen,
                      "propose leaves tokens in the model's KV cache", "take them back: Batch.accept(row, 0)")
    for text in drafted:
        contract.call("end", source.end, text)


def _check_answers(drafter: Drafter, loaded: LoadedModel, texts: list[list[int]], kv: str,
                   contract: Contract) -> None:
    plain = _answers(loaded, texts, kv, None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        drafted = contract.call("drafting", _answers, loaded, texts, kv, drafter)
    for before, after in zip(plain, drafted):
        contract.must(before.token_ids == after.token_ids, "an answer is another with drafts than without")


def _answers(loaded: LoadedModel, texts: list[list[int]], kv: str, drafter: Drafter | None
             ) -> list[Completion]:
    engine = Engine(loaded, kv=parse_kv(kv), max_batch=2, drafter=drafter)
    requests = [engine.submit(tokens, Sampling(max_tokens=ANSWER, ignore_eos=True, seed=number,
                                               temperature=float(number % 2)))
                for number, tokens in enumerate(texts)]
    while engine.step():
        pass
    engine.close()
    return [request.result for request in requests]
