"""`return_token_ids`: the ids of prompts, tokens and alternatives, with which a client continues a text exactly."""

import json
import re

import pytest

from regard.server.response_bodies import ChatCompletion, Completion

PROMPT = {
    "/v1/completions": {"prompt": "Mira put", "logprobs": 3, "max_tokens": 64},
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "Where?"}],
        "logprobs": True,
        "top_logprobs": 3,
    },
}


def chunks_of(text: str) -> list[dict]:
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


@pytest.mark.parametrize(("path", "model"), [("/v1/completions", Completion), ("/v1/chat/completions", ChatCompletion)])
def test_the_ids_of_prompt_tokens_and_alternatives_are_returned(start_server, path, model):
    server = start_server()
    body = server.client.post(path, json=PROMPT[path] | {"return_token_ids": True}).json()
    model.model_validate(body)
    request, choice = server.engine.submitted[0], body["choices"][0]
    prompt_ids = (choice if path == "/v1/completions" else body)["prompt_token_ids"]
    assert prompt_ids == list(request.ids)
    expected = [*server.engine.script, server.engine.eos]
    assert choice["token_ids"] == expected  # the stop token too, as in vLLM
    content = choice["logprobs"]["content"]
    assert [entry["id"] for entry in content] == expected
    generated = server.client.post("/detokenize", json={"tokens": [entry["id"] for entry in content[:-1]]}).json()
    assert generated["prompt"] == "".join(entry["token"] for entry in content[:-1])
    assert all(len(entry["top_logprobs"]) == 3 and "id" in entry["top_logprobs"][2] for entry in content)


@pytest.mark.parametrize("path", PROMPT)
def test_a_stream_has_the_same_ids(start_server, path):
    server = start_server()
    options = {"return_token_ids": True, "stream": True, "n": 2}
    chunks = chunks_of(server.client.post(path, json=PROMPT[path] | options).text)
    prompts = [prompt for chunk in chunks for prompt in (chunk, *chunk["choices"]) if "prompt_token_ids" in prompt]
    assert len(prompts) == (2 if path == "/v1/completions" else 1)  # once per choice, or once per chat
    assert all(prompt["prompt_token_ids"] == list(server.engine.submitted[0].ids) for prompt in prompts)
    for index in range(2):
        choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
        ids = [id for choice in choices for id in choice.get("token_ids", ())]
        assert ids == [*server.engine.script, server.engine.eos]
        scored = [choice["logprobs"]["content"] for choice in choices if choice["logprobs"]]
        assert ids == [entry["id"] for entries in scored for entry in entries]


def test_an_echoed_prompt_has_the_ids_and_scores_of_its_tokens(start_server):
    server = start_server()
    ids = server.client.post("/tokenize", json={"prompt": "Mira put the lamp"}).json()["tokens"]
    body = {"prompt": ids, "echo": True, "max_tokens": 0, "logprobs": 1, "return_token_ids": True}
    choice = server.client.post("/v1/completions", json=body).json()["choices"][0]
    content = choice["logprobs"]["content"]
    assert [entry["id"] for entry in content] == ids and choice["token_ids"] == []
    assert [entry["logprob"] for entry in content] == choice["logprobs"]["token_logprobs"]
    assert content[0]["logprob"] is None and content[0]["top_logprobs"] == [] and content[1]["logprob"] == -0.5


@pytest.mark.parametrize("path", PROMPT)
def test_without_it_responses_have_no_ids(start_server, path):
    client = start_server().client
    for options in ({}, {"return_token_ids": False}, {"stream": True}):
        text = client.post(path, json=PROMPT[path] | options).text
        assert "token_ids" not in text and not re.search(r'"id": ?\d', text)
