"""Every answer that isn't a success has one shape: ``{"error": {message, type, param, code}}``.

Under ``/v1/messages`` it is that of Anthropic's API instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from quantkit.plugins.blame import blame, plugin_failure
from quantkit.runtime.core import ContextLengthError, EngineClosed, EngineDeadError, EngineFull
from quantkit.structure.base import ConstraintError
from quantkit.support.errors import QuantkitError, SourceError, UsageError
from quantkit.text.chat import TemplateError

RETRY_AFTER = {"Retry-After": "1"}
"""Seconds; a place in the queue is free as soon as any request ends."""
ANTHROPIC = "/v1/messages"
"""The path of Anthropic's API, whose errors have their own shape."""
ANTHROPIC_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error",
                   408: "timeout_error", 413: "request_too_large", 500: "api_error", 503: "overloaded_error"}
_CODES = {404: "not_found", 405: "method_not_allowed"}


class ApiError(HTTPException):
    """An answer that isn't a success. The framework lets its own kind of error pass wherever it is raised.

    Args:
        status: The status of HTTP.
        message: This tells a person what is wrong.
        param: The request's parameter that is at fault.
        code: A word by which programs know the error.
        headers: Further headers of the answer.
    """

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None,
                 headers: Mapping[str, str] | None = None) -> None:
        super().__init__(status, message, dict(headers or {}))
        self.param, self.code = param, code

    def body(self) -> dict[str, Any]:
        """``{"error": {…}}``; 5xx is of type ``server_error``, the rest ``invalid_request_error``."""
        kind = "server_error" if self.status_code >= 500 else "invalid_request_error"
        return {"error": {"message": self.detail, "type": kind, "param": self.param, "code": self.code}}

    def anthropic_body(self) -> dict[str, Any]:
        """The same as Anthropic's API says it: ``{"type": "error", "error": {type, message}}``."""
        kind = ANTHROPIC_TYPES.get(self.status_code, "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": self.detail}}

    def response(self, path: str = "") -> JSONResponse:
        """The whole answer to a request for ``path``."""
        anthropic = path == ANTHROPIC or path.startswith(f"{ANTHROPIC}/")
        body = self.anthropic_body() if anthropic else self.body()
        return JSONResponse(body, self.status_code, self.headers)


class RefusedValue(ValueError):
    """While a body is read: a key that isn't known or can't be obeyed, or a value that it can't have.

    Args:
        param: The name of the key.
        reason: The reason why it is refused.
        code: A word by which programs know the error.
        placed: Whether the message begins with the place.
    """

    def __init__(self, param: str, reason: str, code: str = "unsupported_parameter",
                 placed: bool = False) -> None:
        super().__init__(reason)
        self.param = param
        self.code = code
        self.placed = placed


def api_error(error: BaseException) -> ApiError:
    """What a client is told about an error of ours; of any other only that there was one."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, EngineFull):
        return ApiError(503, "the server is busy: its queue is full; try again in a moment",
                        code="overloaded", headers=RETRY_AFTER)
    if isinstance(error, EngineClosed):
        return ApiError(503, "the server is shutting down", code="shutting_down", headers=RETRY_AFTER)
    if isinstance(error, EngineDeadError):  # all of what it says is for the terminal: it may hold anything
        return ApiError(503, f"{error.what} ({error.kind}); {error.next}", code="engine_dead")
    if isinstance(error, ContextLengthError):
        tokens, limit = error.context
        return ApiError(400, f"This model's maximum context length is {limit} tokens; prompt and answer come "
                        f"to {tokens}",
                        code="context_length_exceeded")
    if isinstance(error, ConstraintError):  # of a grammar that is too much work, or that no token fits
        return ApiError(400, _text(error), code="invalid_structure")
    if isinstance(error, UsageError):
        return ApiError(400, _text(error))
    if isinstance(error, TemplateError):
        return ApiError(400, _text(error), param="messages", code="chat_template_error")
    if isinstance(error, SourceError):  # of the tokenizer, the only other part of a model that requests reach
        return ApiError(400, _text(error), code="tokenizer_error")
    if isinstance(error, QuantkitError):
        return ApiError(500, _text(error), code="internal_error")
    if (culprit := blame(error)) is not None:  # what it says is for the terminal: it may hold anything
        return ApiError(500, f"the {culprit[0]} failed: {type(error).__name__}", code="plugin_error")
    return ApiError(500, "internal error", code="internal_error")


def reported(error: BaseException) -> QuantkitError:
    """An error that is nobody's request's fault, as the server's terminal tells of it. Its class is no other
    one, so that any process can read it."""
    failure = plugin_failure(error) or error
    if not isinstance(failure, QuantkitError):
        first = str(error).strip().splitlines()[:1]
        return QuantkitError(f"internal error: {': '.join([type(error).__name__, *first])}")
    plain = QuantkitError(failure.what, why=failure.why, next=failure.next)
    plain.exit_code = failure.exit_code
    return plain


def install(app: FastAPI, on_error: Callable[[BaseException], None] | None = None) -> None:
    """Make an app answer in this shape wherever it or its framework refuses something.

    Args:
        app: its handlers of errors are set.
        on_error: told about errors of ours that are nobody's request's fault. All others get past the app.
    """

    async def ours(request: Request, error: Exception) -> JSONResponse:
        known = api_error(error)
        if known.status_code == 500 and on_error is not None and isinstance(error, QuantkitError):
            on_error(error)
        return known.response(request.url.path)

    async def framework(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        if error.status_code == 400:  # too deep or too long a number: all that it refuses by itself
            return ApiError(400, "the body can't be read as JSON", code="invalid_json").response(
                request.url.path)
        phrase = HTTPStatus(error.status_code).phrase
        message = f"{phrase}: {request.method} {request.url.path[:200]}"
        return ApiError(error.status_code, message, code=_CODES.get(error.status_code),
                        headers=error.headers).response(request.url.path)

    async def invalid(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        return _invalid(request, error).response(request.url.path)

    for kind in (ApiError, QuantkitError, Exception):
        app.add_exception_handler(kind, ours)
    app.add_exception_handler(HTTPException, framework)
    app.add_exception_handler(RequestValidationError, invalid)


_TYPES = {"string_type": "a string", "list_type": "a list", "int_type": "an integer",
          "float_type": "a number",
          "bool_type": "a boolean", "model_type": "an object", "dict_type": "an object",
          "model_attributes_type": "an object"}
_BRANCHES = {"str", "int", "float", "bool", "constrained-str"}


def _invalid(request: Request, error: RequestValidationError) -> ApiError:
    """The first thing that is wrong with a query or a body."""
    media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media != "application/json" and error.errors()[0]["loc"][0] == "body":
        return ApiError(400, f"the content type is {media[:80]!r}; send Content-Type: application/json")
    problems = [(_place(problem["loc"], error.body), problem) for problem in error.errors()]
    # of a value that may be one of several things, the branch that got furthest knows best what is wrong
    place, first = max(problems, key=lambda pair: (len(pair[0]), pair[1]["type"] not in _TYPES))
    kind, cause = first["type"], first.get("ctx", {}).get("error")
    if kind in ("union_tag_invalid", "union_tag_not_found"):  # what is wrong is a key of the place
        place = [*place, first["ctx"]["discriminator"].strip("'")]
    if kind == "json_invalid":
        return ApiError(400, "the body is not JSON", code="invalid_json")
    if isinstance(cause, RefusedValue):
        param = _dotted([*place, cause.param])
        return ApiError(400, f"{param}: {cause}" if cause.placed else str(cause), param=param,
                        code=cause.code)
    param = _dotted(place)
    if kind in _TYPES:
        types = [_TYPES[problem["type"]] for at, problem in problems if at == place
                 and problem["type"] in _TYPES]
        message = f"it must be {' or '.join(dict.fromkeys(types))}"
    else:
        message = _explained(first)
    code = "missing_parameter" if kind in ("missing", "union_tag_not_found") else "invalid_value"
    return ApiError(400, f"{param}: {message}" if param else f"the body: {message}", param=param or None,
                    code=code)


def _explained(error: Mapping[str, Any]) -> str:
    """What is wrong with a value of the right type."""
    kind, limits = error["type"], error.get("ctx", {})
    if kind in ("missing", "union_tag_not_found"):
        return "it is missing"
    if kind == "union_tag_invalid":
        return f"it is {limits['tag'][:80]!r}; it must be one of {limits['expected_tags']}"
    if kind == "too_long":
        return f"{limits['actual_length']} items are given; at most {limits['max_length']} are accepted"
    if kind == "string_too_long":
        return f"{len(error['input'])} characters are given; at most {limits['max_length']} are accepted"
    if kind in ("too_short", "string_too_short"):
        return "it is empty"
    message = str(error["msg"]).removeprefix("Value error, ")
    return message[:1].lower() + message[1:]


def _place(location: Sequence[Any], body: Any) -> list[Any]:
    """Where in the query or the body; names of a union's branches, which it doesn't have, are left out."""
    place: list[Any] = []
    path = location[1:]
    if location[0] == "query":
        return list(path)
    for number, part in enumerate(path):
        if isinstance(part, int):
            body = body[part] if isinstance(body, list) and part < len(body) else None
        elif part in _BRANCHES or "[" in part or not isinstance(body, dict) or (
                part not in body and number < len(path) - 1):  # what is missing is named last
            continue
        else:
            body = body.get(part)
        place.append(part)
    return place


def _dotted(place: Sequence[Any]) -> str:
    """``messages[0].content``."""
    out = ""
    for part in place:
        out += f"[{part}]" if isinstance(part, int) else f".{part}" if out else part
    return out


def _text(error: QuantkitError) -> str:
    # what comes next in a terminal is a command line, which makes no sense to a client
    return "; ".join(filter(None, (error.what, error.why)))
