"""Ctrl-C and SIGTERM: the first signal requests a stop after the current step, the second one aborts at once."""

import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager


class StopSignal:
    """`requested` becomes true on the first signal; the second one raises KeyboardInterrupt."""

    def __init__(self) -> None:
        self.requested = False

    def handle(self, number: int, frame: object) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True


@contextmanager
def stop_on_signals() -> Generator[StopSignal]:
    """Handle Ctrl-C and SIGTERM: the current step is finished and saved; a second signal aborts at once."""
    stop = StopSignal()
    if threading.current_thread() is not threading.main_thread():  # Python delivers signals to the main thread only
        yield stop
        return
    previous = {number: signal.signal(number, stop.handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
