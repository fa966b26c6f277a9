"""Ctrl-C and SIGTERM ask a long job to end: the step is finished and saved. A second Ctrl-C ends it at once."""

import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager


class StopSignal:
    """`asked` turns true with the first signal."""

    def __init__(self) -> None:
        self.asked = False

    def ask(self, number: int, frame: object) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True


@contextmanager
def stop_on_signals() -> Generator[StopSignal]:
    stop = StopSignal()
    if threading.current_thread() is not threading.main_thread():  # Python delivers signals to the main thread only
        yield stop
        return
    before = {number: signal.signal(number, stop.ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
