"""Compiles what an answer must look like into constraints on tokens, with llguidance.

Everything here comes from a request, so everything is bounded: sizes before anything is read, time and memory
of compiling by a trial in another process (:mod:`quantkit.structure.trial`), and time per token by
llguidance's limits and by :class:`GrammarConstraint`.
"""

from __future__ import annotations

import dataclasses
import json
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from quantkit.structure.base import ConstraintError, TokenConstraint
from quantkit.structure.formats import gemma
from quantkit.structure.lark import LarkWriter, regex_literal, schema_text
from quantkit.structure.schemas import Fault, arguments_schema, closed, path_text, widened
from quantkit.structure.turns import Tool, TurnFormat
from quantkit.support import isolation
from quantkit.support.errors import UsageError
from quantkit.text.tokenizer import Tokenizer

MAX_SCHEMA = 128 * 2**10
MAX_DEPTH = 48
MAX_VALUES = 20_000
"""Characters of a JSON schema, objects and lists within each other, and values in all."""
MAX_REGEX, MAX_GRAMMAR = 8 * 2**10, 64 * 2**10
"""Characters."""
MAX_CHOICES, MAX_CHOICE = 512, 1000
"""Texts to choose from (a row of llguidance's parser has at most 1,000 items), and characters of one."""
MAX_TOOLS = 128
SECONDS, MEMORY = 3.0, 2 * 2**30
"""Of the trial."""
MAX_TOLD = 4
"""Faults of a schema in one message."""
MAX_COMPILED = 32
"""Compiled grammars that are kept."""
MAX_STEP_SECONDS = 0.25
"""Of processor time for one token."""
FREE_SECONDS, SECONDS_PER_TOKEN = 1.0, 0.005
"""Of processor time for all tokens so far: this much, and this much a token. Others wait meanwhile."""
_trials = threading.BoundedSemaphore(2)  # templates are rendered in processes of the same pool, and go on


@dataclass(frozen=True)
class Structure:
    """What an answer must look like: one of the first five, or tools with a choice. With both, and the choice
    ``auto``, the turn is either calls or an answer of that kind.

    Attributes:
        json_schema: JSON by this schema.
        json_object: any JSON object.
        regex: a text that this regular expression matches as a whole, in Rust's syntax without lookaround.
        choice: one of these texts.
        grammar: a text of this grammar, in llguidance's variant of Lark, or in EBNF as llama.cpp has it
            (GBNF, with ``::=``).
        tools: the functions that may be called.
        tool_choice: ``required`` (the turn is calls in the model's own format), a tool's name (one call of
            it), or ``auto`` (text, in which a call that begins must be one).
        parallel_tool_calls: whether there may be several calls.
        reasoning: the turn may begin with reasoning, in the model's own format.
        prompt_opens_reasoning: the turn begins within it.
        strict: whether ``json_schema`` is refused if a part of it can't be kept; otherwise such a part is
            left out. For tools their own ``strict`` decides.
    """

    json_schema: dict[str, Any] | bool | None = None
    json_object: bool = False
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    tools: tuple[Tool, ...] = ()
    tool_choice: str | None = None
    parallel_tool_calls: bool = True
    reasoning: bool = False
    prompt_opens_reasoning: bool = False
    strict: bool = True

    def __post_init__(self) -> None:
        """Raises UsageError: not exactly one kind of structure."""
        kinds = self._kinds
        structures = kinds + (self.tool_choice is not None)
        if kinds > 1 or not structures or (kinds and self.tool_choice not in (None, "auto")):
            raise UsageError(f"an answer has {structures} structures",
                             why="it must have exactly one, or tools that may be called instead",
                             next="give a JSON schema, json_object, a regex, a choice, a grammar, or tools")

    @property
    def _kinds(self) -> int:
        return sum([self.json_schema is not None, self.json_object, self.regex is not None,
                    self.choice is not None, self.grammar is not None])

    @property
    def describes_text(self) -> bool:
        """Whether it says what an answer that isn't a call must look like."""
        return self._kinds > 0


@dataclass(frozen=True)
class CompiledStructure:
    """Makes a constraint with each call; each sequence needs its own.

    Attributes:
        make: makes a constraint.
        widened: parts of schemas that aren't strict which were left out, as JSON paths:
            ``tools.mail: $.properties.to.pattern``, ``schema: $.items.uniqueItems``.
    """

    make: Callable[[], TokenConstraint]
    widened: tuple[str, ...] = ()

    def __call__(self) -> TokenConstraint:
        return self.make()


@dataclass(frozen=True)
class _Schema:
    """A schema of a structure: of the answer, or of the arguments of a tool."""

    schema: Any
    strict: bool
    tool: str | None = None

    @property
    def what(self) -> str:
        return "the JSON schema" if self.tool is None else f"the schema of {self.tool}"

    def names(self, faults: list[Fault]) -> list[str]:
        """Faults as :class:`CompiledStructure` has them. Raises UsageError: there are some, and the schema is
        strict."""
        if faults and self.strict:
            more = f" and {len(faults) - MAX_TOLD} more" if len(faults) > MAX_TOLD else ""
            raise UsageError(f"{self.what} can't be used", why="; ".join(map(str, faults[:MAX_TOLD])) + more,
                             next="leave it out, or set strict to false")
        place = "schema" if self.tool is None else f"tools.{self.tool}"
        return [f"{place}: {path_text(fault.path)}" for fault in faults]


class GrammarConstraint:
    """A :class:`~quantkit.structure.base.TokenConstraint` by llguidance.

    Args:
        matcher: llguidance's, at its beginning; nobody else uses it.
        vocab_size: ids that it knows.
        eos_ids: the ids that end a text: allowed where the grammar is complete, and only there.
    """

    def __init__(self, matcher: Any, vocab_size: int, eos_ids: frozenset[int]) -> None:
        self._matcher, self._eos = matcher, eos_ids
        self._bits = np.zeros((vocab_size + 31) // 32, dtype=np.int32)
        self._vocab_size = vocab_size
        self._seconds, self._tokens = 0.0, 0

    @property
    def ended(self) -> bool:
        return bool(self._matcher.is_stopped())

    def mask(self, scores: torch.Tensor) -> torch.Tensor:
        begin = time.thread_time()
        self._matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
        self._spend(begin)
        allowed = np.unpackbits(self._bits.view(np.uint8), count=self._vocab_size, bitorder="little")
        excluded = torch.ones(scores.numel(), dtype=torch.bool)  # a model's rows past its vocabulary too
        size = min(scores.numel(), self._vocab_size)
        excluded[:size] = torch.from_numpy(allowed[:size]) == 0
        return scores.masked_fill(excluded, -torch.inf)

    def accept(self, token: int) -> None:
        begin = time.thread_time()
        self._tokens += 1
        taken = self._matcher.consume_token(token)
        self._spend(begin)
        if not taken:
            raise ConstraintError(f"token {token} doesn't follow the grammar of the answer")

    def _spend(self, begin: float) -> None:
        """Check for errors and for the time since ``begin``."""
        if self._matcher.is_error():
            raise ConstraintError("the answer can't be constrained further",
                                  why=self._matcher.get_error().strip().splitlines()[0][:300],
                                  next="simplify the schema or grammar")
        spent = time.thread_time() - begin
        self._seconds += spent
        if spent > MAX_STEP_SECONDS or self._seconds > FREE_SECONDS + SECONDS_PER_TOKEN * self._tokens:
            raise ConstraintError("the grammar of the answer takes too much work",
                                  why=f"{self._seconds:.2f} s of processor time for {self._tokens} tokens",
                                  next="simplify the schema or grammar")


class Compiler:
    """Compiles for one served model. Any thread may call it.

    Args:
        tokenizer: the tokenizer of the model.
        format: how it writes calls and reasoning.
        vocab_size: its logits' width.

    Raises:
        UsageError: llguidance isn't installed.
    """

    def __init__(self, tokenizer: Tokenizer, format: TurnFormat, vocab_size: int) -> None:
        try:
            import llguidance
        except ImportError:
            raise UsageError("structured output needs llguidance", why="it is not installed",
                             next="pip install llguidance") from None
        self._library = llguidance
        self._tokenizer = tokenizer
        self._format = format
        self._vocab_size = max(vocab_size, tokenizer.vocab_size)
        special = tokenizer.special_tokens
        # for llguidance, an added token in angle brackets is never part of a text, special or not
        self._special = {text: number for text, number in tokenizer.added_tokens.items()
                         if text in special or (text.startswith("<") and text.endswith(">"))}
        self._writer = LarkWriter(format, self._special)
        self._lock = threading.Lock()
        self._compiled: OrderedDict[str, Any] = OrderedDict()
        self._vocabulary: Any = None

    def prepare(self) -> None:
        """Read the vocabulary now, which the first answer would otherwise wait for.

        Raises:
            UsageError: llguidance can't use the model's tokenizer.
        """
        self._read_vocabulary()

    def compile(self, structure: Structure) -> CompiledStructure:
        """Compile a structure, or find it among the last ones.

        Raises:
            UsageError: the structure is malformed, unsupported or too large, and why.
        """
        check_structure(structure)
        key = json.dumps(dataclasses.asdict(structure))
        with self._lock:
            compiled = self._compiled.get(key)
            if compiled is not None:
                self._compiled.move_to_end(key)
        if compiled is None:
            compiled = self._compile(structure)
            with self._lock:
                self._compiled[key] = compiled
                while len(self._compiled) > MAX_COMPILED:
                    self._compiled.popitem(last=False)
        matcher, names = compiled

        def make() -> TokenConstraint:
            with self._lock:  # the library's object is not to be used by two threads at once
                return GrammarConstraint(matcher.deep_copy(), self._vocab_size, self._tokenizer.eos_ids)

        return CompiledStructure(make, names)

    def _compile(self, structure: Structure) -> tuple[Any, tuple[str, ...]]:
        """A matcher, and what was left out of schemas."""
        from quantkit.structure.trial import limits

        schemas, names = _schemas(structure), []
        widen = gemma.widened if self._format.name == "gemma" else widened
        for number, given in enumerate(schemas):
            schema, faults = (widen if given.tool else widened)(given.schema)
            names += given.names(faults)
            schemas[number] = dataclasses.replace(given, schema=schema)
        with _trials:
            until = time.monotonic() + SECONDS
            what, outcome = self._try(structure, schemas, until)
            if "error" in outcome and (more := self._widen(schemas, until)):
                names += more
                what, outcome = self._try(structure, schemas, until)
        if "error" in outcome:
            place = "" if len(schemas) != 1 else "$: "  # of one that is refused as a whole
            raise UsageError(f"{what} can't be used", why=place + _reason(what, outcome["error"]))
        matcher = self._library.LLMatcher(self._read_vocabulary(), outcome["grammar"], log_level=0,
                                          limits=limits())
        if matcher.is_error():
            raise UsageError(f"{what} can't be used", why=_reason(what, matcher.get_error()))
        return matcher, tuple(names)

    def _try(self, structure: Structure, schemas: list[_Schema], until: float) -> tuple[str, dict[str, str]]:
        """What to call a structure with these schemas in errors, and the outcome of its trial.

        Raises:
            UsageError: the trial was stopped.
        """
        what, lark = self._grammar(_with_schemas(structure, schemas))
        special = {text: number for text, number in self._special.items()
                   if text in self._format.marks or structure.grammar is not None}
        eos = min(self._tokenizer.eos_ids, default=self._vocab_size)
        arguments = {"lark": lark, "given": structure.grammar, "vocab_size": self._vocab_size,
                     "special": special, "eos": eos}
        try:
            return what, isolation.call("quantkit.structure.trial:trial", arguments,
                                       seconds=max(until - time.monotonic(), 0.1), memory=MEMORY)
        except isolation.LimitError as error:
            raise UsageError(f"{what} can't be used", why=f"compiling it {error}",
                             next="make it smaller or simpler") from None
        except isolation.RaisedError as error:
            raise UsageError(f"{what} can't be used", why=str(error)) from None

    def _widen(self, schemas: list[_Schema], until: float) -> list[str]:
        """Take out of the schemas what llguidance refuses; returns what that was."""
        names: list[str] = []
        for number, given in enumerate(schemas):
            if (self._format.name == "gemma" and given.tool) or isinstance(given.schema, bool):
                continue
            if time.monotonic() > until:
                break
            try:
                outcome = isolation.call("quantkit.structure.trial:widen", {"schema": given.schema},
                                        seconds=max(until - time.monotonic(), 0.1), memory=MEMORY)
            except (isolation.LimitError, isolation.RaisedError):
                continue  # what is known of the whole structure must do
            names += given.names([Fault(tuple(path), _reason(given.what, reason))
                                  for path, reason in outcome["faults"]])
            schemas[number] = dataclasses.replace(given, schema=outcome["schema"])
        return names

    def _read_vocabulary(self) -> Any:
        with self._lock:
            if self._vocabulary is None:
                try:
                    self._vocabulary = self._library.LLTokenizer(
                        self._tokenizer.serialized(), n_vocab=self._vocab_size,
                        eos_token=sorted(self._tokenizer.eos_ids) or None)
                except BaseException as error:  # panics of the library are no Exceptions
                    if isinstance(error, KeyboardInterrupt | SystemExit):
                        raise
                    raise UsageError("this model's answers can't be constrained",
                                     why="llguidance can't use its tokenizer: "
                                         + " ".join(str(error).split())[:200]) from None
            return self._vocabulary

    def _grammar(self, structure: Structure) -> tuple[str, str | None]:
        """What to call the structure in errors, and the grammar that we write: none around a given one."""
        rules = what = answer = ""
        if structure.grammar is not None:
            what, answer = "the grammar", "@given"
        elif structure.regex is not None:
            what, answer = "the regular expression", regex_literal(structure.regex)
        elif structure.choice is not None:
            what, answer = "the choice", " | ".join(json.dumps(text) for text in structure.choice)
        elif structure.json_schema is not None or structure.json_object:
            what = "the JSON schema"
            schema = {"type": "object"} if structure.json_schema is None else structure.json_schema
            answer = "%json " + schema_text(schema)
        if structure.tool_choice is not None:
            choice = structure.tool_choice
            if answer:  # instead of such an answer there may be calls
                what = f"{what} with the tools' schemas"
                rules = f"instead: {answer}\n" + self._writer.turn_or_answer(
                    structure.tools, structure.parallel_tool_calls)
                answer = "answer | instead"
            else:
                what, answer = "the tools' schemas", "answer"
                rules = self._writer.turn(structure.tools, choice, structure.parallel_tool_calls)
        before = ""
        if self._format.reasoning is not None and (structure.reasoning or structure.prompt_opens_reasoning):
            before = "reasoning " if structure.prompt_opens_reasoning else "reasoning? "
            rules += self._writer.reasoning(structure.prompt_opens_reasoning)
        if structure.grammar is not None and not before and structure.tool_choice is None:
            return what, None
        return what, f"%llguidance {{}}\nstart: {before}body\nbody: {answer}\n{rules}"


def check_structure(structure: Structure) -> None:
    """Raises UsageError: a structure is larger than may be compiled, or malformed; it says in what."""
    if structure.json_schema is not None:
        check_schema(structure.json_schema, "the JSON schema")
    for name, text, limit in (("regex", structure.regex, MAX_REGEX),
                              ("grammar", structure.grammar, MAX_GRAMMAR)):
        if text is not None and not 0 < len(text) <= limit:
            raise UsageError(f"the {name} has {len(text)} characters", why=f"1 to {limit} are allowed")
    if structure.grammar is not None and structure.grammar.lstrip().startswith("{"):
        raise UsageError("the grammar is JSON", why="it must be Lark or EBNF",
                         next="give a JSON schema as such")
    if structure.choice is not None:
        if not 0 < len(structure.choice) <= MAX_CHOICES:
            raise UsageError(f"the choice has {len(structure.choice)} texts",
                             why=f"1 to {MAX_CHOICES} are allowed")
        if bad := [text for text in structure.choice if not 0 < len(text) <= MAX_CHOICE]:
            raise UsageError(f"a text to choose has {len(bad[0])} characters",
                             why=f"1 to {MAX_CHOICE} are allowed")
    if structure.tool_choice is None:
        return
    names = [tool.name for tool in structure.tools]
    if len(names) > MAX_TOOLS or len(set(names)) != len(names):
        raise UsageError(f"there are {len(names)} tools, {len(set(names))} by different names",
                         why=f"at most {MAX_TOOLS} are allowed, and each needs a name of its own")
    if not names or structure.tool_choice not in (*names, "required", "auto"):
        raise UsageError(f"tool_choice is {structure.tool_choice!r}",
                         why=f"tools: {', '.join(names)[:200] or 'none'}",
                         next="name one of the tools, or give the tool")
    for tool in structure.tools:
        check_schema(tool.parameters, f"the schema of {tool.name}")
    check_schema([tool.parameters for tool in structure.tools], "all tools' schemas together")


def check_schema(schema: Any, what: str) -> None:
    """Raises UsageError: a schema is too large or too deep, or has options of the compiler in it."""
    depth = 0
    values = 0
    level = [schema]
    while level:
        depth, values = depth + 1, values + len(level)
        if depth > MAX_DEPTH + 1 or values > MAX_VALUES:
            raise UsageError(f"{what} is too {'deep' if depth > MAX_DEPTH + 1 else 'large'}",
                             why=f"{MAX_DEPTH} levels and {MAX_VALUES} values are allowed")
        level = [item for value in level if isinstance(value, dict | list)
                 for item in (value.values() if isinstance(value, dict) else value)]
    if (size := len(json.dumps(schema))) > MAX_SCHEMA:
        raise UsageError(f"{what} has {size} characters", why=f"{MAX_SCHEMA} are allowed")
    if isinstance(schema, dict) and "x-guidance" in schema:
        raise UsageError(f"{what} has a key 'x-guidance'", why="it would change how the schema is read",
                         next="leave it out")


def _schemas(structure: Structure) -> list[_Schema]:
    """All schemas that the structure's answer may have to follow."""
    schemas = [] if structure.json_schema is None else [_Schema(structure.json_schema, structure.strict)]
    if (choice := structure.tool_choice) is not None:
        schemas += [_Schema(closed(arguments_schema(tool.parameters)), tool.strict, tool.name)
                    for tool in structure.tools if choice in ("auto", "required", tool.name)]
    return schemas


def _with_schemas(structure: Structure, schemas: list[_Schema]) -> Structure:
    """A structure with others in place of :func:`_schemas`."""
    tools = {given.tool: given.schema for given in schemas}
    return dataclasses.replace(structure, json_schema=tools.get(None), tools=tuple(
        dataclasses.replace(tool, parameters={"type": "object", **tools[tool.name]})
        for tool in structure.tools if tool.name in tools))


def _reason(what: str, error: str) -> str:
    """llguidance's error in a few words."""
    lines = [line.strip() for line in error.strip().splitlines() if line.strip()]
    reason = next(iter(lines), "llguidance refuses it")
    if not what.startswith("the grammar"):  # places in what we wrote around it mean nothing to anybody
        reason = re.sub(r"^at \d+\(\d+\): (failed to compile JSON schema: )?", "", reason)
    if "error:" in error:  # of a regular expression, under a drawing of it
        reason = next((line for line in lines if line.startswith("error:")), reason)
    if "oneOf" in reason:
        reason = "oneOf is supported only where no two of its schemas overlap; use anyOf"
    elif reason.startswith("NoExtension"):
        reason = "no text fits it"
    return reason[:300]
