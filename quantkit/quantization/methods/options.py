"""Checks the options that a recipe gives to something it names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from quantkit.quantization.methods.base import MethodOptions
from quantkit.support.errors import RecipeError, did_you_mean


def checked_options(owner: str, options: type[MethodOptions], values: Mapping[str, Any]) -> MethodOptions:
    """``values`` as ``options``. Raises RecipeError for an option that ``owner``, such as ``transform awq``,
    doesn't have, and for a value that it can't take."""
    try:
        return options.model_validate(values)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        key = ".".join(map(str, fault["loc"]))
        extra = fault["type"] == "extra_forbidden"
        why = did_you_mean(key, options.model_fields) if extra else fault["msg"]
        raise RecipeError(f"{owner} can't take option {key!r}", why=why,
                          next="quantkit plugins list") from None
