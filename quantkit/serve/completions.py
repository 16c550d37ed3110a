"""``/v1/completions``: https://platform.openai.com/docs/api-reference/completions/object."""

from __future__ import annotations

from typing import Any

from quantkit.runtime.request import Completion, TokenInfo, check_ids
from quantkit.serve.logprobs import TextOffsets, text_logprobs
from quantkit.serve.prompt import PromptReader
from quantkit.serve.reply import FINISH, GenerationResponse, ServedEngine
from quantkit.serve.schema import CompletionRequest
from quantkit.serve.work import ChoiceJob, RequestWork, check_size


class CompletionResponse(GenerationResponse):
    """The continuation of one or more prompts; with ``echo`` behind the prompt itself."""

    prefix, whole_kind, piece_kind = "cmpl", "text_completion", "text_completion"

    def __init__(self, model: ServedEngine, body: CompletionRequest) -> None:
        tokenizer = model.loaded.tokenizer
        check_size(len(body.prompts) * body.n, model.engine.stats()["max_queue"])
        reader = PromptReader(tokenizer, model.context, body.max_tokens or 1, "prompt")
        prompts = [reader.encode(p) if isinstance(p, str) else p for p in body.prompts]
        for prompt in prompts:  # before an unknown id is turned into text
            check_ids(model.loaded, prompt)
        self._texts = [p if isinstance(p, str) else tokenizer.decode(p, skip_special=False)
                       for p in body.prompts] if body.echo else [""] * len(prompts)
        self._alternatives, self._echo, self._n = body.logprobs, body.echo, body.n
        # the engine always makes a token; where none is wanted it is dropped again
        self._silent = body.max_tokens == 0
        shown = prompts if body.echo else [[]] * len(prompts)
        self._offsets = [TextOffsets(tokenizer, ids, text) for ids, text in zip(shown, self._texts)
                         for _ in range(body.n if body.logprobs is not None else 0)]
        super().__init__(model, body, prompts, [
            ChoiceJob(prompt, body.sampling(body.max_tokens or 1, i), body.logprobs,
                      body.echo and body.logprobs is not None) for prompt in prompts for i in range(body.n)])

    def choice(self, index: int, tokens: list[TokenInfo], done: Completion) -> dict[str, Any]:
        """A choice with its ``text``."""
        scored = [*(done.prompt_logprobs or []), *([] if self._silent else tokens)]
        return self._choice(index, self._prompt(index) + ("" if self._silent else done.text), scored,
                            "length" if self._silent else FINISH[done.finish_reason])

    def opening(self, index: int, work: RequestWork) -> dict[str, Any] | None:
        """The prompt, if it is wanted; by now it is scored."""
        if not self._echo:
            return None
        return self._choice(index, self._prompt(index), work.tickets[index].result.prompt_logprobs or [])

    def piece(self, index: int, token: TokenInfo) -> dict[str, Any] | None:
        """A choice with its ``text``."""
        if self._silent or (not token.text and self._alternatives is None):
            return None
        return self._choice(index, token.text, [token])

    def closing(self, index: int, done: Completion, rest: str) -> dict[str, Any]:
        """The reason."""
        if self._silent:
            return self._choice(index, "", [], "length") | {"logprobs": None}
        return self._choice(index, rest, [], FINISH[done.finish_reason]) | {"logprobs": None}

    def count(self, done: Completion) -> int:
        """None of the token that was dropped."""
        return 0 if self._silent else super().count(done)

    def _prompt(self, index: int) -> str:
        return self._texts[index // self._n]

    def _choice(self, index: int, text: str, tokens: list[TokenInfo],
                reason: str | None = None) -> dict[str, Any]:
        logprobs = None
        if self._alternatives is not None:
            logprobs = text_logprobs(tokens, self.model.texts, self._offsets[index])
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
