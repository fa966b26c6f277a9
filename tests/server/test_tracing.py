"""OpenTelemetry: one span per request, with the attributes of the conventions for generative AI."""

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes

from regard.server.tracing import Traces, has_opentelemetry
from tests.server.conftest import wait_until

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Where?"}], "temperature": 0.5, "max_tokens": 50}


@pytest.fixture
def spans(monkeypatch):
    """All finished spans, once there are as many as asked for."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)

    def finished(count: int):
        wait_until(lambda: len(exporter.get_finished_spans()) >= count)
        assert len(exporter.get_finished_spans()) == count
        return exporter.get_finished_spans()

    yield finished
    provider.shutdown()


@pytest.mark.parametrize("stream", [False, True])
def test_a_span_has_model_tokens_and_times(spans, start_server, stream):
    server = start_server()
    headers = {"traceparent": PARENT, "x-request-id": "mine"}
    assert (
        server.client.post("/v1/chat/completions", json=CHAT | {"stream": stream}, headers=headers).status_code == 200
    )
    (span,) = spans(1)
    found = dict(span.attributes)
    assert span.name == "chat tiny" and span.kind == trace.SpanKind.SERVER
    assert f"{span.context.trace_id:032x}" == PARENT.split("-")[1] and span.parent.is_remote
    assert 0 < found.pop("gen_ai.response.time_to_first_chunk") < 10
    request = server.engine.submitted[0]
    assert found == {
        "http.request.method": "POST", "http.route": "/v1/chat/completions", "http.response.status_code": 200,
        "http.request.header.x-request-id": ("mine",), "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "regard", "gen_ai.request.model": "tiny", "gen_ai.response.model": "tiny",
        "gen_ai.request.temperature": 0.5, "gen_ai.request.max_tokens": 50, "gen_ai.request.stream": stream,
        "gen_ai.response.finish_reasons": ("stop",), "gen_ai.usage.input_tokens": len(request.ids),
        "gen_ai.usage.output_tokens": len(request.new), "gen_ai.usage.cache_read.input_tokens": 0,
    }  # fmt: skip
    known = {name for name in vars(gen_ai_attributes).values() if isinstance(name, str)}
    assert {name for name in found if name.startswith("gen_ai.")} <= known
    assert "Where?" not in str(span.attributes) and not span.events


def test_refused_and_other_requests_have_spans_too(spans, start_server):
    server = start_server()
    server.client.get("/health")
    server.client.post("/v1/completions", json={"model": "tiny", "prompt": 3})
    server.client.get("/nothing")
    health, refused, nothing = spans(3)
    assert (health.name, refused.name, nothing.name) == ("GET /health", "POST /v1/completions", "GET")
    assert refused.attributes["error.type"] == "400" and health.status.is_unset


def test_without_the_library_there_are_no_spans(start_server, monkeypatch):
    monkeypatch.setattr("regard.server.tracing.find_spec", lambda name: None)
    assert not has_opentelemetry()
    server = start_server()
    assert Traces not in [middleware.cls for middleware in server.app.user_middleware]
    assert server.client.get("/health").status_code == 200
