"""Puts Ctrl-C off to where it leaves nothing behind."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def interrupt_put_off() -> Iterator[Callable[[], None]]:
    """Ctrl-C waits in the block until the function that it gets is called, or its end. A second one doesn't
    wait. Ray, interrupted while it starts processes, forgets some of them.

    Raises:
        KeyboardInterrupt: by that function, and at the end.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None  # signals are somebody else's there
        return
    pressed = False

    def press(number: int, frame: FrameType | None) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True

    def check() -> None:
        if pressed:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, press)
    try:
        yield check
        check()
    finally:
        signal.signal(signal.SIGINT, before)
