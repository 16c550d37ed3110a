"""docs/serving.md names every route, option, parameter and error code."""

import re

import pytest

from quantkit.cli.serve.command import command
from quantkit.serving.openai.chat_request import ChatRequest
from quantkit.serving.openai.completions import CompletionRequest


@pytest.fixture(scope="module")
def text(root):
    return (root / "docs" / "serving.md").read_text(encoding="utf-8")


def test_routes(text, shared):
    for route in shared.application.api.routes:
        assert f"{route.path.replace('{name:path}', 'NAME')}`" in text
    described = shared.get("/openapi.json").json()["paths"]
    assert {"/v1/chat/completions", "/v1/completions", "/v1/models", "/health", "/ready"} <= set(described)


def test_options(text):
    generic = {"--name", "--revision", "--dtype", "--debug"}  # other commands have them too
    options = {name for parameter in command.params for name in parameter.opts if name.startswith("--")}
    assert {name for name in options - generic if name not in text} == set()


def test_parameters(text):
    names = set(ChatRequest.model_fields) | set(CompletionRequest.model_fields)
    assert {name for name in names if f"`{name}" not in text} == set()


def test_error_codes(text, root):
    codes = {code for path in sorted((root / "quantkit" / "serving").rglob("*.py"))
             for code in re.findall(r'code="(\w+)"', path.read_text(encoding="utf-8"))}
    assert "model_not_found" in codes
    assert {code for code in codes if f"`{code}`" not in text} == set()
