"""``/tokenize`` and ``/detokenize`` as vLLM has them."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import Field, model_validator

from quantkit.runtime.core import check_ids
from quantkit.runtime.sampler import Sampling
from quantkit.serving.conversation import MAX_MESSAGES, Conversation, choose_tools
from quantkit.serving.errors import RefusedValue
from quantkit.serving.models import ServedEngine
from quantkit.serving.openai.chat_request import Message, TemplateOptions, Tools, check_options, plain_tools
from quantkit.serving.schema import Ids, RequestPart, String
from quantkit.serving.turns import render
from quantkit.serving.work import PromptReader

MAX_TOKENS = 2**18
"""Ids that are turned into text at once."""


class TokenizeRequest(RequestPart):
    """Body of ``/tokenize``: a text, or a conversation as it would be answered."""

    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {
        "add_generation_prompt": (True,), "continue_final_message": (False,), "chat_template": ()}
    refused = frozenset(neutral)

    model: String | None = Field(default=None, description="May be left out where one model is served.")
    prompt: String | None = Field(default=None, description="Either this or messages.")
    messages: Annotated[list[Message], Field(
        min_length=1, max_length=MAX_MESSAGES, fail_fast=True)] | None = None
    tools: Tools = Field(default_factory=list, description="With messages.")
    chat_template_kwargs: TemplateOptions = Field(default_factory=dict, description="With messages.")
    add_special_tokens: bool | None = Field(
        default=None, description="Whether a prompt gets what the tokenizer puts around a text; it does by "
                                  "default. A conversation has what its template writes.")
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _consistent(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise RefusedValue("prompt", "give either prompt or messages", "invalid_value")
        if self.messages is None and (self.tools or self.chat_template_kwargs):
            raise RefusedValue("tools" if self.tools else "chat_template_kwargs",
                               "only messages have tools and template values", "invalid_value")
        if self.messages is not None and self.add_special_tokens:
            raise RefusedValue("add_special_tokens", "the special tokens of a conversation are "
                               "those that its template writes")
        choose_tools(plain_tools(self.tools), None, False, None)
        check_options(self.chat_template_kwargs)
        return self


class DetokenizeRequest(RequestPart):
    """Body of ``/detokenize``."""

    model: String | None = Field(default=None, description="May be left out where one model is served.")
    tokens: Annotated[Ids, Field(max_length=MAX_TOKENS)]


def tokenize(model: ServedEngine, body: TokenizeRequest) -> dict[str, Any]:
    """The answer of ``/tokenize``.

    Raises:
        ApiError: the text is far longer than the model's context.
        QuantkitError: the template or the tokenizer is at fault.
    """
    tokenizer = model.loaded.tokenizer
    if body.messages is not None:
        tools, _ = choose_tools(plain_tools(body.tools), None, False, None)
        ids = render(model, Conversation([message.plain() for message in body.messages], Sampling(), None,
                                         tools=tools, template_options=body.chat_template_kwargs))
    else:
        prompt = body.prompt or ""
        PromptReader(tokenizer, model.context, 1, "prompt").check(prompt)
        ids = tokenizer.encode(prompt, body.add_special_tokens is not False)
    return {"count": len(ids), "max_model_len": model.context, "tokens": ids,
            "token_strs": [model.texts.text(token) for token in ids] if body.return_token_strs else None}


def detokenize(model: ServedEngine, body: DetokenizeRequest) -> dict[str, Any]:
    """The answer of ``/detokenize``.

    Raises:
        UsageError: an id is unknown.
    """
    check_ids(model.loaded, body.tokens)
    return {"prompt": model.loaded.tokenizer.decode(body.tokens, skip_special=False)}
