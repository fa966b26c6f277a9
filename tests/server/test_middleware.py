"""API keys, hosts, origins, body sizes, security headers."""

import asyncio
import json
import re

import httpx
import pytest

from regard.server.app import create_app
from regard.server.middleware import MAX_CONTAINERS, BodyLimit, count_containers
from regard.server.network_options import TEXT_BODY, NetworkOptions
from regard.server.served_model import ServedModel
from tests.server.conftest import serve
from tests.server.fake_engine import FakeEngine

PUBLIC = {"/health", "/ready"}


def test_every_route_but_the_public_ones_needs_the_key(start_server):
    server = start_server(key="s3cret", every_route=True)
    paths = server.client.get("/openapi.json").json()["paths"]
    routes = [(method, re.sub(r"{\w+}", "tiny", path)) for path in paths.keys() - PUBLIC for method in paths[path]]
    assert {("post", "/v1/completions"), ("get", "/v1/models/tiny"), ("post", "/regard/patch")} < set(routes)
    assert {("post", "/regard/runs/start"), ("post", "/regard/models/load"), ("get", "/regard/runs")} < set(routes)
    with httpx.Client(base_url=server.url, timeout=60) as client:
        for method, path in [*routes, ("get", "/metrics"), ("get", "/openapi.json"), ("get", "/nothing")]:
            for value in (None, "Bearer s3cre", "Basic s3cret", "s3cret", "Bearer s\u00e9cret".encode("latin-1")):
                response = client.request(method, path, headers={"authorization": value} if value else {})
                assert response.status_code == 401 and response.json()["error"]["code"] == "invalid_api_key"
        for path in (*PUBLIC, "/", "/web/app.js"):
            assert client.get(path).status_code == 200
    assert server.client.get("/v1/models").status_code == 200


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "[", ""])
def test_foreign_host_names_are_refused(start_server, host):
    assert start_server().client.get("/v1/models", headers={"host": host}).status_code in (400, 403)


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:80", "[::1]:8000", "127.0.0.1"])
def test_local_host_names_are_served(start_server, host):
    assert start_server().client.get("/v1/models", headers={"host": host}).status_code == 200


def test_requests_from_other_origins_are_refused(start_server):
    server = start_server()
    for origin in ("https://evil.example", "null", server.url + "0", server.url.replace("http", "ftp://http")):
        assert server.client.get("/v1/models", headers={"origin": origin}).status_code == 403
    response = server.client.get("/v1/models", headers={"origin": server.url})
    assert response.status_code == 200 and "access-control-allow-origin" not in response.headers


def test_an_address_that_is_not_local_requires_a_key():
    assert set(NetworkOptions(host="::1").host_names) >= {"127.0.0.1", "localhost"}
    assert NetworkOptions(host="0.0.0.0", keys=("k",)).host_names == ()
    assert "a.example" in NetworkOptions(host="0.0.0.0", keys=("k",), allow_hosts=("a.example",)).host_names
    with pytest.raises(ValueError, match="set a key, or bind 127.0.0.1"):
        NetworkOptions(host="0.0.0.0")


@pytest.mark.parametrize("keys", ["secret", ("",), ("secret", ""), (" ",), (None,)])
def test_wrong_keys_are_refused(keys):
    """A string would be as many keys as it has letters."""
    with pytest.raises(ValueError, match="keys must be a tuple of strings, none of them empty"):
        NetworkOptions(host="0.0.0.0", keys=keys)


def test_an_allowed_origin_may_call_the_server(tokenizer):
    origin = "https://app.example"
    network = NetworkOptions(keys=("k",), allow_origins=(origin,))
    app = create_app([ServedModel("tiny", tokenizer, FakeEngine(tokenizer, "x"))], network)
    with serve(app) as port, httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
        asked = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,x-other"}
        preflight = client.options("/v1/completions", headers={"origin": origin} | asked)
        assert preflight.status_code == 200 and preflight.headers["access-control-allow-origin"] == origin
        assert "authorization" in preflight.headers["access-control-allow-headers"]
        for headers, status in [({}, 401), ({"authorization": "Bearer k"}, 200)]:
            response = client.get("/v1/models", headers={"origin": origin} | headers)
            assert response.status_code == status and response.headers["access-control-allow-origin"] == origin
        for other in ("https://app.example.evil", "http://app.example", "null"):
            assert client.options("/v1/completions", headers={"origin": other} | asked).status_code == 403


@pytest.mark.parametrize("origin", ["*", "app.example", "https://app.example/", "https://app.example/page", ""])
def test_unsafe_and_invalid_origins_are_refused(origin):
    with pytest.raises(ValueError, match="origin"):
        NetworkOptions(allow_origins=(origin,))


def test_any_origin_may_call_a_server_with_a_key(tokenizer):
    network = NetworkOptions(keys=("k",), allow_origins=("*",))
    app = create_app([ServedModel("tiny", tokenizer, FakeEngine(tokenizer, "x"))], network)
    with serve(app) as port:
        headers = {"origin": "https://any.example", "authorization": "Bearer k"}
        response = httpx.get(f"http://127.0.0.1:{port}/v1/models", headers=headers, timeout=60)
        assert response.status_code == 200 and response.headers["access-control-allow-origin"] == "*"


def test_each_request_is_logged_if_asked_for(tokenizer, caplog):
    app = create_app([ServedModel("tiny", tokenizer, FakeEngine(tokenizer, "x"))], NetworkOptions(access_log=True))
    body = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 2}
    with (
        caplog.at_level("INFO", "regard.access"),
        serve(app) as port,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client,
    ):
        client.post("/v1/completions", json=body)
        client.post("/v1/completions", json=body | {"stream": True})
        client.get("/a%0Ab/" + "x" * 500, headers={"x-request-id": "mine-1"})
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 3
    for line in lines[:2]:
        assert re.fullmatch(r"POST /v1/completions 200 \d+\.\d ms, 3 \+ 2 tokens, req_[0-9a-f]{24}", line)
    assert re.fullmatch(r"GET /a%0Ab/x+ 404 \d+\.\d ms, 0 \+ 0 tokens, mine-1", lines[2]) and len(lines[2]) < 300


def test_requests_are_not_logged_by_default(start_server, caplog):
    with caplog.at_level("INFO", "regard.access"):
        start_server().client.get("/health")
    assert not [record for record in caplog.records if record.name == "regard.access"]


def test_long_bodies_are_refused_before_they_are_read(start_server):
    server = start_server()
    body = json.dumps({"model": "tiny", "prompt": "x" * TEXT_BODY}).encode()
    json_header = {"content-type": "application/json"}
    declared = server.client.post("/v1/completions", content=body, headers=json_header)
    undeclared = server.client.post("/v1/completions", content=iter([body[:1000], body[1000:]]), headers=json_header)
    assert declared.status_code == undeclared.status_code == 413
    assert server.client.post("/v1/completions", json={"model": "tiny", "prompt": "Mira"}).status_code == 200


def test_brackets_in_a_string_are_not_counted(start_server):
    server = start_server()
    prompt = '[{"\\' * 20_000
    assert len(prompt) > MAX_CONTAINERS
    response = server.client.post("/v1/completions", json={"model": "tiny", "prompt": prompt})
    assert response.json()["error"]["code"] == "context_length_exceeded"
    assert count_containers(json.dumps([prompt] * 2 + [[{}]] * MAX_CONTAINERS).encode()) == 2 * MAX_CONTAINERS + 1


@pytest.mark.parametrize(
    ("options", "body", "message"),
    [
        ("boundary=a", b"\r\n--aX" * 1000, "the boundary of the form occurs more than 64 times"),
        ("boundary=a; charset=punycode", b"--a", "without a charset"),
    ],
)
def test_forms_that_block_the_event_loop_are_refused(start_server, options, body, message):
    headers = {"content-type": f"multipart/form-data; {options}"}
    response = start_server().client.post("/v1/audio/transcriptions", content=body, headers=headers)
    assert response.status_code == 400 and message in response.json()["error"]["message"]


@pytest.mark.parametrize("length", ["²", "-1", "1e3", "9" * 5000])
def test_an_invalid_content_length_is_refused(length):
    """The middleware is called directly, because an HTTP server may refuse the header first."""
    messages = []

    async def send(message):
        messages.append(message)

    scope = {"type": "http", "headers": [(b"content-length", length.encode("latin-1"))]}
    asyncio.run(BodyLimit(None, TEXT_BODY)(scope, None, send))
    assert messages[0]["status"] == 413


def test_security_headers_allow_no_other_host(start_server):
    server = start_server()
    for path in ("/", "/web/app.js", "/v1/models", "/nothing"):
        headers = server.client.get(path).headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
        assert headers["x-content-type-options"] == "nosniff" and "set-cookie" not in headers


def test_every_response_has_the_id_of_its_request(start_server):
    server = start_server(key="k")
    for path, headers, status in (
        ("/health", {}, 200),
        ("/nothing", {}, 404),
        ("/v1/models", {"authorization": "x"}, 401),
    ):
        response = server.client.get(path, headers=headers | {"x-request-id": "mine:1"})
        assert response.status_code == status and response.headers["x-request-id"] == "mine:1"
        new = [server.client.get(path, headers=headers).headers["x-request-id"] for _ in range(2)]
        assert len(set(new)) == 2 and all(re.fullmatch("req_[0-9a-f]{24}", id) for id in new)
    for bad in ("a b", "x" * 129, 'a"b', "é".encode()):
        response = server.client.get("/health", headers={"x-request-id": bad})
        assert response.headers["x-request-id"].startswith("req_")


def test_an_unexpected_failure_names_the_request(start_server, monkeypatch, caplog):
    server = start_server()

    async def fail(*args, **options):
        raise KeyError("a bug")

    monkeypatch.setattr(ServedModel, "encode", fail)
    body, headers = {"model": "tiny", "prompt": "a"}, {"x-request-id": "mine-2"}
    response = server.client.post("/v1/completions", json=body, headers=headers)
    assert response.status_code == 500 and "mine-2" in response.json()["error"]["message"]
    assert response.headers["x-request-id"] == "mine-2" and "a bug" not in response.text
    assert any("mine-2" in record.getMessage() for record in caplog.records)


def test_a_url_encoded_body_is_refused_before_it_is_parsed(start_server):
    """Parsing takes 0.1 microseconds per byte, in the event loop."""
    client, headers = start_server().client, {"content-type": "application/x-www-form-urlencoded; charset=utf-8"}
    for path, body in [
        ("/v1/completions", b'{"model": "tiny", "prompt": "a"}'),
        ("/v1/audio/transcriptions", b"&" * 99),
    ]:
        response = client.post(path, content=body, headers=headers)
        assert response.status_code == 400 and response.json()["error"]["code"] == "unsupported_body"
        assert "Content-Type: application/json" in response.json()["error"]["message"]


def test_a_key_may_have_any_characters(tokenizer):
    app = create_app([ServedModel("tiny", tokenizer, FakeEngine(tokenizer, "x"))], NetworkOptions(keys=("clé",)))
    with serve(app) as port:
        for sent, status in [("clé", 200), ("cle", 401)]:
            headers = {"authorization": f"Bearer {sent}".encode()}
            assert httpx.get(f"http://127.0.0.1:{port}/v1/models", headers=headers, timeout=60).status_code == status
