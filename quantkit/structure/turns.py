"""How one model writes tool calls and reasoning, and the parsers of its turns.

The format is recognized by the chat template's text, as a model writes what its template shows it. A model
whose template has no place for tools is told about them, and how to call them, in a system message.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from quantkit.structure.base import PlainTurn, TurnParser
from quantkit.structure.formats.bare_calls import BareCalls
from quantkit.structure.formats.gemma import FUNCTION_GEMMA, GEMMA4, GemmaTurn
from quantkit.structure.formats.hermes import HermesTurn
from quantkit.structure.formats.json_turn import PYTHON_TAG, JsonTurn
from quantkit.structure.formats.mistral import ARGS, CALL_ID, MistralTurn
from quantkit.structure.formats.mistral import OPEN as TOOL_CALLS
from quantkit.structure.formats.scanner import TurnScanner
from quantkit.support.errors import UsageError
from quantkit.text.tokenizer import Tokenizer

NAMES = ("hermes", "llama3", "mistral", "gemma", "json")
THINK, MISTRAL_THINK = ("<think>", "</think>"), ("[THINK]", "[/THINK]")
_OTHER_CALLS = ("<function=", "<arg_key>", "<parameter=")
"""Within ``<tool_call>``, formats that aren't Hermes' (Qwen3-Coder's and GLM's, for instance)."""


@dataclass(frozen=True)
class Tool:
    """A function that the model may call.

    Attributes:
        description: its purpose, for the model.
        parameters: JSON schema of its arguments.
        strict: whether calls must follow the schema whatever the model would write.
    """

    name: str
    description: str = ""
    parameters: dict[str, Any] = field(default_factory=dict)
    strict: bool = False


@dataclass(frozen=True)
class TurnFormat:
    """How one model writes tool calls and reasoning.

    Attributes:
        name: ``hermes``, ``llama3``, ``mistral``, ``gemma`` or ``json``.
        reasoning: the texts that open and close it; ``None`` if the model shows none.
        special: special tokens whose text the parser must see, for ``Engine.submit(keep_special=…)``.
        variant: the one of a family's notations that the template shows: for Mistral ``args``, ``call_id`` or
            ``list``, for Gemma ``function`` or ``4``; for plain JSON ``user`` where no system message is
            possible.
    """

    name: str
    reasoning: tuple[str, str] | None = None
    special: frozenset[int] = frozenset()
    variant: str = ""

    @property
    def marks(self) -> tuple[str, ...]:
        """Every text that tells the parser something and may be a token of its own."""
        calls = {"llama3": (PYTHON_TAG,), "mistral": (TOOL_CALLS, ARGS, CALL_ID),
                 "hermes": ("<tool_call>", "</tool_call>")}.get(self.name, ())
        if self.name == "gemma":
            gemma = gemma_marks(self)
            calls = (gemma.open, gemma.close, gemma.quote)
        return (*calls, *(self.reasoning or ()))


def turn_format(tokenizer: Tokenizer, name: str = "auto") -> TurnFormat:
    """The format of a model's turns.

    Args:
        name: one of :data:`NAMES`; by default as the chat template shows.

    Raises:
        UsageError: no such format.
    """
    if name not in ("auto", *NAMES):
        raise UsageError(f"there is no format of tool calls named {name!r}",
                         why=f"formats: {', '.join(NAMES)}",
                         next="leave it out, and the chat template decides")
    template = tokenizer.template_text
    family = _family(template) if name == "auto" else name
    reasoning = next((marks for marks in (THINK, MISTRAL_THINK) if marks[0] in template), None)
    variant = ""
    if family == "mistral":
        variant = ("call_id" if CALL_ID in template else "args" if ARGS in template else "list")
    elif family == "gemma":
        variant = "4" if GEMMA4.open in template else "function"
    elif family == "json" and ("system" not in template or "System role not supported" in template):
        variant = "user"
    unmarked = TurnFormat(family, reasoning, variant=variant)
    return TurnFormat(family, reasoning, tokenizer.special_ids(unmarked.marks), variant)


def _family(template: str) -> str:
    if TOOL_CALLS in template:
        return "mistral"
    if FUNCTION_GEMMA.open in template or GEMMA4.open + "call:" in template:
        return "gemma"
    if "<tool_call>" in template and '"arguments"' in template and not any(
            other in template for other in _OTHER_CALLS):
        return "hermes"
    if "<|start_header_id|>" in template and "tools" in template and '"parameters": ' in template:
        return "llama3"
    return "json"


def gemma_marks(format: TurnFormat) -> Any:
    """The markers of this generation of Gemma."""
    return GEMMA4 if format.variant == "4" else FUNCTION_GEMMA


def parser(format: TurnFormat, tools: Sequence[Tool], prompt_opens_reasoning: bool = False,
           bare_json_calls: bool = False) -> TurnParser:
    """The parser of one turn. Without tools, calls are text.

    Args:
        tools: those that can be called; what looks like a call of another one is text.
        prompt_opens_reasoning: whether the turn begins within reasoning (:func:`opens_reasoning`).
        bare_json_calls: whether a whole message that is a call as plain JSON is one in the formats too that
            write calls otherwise.
    """
    names = [tool.name for tool in tools]
    if not names and format.reasoning is None:
        return PlainTurn()
    rest = (format.reasoning, prompt_opens_reasoning)
    if not names:
        return TurnScanner((), (), *rest)
    marked: TurnScanner
    if format.name == "hermes":
        marked = HermesTurn(names, *rest)
    elif format.name == "mistral":
        marked = MistralTurn(names, *rest)
    elif format.name == "gemma":
        marked = GemmaTurn(names, gemma_marks(format), *rest)
    else:
        return JsonTurn(names, (PYTHON_TAG,) if format.name == "llama3" else (), *rest)
    return BareCalls(marked, tools) if bare_json_calls else marked


def opens_reasoning(format: TurnFormat, prompt: str) -> bool:
    """Whether a prompt ends within reasoning, so that the turn goes on there.

    Args:
        prompt: its text with special tokens, or the end of it.
    """
    if format.reasoning is None:
        return False
    opening, close = format.reasoning
    return prompt.rstrip().endswith(opening) and prompt.rfind(opening) > prompt.rfind(close)
