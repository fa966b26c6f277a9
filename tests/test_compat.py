"""A call in a thread of its own, whose OpenMP threads end with it."""

import threading

import pytest

from regard.compat import run_in_thread


def test_the_result_and_errors_of_a_call_in_a_thread_arrive() -> None:
    thread = run_in_thread(threading.current_thread)
    assert thread is not threading.current_thread()
    thread.join(timeout=10)
    assert not thread.is_alive()
    with pytest.raises(ZeroDivisionError):
        run_in_thread(divmod, 1, 0)
