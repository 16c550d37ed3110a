"""The models of the tests of memory."""

from tests.memory.conftest import checkpoint, tiny  # noqa: F401
