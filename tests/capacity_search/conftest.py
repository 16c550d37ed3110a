"""The models of the tests of memory."""

from tests.runtime.memory import conftest as memory

tiny = memory.tiny
checkpoint = memory.checkpoint
