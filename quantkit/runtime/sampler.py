"""Choosing the next token, and finding the stop string that ends a text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from quantkit.ops import gpu
from quantkit.ops.rows import greedy, one_thread
from quantkit.runtime.penalties import CountedTokens, change_logits, change_logits_there, count_tokens
from quantkit.structure.base import ConstraintError, TokenConstraint
from quantkit.support.errors import QuantkitError, UsageError

MAX_TOKENS = 2**31
MIN_TEMPERATURE = 1e-4
"""Below it is greedy in all but name, and soon out of float32's range."""
MAX_STOPS, MAX_STOP_LENGTH = 64, 1024
MAX_BIASES, MAX_BIAS, MAX_PENALTY = 300, 100.0, 2.0
_SMALLEST = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class Sampling:
    """How one sequence is continued. The defaults are greedy.

    Attributes:
        max_tokens: the largest number of new tokens.
        temperature: the logits are divided by it; 0 is greedy, the lowest id of equals.
        top_k: only the k most likely (0: all).
        top_p: only the most likely that together reach p (1: all), https://arxiv.org/abs/1904.09751.
        min_p: only those at least so likely as min_p × the most likely, https://arxiv.org/abs/2407.01082.
        repetition_penalty: divides the logit of every token already there, prompt included (1: none;
            a negative logit is multiplied), https://arxiv.org/abs/1909.05858.
        logit_bias: (id, number) pairs: what is added to the logit of a token. They come first of all.
        presence_penalty: subtracted from the logit of every token that the answer has already, the prompt
            not counted (0: none; OpenAI's).
        frequency_penalty: subtracted from it once for each time that the answer has it (0: none; OpenAI's).
        seed: the seed of this sequence's own generator; ``None`` draws one.
        stop: texts that end it; they are not part of the output.
        stop_token_ids: tokens that end it as an end-of-sequence token does, also with ``ignore_eos``.
        ignore_eos: go on after an end-of-sequence token.

    Raises:
        UsageError: a field is out of range; it is named.
    """

    max_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.stop, list):
            object.__setattr__(self, "stop", tuple(self.stop))
        if isinstance(self.logit_bias, list):
            object.__setattr__(self, "logit_bias", tuple(self.logit_bias))
        for field, good, rule in (
            ("max_tokens", _whole(self.max_tokens, 1, MAX_TOKENS), f"a whole number from 1 to {MAX_TOKENS}"),
            ("temperature", self.temperature == 0 or (_real(self.temperature)
                                                      and MIN_TEMPERATURE <= self.temperature <= 100),
             f"0 (greedy) or a number from {MIN_TEMPERATURE:g} to 100"),
            ("top_k", _whole(self.top_k, 0, 2**31), "0 (all) or a whole number above"),
            ("top_p", _real(self.top_p) and 0 < self.top_p <= 1, "a number above 0 and at most 1"),
            ("min_p", _real(self.min_p) and 0 <= self.min_p <= 1, "a number from 0 to 1"),
            ("repetition_penalty", _real(self.repetition_penalty) and 0.01 <= self.repetition_penalty <= 100,
             "a number from 0.01 to 100"),
            ("logit_bias", _biases(self.logit_bias),
             f"at most {MAX_BIASES} pairs of a token id, each id once, and a number from {-MAX_BIAS:g} to "
             f"{MAX_BIAS:g}"),
            *((name, _real(value := getattr(self, name)) and -MAX_PENALTY <= value <= MAX_PENALTY,
               f"a number from {-MAX_PENALTY:g} to {MAX_PENALTY:g}")
              for name in ("presence_penalty", "frequency_penalty")),
            ("seed", self.seed is None or _whole(self.seed, 0, 2**63 - 1),
             "a whole number from 0 to 2^63 - 1"),
            ("stop", isinstance(self.stop, tuple) and len(self.stop) <= MAX_STOPS and all(
                isinstance(s, str) and 0 < len(s) <= MAX_STOP_LENGTH for s in self.stop),
             f"at most {MAX_STOPS} texts of 1 to {MAX_STOP_LENGTH} characters"),
            ("stop_token_ids", isinstance(self.stop_token_ids, tuple)
             and len(self.stop_token_ids) <= MAX_STOPS
             and all(_whole(token, 0, 2**31 - 1) for token in self.stop_token_ids),
             f"at most {MAX_STOPS} token ids"),
            ("ignore_eos", isinstance(self.ignore_eos, bool), "true or false"),
        ):
            if not good:
                raise UsageError(f"{field} is {str(getattr(self, field))[:80]!r}", why=f"it must be {rule}")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def has_logit_changes(self) -> bool:
        """Whether logits are changed before temperature and filters, so that another one may be largest."""
        return (self.repetition_penalty != 1 or bool(self.logit_bias)
                or self.presence_penalty != 0 or self.frequency_penalty != 0)


class Sampler:
    """One sequence's sampler; its random numbers are its own, so a batch's other members don't matter.

    A seed draws other tokens on a GPU than on a CPU: each has its own way to draw.

    Args:
        prompt_tokens: the place at which the answer begins in the sequence's ids.
        constraint: says which tokens may follow; whoever appends a token tells it.

    Attributes:
        prompt_tokens: the argument.
        on_host: whether a constraint plays a part, which the host alone knows.
        changes: whether a bias or the sequence so far do.
        counts: where a GPU counts the sequence's tokens, once it has changed its logits.
        seed: the seed of the random numbers, drawn if the settings name none.
        drawn: tokens that were chosen so far.
    """

    def __init__(self, sampling: Sampling, prompt_tokens: int = 0,
                 constraint: TokenConstraint | None = None) -> None:
        self.sampling, self.drawn = sampling, 0
        self.prompt_tokens, self._constraint = prompt_tokens, constraint
        self.on_host, self.changes = constraint is not None, sampling.has_logit_changes
        self.counts: CountedTokens | None = None
        self._generator = torch.Generator()
        self.seed = self._generator.seed() & 2**63 - 1 if sampling.seed is None else sampling.seed
        if sampling.seed is not None:
            self._generator.manual_seed(sampling.seed)

    def preview(self) -> Sampler:
        """A sampler that draws what this one will draw next, without its constraint, and leaves it alone.
        Where a GPU draws and logits are changed, it draws other numbers."""
        copy = Sampler(self.sampling, self.prompt_tokens)
        copy.seed, copy.drawn = self.seed, self.drawn
        if not self.sampling.greedy:
            copy._generator.set_state(self._generator.get_state())
        return copy

    def __call__(self, logits: torch.Tensor, history: Sequence[int]) -> int:
        """The next id.

        Args:
            logits: ``[vocab]``, any float dtype and device.
            history: every id so far, prompt and output.

        Raises:
            ConstraintError: the constraint fails.
            QuantkitError: the logits hold NaN or infinity: the model is broken, or its dtype too narrow.
        """
        if can_sample_on_device(logits, [self]) and not self.changes:
            (token,) = draw_ahead(logits[None], [self], [0])
            if isinstance(token, QuantkitError):
                raise token
            self.drawn += 1
            return token
        best = greedy(logits)
        if best is None:
            raise not_finite()
        self.drawn += 1
        if self.sampling.greedy and not (self.on_host or self.changes):
            return best
        with one_thread():
            scores = self._allowed(logits, history)
            return int(scores.argmax()) if self.sampling.greedy else self._draw(scores.softmax(-1))

    def candidate(self, logits: torch.Tensor, history: Sequence[int]) -> tuple[int, float]:
        """A token that may stand at a place, and its probability, among those that the filters leave.

        Args:
            logits, history: see :meth:`__call__`.

        Raises:
            QuantkitError: the logits hold NaN or infinity.
        """
        if greedy(logits) is None:
            raise not_finite()
        scores = self._allowed(logits, history)
        chances = scores.softmax(-1)
        token = int(scores.argmax()) if self.sampling.greedy else self._draw(chances)
        return token, float(chances[token])

    def _allowed(self, logits: torch.Tensor, history: Sequence[int]) -> torch.Tensor:
        """float32 ``[vocab]`` on the host: what penalties, the constraint and filters make of logits."""
        scores = logits.float().cpu()
        if self.changes:
            scores = change_logits(scores, history, self.sampling, self.prompt_tokens)
        if self._constraint is not None:
            scores = _masked(scores, self._constraint)
        return filter_tokens(scores, self.sampling)

    def _draw(self, chances: torch.Tensor) -> int:
        return int(torch.multinomial(chances, 1, generator=self._generator))


def not_finite() -> QuantkitError:
    """There is no token to choose."""
    return QuantkitError("the model's output is not finite", next="--dtype float32",
                         why="its weights are finite: activations outgrow the dtype that it runs in")


def sample_tokens(logits: torch.Tensor, samplers: Sequence[Sampler],
                  histories: Sequence[Sequence[int]]) -> list[int | QuantkitError]:
    """The next id of every row, or why there is none. A GPU is waited for once.

    Args:
        logits: ``[B, vocab]``, any float dtype and device.
        samplers: the sampler of each row.
        histories: every id of a sequence so far; only those whose sampler :attr:`Sampler.changes` logits
            count.
    """
    results: list[int | QuantkitError] = [0] * len(samplers)
    on_host = [row for row, sampler in enumerate(samplers) if not can_sample_on_device(logits, [sampler])]
    on_device = [row for row in range(len(samplers)) if row not in on_host]
    if on_device:
        rows = logits if len(on_device) == len(samplers) else logits[on_device]
        pending = sample_async(rows, [samplers[row] for row in on_device],
                               [histories[row] for row in on_device])
        for row, token in zip(on_device, pending.tokens()):
            results[row] = token
    for row in on_host:
        try:
            results[row] = samplers[row](logits[row], histories[row])
        except QuantkitError as error:
            results[row] = error
    return results


@dataclass(frozen=True)
class ChosenScores:
    """The log-probability of a token that was chosen, and the most likely ones with theirs."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def token_scores(logits: torch.Tensor, ids: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities float32 ``[n, 1 + count]``, those of ``ids [n]`` first, and whose they are, where
    ``logits [n, vocab]`` are."""
    every = logits.float().log_softmax(-1)
    best = every.topk(min(count, every.shape[1]), dim=-1)
    chosen = ids[:, None]
    return torch.cat((every.gather(1, chosen), best.values), 1), torch.cat((chosen, best.indices), 1)


@dataclass(frozen=True)
class PendingTokens:
    """Tokens that a GPU chooses; nobody has waited for them yet.

    Attributes:
        ids: int64 ``[B]``, there: what the next step takes; 0 where there is none.
    """

    ids: torch.Tensor
    _here: torch.Tensor
    _ready: torch.cuda.Event | None
    _scores: tuple[torch.Tensor, torch.Tensor] | None = None
    _counts: Sequence[int | None] = ()

    def scores(self) -> list[ChosenScores | None]:
        """Those that were asked for, once :meth:`tokens` has waited."""
        if self._scores is None:
            return [None] * len(self._here)
        scores = list[ChosenScores | None]()
        rows = iter(zip(*(part.tolist() for part in self._scores)))
        for count in self._counts:
            if count is None:
                scores.append(None)
            else:
                values, ids = next(rows)
                scores.append(ChosenScores(values[0], tuple(zip(ids[1:1 + count], values[1:1 + count]))))
        return scores

    def tokens(self) -> list[int | QuantkitError]:
        """Wait for them: ids, or why there is none."""
        if self._ready is not None:
            self._ready.synchronize()
        return [not_finite() if token < 0 else token for token in self._here.tolist()]


def can_sample_on_device(logits: torch.Tensor, samplers: Sequence[Sampler]) -> bool:
    """Whether all these rows' tokens can be chosen where the logits are."""
    return gpu.reason_against(logits.device.type, logits.dtype) is None and not any(
        sampler.on_host for sampler in samplers)


def sample_async(logits: torch.Tensor, samplers: Sequence[Sampler], histories: Sequence[Sequence[int]],
                 logprobs: Sequence[int | None] = ()) -> PendingTokens:
    """Begin to choose the next id of every row of ``logits [B, vocab]``, where :func:`can_sample_on_device`
    says so. ``histories`` are those of :func:`sample_tokens`, or without the last token where a GPU has
    counted it; ``logprobs`` the numbers of likely tokens whose log-probabilities are asked for beside the
    chosen one's, before biases and penalties; ``None``: not even that."""
    with gpu.current(logits.device):
        before = logits
        changed = [row for row, sampler in enumerate(samplers) if sampler.changes]
        changing = [samplers[row] for row in changed]
        if changed:
            rows = change_logits_there(logits if len(changed) == len(samplers) else logits[changed], changing,
                                       [histories[row] for row in changed])
            logits = rows if len(changed) == len(samplers) else logits.float().index_copy(
                0, gpu.sent(torch.tensor(changed), logits.device), rows)
        ids, finite = _drawn(logits, samplers)
        known = torch.where(finite != 0, ids, -1)
        if changed:
            chosen = known.clamp(min=0)
            count_tokens(changing, chosen if len(changed) == len(samplers) else chosen[changed])
        for sampler in samplers:
            sampler.drawn += 1
        ids, scores = known.clamp(min=0), None
        wanted = [row for row, count in enumerate(logprobs) if count is not None]
        if wanted:
            rows = gpu.sent(torch.tensor(wanted), logits.device)
            largest = max(count for count in logprobs if count is not None)
            scores = token_scores(before[rows], ids[rows], largest)
        if logits.device.type != "cuda":
            return PendingTokens(ids, known, None, scores, logprobs)
        here = _on_its_way(known)
        if scores is not None:
            scores = _on_its_way(scores[0]), _on_its_way(scores[1])
        ready = torch.cuda.Event()
        ready.record()
        return PendingTokens(ids, here, ready, scores, logprobs)


def draw_ahead(logits: torch.Tensor, samplers: Sequence[Sampler], ahead: Sequence[int]
               ) -> list[int | QuantkitError]:
    """The ids of every row of ``logits [B, vocab]``, where :func:`can_sample_on_device` says so and no
    sampler changes logits. Whoever takes a token counts it in :attr:`Sampler.drawn`.

    Args:
        samplers: the sampler of each row; several rows may have the same.
        ahead: for each row, tokens that its sampler draws before it.
    """
    with gpu.current(logits.device):
        ids, finite = _drawn(logits, samplers, ahead)
        return [not_finite() if token < 0 else token for token in torch.where(finite != 0, ids, -1).tolist()]


def _on_its_way(there: torch.Tensor) -> torch.Tensor:
    """A copy on the host, which is there when the device has come so far."""
    here = torch.empty(there.shape, dtype=there.dtype, pin_memory=True)
    return here.copy_(there, non_blocking=True)


def _drawn(logits: torch.Tensor, samplers: Sequence[Sampler],
           ahead: Sequence[int] | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids ``[B]``, and whether a row's logits are finite; ``ahead``: see :func:`draw_ahead`."""
    if all(sampler.sampling.greedy for sampler in samplers):
        from quantkit_kernels.triton.argmax import argmax

        return argmax(logits)
    from quantkit_kernels.triton.sampling import choose as chosen

    settings = [sampler.sampling for sampler in samplers]
    steps = [sampler.drawn + more for sampler, more in zip(samplers, ahead or [0] * len(samplers))]
    integers = torch.tensor([[sampler.seed for sampler in samplers], steps,
                             [sampling.top_k for sampling in settings]])
    real = torch.tensor([[sampling.temperature for sampling in settings],
                         [sampling.top_p for sampling in settings],
                         [sampling.min_p for sampling in settings]], dtype=torch.float64)
    numbers = gpu.sent(torch.cat((integers, real.view(torch.int64))), logits.device)  # all in one copy
    seed, step, top_k = numbers[:3]
    temperature, top_p, min_p = numbers[3:].view(torch.float64).float()
    top_p = top_p.clamp(min=_SMALLEST)
    return chosen(logits, temperature, seed, step, top_k
                  if any(sampling.top_k for sampling in settings) else None,
                  top_p if any(sampling.top_p < 1 for sampling in settings) else None,
                  min_p if any(sampling.min_p for sampling in settings) else None)


def _masked(scores: torch.Tensor, constraint: TokenConstraint) -> torch.Tensor:
    """Scores with −inf where the constraint excludes a token; its failures are ConstraintErrors."""
    try:
        masked = constraint.mask(scores)
    except QuantkitError:
        raise
    except Exception as error:
        raise ConstraintError("the constraint on the answer failed",
                              why=f"{type(error).__name__}: {error}") from error
    if masked.max() == -torch.inf:
        raise ConstraintError("the constraint on the answer allows no token",
                              why="the model's vocabulary has none that may follow")
    return masked


def filter_tokens(scores: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Temperature, top-k, top-p, min-p, in transformers' order; excluded tokens become −inf.

    Args:
        scores: float32 ``[vocab]``, finite or −inf where a token is excluded already; not written to.

    Returns:
        float32 ``[vocab]``; the most likely token is never excluded.
    """
    if sampling.greedy:
        return scores
    # with the largest at 0 nothing overflows at a small temperature, and min-p is one comparison
    scores = (scores - scores.max()) / sampling.temperature
    if 0 < sampling.top_k < scores.numel():
        scores = scores.masked_fill(scores < scores.topk(sampling.top_k).values[-1], -torch.inf)
    if sampling.top_p < 1:
        values, order = scores.sort(descending=True, stable=True)
        chances = values.softmax(-1)
        excluded = chances.cumsum(-1) - chances >= sampling.top_p
        excluded[0] = False  # also where top_p is 0 in float32
        scores = scores.index_fill(0, order[excluded], -torch.inf)
    if sampling.min_p > 0:
        scores = scores.masked_fill(scores < math.log(sampling.min_p), -torch.inf)
    return scores


def _biases(pairs: object) -> bool:
    if not isinstance(pairs, tuple) or len(pairs) > MAX_BIASES:
        return False
    if not all(isinstance(pair, tuple | list) and len(pair) == 2 for pair in pairs):
        return False
    return len({str(token) for token, _ in pairs}) == len(pairs) and all(
        _whole(token, 0, 2**31) and _real(bias) and -MAX_BIAS <= bias <= MAX_BIAS for token, bias in pairs)


def _whole(value: object, low: int, high: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _real(value: object) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int) and not isinstance(value, bool)  # which may be too large for a float


class StopStrings:
    """Feed text in pieces, get back what may be shown.

    The stop string that is complete first ends the text, and of those that end together the longest:
    how the text was cut into pieces makes no difference.

    Args:
        stops: the strings; none is empty.

    Attributes:
        stop: the stop string that came, or ``None`` so far.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._pending = ""
        self.stop: str | None = None

    def push(self, text: str) -> str:
        """Add text; returns what is certainly before any stop string. After one, nothing."""
        if self.stop is not None:
            return ""
        self._pending += text
        hits = [(start + len(stop), start, stop) for stop in self._stops
                if (start := self._pending.find(stop)) >= 0]
        if hits:
            first = min(hits)
            end, self.stop = first[1:]
        else:
            end = len(self._pending) - self._possible()
        out, self._pending = self._pending[:end], "" if self.stop is not None else self._pending[end:]
        return out

    def finish(self) -> str:
        """The text that was kept back, now that nothing follows."""
        out, self._pending = self._pending, ""
        return out

    def _possible(self) -> int:
        """Length of the longest end of the text that is kept back that is the beginning of a stop string."""
        return max((size for stop in self._stops for size in range(1, min(len(stop), len(self._pending) + 1))
                    if self._pending.endswith(stop[:size])), default=0)
