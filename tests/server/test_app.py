"""GET /v1/models, /health, /metrics, and the frozen fields of requests."""


def test_models_are_listed(start_server):
    client = start_server().client
    listed = client.get("/v1/models").json()
    assert listed["object"] == "list" and listed["data"][0]["id"] == "tiny"
    assert client.get("/v1/models/tiny").json() == listed["data"][0]


def test_metrics_are_prometheus_text(start_server):
    server = start_server()
    server.client.post("/v1/completions", json={"model": "tiny", "prompt": "Mira"})
    server.client.get("/no/such/path")
    response = server.client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    lines = response.text.splitlines()
    assert "regard_engine_submitted_total 1" in lines
    assert 'regard_http_answers_total{route="/v1/completions",status="200"} 1' in lines
    assert 'regard_http_answers_total{route="other",status="404"} 1' in lines


def test_health_reports_a_stopped_engine(start_server):
    server = start_server()
    assert server.client.get("/health").json() == {"status": "ok"}
    server.app.state.served.engine._stopping = True
    assert server.client.get("/health").status_code == 503
    assert server.client.get("/metrics").status_code == 503
    response = server.client.post("/v1/completions", json={"model": "tiny", "prompt": "Mira"})
    assert response.status_code == 503 and "retry-after" in response.headers


def test_request_fields_are_frozen(start_server):
    """Clients depend on these fields; note a change in the changelog."""
    schema = start_server().client.get("/openapi.json").json()["components"]["schemas"]
    shared = "frequency_penalty max_tokens min_p model n presence_penalty repetition_penalty seed stop stream"
    shared += " stream_options temperature top_k top_p user logit_bias"
    chat = " messages max_completion_tokens logprobs top_logprobs response_format modalities service_tier store"
    chat += " reasoning_effort verbosity tool_choice function_call tools functions audio prediction moderation"
    chat += " web_search_options prompt_cache_options prompt_cache_retention metadata parallel_tool_calls"
    chat += " safety_identifier prompt_cache_key"
    fields = {name: " ".join(sorted(schema[name]["properties"])) for name in schema if name.endswith("Body")}
    assert fields == {
        "CompletionBody": " ".join(sorted((shared + " prompt logprobs echo best_of suffix").split())),
        "ChatBody": " ".join(sorted((shared + chat).split())),
        "PassageBody": "messages text",
        "AttentionBody": "head layer messages text",
        "ErrorBody": "error",
    }
