"""POST /tokenize and /detokenize."""

import pytest

QUESTION = [{"role": "user", "content": "Where is the lamp?"}]


def test_a_prompt_is_tokenized_and_back(start_server, tokenizer):
    server = start_server()
    server.served.tokenizer.prefix_ids = (3,)
    response = server.client.post("/tokenize", json={"model": "tiny", "prompt": "Mira put"}).json()
    ids = tokenizer.encode("Mira put")
    assert response == {"count": len(ids) + 1, "max_model_len": 4096, "tokens": [3, *ids], "token_strs": None}
    body = {"prompt": "Mira put", "add_special_tokens": False, "return_token_strs": True}
    response = server.client.post("/tokenize", json=body).json()
    assert response["tokens"] == ids and "".join(response["token_strs"]) == "Mira put"
    assert server.client.post("/detokenize", json={"tokens": ids}).json() == {"prompt": "Mira put"}
    assert server.client.post("/detokenize", json={"tokens": []}).json() == {"prompt": ""}


def test_messages_are_tokenized_by_the_template(start_server, tokenizer):
    client = start_server().client
    for options, end in [({}, "<|assistant|>"), ({"add_generation_prompt": False}, "")]:
        response = client.post("/tokenize", json={"messages": QUESTION} | options).json()
        text = "<|user|> Where is the lamp?" + end
        assert response["tokens"] == tokenizer.encode(text, special=True)
        assert client.post("/detokenize", json={"tokens": response["tokens"]}).json() == {"prompt": text}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "a", "messages": QUESTION}),
        ("/tokenize", {"prompt": "a", "add_generation_prompt": True}),
        ("/tokenize", {"prompt": "a", "chat_template_kwargs": {}}),
        ("/tokenize", {"messages": QUESTION, "add_special_tokens": True}),
        ("/detokenize", {"tokens": [-1]}),
        ("/detokenize", {"tokens": [340]}),
        ("/detokenize", {"tokens": "a"}),
    ],
)
def test_invalid_requests_are_refused(start_server, path, body):
    client = start_server().client
    assert client.post(path, json=body).status_code == 400
    assert client.post(path, json=body | {"model": "other"}).status_code in (400, 404)
