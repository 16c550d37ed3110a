"""A loaded model as lm-eval's ``LM``: the same texts become the same tokens as in its own ``hf`` model.

lm-eval is optional, so its base class is only known when :func:`lm_eval_model` is called; everything
else is in :class:`LmEvalAdapter`. https://github.com/EleutherAI/lm-evaluation-harness
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from quantkit.evaluation.tasks.scoring import BATCH, Scorer, ScoringRequest
from quantkit.kv.spec import KVSpec
from quantkit.runtime.generate import generate
from quantkit.runtime.loader import LoadedModel
from quantkit.runtime.sampler import Sampling
from quantkit.support.errors import QuantkitError, UsageError, did_you_mean
from quantkit.support.progress import Listener, ProgressEvent, silent

INSTALL = "pip install lm-eval"
MAX_NEW_TOKENS = 256
"""lm-eval's default for tasks that don't say how much is to be generated."""
_LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def lm_eval_model(loaded: LoadedModel, *, kv: KVSpec | None = None, batch: int = BATCH,
                  progress: Listener = silent) -> Any:
    """An ``lm_eval.api.model.LM``, for ``lm_eval.simple_evaluate(model=…)`` or quantkit's own tasks.

    Args:
        loaded: the model in memory.
        kv: how keys and values are kept; by default as the model's checkpoint says.
        batch: requests side by side, at most.
        progress: told how many requests of a call are done.

    Raises:
        QuantkitError: lm-eval is not installed.
    """
    return _bound()(loaded, kv=kv, batch=batch, progress=progress)


@functools.cache
def _bound() -> Any:
    try:
        from lm_eval.api.model import LM
    except ImportError as error:
        raise QuantkitError("tasks need lm-eval, which is not installed", why=str(error),
                            next=INSTALL) from None
    return type("QuantkitLM", (LmEvalAdapter, LM), {"__doc__": LmEvalAdapter.__doc__})


class LmEvalAdapter:
    """Everything of an ``LM`` but its base class; see :func:`lm_eval_model`.

    Attributes:
        label: stands beside the progress.
    """

    def __init__(self, loaded: LoadedModel, *, kv: KVSpec | None = None, batch: int = BATCH,
                 progress: Listener = silent) -> None:
        super().__init__()
        self.loaded = loaded
        self.kv = kv or loaded.kv
        self.batch = batch
        self.scorer = Scorer(loaded, self.kv, batch)
        self.label = loaded.label
        self._progress = progress

    # -- what lm-eval asks a model for

    @property
    def max_length(self) -> int:
        """Tokens that the model reads at most."""
        return self.scorer.max_length

    @property
    def max_gen_toks(self) -> int:
        """New tokens for a task that doesn't say how many."""
        return MAX_NEW_TOKENS

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text.

        Raises:
            UsageError: the model has none.
        """
        token = self.loaded.tokenizer.eos_id
        if token is None:
            raise UsageError(f"{self.loaded.uri} has no end-of-sequence token",
                             why="its tokenizer_config.json names no eos_token")
        return token

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text that has no context: BOS, or the end-of-sequence token."""
        bos = self.loaded.tokenizer.bos_id
        return self.eot_token_id if bos is None else bos

    @property
    def tokenizer_name(self) -> str:
        """lm-eval's key for cached requests."""
        return self.loaded.uri.replace("/", "__")

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Whether there is one: ``""``, or ``None``. Its text stays in the tokenizer."""
        return "" if chat_template and self.loaded.tokenizer.has_chat else None

    def apply_chat_template(self, chat_history: Sequence[Mapping[str, Any]],
                            add_generation_prompt: bool = True) -> str:
        """The conversation as text.

        Args:
            chat_history: ``role`` and ``content`` each.
            add_generation_prompt: up to where the assistant answers; otherwise the last message is
                the beginning of its answer.

        Raises:
            SourceError: the model has no chat template, or it fails.
        """
        history = list(chat_history)
        if add_generation_prompt:
            return self.loaded.tokenizer.chat_text(history)
        return self.loaded.tokenizer.chat_text(history[:-1]) + str(history[-1]["content"])

    def tok_encode(self, string: str, add_special_tokens: bool | None = None) -> list[int]:
        """Ids; a text that begins with BOS gets no second one."""
        special = add_special_tokens
        if special is None:
            bos = self.loaded.tokenizer.decode([self.prefix_token_id], skip_special=False)
            special = not string.startswith(bos)
        return self.loaded.tokenizer.encode(string, special=special)

    def encode_pair(self, context: str, continuation: str) -> ScoringRequest:
        """Ids of a context and of what is scored after it.

        Spaces at the context's end go to the continuation, where most tokenizers have them; both are
        then encoded as one text and cut where the context's own tokens end.
        """
        if not context:
            ids = tuple(self.tok_encode(continuation, add_special_tokens=False))
            if ids[:1] == (self.prefix_token_id,):
                return ScoringRequest(ids[:1], ids[1:])
            return ScoringRequest((self.prefix_token_id,), ids)
        joined, head = self.tok_encode(context + continuation), self.tok_encode(context.rstrip())
        return ScoringRequest(tuple(head) or (self.prefix_token_id,), tuple(joined[len(head):]))

    # -- the three kinds of requests; each is an lm-eval Instance, whose ``args`` are what matters

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Of every ``(context, continuation)``: its log-likelihood, and whether greedy decoding writes it.

        Raises:
            UsageError: a continuation has no token of its own.
            QuantkitError: the model's output is not finite.
        """
        pairs = []
        for request in requests:
            context, continuation = request.args
            pair = self.encode_pair(context, continuation)
            if not pair.continuation:
                raise UsageError(f"the continuation {continuation!r} has no token of its own",
                                 why=f"after {context[-40:]!r} the tokenizer joins it to the last token",
                                 next="let the task's texts meet at a space")
            pairs.append(pair)
        scores = self.scorer.score(pairs, _Counter(self._progress, len(pairs), self.label))
        return [(score.logprob, score.greedy) for score in scores]

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of every whole text, cut into pieces as long as the model's context."""
        pieces, owners = [], []
        for owner, request in enumerate(requests):
            for piece in rolling(self.tok_encode(request.args[0]), self.prefix_token_id, self.max_length):
                pieces.append(piece)
                owners.append(owner)
        totals = [0.0] * len(requests)
        scores = self.scorer.score(pieces, _Counter(self._progress, len(pieces), self.label))
        for owner, likelihood in zip(owners, scores, strict=True):
            totals[owner] += likelihood.logprob
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """The continuation of every ``(context, settings)`` up to a stop string, which isn't part of it.

        Raises:
            UsageError: a setting is unknown, or leaves no room for the context.
        """
        prompts = []
        settings = []
        cut = 0
        for number, request in enumerate(requests):
            context, options = request.args
            sampling = sampling_of(options, seed=number)
            room = self.max_length - sampling.max_tokens
            if room < 1:
                raise UsageError(f"{sampling.max_tokens} new tokens leave no room for a context",
                                 why=f"{self.loaded.uri} takes {self.max_length} tokens in all")
            ids = self.tok_encode(context) or [self.prefix_token_id]
            cut += len(ids) > room
            prompts.append(ids[-room:])
            settings.append(sampling)
        if cut:
            warnings.warn(f"{cut} of {len(prompts)} contexts with their answers are longer than the "
                          f"{self.max_length} tokens that {self.loaded.uri} takes; the beginnings of the "
                          "contexts were cut", stacklevel=2)
        done, texts = _Counter(self._progress, len(prompts), self.label), [""] * len(prompts)
        order = sorted(range(len(prompts)), key=lambda index: (-len(prompts[index]), index))
        for start in range(0, len(order), self.batch):
            indices = order[start:start + self.batch]
            results = generate(self.loaded, [prompts[index] for index in indices],
                               [settings[index] for index in indices], kv=self.kv)
            for index, completion in zip(indices, results, strict=True):
                texts[index] = completion.text
            done(len(indices))
        return texts


class _Counter:
    """Turns counts of finished requests into progress events."""

    def __init__(self, progress: Listener, total: int, label: str) -> None:
        self._progress = progress
        self._total = total
        self._label = label
        self._done = 0
        progress(ProgressEvent(0, total, label))

    def __call__(self, count: int) -> None:
        self._done += count
        self._progress(ProgressEvent(self._done, self._total, self._label))


def rolling(ids: Sequence[int], prefix: int, length: int) -> Iterator[ScoringRequest]:
    """Cut a text so that each token is scored once, the last piece after as much context as fits.

    Args:
        ids: the tokens of the text.
        prefix: stands before the first piece.
        length: tokens that the model reads at most.
    """
    first = min(length, len(ids))
    if first:
        yield ScoringRequest((prefix,), tuple(ids[:first]))
    for start in range(first, len(ids), length):
        end = min(start + length, len(ids))
        yield ScoringRequest(tuple(ids[end - length - 1:start]), tuple(ids[start:end]))


def sampling_of(options: Mapping[str, Any], seed: int = 0) -> Sampling:
    """lm-eval's ``generation_kwargs`` as a sampling setting; greedy unless they ask for more.

    Raises:
        UsageError: an option is unknown or out of range.
    """
    unused = dict(options)
    until = unused.pop("until", [])
    stop = tuple(text for text in ([until] if isinstance(until, str) else until or []) if text)
    lengths = [unused.pop(name) for name in _LENGTHS if name in unused]
    sample = unused.pop("do_sample", None)
    rest = {name: unused.pop(name) for name in _SAMPLING if name in unused}
    if sample is False or not rest.get("temperature"):
        rest = {name: value for name, value in rest.items() if name == "repetition_penalty"}
    if unused:
        raise UsageError(f"generation_kwargs has {min(unused)!r}, which quantkit doesn't know",
                         why=did_you_mean(min(unused), ["until", "do_sample", *_LENGTHS, *_SAMPLING]))
    return Sampling(max_tokens=int(lengths[0]) if lengths else MAX_NEW_TOKENS, stop=stop, seed=seed, **rest)
