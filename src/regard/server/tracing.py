"""OpenTelemetry: one span per HTTP request, with the attributes of the conventions for generative AI.

Spans are made by the tracer provider of the process, by default none; `opentelemetry-instrument regard serve …` sets
one up from the environment (OTEL_EXPORTER_OTLP_ENDPOINT …). A span continues the trace of the client's `traceparent`
header. Prompts and outputs are never in a span.
https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans/
"""

from importlib.util import find_spec
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from regard.server.generation import GenerationTask

OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
}
REQUEST_FIELDS = {  # of a body: the last part of the attribute's name
    "temperature": "temperature", "top_p": "top_p", "top_k": "top_k", "max_tokens": "max_tokens", "seed": "seed",
    "max_output_tokens": "max_tokens", "frequency_penalty": "frequency_penalty", "n": "choice.count",
    "presence_penalty": "presence_penalty", "stream": "stream",
}  # fmt: skip


def has_opentelemetry() -> bool:
    return find_spec("opentelemetry") is not None and find_spec("opentelemetry.trace") is not None


class Traces:
    def __init__(self, app: ASGIApp):
        from opentelemetry import propagate, trace

        self.app, self.trace, self.propagate = app, trace, propagate
        self.tracer = trace.get_tracer("regard")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        state = scope.setdefault("state", {})
        context = self.propagate.extract(dict(Headers(scope=scope)))
        kind, method = self.trace.SpanKind.SERVER, scope["method"]

        with self.tracer.start_as_current_span(method, context=context, kind=kind, record_exception=False) as span:
            try:
                await self.app(scope, receive, send)
            finally:
                status = state.get("status", 0)
                route = getattr(scope.get("route"), "path", None)
                operation, model = OPERATIONS.get(route or ""), getattr(state.get("body"), "model", None)
                name = f"{operation} {model}" if operation and model else f"{method} {route}" if route else method
                span.update_name(name)
                attributes = http_attributes(method, route, status, state.get("request_id"))
                if operation and model:
                    attributes |= body_attributes(operation, state["body"])
                    attributes |= usage_attributes(state.get("usage") or {})
                    attributes |= generation_attributes(state.get("generation"))
                span.set_attributes({key: value for key, value in attributes.items() if value is not None})
                if status >= 500:
                    span.set_status(self.trace.StatusCode.ERROR)


def http_attributes(method: str, route: str | None, status: int, id: str | None) -> dict[str, Any]:
    return {
        "http.request.method": method,
        "http.route": route,
        "http.response.status_code": status or None,
        "http.request.header.x-request-id": None if id is None else [id],
        "error.type": str(status) if status >= 400 else None,
    }


def body_attributes(operation: str, body: Any) -> dict[str, Any]:
    named = {name: getattr(body, field, None) for field, name in REQUEST_FIELDS.items() if hasattr(body, field)}
    return {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "regard",
        "gen_ai.request.model": body.model,
        "gen_ai.response.model": body.model,
        **{f"gen_ai.request.{name}": value for name, value in named.items()},
    }


def usage_attributes(usage: dict[str, Any]) -> dict[str, Any]:
    return {
        "gen_ai.usage.input_tokens": usage.get("prompt_tokens"),
        "gen_ai.usage.output_tokens": usage.get("completion_tokens"),
        "gen_ai.usage.cache_read.input_tokens": usage.get("prompt_tokens_details", {}).get("cached_tokens"),
    }


def generation_attributes(generation: GenerationTask | None) -> dict[str, Any]:
    choices = [] if generation is None else generation.choices
    first = [choice.first_token - choice.handle.created for choice in choices if choice.first_token]
    return {
        "gen_ai.response.finish_reasons": [choice.finish for choice in choices if choice.finish] or None,
        "gen_ai.response.time_to_first_chunk": min(first, default=None),
    }
