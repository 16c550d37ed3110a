"""The GPU runtime runs in Triton's interpreter here, unless there is a GPU."""

from tests.helpers.triton_interpreter import interpreted, poisoned

__all__ = ["interpreted", "poisoned"]
