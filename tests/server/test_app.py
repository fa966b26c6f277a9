"""GET /v1/models, /health, /ready, and the schema of requests and responses."""

import pytest

from regard.server.response_bodies import ChatCompletion, Completion
from tests.server.fake_engine import FakeEngine


def test_models_are_listed(start_server):
    client = start_server().client
    listed = client.get("/v1/models").json()
    assert listed["object"] == "list" and listed["data"][0]["id"] == "tiny"
    assert listed["data"][0]["max_model_len"] == FakeEngine.capacity  # vLLM's name
    assert client.get("/v1/models/tiny").json() == listed["data"][0]


def test_a_draining_server_is_alive_but_not_ready(start_server):
    server = start_server()
    assert server.client.get("/ready").json() == {"status": "ok"}
    server.app.state.models.draining = True
    response = server.client.get("/ready")
    assert response.status_code == 503 and response.json()["error"]["code"] == "not_ready"
    assert server.client.get("/health").json() == {"status": "ok"}


def test_health_reports_a_stopped_engine(start_server, caplog):
    server = start_server()
    assert server.client.get("/health").json() == {"status": "ok"}
    server.served.engine._stopping = True
    assert server.client.get("/health").status_code == server.client.get("/ready").status_code == 503
    assert 'regard_engine_up{model="tiny"} 0' in server.client.get("/metrics").text
    response = server.client.post("/v1/completions", json={"model": "tiny", "prompt": "Mira"})
    assert response.status_code == 503 and "retry-after" in response.headers
    assert not caplog.records  # probes and clients would fill the disk


def test_request_fields_are_frozen(start_server):
    """Clients depend on these fields; note a change in the changelog."""
    schema = start_server(every_route=True).client.get("/openapi.json").json()["components"]["schemas"]
    shared = "frequency_penalty max_tokens min_p model n presence_penalty repetition_penalty seed stop stream"
    shared += " stream_options temperature top_k top_p user logit_bias min_tokens ignore_eos typical_p"
    shared += " structured_outputs cache_salt priority timeout stop_token_ids return_token_ids"
    chat = " messages max_completion_tokens logprobs top_logprobs response_format modalities service_tier store"
    chat += " reasoning_effort verbosity tool_choice function_call tools functions audio prediction moderation"
    chat += " web_search_options prompt_cache_options prompt_cache_retention metadata parallel_tool_calls"
    chat += " safety_identifier prompt_cache_key chat_template_kwargs search"
    fields = {name: " ".join(sorted(schema[name]["properties"])) for name in schema if name.endswith(("Body", "Form"))}
    assert fields == {
        "CompletionBody": " ".join(sorted((shared + " prompt logprobs echo best_of suffix").split())),
        "ChatBody": " ".join(sorted((shared + chat).split())),
        "EmbeddingBody": "dimensions encoding_format input model user",
        "RerankBody": "documents model query return_documents top_n",
        "TokenizeBody": "add_generation_prompt add_special_tokens chat_template_kwargs messages model prompt"
        " return_token_strs",
        "DetokenizeBody": "model tokens",
        "ResponsesBody": "access_programs background cache_salt chat_template_kwargs context_management"
        " conversation image include input"
        " instructions max_output_tokens max_tool_calls metadata model moderation parallel_tool_calls"
        " previous_response_id priority prompt prompt_cache_key prompt_cache_options prompt_cache_retention"
        " reasoning safety_identifier service_tier store stream"
        " stream_options temperature text timeout tool_choice tools top_logprobs top_p truncation user",
        "PassageBody": "messages model text",
        "InstrumentBody": "controls model",
        "OverviewBody": "ids layers model target",
        "HeadBody": "columns head ids layer model pool rows target",
        "LensBody": "chat ids logits model start stop target text top",
        "PatchBody": "answer chat clean corrupted layer model position top wrong",
        "RunMetricsBody": "columns points runs",
        "StartDemoBody": "run steps",
        "StopDemoBody": "run",
        "LoadModelBody": "model",
        "UnloadModelBody": "model",
        "PlanBody": "batch context device dtype model weights",
        "VerifyBody": "model",
        "LoadAdapterBody": "lora_name lora_path model",
        "UnloadAdapterBody": "lora_name",
        "ErrorBody": "error",
        "AudioForm": "file model prompt response_format temperature",
        "TranscriptionForm": "file language model prompt response_format stream temperature timestamp_granularities[]",
    }


@pytest.mark.parametrize(
    ("path", "body", "model"),
    [
        ("/v1/completions", {"prompt": "Mira"}, Completion),
        ("/v1/completions", {"prompt": "Mira", "logprobs": 2, "n": 2}, Completion),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}, ChatCompletion),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "hi"}], "logprobs": True, "top_logprobs": 2},
            ChatCompletion,
        ),
    ],
)
def test_responses_have_the_schema_of_the_api(start_server, path, body, model):
    client = start_server().client
    response = client.post(path, json={"model": "tiny"} | body)
    model.model_validate_json(response.content)
    schema = client.get("/openapi.json").json()
    content = schema["paths"][path]["post"]["responses"]["200"]["content"]
    assert content["application/json"]["schema"]["$ref"].endswith("/" + model.__name__)
    assert "text/event-stream" in content
    required = schema["components"]["schemas"][model.__name__]["required"]
    assert set(required) == set(response.json())
