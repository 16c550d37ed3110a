"""``/openapi.json``: the requests that this server accepts, with its limits, and all responses."""

from __future__ import annotations

from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from quantkit.serving.answers import (
    AnthropicErrorResponse,
    AnthropicEvent,
    ChatChunk,
    ErrorResponse,
    ResponseEvent,
    TextChunk,
)
from quantkit.serving.ignored import IGNORED, Ignored
from quantkit.serving.models import ServedModels
from quantkit.serving.openai.embeddings import MAX_INPUTS
from quantkit.serving.schema import INT64

Responses = dict[int | str, dict[str, Any]]
ANY = (400, 403, 405, 408, 500)
"""Errors that any route may answer with: 400 what isn't HTTP, 408 headers that don't come."""
LIMITS = {"max_tokens", "max_completion_tokens", "max_output_tokens", "n_predict"}
"""Fields that say how long an answer may be. Unless the server is strict, what doesn't fit is cut."""
_USER = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 16}
EXAMPLES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": _USER, "/v1/messages": _USER,
    "/v1/completions": {"prompt": "Hello", "max_tokens": 16},
    "/v1/messages/count_tokens": {"messages": _USER["messages"]}, "/tokenize": {"prompt": "Hello"},
    "/v1/responses": {"input": "Hello", "max_output_tokens": 16}, "/v1/embeddings": {"input": "Hello"},
    "/detokenize": {"tokens": [0]}}


def responses(answer: type[BaseModel], *others: int, chunk: type[BaseModel] | None = None, done: bool = True,
              error: type[BaseModel] = ErrorResponse) -> Responses:
    """What a route answers.

    Args:
        answer: The body of an answer with 200.
        others: The statuses of errors beside :data:`ANY`.
        chunk: The body of an event, if a stream is asked for.
        done: Whether the last event is ``[DONE]``.
        error: The body of errors.
    """
    good: dict[str, Any] = {"model": answer}
    if chunk is not None:
        good["content"] = {"text/event-stream": {"itemSchema": _event([chunk, error], done)}}
    return {200: good, **_errors(others, error)}


def anthropic_responses(answer: type[BaseModel], *others: int,
                        chunk: type[BaseModel] | None = None) -> Responses:
    """The same for a route of Anthropic's API."""
    return responses(answer, *others, chunk=chunk, done=False, error=AnthropicErrorResponse)


def text_responses(*others: int) -> Responses:
    """What a route answers that answers with plain text."""
    good = {"content": {"text/plain": {"schema": {"type": "string"}}}}
    return {200: {"description": "Text", **good}, **_errors(others, ErrorResponse)}


def _errors(others: Sequence[int], error: type[BaseModel]) -> Responses:
    return {status: {"model": error, "description": HTTPStatus(status).phrase}
            for status in sorted({*ANY, *others})}


def _event(parts: list[type[BaseModel]], done: bool) -> dict[str, Any]:
    """A server-sent event as OpenAPI 3.2 describes one."""
    content = {"anyOf": [{"$ref": f"#/components/schemas/{part.__name__}"} for part in parts]}
    text = {"type": "string", "contentMediaType": "application/json", "contentSchema": content}
    data = {"anyOf": [{"const": "[DONE]"}, text]} if done else text
    name = {} if done else {"event": {"type": "string"}}
    return {"type": "object", "properties": {**name, "data": data}, "required": ["data", *name]}


def describe(api: FastAPI, models: ServedModels, *, key: bool) -> None:
    """Make an application's description say what holds for the models that it serves.

    Args:
        api: The application, which has all of its routes.
        models: The models that are served.
        key: Whether clients need a key.
    """
    make = api.openapi

    def openapi() -> dict[str, Any]:
        if api.openapi_schema is None:
            token = IGNORED.set(Ignored(models.strict_requests))
            try:
                _refine(make(), models, key)
            finally:
                IGNORED.reset(token)
        assert api.openapi_schema is not None
        return api.openapi_schema

    api.openapi = openapi  # type: ignore[method-assign]


def _refine(schema: dict[str, Any], models: ServedModels, key: bool) -> None:
    parts = schema["components"]["schemas"]
    _, chunks = models_json_schema([(part, "serialization") for part in (
        ChatChunk, TextChunk, ResponseEvent, AnthropicEvent)], ref_template="#/components/schemas/{model}")
    parts.update(chunks["$defs"])
    for unused in ("HTTPValidationError", "ValidationError"):  # the framework's own, which nothing answers
        parts.pop(unused, None)
    for path, operations in schema["paths"].items():
        for operation in operations.values():
            operation["responses"].pop("422", None)
            for parameter in operation.get("parameters", ()):
                if parameter["in"] == "path":  # a model's name
                    parameter["schema"]["enum"] = models.names
            if path in EXAMPLES:
                content = operation["requestBody"]["content"]["application/json"]
                content["example"] = {"model": models.names[0], **EXAMPLES[path]}
    _limit(parts, models)
    _name_keys(parts)
    operation_id = schema["paths"]["/v1/models/{name}"]["get"]["operationId"]
    schema["paths"]["/v1/models"]["get"]["responses"]["200"]["links"] = {
        "model": {"operationId": operation_id, "parameters": {"name": "$response.body#/data/0/id"}}}
    if key:
        schema["components"]["securitySchemes"] = {
            "key": {"type": "http", "scheme": "bearer"},
            "header": {"type": "apiKey", "in": "header", "name": "x-api-key"}}
        schema["security"] = [{"key": []}, {"header": []}]
        schema["paths"]["/health"]["get"]["security"] = []


def _limit(parts: dict[str, Any], models: ServedModels) -> None:
    """Put the models' limits into the bodies' schemas: of several models the largest ones."""
    limit = max(model.context for model in models) - 1  # a prompt has a token at least
    vocabulary = max(model.loaded.config.vocab_size for model in models)
    queue = max(model.max_queue for model in models)
    for part in parts.values():
        properties = part.get("properties", {})
        if "model" in properties and not {"object", "role"} & properties.keys():
            any_name = len(models) == 1 and not models.strict_requests  # which answers to any name
            _texts(properties["model"])["examples" if any_name else "enum"] = models.names
            for field in LIMITS & properties.keys() if models.strict_requests else ():
                for option in properties[field].get("anyOf", [properties[field]]):
                    if option.get("type") == "integer":
                        option["maximum"] = limit
            if "anyOf" in properties.get("priority", ()) and all(
                    model.scheduling_policy == "fcfs" for model in models):
                _integers(properties["priority"]).update(minimum=0, maximum=0)
            if "include" in properties and not models.strict_requests:
                array = next(part for part in properties["include"]["anyOf"] if part.get("type") == "array")
                array["items"] = {"type": "string"}
            if "seed" in properties:  # the framework makes numbers of 53 bits of them
                _integers(properties["seed"]).update(minimum=-INT64, maximum=INT64 - 1)
    for name, field, inputs in (("CompletionRequest", "prompt", queue),
                                ("EmbeddingRequest", "input", MAX_INPUTS)):
        for option in parts[name]["properties"][field]["anyOf"]:
            inside = option.get("items", {})
            if inside.get("type") in ("string", "array"):
                option["maxItems"] = inputs
            ids = inside if inside.get("type") == "array" else option
            if ids.get("items", {}).get("type") == "integer":
                ids["items"] |= {"minimum": 0, "maximum": vocabulary - 1}
                ids["maxItems"] = limit
    parts["DetokenizeRequest"]["properties"]["tokens"]["items"] |= {"minimum": 0, "maximum": vocabulary - 1}
    width = max(model.loaded.config.hidden_size for model in models)
    _integers(parts["EmbeddingRequest"]["properties"]["dimensions"])["maximum"] = width


def _name_keys(schema: Any) -> None:
    """Say of objects with patterns for their keys that they have no others."""
    for part in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
        _name_keys(part)
    if isinstance(schema, dict) and isinstance(patterns := schema.get("patternProperties"), dict):
        ((pattern, value),) = patterns.items()
        del schema["patternProperties"]
        schema |= {"propertyNames": {"pattern": pattern}, "additionalProperties": value}


def _texts(schema: dict[str, Any]) -> dict[str, Any]:
    """The part of a nullable schema that is about texts."""
    return next(option for option in schema.get("anyOf", [schema]) if option.get("type") == "string")


def _integers(schema: dict[str, Any]) -> dict[str, Any]:
    """The part of a nullable schema that is about integers."""
    integer: dict[str, Any] = next(option for option in schema.get("anyOf", [schema])
                                   if option.get("type") == "integer")
    return integer
