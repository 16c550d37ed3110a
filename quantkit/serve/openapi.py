"""``/openapi.json``: the requests that this server accepts, with its limits, and all responses."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from quantkit.serve.answers import ChatChunk, ErrorResponse, TextChunk
from quantkit.serve.reply import ServedEngine
from quantkit.serve.schema import INT64

Responses = dict[int | str, dict[str, Any]]
ANY = (400, 403, 405, 408, 500)
"""Errors that any route may answer with: 400 what isn't HTTP, 408 headers that don't come."""


def responses(answer: type[BaseModel], *others: int, chunk: type[BaseModel] | None = None) -> Responses:
    """What a route answers.

    Args:
        answer: with 200.
        others: statuses of errors beside :data:`ANY`.
        chunk: with 200 too, if a stream is asked for: what its events hold.
    """
    good: dict[str, Any] = {"model": answer}
    if chunk is not None:
        good["content"] = {"text/event-stream": {"itemSchema": _event(chunk)}}
    return {200: good, **{status: {"model": ErrorResponse, "description": HTTPStatus(status).phrase}
                          for status in sorted({*ANY, *others})}}


def _event(chunk: type[BaseModel]) -> dict[str, Any]:
    """A server-sent event as OpenAPI 3.2 describes one."""
    content = {"anyOf": [{"$ref": f"#/components/schemas/{part.__name__}"}
                         for part in (chunk, ErrorResponse)]}
    data = {"anyOf": [{"const": "[DONE]"}, {"type": "string", "contentMediaType": "application/json",
                                            "contentSchema": content}]}
    return {"type": "object", "properties": {"data": data}, "required": ["data"]}


def describe(api: FastAPI, model: ServedEngine, *, key: bool) -> None:
    """Make an application's description say what holds for the model that it serves.

    Args:
        api: its routes; complete.
        model: what is served.
        key: whether clients need one.
    """
    make = api.openapi

    def openapi() -> dict[str, Any]:
        if api.openapi_schema is None:
            _refine(make(), model, key)
        assert api.openapi_schema is not None
        return api.openapi_schema

    api.openapi = openapi  # type: ignore[method-assign]


def _refine(schema: dict[str, Any], model: ServedEngine, key: bool) -> None:
    parts = schema["components"]["schemas"]
    _, chunks = models_json_schema([(ChatChunk, "serialization"), (TextChunk, "serialization")],
                                   ref_template="#/components/schemas/{model}")
    parts.update(chunks["$defs"])
    for unused in ("HTTPValidationError", "ValidationError"):  # the framework's own, which nothing answers
        parts.pop(unused, None)
    for operations in schema["paths"].values():
        for operation in operations.values():
            operation["responses"].pop("422", None)
            for parameter in operation.get("parameters", ()):  # a model's name
                parameter["schema"]["enum"] = [model.name]
    limit = model.context - 1  # a prompt has a token at least
    for name in ("ChatRequest", "CompletionRequest"):
        properties = parts[name]["properties"]
        properties["model"]["enum"] = [model.name]
        for field in {"max_tokens", "max_completion_tokens"} & properties.keys():
            _integers(properties[field])["maximum"] = limit
        # the framework makes numbers of 53 bits of them
        _integers(properties["seed"]).update(minimum=-INT64, maximum=INT64 - 1)
    prompt = parts["CompletionRequest"]["properties"]["prompt"]
    queue, vocabulary = model.engine.stats()["max_queue"], model.loaded.config.vocab_size
    for option in prompt["anyOf"]:
        inside = option.get("items", {})
        if inside.get("type") in ("string", "array"):
            option["maxItems"] = queue
        ids = inside if inside.get("type") == "array" else option
        if ids.get("items", {}).get("type") == "integer":
            ids["items"] |= {"minimum": 0, "maximum": vocabulary - 1}
            ids["maxItems"] = limit
    bodies = {"/v1/chat/completions": {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 16},
              "/v1/completions": {"prompt": "Hello", "max_tokens": 16}}
    for path, example in bodies.items():
        content = schema["paths"][path]["post"]["requestBody"]["content"]["application/json"]
        content["example"] = {"model": model.name, **example}
    operation_id = schema["paths"]["/v1/models/{name}"]["get"]["operationId"]
    schema["paths"]["/v1/models"]["get"]["responses"]["200"]["links"] = {
        "model": {"operationId": operation_id, "parameters": {"name": "$response.body#/data/0/id"}}}
    if key:
        schema["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        schema["security"] = [{"key": []}]
        schema["paths"]["/health"]["get"]["security"] = []


def _integers(schema: dict[str, Any]) -> dict[str, Any]:
    """The part of a nullable schema that is about integers."""
    integer: dict[str, Any] = next(option for option in schema.get("anyOf", [schema])
                                   if option.get("type") == "integer")
    return integer
