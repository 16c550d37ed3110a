"""What all answers of a model are to the server: jobs for the engine, and a body or a stream made of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

from quantkit.serving.errors import ApiError
from quantkit.serving.ignored import IGNORED
from quantkit.serving.models import ServedEngine
from quantkit.serving.work import ChoiceJob, RequestWork
from quantkit.structure.grammar import Structure

FINISH = {"stop": "stop", "stop_string": "stop", "length": "length", "tool_calls": "tool_calls"}
"""Why a sequence ended, in OpenAI's words: whether by the model or by a stop text is one thing there."""


class Reply(ABC):
    """One request's answer.

    Attributes:
        model: what answers.
        id: the answer's.
        jobs: one for each choice, in the order of their indices; they have a constraint once :meth:`compile`
            was called.
        structure: what each choice must look like.
        stream: whether it is sent as it comes.
        event_names: whether each event of a stream has its ``type`` as name.
        ends_with_done: whether ``[DONE]`` ends a stream.
    """

    model: ServedEngine
    id: str
    jobs: Sequence[ChoiceJob]
    structure: Structure | None
    stream: bool
    event_names = False
    ends_with_done = True

    def compile(self) -> None:
        """Give the jobs their constraints. It may take seconds. Parts of schemas that are left out count as
        ignored.

        Raises:
            ApiError: the structure can't be compiled.
        """
        if self.structure is not None:
            compiled = self.model.compile(self.structure)
            for part in compiled.widened:
                IGNORED.get().other(part)
            self.jobs = [replace(job, constraint=compiled()) for job in self.jobs]

    @abstractmethod
    async def body(self, work: RequestWork) -> dict[str, Any]:
        """The answer as one object, when everything is there."""

    @abstractmethod
    def events(self, work: RequestWork) -> AsyncIterator[dict[str, Any]]:
        """The answer as it comes: events."""

    def keep_alive(self) -> dict[str, Any] | None:
        """An event without content, for clients that wait for events; ``None``: a comment is enough."""
        return None

    def error(self, error: ApiError) -> dict[str, Any]:
        """The event that tells of an error in a stream."""
        return error.body()
