"""The server's metrics in Prometheus' text format.

    # HELP name what it measures
    # TYPE name counter
    name{label="value"} 3

A histogram has the cumulative counts of its buckets, `name_bucket{le="0.5"}`, and `name_sum` and `name_count`.
Metrics of an engine have the label `model`.
"""

import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from regard.engine.async_engine import RequestHandle

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 150, 300, 600)
PREFIX = "regard_engine_"
METRICS_TYPE = "text/plain; version=0.0.4"
FINISHES = ("stop", "length", "cancelled", "timeout", "error")
COUNTERS = {  # of Engine.metrics(): what they count
    "steps": "Steps of the engine.",
    "prompt_tokens": "Tokens of submitted prompts.",
    "new_tokens": "Generated tokens.",
    "preemptions": "Requests that were stopped to free memory, and computed again later.",
    "evicted_blocks": "Blocks of cached prefixes that were evicted.",
    "prefix_query_tokens": "Prompt tokens that were looked up in the prefix cache.",
    "prefix_hit_tokens": "Prompt tokens that were found in the prefix cache.",
    "drafts": "Drafts that were verified.",
    "draft_tokens": "Tokens of drafts.",
    "accepted_draft_tokens": "Tokens of drafts that were accepted.",
    "draft_seconds": "Time to propose drafts.",
    "verify_seconds": "Time to verify drafts.",
}
GAUGES = {
    "tokens_per_draft": "New tokens of a request per forward with a draft.",
    "speculation_speedup": "Decoded tokens per second, relative to the steps without drafts.",
    "rows": "Requests that can be decoded at once.",
    "running": "Requests that are being decoded.",
    "waiting": "Requests in the queue.",
    "blocks": "Blocks of the store.",
    "free_blocks": "Blocks that no request uses.",
    "cached_blocks": "Blocks of cached prefixes.",
    "cached_states": "Snapshots of recurrent states of cached prefixes.",
    "cache_bytes": "Bytes of keys, values and states that the store can keep.",
    "cached_tokens": "Tokens of running requests whose keys and values are kept.",
    "evicted_tokens": "Tokens of running requests whose keys and values are no longer kept.",
}


class Histogram:
    def __init__(self, name: str, help: str, bounds: tuple[float, ...] = SECONDS):
        self.name, self.help, self.bounds = name, help, bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def lines(self, label: str) -> Iterator[str]:
        total = 0
        for bound, count in zip((*self.bounds, "+Inf"), self.counts, strict=True):
            total += count
            yield f'{self.name}_bucket{{{label},le="{bound}"}} {total}'
        yield f"{self.name}_sum{{{label}}} {self.sum!r}"
        yield f"{self.name}_count{{{label}}} {total}"


class RequestMetrics:
    """Times of one model's requests. Used only in the event loop. A choice of a request counts as one request, as in
    the engine."""

    def __init__(self) -> None:
        self.queue = Histogram("regard_request_queue_seconds", "Time from submission to the first step of a request.")
        self.first_token = Histogram("regard_time_to_first_token_seconds", "Time from submission to the first token.")
        self.per_token = Histogram("regard_time_per_output_token_seconds", "Mean time between the tokens of a request.")
        self.latency = Histogram("regard_request_latency_seconds", "Time from submission to the last token.")

    @property
    def histograms(self) -> tuple[Histogram, ...]:
        return self.queue, self.first_token, self.per_token, self.latency

    def observe(self, handle: RequestHandle, first: float, tokens: int) -> None:
        """A finished request, `first` the time of its first token."""
        now = time.monotonic()
        if handle.started is not None:
            self.queue.observe(handle.started - handle.created)
        self.first_token.observe(first - handle.created)
        if tokens > 1:
            self.per_token.observe((now - first) / (tokens - 1))
        self.latency.observe(now - handle.created)


class ModelMetrics(NamedTuple):
    """`engine`: the metrics of its engine; None if the engine has stopped, {} if the model has none."""

    name: str
    engine: Mapping[str, float] | None
    requests: RequestMetrics

    @property
    def label(self) -> str:
        return f'model="{escape(self.name)}"'


def metrics_text(models: Sequence[ModelMetrics], responses: Mapping[tuple[str, int], int]) -> str:
    """responses: their numbers by route and status."""
    lines = [*engine_lines(models)]
    for family in zip(*(model.requests.histograms for model in models), strict=True):
        lines += header(family[0].name, "histogram", family[0].help)
        for model, histogram in zip(models, family, strict=True):
            lines += histogram.lines(model.label)
    labels = (
        (f'route="{escape(route)}",status="{status}"', count) for (route, status), count in sorted(responses.items())
    )
    lines += samples("regard_http_responses_total", "counter", "Responses by route and status.", labels)
    return "\n".join(lines) + "\n"


def engine_lines(models: Sequence[ModelMetrics]) -> Iterator[str]:
    up = [(model.label, float(model.engine is not None)) for model in models if model.engine != {}]
    yield from samples("regard_engine_up", "gauge", "1 if the engine runs, 0 if it has stopped.", up)
    engines = [(model.label, model.engine) for model in models if model.engine]
    for name in sorted({name for _, engine in engines for name in engine}):
        values = [(label, engine[name]) for label, engine in engines if name in engine]
        if name in COUNTERS:
            yield from samples(f"{PREFIX}{name}_total", "counter", COUNTERS[name], values)
        elif name not in FINISHES:
            help = GAUGES.get(name, f"The engine's {name.replace('_', ' ')}.")
            yield from samples(PREFIX + name, "gauge", help, values)
    finished = [
        (f'{label},reason="{name}"', engine[name]) for label, engine in engines for name in FINISHES if name in engine
    ]
    yield from samples(f"{PREFIX}finished_requests_total", "counter", "Finished requests by reason.", finished)


def samples(name: str, type: str, help: str, values: Iterable[tuple[str, float]]) -> Iterator[str]:
    yield from header(name, type, help)
    for labels, value in values:
        yield f"{name}{{{labels}}} {value:.17g}"


def header(name: str, type: str, help: str) -> Iterator[str]:
    yield f"# HELP {name} {help}"
    yield f"# TYPE {name} {type}"


def escape(label: str) -> str:
    return label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def merge_metrics(texts: Mapping[str, str | None]) -> str:
    """The metrics of several replicas as one text, with the label `replica`. texts: by replica; None: it has none.

    The samples of one metric are adjacent, after its HELP and TYPE.
    """
    up = [(f'replica="{replica}"', float(text is not None)) for replica, text in texts.items()]
    first = samples("regard_replica_up", "gauge", "1 if the replica answers and its engines run, 0 if not.", up)
    return "".join(f"{line}\n" for line in (*first, *merged_lines(texts)))


def merged_lines(texts: Mapping[str, str | None]) -> Iterator[str]:
    headers: dict[str, list[str]] = {}  # by metric
    samples: dict[str, list[str]] = {}
    for replica, text in texts.items():
        metric, seen = "", set()
        for line in (text or "").splitlines():
            if line.startswith("#"):
                metric = line.split(" ", 3)[2]
                if metric not in seen and metric not in headers:
                    headers[metric], samples[metric] = [], []
                seen.add(metric)
                if line not in headers[metric]:
                    headers[metric].append(line)
            elif line:
                samples[metric].append(labelled(line, replica))
    return (line for metric in headers for line in (*headers[metric], *samples[metric]))


def labelled(sample: str, replica: str) -> str:
    """`name{a="b"} 1` or `name 1` with one more label."""
    name, brace, rest = sample.partition("{")
    if brace:
        return f'{name}{{replica="{replica}",{rest}'
    name, _, value = sample.partition(" ")
    return f'{name}{{replica="{replica}"}} {value}'
