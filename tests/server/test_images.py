"""Images in chats: the answer over HTTP equals that of the model in Python, and bad images are refused by name."""

import base64
import threading
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path

import httpx
import openai
import pytest
import torch
from PIL import Image

from regard.checkpoint.image_processor import ImageProcessor
from regard.cli.open_served import generating_model
from regard.engine.namespace import embedding_keys
from regard.engine.request import Sampling
from regard.image_prompts import embed_prompt
from regard.kernels.attention.mask import Full
from regard.language_model import LanguageModel
from regard.models.decoder import Decoder
from regard.models.encoder import Encoder
from regard.models.interleaved import Interleaved
from regard.models.stack import Repeat
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.feedforward import SwiGLU
from regard.parts.patches import Patches
from regard.parts.position.rope import Rope
from regard.server import image_input
from regard.server.app import create_app
from regard.server.network_options import NetworkOptions
from regard.text.train import byte
from tests.laws import randomize_weights
from tests.server.conftest import serve, wait_until

TOKENIZER = byte(["<image>"])
MARKER = TOKENIZER.core.token_to_id("<image>")
PARTS_TEMPLATE = """{% for m in messages %}{{ m.role }}: {% if m.content is string %}{{ m.content }}{% else %}{% for
part in m.content %}{{ '<image>' if part.type == 'image' else part.text }}{% endfor %}{% endif %}
{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"""


@pytest.fixture(scope="module")
def llm() -> LanguageModel:
    def layers(attention: Attention) -> tuple[Repeat, ...]:
        return (Repeat((Block((Sublayer(attention), Sublayer(SwiGLU(24)))),), 2),)

    vision = Encoder(Patches((4, 4), (8, 8)), 16, layers(Attention(2, mask=Full())))
    decoder = Decoder(TOKENIZER.vocab_size, 32, layers(Attention(4, 2, position=Rope())), context=256)
    model = Interleaved(vision, decoder, MARKER).build(seed=0).double()
    randomize_weights(model, seed=1)
    return LanguageModel(model, TOKENIZER, image_processor=ImageProcessor((0.5,) * 3, (0.5,) * 3, resize=(8, 8)))


@pytest.fixture(scope="module")
def client(llm: LanguageModel) -> Iterator[httpx.Client]:
    with (
        serve(create_app([generating_model("eyes", Path("eyes"), llm)], NetworkOptions(max_body=1 << 23))) as port,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client,
    ):
        yield client


def picture(color: str, size: tuple[int, int] = (12, 9)) -> Image.Image:
    image = Image.new("RGB", size, color)
    image.putpixel((1, 1), (0, 0, 0))
    return image


def data_url(image: Image.Image, format: str = "png") -> str:
    image.save(buffer := BytesIO(), format)
    return f"data:image/{format};base64,{base64.b64encode(buffer.getvalue()).decode()}"


def part(url: str, **more) -> dict:
    return {"type": "image_url", "image_url": {"url": url} | more}


def ask(client: httpx.Client, *content: str | dict, **options) -> httpx.Response:
    parts = [{"type": "text", "text": item} if isinstance(item, str) else item for item in content]
    body = {"model": "eyes", "messages": [{"role": "user", "content": parts}], "max_tokens": 8, "temperature": 0}
    return client.post("/v1/chat/completions", json=body | options)


def expected(llm: LanguageModel, prompt: str, images: list[Image.Image]) -> str:
    """The answer to a prompt of the default template."""
    ids = llm.tokenizer.encode(f"<|user|> {prompt}<|assistant|>", special=True)
    sampling = Sampling(max_new=8, temperature=0, stop_ids=llm.tokenizer.stop_ids)
    ids, embeddings = embed_prompt(llm.model, llm.tokenizer, llm.image_processor, ids, images)
    tokens = llm.engine.generate(ids, sampling, embeddings=embeddings)
    return llm.tokenizer.decode([token.id for token in tokens if token.id not in llm.tokenizer.stop_ids])


@pytest.fixture(scope="module")
def answers(llm: LanguageModel) -> dict[str, str]:
    """By colour; computed before the server uses the engine."""
    return {color: expected(llm, "What is <image>?", [picture(color)]) for color in ("red", "blue", "green")}


def test_answers_depend_on_the_image_and_equal_those_in_python(answers, client):
    assert len(set(answers.values())) == 3
    for color, format in (("red", "png"), ("blue", "webp"), ("red", "png")):
        image = picture(color) if format == "png" else picture(color).convert("RGBA")
        url = data_url(picture(color)) if format == "png" else lossless_webp(image)
        response = ask(client, "What is ", part(url, detail="auto"), "?")
        assert response.status_code == 200, response.text
        assert response.json()["choices"][0]["message"]["content"] == answers[color], color
        assert response.json()["usage"]["prompt_tokens"] == len("<> What is ?<>") - 2 + 4  # the image has 4 patches


def lossless_webp(image: Image.Image) -> str:
    image.convert("RGB").save(buffer := BytesIO(), "webp", lossless=True)
    return f"data:image/webp;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def test_concurrent_images_do_not_mix(answers, client):
    """Their prompts have the same ids, so a shared prefix would give one the image of another."""
    colors = ["red", "blue", "green"] * 4
    with ThreadPoolExecutor(6) as pool:
        found = pool.map(lambda color: ask(client, "What is ", part(data_url(picture(color))), "?"), colors)
        for color, response in zip(colors, found, strict=True):
            assert response.status_code == 429 or (
                response.json()["choices"][0]["message"]["content"] == answers[color]
            ), color


def test_the_keys_of_an_image_are_computed_once_for_all_choices(answers, client, monkeypatch):
    threads = []

    def recorded(*args):
        threads.append(threading.current_thread().name)
        return embedding_keys(*args)

    monkeypatch.setattr("regard.engine.request_builder.embedding_keys", recorded)
    response = ask(client, "What is ", part(data_url(picture("red"))), "?", n=3)
    assert [choice["message"]["content"] for choice in response.json()["choices"]] == [answers["red"]] * 3
    assert len(threads) == 1 and threads[0] != "regard-engine"


def test_an_equal_image_is_read_from_the_prefix_cache(llm, answers, client):
    before = llm.engine.metrics()["prefix_hit_tokens"]
    url = data_url(picture("red", (30, 30)))
    texts = [ask(client, part(url), "What is in this picture, and where?").json() for _ in range(2)]
    assert texts[0]["choices"] == texts[1]["choices"]
    assert llm.engine.metrics()["prefix_hit_tokens"] - before >= 32


def test_streams_several_images_and_templates_with_parts(llm, client, answers, monkeypatch):
    images = [part(data_url(picture(color))) for color in ("red", "blue")]
    both = ask(client, images[0], " and ", images[1]).json()["choices"][0]["message"]["content"]
    reverse = ask(client, images[1], " and ", images[0]).json()["choices"][0]["message"]["content"]
    assert both != reverse
    with openai.OpenAI(base_url=f"{client.base_url}/v1", api_key="-", max_retries=0) as api:
        content = [images[0], {"type": "text", "text": " and "}, images[1]]
        stream = api.chat.completions.create(
            model="eyes", messages=[{"role": "user", "content": content}], max_tokens=8, temperature=0, stream=True
        )
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == both
        items = [{"type": "input_image", "image_url": i["image_url"]["url"], "detail": "auto"} for i in images]
        items.insert(1, {"type": "input_text", "text": " and "})
        response = api.responses.create(
            model="eyes", input=[{"role": "user", "content": items}], max_output_tokens=16, temperature=0, store=False
        )
        assert response.output_text.startswith(both)
    monkeypatch.setattr(llm.tokenizer, "chat_template", PARTS_TEMPLATE)
    body = {"messages": [{"role": "user", "content": [images[0], {"type": "text", "text": "<image>"}]}]}
    ids = client.post("/tokenize", json=body).json()["tokens"]
    assert ids.count(MARKER) == 4  # the typed one is characters
    assert ask(client, images[0], "<image>").status_code == 200


@pytest.mark.parametrize(
    ("url", "code", "message"),
    [
        ("https://example.com/cat.png", "invalid_value", "the server fetches none"),
        ("file:///etc/passwd", "invalid_value", "the server fetches none"),
        ("data:image/svg+xml;base64,AAAA", "invalid_value", "data:image/png;base64"),
        ("data:image/png;base64,%%%", "invalid_image", "image 1 cannot be read"),
        ("data:image/png;base64,", "invalid_image", "not a PNG image, or damaged"),
        ("data:image/png;base64,AAAA", "invalid_image", "not a PNG image, or damaged"),
        (data_url(picture("red")).replace("png", "jpeg", 1), "invalid_image", "not a JPEG image, or damaged"),
        (data_url(picture("red"))[:-40], "invalid_image", "not a PNG image, or damaged"),
    ],
)
def test_bad_images_are_refused(client, url, code, message):
    response = ask(client, part(url))
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (400, code) and message in error["message"], error


def test_a_decompression_bomb_is_refused_before_it_is_decoded(client, monkeypatch):
    side = 60_000
    header = b"IHDR" + side.to_bytes(4, "big") * 2 + bytes((1, 0, 0, 0, 0))
    chunks = [header, b"IDAT" + zlib.compress(bytes(1 << 20)), b"IEND"]
    data = b"\x89PNG\r\n\x1a\n" + b"".join(
        (len(chunk) - 4).to_bytes(4, "big") + chunk + zlib.crc32(chunk).to_bytes(4, "big") for chunk in chunks
    )
    response = ask(client, part(f"data:image/png;base64,{base64.b64encode(data).decode()}"))
    assert response.status_code == 400 and response.json()["error"]["code"] == "invalid_image"
    monkeypatch.setattr(image_input, "MAX_PIXELS", 12 * 9 * 2)
    url = data_url(picture("red"))
    assert ask(client, *[part(url)] * 2).status_code == 200
    refused = ask(client, *[part(url)] * 3).json()["error"]["message"]  # counted together
    assert refused == "image 3 cannot be read: 12 x 9 pixels are too many; 0 are left"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"content": [part(data_url(picture("red")), detail="high")]}, "detail"),
        ({"content": [part(data_url(picture("red")))] * 17}, "17 images; send at most 16"),
        ({"content": [{"type": "input_audio", "input_audio": {}}]}, "input_audio"),
        ({"role": "system", "content": [part(data_url(picture("red")))]}, "only a user sends them"),
        ({"content": [part(data_url(picture("red")))] * 14 + [{"type": "text", "text": "x" * 220}]}, "tokens of text"),
    ],
)
def test_other_requests_are_refused_by_name(client, change, message):
    body = {"model": "eyes", "messages": [{"role": "user"} | change]}
    response = client.post("/v1/chat/completions", json=body)
    assert response.status_code == 400 and message in response.json()["error"]["message"], response.text


def test_an_image_token_in_a_completion_has_no_image(client):
    response = client.post("/v1/completions", json={"model": "eyes", "prompt": [[70, MARKER]]})
    assert (
        response.status_code == 400 and "has the token <image> without an image" in response.json()["error"]["message"]
    )
    assert client.post("/v1/completions", json={"model": "eyes", "prompt": "a lamp"}).status_code == 200


def test_a_model_without_images_refuses_them(start_server):
    body = {"model": "tiny", "messages": [{"role": "user", "content": [part(data_url(picture("red")))]}]}
    for path in ("/v1/chat/completions", "/tokenize"):
        response = start_server().client.post(path, json=body)
        assert response.status_code == 400 and response.json()["error"]["code"] == "no_images"


def test_the_server_answers_while_an_image_is_read(llm, answers):
    started, may_finish = threading.Event(), threading.Event()
    served = generating_model("eyes", Path("eyes"), llm)

    def embed(ids, images):
        started.set()
        assert may_finish.wait(timeout=60)
        return torch.zeros(len(ids), 32)

    served.images = served.images._replace(embed=embed)
    with (
        serve(create_app([served])) as port,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client,
        ThreadPoolExecutor(9) as pool,
    ):
        first = pool.submit(ask, client, part(data_url(picture("red"))))
        assert started.wait(timeout=60) and client.get("/health").status_code == 200
        others = [pool.submit(ask, client, part(data_url(picture("red")))) for _ in range(8)]
        wait_until(lambda: sum(other.done() for other in others) == 1)  # eight run or wait
        may_finish.set()
        assert first.result().status_code == 200
        assert sorted(other.result().status_code for other in others) == [200] * 7 + [429]
