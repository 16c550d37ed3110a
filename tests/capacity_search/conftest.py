"""The models of the tests of memory."""

from tests.runtime.memory.conftest import checkpoint, tiny  # noqa: F401
