"""The thread for work beside the engine runs one job at a time, and ends when none is left."""

import asyncio
import threading
import time
from concurrent.futures import Future

from regard.server.worker_thread import WorkerThread


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("regard-test")]


def test_the_thread_runs_one_job_at_a_time_and_ends() -> None:
    worker, log = WorkerThread("test"), []

    def job(name: str) -> str:
        log.append(f"start {name}")
        time.sleep(0.02)
        log.append(f"end {name}")
        return name

    async def main() -> list[str]:
        results = await asyncio.gather(*(worker.run(job, name) for name in "abc"))
        return [*results, await worker.run(job, "d")]

    assert asyncio.run(main()) == list("abcd")
    assert log == [f"{event} {name}" for name in "abcd" for event in ("start", "end")]
    for thread in threads():
        thread.join(timeout=60)
    assert not threads()


def test_a_cancelled_job_that_has_started_ends_before_the_next() -> None:
    worker, running = WorkerThread("test"), threading.Event()
    log = []

    def long() -> None:
        running.set()
        time.sleep(0.1)
        log.append("long")

    async def main() -> None:
        task = asyncio.ensure_future(worker.run(long))
        while not running.is_set():
            await asyncio.sleep(0.001)
        task.cancel()
        await worker.run(log.append, "short")

    asyncio.run(main())
    assert log == ["long", "short"]


def test_stop_cancels_waiting_jobs() -> None:
    """Also between the end of a job and the start of the next."""
    submitted, between, go_on = threading.Event(), threading.Event(), threading.Event()

    class PausedThread(WorkerThread):
        def _finish(self, job: Future) -> None:
            super()._finish(job)
            if not job.cancelled():
                between.set()
                go_on.wait(timeout=60)

    worker = PausedThread("test")

    async def main() -> list[object]:
        jobs = [asyncio.ensure_future(worker.run(submitted.wait, 60)) for _ in range(2)]
        await asyncio.sleep(0)  # submits both
        submitted.set()
        while not between.is_set():
            await asyncio.sleep(0.001)
        stop = threading.Thread(target=worker.stop, daemon=True)
        stop.start()
        await asyncio.wait(jobs[1:], timeout=60)  # cancelled, though the thread has not ended
        assert stop.is_alive()
        go_on.set()
        await asyncio.to_thread(stop.join, 60)
        assert not stop.is_alive()
        return await asyncio.gather(*jobs, return_exceptions=True)

    first, second = asyncio.run(main())
    assert first is True
    assert isinstance(second, asyncio.CancelledError)
