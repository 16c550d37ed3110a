"""A loaded model as one object: it continues texts, answers messages, scores texts and converses."""

from __future__ import annotations

import math
import signal
import threading
import weakref
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, TypedDict, Unpack, cast

from quantkit.api.progress import Progress, reported
from quantkit.kv.build import check_kv
from quantkit.kv.spec import KVSpec, parse_kv
from quantkit.runtime.core import Completion
from quantkit.runtime.denoising import parse_denoising
from quantkit.runtime.drafting.base import parse_drafter
from quantkit.runtime.engine import Engine
from quantkit.runtime.loader import LoadedModel
from quantkit.runtime.loader import load as load_weights
from quantkit.runtime.sampler import Sampling
from quantkit.support.errors import UsageError

if TYPE_CHECKING:
    from quantkit.text.tokenizer import Tokenizer

Message = Mapping[str, Any]
"""``{"role": "user", "content": "…"}``; roles are ``system``, ``user``, ``assistant`` and ``tool``."""
Prompt = str | Sequence[Message] | Sequence[int]
"""A text that is continued as it stands, messages that are answered, or token ids."""

WAITING = 2**20
"""Requests that may wait: as many as anybody submits at once."""


class SamplingOptions(TypedDict, total=False):
    """Keywords of the functions that generate text; :class:`~quantkit.runtime.sampler.Sampling` has what they
    mean and their defaults."""

    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: tuple[tuple[int, float], ...]
    seed: int | None
    stop: Sequence[str]
    ignore_eos: bool


@dataclass(frozen=True)
class TextScore:
    """What a model says of a text.

    Attributes:
        token_ids: the text's tokens.
        logprobs: natural logarithms of their probabilities, one fewer: the first has nothing before it.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]

    @property
    def nll(self) -> float:
        """The mean negative log-likelihood of a token, in nats."""
        return -math.fsum(self.logprobs) / len(self.logprobs)

    @property
    def perplexity(self) -> float:
        return math.exp(self.nll)


class Model:
    """A model that is ready to run. :func:`load` makes one.

    Calls may come from several threads; their requests run side by side, and what one generates doesn't
    depend on the others.

    Args:
        loaded: weights and tokenizer.
        engine: runs the requests.

    Attributes:
        loaded: weights, tokenizer, config, and what is known of them.
        engine: the engine, for what this class doesn't offer: constraints, priorities, traces.
    """

    def __init__(self, loaded: LoadedModel, engine: Engine) -> None:
        self.loaded = loaded
        self.engine = engine
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<quantkit.Model {self.loaded.uri}: {self.loaded.label}, KV cache {self.kv}>"

    @property
    def tokenizer(self) -> Tokenizer:
        return self.loaded.tokenizer

    @property
    def kv(self) -> KVSpec:
        """How keys and values are kept."""
        return self.engine.cache.spec

    def generate(self, prompt: Prompt, **options: Unpack[SamplingOptions]) -> Completion:
        """Continue a text, or answer messages.

        Args:
            prompt: the text, continued as it stands; messages, written in the model's chat template; or
                token ids.
            options: ``max_tokens`` (128), ``temperature`` (0: the likeliest token each time), ``top_k``,
                ``top_p``, ``min_p``, ``repetition_penalty``, ``presence_penalty``, ``frequency_penalty``,
                ``logit_bias`` (pairs of a token id and what is added to its logit), ``seed``, ``stop`` (texts
                that end the answer), ``ignore_eos``.

        Raises:
            UsageError: an option is out of range, or prompt and answer are longer than the model's context.
            SourceError: there are messages, and the model has no chat template.

        >>> model.generate("1, 2, 3,", max_tokens=3).text
        ' 4,'
        """
        return self._completions([prompt], options)[0]

    def generate_all(self, prompts: Sequence[Prompt], **options: Unpack[SamplingOptions]) -> list[Completion]:
        """:meth:`generate` for several prompts, side by side; a completion each, in their order.

        >>> print(*(done.text for done in model.generate_all(["1, 2, 3,", "2, 4, 6,"], max_tokens=3)))
         4,  8,
        """
        return self._completions(prompts, options)

    def stream(self, prompt: Prompt, **options: Unpack[SamplingOptions]) -> TextStream:
        """:meth:`generate`, a piece of text at a time. A loop that is left ends the request.

        >>> for piece in model.stream("1, 2, 3,", max_tokens=3):
        ...     print(repr(piece))
        ' '
        '4'
        ','
        """
        return TextStream(self, self.encode(prompt), options)

    def score(self, text: str) -> TextScore:
        """How likely each token of a text is behind those before it.

        Raises:
            UsageError: the text has fewer than two tokens, or more than the model's context less one.

        >>> model.score("The capital of France is Paris.").perplexity < model.score(
        ...     "The capital of France is seven.").perplexity
        True
        """
        token_ids = self.tokenizer.encode(text)
        if len(token_ids) < 2:
            raise UsageError("a text of fewer than two tokens has no score",
                             why="the first token has nothing before it", next="give a longer text")
        (done,) = self._completions([token_ids], SamplingOptions(max_tokens=1), logprobs=0, echo=True)
        assert done.prompt_logprobs is not None
        return TextScore(tuple(token_ids), tuple(
            info.logprob for info in done.prompt_logprobs if info.logprob is not None))

    def chat(self, system: str | None = None, **options: Unpack[SamplingOptions]) -> Chat:
        """Begin a conversation.

        Args:
            system: the system message.
            options: of every answer; at most 1,024 new tokens unless said otherwise.

        Raises:
            SourceError: the model has no chat template.

        >>> conversation = model.chat("Answer in one sentence.", max_tokens=40)
        >>> answer = conversation.send("Why is the sky blue?")
        >>> print(*(message["role"] for message in conversation.messages))
        system user assistant
        """
        return Chat(self, system, options)

    def encode(self, prompt: Prompt) -> list[int]:
        """The token ids of a prompt."""
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        if prompt and isinstance(prompt[0], int):
            return list(cast(Sequence[int], prompt))
        return self.tokenizer.chat(cast(Sequence[Message], prompt))

    def _completions(self, prompts: Sequence[Prompt], options: SamplingOptions, **wanted: Any
                     ) -> list[Completion]:
        """The results for prompts, which are taken out of the engine if nobody waits for them any more."""
        streams = list[TextStream]()
        try:
            for prompt in prompts:
                streams.append(TextStream(self, self.encode(prompt), options, **wanted))
            return [stream.finish() for stream in streams]
        finally:
            for stream in streams:
                stream.close()

    def step(self) -> None:
        """Let the engine make a step, of all requests; streams call it."""
        with self._lock, _interrupted_later():
            self.engine.step()


class TextStream(Iterator[str]):
    """The pieces of a text that is generated while they are asked for. :meth:`Model.stream` makes one.

    Args:
        model: generates it.
        prompt: token ids.
        options: as of :meth:`Model.generate`.

    Raises:
        UsageError: as :meth:`Model.generate`; at once, and not with the first piece.
    """

    def __init__(self, model: Model, prompt: Sequence[int], options: SamplingOptions, **wanted: Any) -> None:
        text, errors = list[str](), list[BaseException]()
        self._model, self._text, self._errors = model, text, errors
        self._request = model.engine.submit(
            prompt, sampling_of(options), on_token=lambda info: text.append(info.text),
            on_error=errors.append, **wanted)
        weakref.finalize(self, self._request.cancel)

    @property
    def result(self) -> Completion:
        """What was generated so far; when the stream has ended, the whole."""
        return self._request.result

    def __next__(self) -> str:
        while not any(self._text):
            if self._request.done:
                self._raise()
                raise StopIteration
            self._model.step()
        piece = "".join(self._text)
        self._text.clear()
        return piece

    def finish(self) -> Completion:
        """The whole result. Raises what went wrong with this request."""
        while not self._request.done:
            self._model.step()
        self._raise()
        return self._request.result

    def close(self) -> None:
        """End it before it ends itself."""
        self._request.cancel()
        while not self._request.done:
            self._model.step()

    def _raise(self) -> None:
        if self._errors:
            raise self._errors[0]


class Chat:
    """A conversation: messages, to which a model's answers are added. :meth:`Model.chat` makes one.

    What was said before stays in the KV cache.

    Attributes:
        messages: what was said, as chat templates take it.
    """

    def __init__(self, model: Model, system: str | None, options: SamplingOptions) -> None:
        self._model, self._options = model, SamplingOptions(**{"max_tokens": 1024, **options})
        sampling_of(self._options)
        self._begin: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        model.tokenizer.chat_text([*self._begin, {"role": "user", "content": ""}])
        self.messages = list(self._begin)

    def send(self, text: str) -> str:
        """Say something; the whole answer.

        Raises:
            QuantkitError: such as that the conversation is longer than the model's context; nothing was added
                to it.
        """
        return "".join(self.stream(text))

    def stream(self, text: str) -> Generator[str, None, None]:
        """:meth:`send`, a piece of the answer at a time. What came of an answer that is left stays."""
        messages = [*self.messages, {"role": "user", "content": text}]
        return self._answered(messages, TextStream(self._model, self._model.encode(messages), self._options))

    def clear(self) -> None:
        """Begin anew, behind the system message."""
        self.messages = list(self._begin)

    def _answered(self, messages: list[Message], answer: TextStream) -> Generator[str, None, None]:
        failed = True
        try:
            yield from answer
            failed = False
        except (GeneratorExit, KeyboardInterrupt):
            failed = False
            raise
        finally:
            try:
                answer.close()
            finally:
                if not failed:
                    self.messages = [*messages, {"role": "assistant", "content": answer.result.text}]


def load(model: str, *, kv: str | KVSpec | None = None, draft: str = "none", blocks: str | None = None,
         device: str = "auto", dtype: str = "auto", revision: str | None = None, verify: bool = False,
         max_batch: int = 8, max_queue: int = WAITING, max_itl: float | None = None,
         kv_memory: int | None = None, prefix_cache: int | None = None, progress: Progress = True) -> Model:
    """Load a model that runs.

    Args:
        model: a checkpoint's folder, or anything that can be quantized: a folder, a ``.gguf`` file,
            ``OWNER/NAME`` or ``OWNER/NAME:Q4_K_M`` on the hub, ``pkg:NAME``.
        kv: how keys and values are kept: ``int8``, ``"snapkv(0.5)+int4"``; by default as the checkpoint says.
        draft: guesses tokens that a step confirms: ``ngram``, ``"self(CHECKPOINT)"``; what is generated stays
            the same.
        blocks: how a model writes blocks of tokens, if it does: ``"steps=2, confidence=0.9"``.
        device: ``cpu``, ``cuda``, ``cuda:1``; ``auto`` takes a GPU if there is one.
        dtype: dtype of activations and plain weights: ``float32``, ``bfloat16``, ``float16``; ``auto`` is the
            model's own.
        revision: branch, tag or commit of a model on the hub.
        verify: first check all bytes of a checkpoint of ours against their hashes.
        max_batch: the number of sequences that run side by side.
        max_queue: the number of requests that may wait.
        max_itl: seconds between two tokens of a request while another's prompt is read; by default prompts
            are read in large pieces.
        kv_memory: bytes that the KV cache takes at once; by default it grows and shrinks, and on a GPU takes
            what is left.
        prefix_cache: bytes of keys and values kept for prompts that begin like earlier ones; 0: none; by
            default a part of the machine's memory.
        progress: whether a bar is shown where that takes a while, or a callback.

    Raises:
        UsageError: a setting can't be read; the device isn't there.
        QuantkitError: the model isn't there, isn't known or is damaged.

    >>> model = quantkit.load("smollm2", kv="int8", progress=False)
    >>> model
    <quantkit.Model smollm2: Q4_1, KV cache int8>
    """
    spec = parse_kv(kv) if isinstance(kv, str) else kv
    if spec is not None:
        check_kv(spec)
    drafter, denoising = parse_drafter(draft), parse_denoising(blocks)
    with reported(progress, f"loading {model}", after=2.0) as listener:
        loaded = load_weights(model, revision=revision, dtype=dtype, device=device, verify=verify,
                              progress=listener, loading=listener)
    return Model(loaded, Engine(loaded, kv=spec, max_batch=max_batch, max_queue=max_queue,
                                max_itl=max_itl, memory=kv_memory, prefix_cache=prefix_cache,
                                drafter=drafter, denoising=denoising))


@contextmanager
def _interrupted_later() -> Iterator[None]:
    """Ctrl-C takes effect at the end of the block: a step is never cut in two."""
    if (threading.current_thread() is not threading.main_thread()
            or signal.getsignal(signal.SIGINT) is not signal.default_int_handler):
        yield
        return
    came = list[int]()
    signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if came:
            raise KeyboardInterrupt


def sampling_of(options: SamplingOptions) -> Sampling:
    """Checked settings. Raises UsageError: one is unknown or out of range."""
    stop = options.get("stop", ())
    values: dict[str, Any] = {**options, "stop": (stop,) if isinstance(stop, str) else tuple(stop)}
    if unknown := values.keys() - {field.name for field in fields(Sampling)}:
        raise UsageError(f"an option of generation is called {min(unknown)}", why="there is no such option",
                         next="help(quantkit.Model.generate) lists them")
    return Sampling(**values)


__all__ = ["Chat", "Message", "Model", "Prompt", "SamplingOptions", "TextScore", "TextStream", "load"]
