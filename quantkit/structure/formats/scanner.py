"""What the parsers of all formats share: reasoning, text, and the markers at which calls begin.

A parser reads one character after another, so how a text is cut can make no difference. What turns out to be
no call is read again as text.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable, Collection, Sequence

from quantkit.structure.base import ReasoningDelta, TextDelta, ToolCallDelta, TurnDelta

MAX_SPACE, MAX_HEAD = 256, 2**16
"""Characters of white space before what may be a call, and of what may be one whose name hasn't come: with
more it is text. What is held is looked at again with each character."""


class TurnScanner:
    """Reasoning and text; a format adds how calls are written.

    White space around reasoning and calls belongs to the format and is dropped.

    Args:
        names: the names of the tools that can be called.
        marks: texts that begin calls wherever they come.
        reasoning: the texts that open and close reasoning.
        opened: whether the prompt has opened reasoning already.
        close: the text that a call ends with, if that is always the same.
    """

    def __init__(self, names: Collection[str] = (), marks: Sequence[str] = (),
                 reasoning: tuple[str, str] | None = None, opened: bool = False,
                 close: str = "") -> None:
        self._names, self._marks = frozenset(names), tuple(marks)
        self._close = close
        self._think = reasoning or ("", "")
        self._input: deque[str] = deque()
        self._out: list[TurnDelta] = []
        self._held = ""  # what may be the beginning of a marker
        self._space: list[str] = []  # white space that counts only if more of the same kind follows
        self._raw = ""  # of the call that is being read
        self._head_parts: list[str] = []  # and the characters behind it, until its name has come
        self._skips_space = self._spoke = False
        self._calls, self._begun = 0, False
        self._state: Callable[[str], None] = self._begin
        if reasoning is not None and opened:
            self._state, self._skips_space = self._reasoning, True
        elif reasoning is None:
            self._state = self._answer()

    def push(self, text: str) -> list[TurnDelta]:
        self._input.extend(text)
        self._run()
        return self._take()

    def finish(self) -> list[TurnDelta]:
        while not self._end():
            self._run()
        return self._take()

    def _answer(self) -> Callable[[str], None]:
        """The state in which what follows reasoning is read."""
        return self._text

    def _marked(self, mark: str) -> Callable[[str], None]:
        """The state behind a marker. Where no tools can be called there are none."""
        return self._text

    def new_call_id(self) -> str:
        """An id that no other call has."""
        return "call_" + secrets.token_hex(12)

    def _run(self) -> None:
        while self._input:
            self._state(self._input.popleft())

    def _take(self) -> list[TurnDelta]:
        out, self._out = self._out, []
        return out

    def _again(self, text: str) -> None:
        self._input.extendleft(reversed(text))

    def _read_as_text(self, text: str) -> None:
        """What was read belongs to no call: go on with ``text`` as text."""
        self._raw, self._state = "", self._text
        self._again(text)

    def _begin(self, char: str) -> None:
        self._held += char
        begun = self._held.lstrip()
        if begun == self._think[0]:
            self._held = ""
            self._state = self._reasoning
            self._skips_space = True
        elif not self._think[0].startswith(begun) or len(self._held) > MAX_SPACE:
            text, self._held, self._state = self._held, "", self._answer()
            self._again(text)

    def _reasoning(self, char: str) -> None:
        close = self._think[1]
        self._held += char
        if self._held.endswith(close):
            self._say(ReasoningDelta, self._held[:-len(close)])
            self._held = ""
            self._space.clear()
            self._skips_space, self._state = True, self._answer()
        else:
            self._release(ReasoningDelta, (close,))

    def _text(self, char: str) -> None:
        self._held += char
        for mark in self._marks:
            if self._held.endswith(mark):
                self._say(TextDelta, self._held[:-len(mark)])
                self._raw, self._held = self._taken_space() + mark, ""
                self._begun, self._state = False, self._marked(mark)
                return
        self._release(TextDelta, self._marks)

    def _release(self, kind: type[TextDelta] | type[ReasoningDelta], marks: Sequence[str]) -> None:
        kept = max((size for mark in marks for size in range(1, min(len(mark), len(self._held) + 1))
                    if self._held.endswith(mark[:size])), default=0)
        end = len(self._held) - kept
        text, self._held = self._held[:end], self._held[end:]
        self._say(kind, text)

    def _say(self, kind: type[TextDelta] | type[ReasoningDelta], text: str) -> None:
        """Add text or reasoning, white space at its end only when more follows."""
        if self._skips_space:
            text = text.lstrip()
        if not text:
            return
        if self._skips_space and kind is TextDelta and self._spoke:
            text = "\n" + text  # text before and behind a call stays apart
        self._skips_space = False
        shown = text.rstrip()
        if not shown:
            self._space.append(text)
            return
        self._spoke = self._spoke or kind is TextDelta
        self._put(kind, self._taken_space() + shown)
        self._space.append(text[len(shown):])

    def _taken_space(self) -> str:
        space, self._space = "".join(self._space), []
        return space

    def _head_grows(self, char: str) -> bool:
        """Keep a character of what may be a call, until its name has come; returns whether it may still be
        one."""
        if self._begun:
            return True
        self._head_parts.append(char)
        return len(self._head_parts) <= MAX_HEAD

    def _put(self, kind: type[TextDelta] | type[ReasoningDelta], text: str) -> None:
        last = self._out[-1] if self._out else None
        if isinstance(last, kind):
            self._out[-1] = kind(last.text + text)
        elif text:
            self._out.append(kind(text))

    def _call(self, name: str) -> None:
        """A call begins. Text behind it goes on without the white space between."""
        self._out.append(ToolCallDelta(self._calls, id=self.new_call_id(), name=name))
        self._calls, self._begun = self._calls + 1, True
        self._head_parts.clear()
        self._space.clear()
        self._skips_space = True

    def _arguments(self, text: str) -> None:
        """More arguments of the call that began last."""
        last = self._out[-1] if self._out else None
        if isinstance(last, ToolCallDelta):
            self._out[-1] = ToolCallDelta(last.index, last.arguments + text, last.id, last.name)
        else:
            self._out.append(ToolCallDelta(self._calls - 1, text))

    def _broken(self) -> None:
        """What was read is no call: all of it is text. A marker can begin in it, but not at its beginning."""
        raw = self._raw + "".join(self._head_parts)
        self._raw = ""
        self._state = self._text
        self._head_parts.clear()
        mark = next((mark for mark in self._marks if raw.lstrip().startswith(mark)), raw.lstrip()[:1])
        begin = len(raw) - len(raw.lstrip()) + len(mark)
        self._say(TextDelta, raw[:begin])
        self._again(raw[begin:])

    def _closing(self, char: str) -> None:
        """Behind a call, where it is closed; what is anything else is text."""
        self._raw += char
        begun = self._raw.lstrip()
        if begun == self._close:
            self._raw, self._state = "", self._text
        elif not self._close.startswith(begun) or len(self._raw) > MAX_SPACE:
            self._read_as_text(self._raw)

    def _end(self) -> bool:
        """Nothing follows: what is held comes out as what it is so far. Returns whether that is all."""
        if self._state == self._closing and self._raw.strip():
            self._read_as_text(self._raw)
            return False
        if self._state == self._begin:
            text, self._held, self._state = self._held, "", self._answer()
            self._again(text)
            return False
        if self._state == self._reasoning:
            self._say(ReasoningDelta, self._held)
        elif self._state == self._text:
            self._say(TextDelta, self._held)
            self._put(TextDelta, self._taken_space())
        elif self._raw and not self._begun:
            self._broken()
            return False
        self._held = self._raw = ""
        self._space.clear()
        return True
