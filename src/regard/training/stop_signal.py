"""Ctrl-C and SIGTERM: the first signal requests a stop after the current step, the second one aborts at once."""

import signal
import threading
from collections.abc import Callable, Generator
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
    with handle_signals(stop.handle, signal.SIGINT, signal.SIGTERM):
        yield stop


@contextmanager
def handle_signals(handler: Callable[[int, object], None], *numbers: signal.Signals) -> Generator[None]:
    """Call the handler for these signals. In a thread nothing changes: Python delivers signals to the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, earlier in previous.items():
            signal.signal(number, earlier)
