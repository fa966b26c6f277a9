"""The requests of lm-eval (0.4.13, `local-completions` and `local-chat-completions`), read as lm-eval reads responses.

`benchmarks/lm_eval_agreement.py` runs lm-eval itself.
"""

import httpx
import pytest
import torch
import transformers

from regard.checkpoint.model_folder import load
from regard.engine.engine import Engine
from regard.server.app import create_app
from regard.server.served_model import ServedModel
from regard.text.train import byte
from tests.server.conftest import serve

NAME = "tiny"


@pytest.fixture(scope="module")
def reference(tmp_path_factory) -> transformers.LlamaForCausalLM:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=261, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.3, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """More than a server's rows, of different lengths."""
    lengths = torch.arange(20) % 7 + 12
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(5, 261, (int(length),), generator=generator).tolist() for length in lengths]


@pytest.fixture(scope="module")
def client(reference, prompts, tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    reference.save_pretrained(folder)
    tokenizer = byte()
    tokenizer.stop_ids = (best_next(reference, prompts[3]),)  # the token after this prompt has no text
    app = create_app([ServedModel(NAME, tokenizer, Engine(load(folder), rows=4))])
    with serve(app) as port, httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
        yield client


def best_next(reference, ids: list[int]) -> int:
    return int(logprobs(reference, ids)[-1].argmax())


@torch.no_grad()
def logprobs(reference, ids: list[int]) -> torch.Tensor:
    return reference(torch.tensor([ids])).logits[0].log_softmax(-1)  # (L, V)


def loglikelihoods(response: dict, contexts: list[int]) -> list[tuple[float, bool]]:
    """As lm-eval's parse_logprobs: the last token is taken for the new one, and is left out."""
    found = []
    for choice, context in zip(sorted(response["choices"], key=lambda c: c["index"]), contexts, strict=True):
        tokens = choice["logprobs"]["token_logprobs"][context:-1]
        tops = choice["logprobs"]["top_logprobs"][context:-1]
        greedy = all(token == max(top.values()) for token, top in zip(tokens, tops, strict=True))
        found.append((sum(tokens), greedy))
    return found


def test_loglikelihoods_of_echoed_prompts_equal_those_of_transformers(client, reference, prompts):
    prompts = [*prompts, [*prompts[0], best_next(reference, prompts[0])]]  # the last continuation is greedy
    contexts = [len(ids) - 1 - i % 5 for i, ids in enumerate(prompts[:-1])] + [len(prompts[0])]
    body = {
        "model": NAME, "prompt": prompts, "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True,
    }  # fmt: skip
    response = client.post("/v1/completions", json=body).json()
    assert response["usage"]["completion_tokens"] == len(prompts)
    found = loglikelihoods(response, contexts)
    for ids, context, (loglikelihood, greedy) in zip(prompts, contexts, found, strict=True):
        scores = logprobs(reference, ids)[context - 1 : -1]  # (continuation, V)
        expected = scores[range(len(scores)), ids[context:]]
        assert loglikelihood == pytest.approx(float(expected.sum()), abs=1e-4)
        assert greedy == bool((expected == scores.amax(-1)).all())
    assert found[-1][1] and not all(greedy for _, greedy in found)
    for ids, choice in zip(prompts, response["choices"], strict=True):
        assert len(choice["logprobs"]["token_logprobs"]) == len(ids) + 1
    assert response["choices"][3]["finish_reason"] == "stop"


def test_echo_with_no_new_token_has_the_same_loglikelihoods(client, prompts):
    body = {"model": NAME, "prompt": prompts[:4], "temperature": 0, "max_tokens": 1, "logprobs": 1, "echo": True}
    expected = client.post("/v1/completions", json=body).json()
    found = client.post("/v1/completions", json=body | {"max_tokens": 0}).json()
    assert found["usage"]["completion_tokens"] == 0
    for ids, choice, other in zip(prompts, found["choices"], expected["choices"], strict=False):
        assert choice["finish_reason"] == "length"
        for key, values in choice["logprobs"].items():
            assert values == other["logprobs"][key][: len(ids)]
    lines = client.post("/v1/completions", json=body | {"max_tokens": 0, "stream": True}).text.split("\n\n")
    assert sum("token_logprobs" in line for line in lines) == 8 and lines[-2] == "data: [DONE]"
    assert client.post("/v1/completions", json=body | {"max_tokens": 0, "echo": False}).status_code == 400


def test_greedy_generations_equal_those_of_transformers(client, reference, prompts):
    body = {
        "prompt": prompts[:3], "model": NAME, "max_tokens": 12, "temperature": 0, "stop": ["\n", "<|end|>"],
        "seed": 1234,
    }  # fmt: skip
    choices = client.post("/v1/completions", json=body).json()["choices"]
    stop = best_next(reference, prompts[3])
    for ids, choice in zip(prompts, choices, strict=False):
        row = torch.tensor([ids])
        output = reference.generate(
            row, attention_mask=torch.ones_like(row), max_new_tokens=12, do_sample=False, eos_token_id=stop,
            pad_token_id=stop,
        )  # fmt: skip
        new = [id for id in output[0, len(ids) :].tolist() if id != stop]
        assert choice["text"] == byte().decode(new).split("\n")[0]
    messages = [{"role": "user", "content": "Where is the lamp?"}]
    chat = {key: value for key, value in body.items() if key != "prompt"} | {"messages": messages}
    assert isinstance(client.post("/v1/chat/completions", json=chat).json()["choices"][0]["message"]["content"], str)
