"""Requests that are run before the first one arrives, so that the kernels of prompts are compiled then."""

from typing import TYPE_CHECKING

from regard.engine.request import Sampling

if TYPE_CHECKING:
    from regard.engine.engine import Engine

PROMPTS = ((16,), (33,), (1040,), (2049,), (48, 17), (700, 1024))  # lengths of those that are prefilled in one batch


def warm_up_prompts(engine: "Engine") -> None:
    """Compute prompts of all shapes, by requests that are neither counted nor cached. The engine is idle."""
    counts, namespace = engine.counts.copy(), engine.scheduler.namespace
    engine.scheduler.namespace = lambda request: None
    try:
        for lengths in PROMPTS:
            for length in lengths[: engine.store.rows]:
                engine.submit([0] * max(1, min(length, engine.capacity - 2)), Sampling(max_new=2, top_p=0.9))
            while not engine.idle:
                engine.step()
    finally:
        engine.counts, engine.scheduler.namespace = counts, namespace
