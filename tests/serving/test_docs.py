"""The pages about serving name every route, parameter and error code, and options that exist."""

import re

import click
import pytest

from quantkit.plugins.manager import registry
from quantkit.serving.openai.chat_request import ChatRequest
from quantkit.serving.openai.completions import CompletionRequest

PAGES = ("serving.md", "serving-api.md", "serving-operations.md")


@pytest.fixture(scope="module")
def pages(root):
    return {name: (root / "docs" / name).read_text(encoding="utf-8") for name in PAGES}


def test_routes(pages, shared):
    for route in shared.application.api.routes:
        assert f"{route.path.replace('{name:path}', 'NAME')}`" in pages["serving-api.md"]
    described = shared.get("/openapi.json").json()["paths"]
    assert {"/v1/chat/completions", "/v1/completions", "/v1/models", "/health", "/ready"} <= set(described)


def test_options(pages):
    """docs/cli.md, made from the command's help, has all of them."""
    serve = registry("commands").get("serve-local")
    options = {name for parameter in serve.params if isinstance(parameter, click.Option)
               for name in (*parameter.opts, *parameter.secondary_opts)}
    named = {name for text in pages.values() for name in re.findall(r"`(--[a-z][a-z-]+)", text)}
    assert len(named) > 20 and named <= options


def test_parameters(pages):
    names = set(ChatRequest.model_fields) | set(CompletionRequest.model_fields)
    assert {name for name in names if f"`{name}" not in pages["serving-api.md"]} == set()


def test_error_codes(pages, root):
    codes = {code for path in sorted((root / "quantkit" / "serving").rglob("*.py"))
             for code in re.findall(r'code="(\w+)"', path.read_text(encoding="utf-8"))}
    assert "model_not_found" in codes
    assert {code for code in codes if f"`{code}`" not in pages["serving-operations.md"]} == set()
