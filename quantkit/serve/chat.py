"""``/v1/chat/completions``: https://platform.openai.com/docs/api-reference/chat/object."""

from __future__ import annotations

from typing import Any

from quantkit.runtime.request import Completion, TokenInfo
from quantkit.serve.errors import ApiError
from quantkit.serve.logprobs import chat_logprobs
from quantkit.serve.prompt import PromptReader
from quantkit.serve.reply import FINISH, GenerationResponse, ServedEngine
from quantkit.serve.schema import ChatRequest
from quantkit.serve.work import ChoiceJob, RequestWork, check_size


class ChatResponse(GenerationResponse):
    """The assistant's next turn."""

    prefix, whole_kind, piece_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, model: ServedEngine, body: ChatRequest) -> None:
        tokenizer = model.loaded.tokenizer
        if not tokenizer.has_chat:
            raise ApiError(400, f"{model.name} has no chat template, so it can't chat; use /v1/completions",
                           param="messages", code="no_chat_template")
        check_size(body.n, model.engine.stats()["max_queue"])
        reader = PromptReader(tokenizer, model.context, body.wanted or 1, "messages")
        prompt = tokenizer.chat([message.plain() for message in body.messages], reader.check,
                                parse_special=model.parse_special)
        # a prompt that leaves no room asks for one token, and is refused with the numbers
        limit = body.wanted or max(model.context - len(prompt), 1)
        self._alternatives = (body.top_logprobs or 0) if body.logprobs else None
        super().__init__(model, body, [prompt], [
            ChoiceJob(prompt, body.sampling(limit, i), self._alternatives) for i in range(body.n)])

    def choice(self, index: int, tokens: list[TokenInfo], done: Completion) -> dict[str, Any]:
        """A choice with its ``message``."""
        return {"index": index, "message": {"role": "assistant", "content": done.text, "refusal": None},
                "logprobs": self._logprobs(tokens), "finish_reason": FINISH[done.finish_reason]}

    def opening(self, index: int, work: RequestWork) -> dict[str, Any]:
        """The role."""
        return _delta(index, {"role": "assistant", "content": "", "refusal": None})

    def piece(self, index: int, token: TokenInfo) -> dict[str, Any] | None:
        """A streamed choice with its ``delta``."""
        if not token.text and self._alternatives is None:
            return None
        return _delta(index, {"content": token.text}, self._logprobs([token]))

    def closing(self, index: int, done: Completion, rest: str) -> dict[str, Any]:
        """The reason."""
        return _delta(index, {"content": rest} if rest else {}, reason=FINISH[done.finish_reason])

    def _logprobs(self, tokens: list[TokenInfo]) -> dict[str, Any] | None:
        return None if self._alternatives is None else chat_logprobs(tokens, self.model.texts)


def _delta(index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None = None,
           reason: str | None = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
