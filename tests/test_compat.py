"""A call in a thread of its own, whose OpenMP threads end with it."""

import signal
import threading
import time

import pytest

from regard.compat import run_in_thread


def test_the_result_and_errors_of_a_call_in_a_thread_arrive() -> None:
    thread = run_in_thread(threading.current_thread)
    assert thread is not threading.current_thread()
    thread.join(timeout=60)
    assert not thread.is_alive()
    with pytest.raises(ZeroDivisionError):
        run_in_thread(divmod, 1, 0)


def test_ctrl_c_ends_a_call_in_a_thread() -> None:
    ended: list[bool] = []

    def work() -> None:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        try:
            for _ in range(6000):
                time.sleep(0.01)
        finally:
            ended.append(True)

    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run_in_thread(work)
    assert ended
    assert time.monotonic() - begin < 30
