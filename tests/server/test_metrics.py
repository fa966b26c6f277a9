"""GET /metrics: Prometheus' text format, read by a parser of its rules, with counts that match the requests."""

import math
import re
from typing import NamedTuple

import pytest

from regard.engine.engine import Engine
from regard.server.metrics import COUNTERS, FINISHES, GAUGES, Histogram, ModelMetrics, RequestMetrics, metrics_text
from tests.laws import MODELS, build
from tests.server.conftest import wait_until

NAME = "[a-zA-Z_:][a-zA-Z0-9_:]*"
LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\\n]|\\["\\n])*)"(?:,|$)')
SAMPLE = re.compile(rf"({NAME})(?:\{{(.*)\}})? (\S+)")
SUFFIXES = {"histogram": ("_bucket", "_sum", "_count"), "counter": ("",), "gauge": ("",)}


class Family(NamedTuple):
    type: str
    samples: dict[tuple[str, tuple[tuple[str, str], ...]], float]  # (suffix, labels): value

    def value(self, suffix: str = "", **labels: str) -> float:
        return self.samples[suffix, tuple(sorted(labels.items()))]


def parse(text: str) -> dict[str, Family]:
    """The metric families of a text; AssertionError if it violates the format."""
    assert text.endswith("\n")
    families: dict[str, Family] = {}
    helps: set[str] = set()
    for line in text.splitlines():
        if line.startswith("# HELP "):
            name, _, help = line.removeprefix("# HELP ").partition(" ")
            assert name not in helps and help.strip()
            helps.add(name)
        elif line.startswith("# TYPE "):
            name, type = line.removeprefix("# TYPE ").split(" ")
            assert re.fullmatch(NAME, name) and name in helps and name not in families
            families[name] = Family(type, {})
        else:
            match = SAMPLE.fullmatch(line)
            assert match, line
            sample, labels, value = match.groups()
            family, suffix = next(
                (f, sample[len(f) :])
                for f, (type, _) in families.items()
                if sample.startswith(f) and sample[len(f) :] in SUFFIXES[type]
            )
            assert family == list(families)[-1], f"{line} is not below its type"
            pairs = LABEL.findall(labels or "")
            assert "".join(f'{k}="{v}",' for k, v in pairs).rstrip(",") == (labels or "")
            key = suffix, tuple(sorted(pairs))
            assert key not in families[family].samples
            families[family].samples[key] = float(value)
    for name, (type, samples) in families.items():
        assert name.endswith("_total") == (type == "counter"), name
        if type == "histogram":
            check_histogram(families[name], samples)
    return families


def check_histogram(family: Family, samples: dict) -> None:
    for model in {dict(labels)["model"] for _, labels in samples}:
        buckets = {
            float(dict(labels)["le"]): value
            for (suffix, labels), value in samples.items()
            if suffix == "_bucket" and ("model", model) in labels
        }
        bounds, counts = list(buckets), list(buckets.values())
        assert bounds == sorted(bounds) and bounds[-1] == math.inf and counts == sorted(counts)
        assert family.value("_count", model=model) == counts[-1] and family.value("_sum", model=model) >= 0


def test_metrics_count_requests_and_time_them(start_server):
    server = start_server()
    server.engine.step_seconds = 0.01
    body = {"model": "tiny", "prompt": "Mira", "max_tokens": 5, "n": 2}
    assert server.client.post("/v1/completions", json=body).status_code == 200
    families = parse(server.client.get("/metrics").text)
    first, per_token, latency = (
        families[f"regard_{name}_seconds"].value("_sum", model="tiny")
        for name in ("time_to_first_token", "time_per_output_token", "request_latency")
    )
    assert first >= 0.02 and 4 * per_token == pytest.approx(latency - first) and per_token > 0
    server.client.post("/v1/completions", json=body | {"max_tokens": 1, "n": 1})
    server.client.get("/no/such/path")
    response = server.client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    families = parse(response.text)
    responses = families["regard_http_responses_total"]
    assert responses.value(route="/v1/completions", status="200") == 2
    assert responses.value(route="other", status="404") == 1
    assert families["regard_engine_running"].value(model="tiny") == 0
    assert families["regard_engine_new_tokens_total"].value(model="tiny") == 11
    assert families["regard_engine_finished_requests_total"].value(model="tiny", reason="length") == 3
    queue, first, per_token, latency = (
        families[f"regard_{name}_seconds"]
        for name in ("request_queue", "time_to_first_token", "time_per_output_token", "request_latency")
    )
    assert [family.value("_count", model="tiny") for family in (queue, first, per_token, latency)] == [3, 3, 2, 3]
    # Steps take at least 0.01 seconds; two requests have five, one has one.
    assert (
        queue.value("_sum", model="tiny") < first.value("_sum", model="tiny")
        and first.value("_sum", model="tiny") >= 0.03
    )
    assert latency.value("_sum", model="tiny") >= 0.11
    assert latency.value("_bucket", model="tiny", le="0.025") <= 1


def test_a_request_that_waits_has_a_queue_time(start_server):
    server = start_server()
    server.engine.rows = 1  # the second request waits for the first
    server.engine.step_seconds = 0.01
    body = {"model": "tiny", "prompt": ["Mira", "Tomas"], "max_tokens": 10}
    assert server.client.post("/v1/completions", json=body).status_code == 200
    assert parse(server.client.get("/metrics").text)["regard_request_queue_seconds"].value("_sum", model="tiny") >= 0.1


def test_a_cancelled_request_is_not_timed(start_server):
    server = start_server(repeat=True)
    with server.client.stream(
        "POST", "/v1/completions", json={"model": "tiny", "prompt": "a", "stream": True}
    ) as stream:
        next(stream.iter_lines())
        server.engine.may_step.clear()
    # The cancellation waits for the step, or came before it.
    wait_until(lambda: server.served.engine._inbox or server.engine.idle)
    server.engine.may_step.set()
    wait_until(lambda: server.engine.idle)
    assert (
        parse(server.client.get("/metrics").text)["regard_request_latency_seconds"].value("_count", model="tiny") == 0
    )


def test_every_metric_of_the_engine_is_described():
    metrics = Engine(build(MODELS["grouped-query"])).metrics()
    assert set(metrics) <= {*COUNTERS, *GAUGES, *FINISHES}
    families = parse(metrics_text([ModelMetrics("m", metrics | {"steps": 2**53 - 1}, RequestMetrics())], {}))
    assert families["regard_engine_steps_total"].value(model="m") == 2**53 - 1
    assert families["regard_engine_free_blocks"].value(model="m") == metrics["free_blocks"]


@pytest.mark.parametrize(("value", "bucket"), [(0.0, 0), (1.0, 0), (1.5, 1), (2.0, 1), (9.0, 2)])
def test_a_bucket_includes_its_bound(value: float, bucket: int):
    histogram = Histogram("seconds", "Seconds.", (1, 2))
    histogram.observe(value)
    assert histogram.counts.index(1) == bucket


def test_labels_are_escaped():
    text = metrics_text([ModelMetrics('m"\n', {"running": 1}, RequestMetrics())], {('a"b\\c\nd', 200): 1})
    assert parse(text)["regard_http_responses_total"].value(route='a\\"b\\\\c\\nd', status="200") == 1
    assert parse(text)["regard_engine_running"].value(model='m\\"\\n') == 1


def test_models_have_their_own_values_in_one_family():
    fast, slow, encoder = RequestMetrics(), RequestMetrics(), RequestMetrics()
    slow.latency.observe(3.0)
    text = metrics_text(
        [
            ModelMetrics("fast", {"steps": 2, "rows": 4, "stop": 1}, fast),
            ModelMetrics("stopped", None, slow),
            ModelMetrics("encoder", {}, encoder),  # has no engine
        ],
        {},
    )
    families = parse(text)
    up = families["regard_engine_up"]
    assert up.type == "gauge" and len(up.samples) == 2
    assert up.value(model="fast") == 1 and up.value(model="stopped") == 0
    assert families["regard_engine_steps_total"].samples == {("", (("model", "fast"),)): 2}
    latency = families["regard_request_latency_seconds"]
    counts = {name: latency.value("_count", model=name) for name in ("fast", "stopped", "encoder")}
    assert counts == {"fast": 0, "stopped": 1, "encoder": 0}
