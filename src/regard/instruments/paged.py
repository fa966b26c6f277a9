"""The blocks of the paged cache: an engine generates for three requests, and its store tells which blocks they have."""

from functools import partial

from regard.engine.engine import Engine
from regard.engine.request import Request, Sampling
from regard.engine.stores.paged import Paged
from regard.instruments.examples import example_subject
from regard.instruments.instrument import Instrument, Panel, Quiz, Slider, Subject, Switch
from regard.instruments.panels import heatmap, numbers, table, tokens

SLOTS = 48  # tokens that the pool can keep
CAPACITY, NEW = 24, 12  # tokens per request, and new ones of them
EVERY = 3  # steps between two requests
PROMPTS = ((2, 6, 15, 21, 2, 8, 27, 5), (2, 6, 15, 21, 2, 8, 27, 5, 3, 4), (2, 10, 14))  # 2 starts as 1


def run_engine(steps: int, block: int, shared: bool) -> tuple[Paged, list[Request]]:
    """The store of a new engine after some steps, and its requests."""
    store = partial(Paged, blocks=SLOTS // block, block=block)
    model = example_subject().model
    engine = Engine(model, rows=len(PROMPTS), capacity=CAPACITY, store=store, prefix_cache=shared)
    requests: list[Request] = []
    for step in range(steps):
        if step % EVERY == 0 and len(requests) < len(PROMPTS):
            requests.append(engine.submit(PROMPTS[len(requests)], Sampling(max_new=NEW, temperature=0)))
        engine.step()
    assert isinstance(engine.store, Paged)
    return engine.store, requests


def state_of(request: Request) -> str:
    return "ended" if request.finish else "waiting" if request.row is None else "running"


def paged_cache(subject: Subject | None, steps: int, block: int, shared: bool) -> list[Panel]:
    store, requests = run_engine(steps, block, shared)
    pool, metrics = store.pool, store.metrics()
    owned = [[] if request.row is None else store.owned[request.row] for request in requests]
    lengths = store.table.lengths.tolist()
    kept = [0 if request.row is None else lengths[request.row] for request in requests]
    names, width = [f"request {i}" for i in range(1, len(requests) + 1)], -(-CAPACITY // block)
    owners = {b: [str(i) for i, blocks in enumerate(owned, 1) if b in blocks] for b in range(1, store.blocks + 1)}
    notes = [", ".join(of) or ("cached" if b in pool.cached else "free") for b, of in owners.items()]
    taken = sum(bool(of) for of in owners.values())
    items: dict[str, float | str] = {
        "blocks that requests have": f"{taken} of {store.blocks}",
        "slots of these": taken * block,
        "slots that a contiguous cache reserves": store.rows * CAPACITY,
        "prompt tokens found in the cache": metrics["prefix_hit_tokens"],
        "cached blocks, free to be taken": metrics["cached_blocks"],
    }
    if subject is not None and subject.metrics is not None:
        live = subject.metrics()
        if "blocks" in live:
            items[f"{subject.name} now: blocks in use"] = f"{live['blocks'] - live['free_blocks']} of {live['blocks']}"
            items[f"{subject.name} now: cached blocks"] = live["cached_blocks"]
            items[f"{subject.name}: prompt tokens found in its cache"] = live["prefix_hit_tokens"]
    return [
        heatmap(
            "block tables: the number of each block, in the order of the tokens",
            [[*blocks, *[None] * (width - len(blocks))] for blocks in owned],
            names,
            [f"{i * block}–{(i + 1) * block - 1}" for i in range(width)],
            "positive",
        ),
        tokens(
            "the pool: the requests that have each block",
            [str(b) for b in owners],
            [len(of) / len(PROMPTS) for of in owners.values()],
            notes,
        ),
        table(
            "requests",
            ("request", "state", "prompt", "new tokens", "tokens kept", "blocks", "unused slots"),
            [
                (i, state_of(r), len(r.ids), len(r.new), n, len(blocks), len(blocks) * block - n if blocks else 0)
                for i, (r, n, blocks) in enumerate(zip(requests, kept, owned, strict=True), 1)
            ],
        ),
        numbers(items),
    ]


INSTRUMENTS = (
    Instrument(
        "blocks", "The blocks of a paged cache",
        "A request takes blocks as it grows, and shares those of an equal prefix; an engine runs here, step by step.",
        r"\text{slot}(t) = \text{table}\!\left[\lfloor t / b \rfloor\right] \cdot b + t \bmod b",
        (
            Slider("steps", "steps of the engine", 1, 20, 8),
            Slider("block", "tokens per block b", 2, 8, 4, 2),
            Switch("shared", "requests share equal prefixes", True),
        ),
        Quiz(
            "Requests 1 and 2 start with the same 8 tokens. Which blocks do both have, with 4 tokens per block?",
            "Blocks 1 and 2: request 2 computes only the other two tokens of its prompt. Without sharing it has "
            "blocks of its own.",
            {"steps": 4, "block": 4, "shared": True},
        ),
        paged_cache, ("engine/stores/paged.py", "engine/stores/blocks.py", "engine/engine.py"), reads_model=True,
    ),
)  # fmt: skip
