"""Adapters over HTTP: named as models, listed, loaded from the server's folder and unloaded while it runs."""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import pytest
import torch
from torch import nn

from regard.adapt import LoRA, add_lora, save_adapter
from regard.adapt.lora_weights import without_gradients
from regard.engine.engine import Engine
from regard.language_model import LanguageModel
from regard.models.decoder import Decoder
from regard.models.stack import Repeat
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.feedforward import SwiGLU
from regard.parts.position.rope import Rope
from regard.server.app import create_app
from regard.server.served_model import ServedModel
from regard.text.train import byte
from tests.server.conftest import serve


@pytest.fixture(scope="module")
def model():
    block = Block((Sublayer(Attention(heads=4, kv_heads=2, position=Rope())), Sublayer(SwiGLU(48))))
    return Decoder(vocab=261, width=32, layers=(Repeat((block,)),), context=96).build(seed=3).double()


@pytest.fixture(scope="module")
def versions(model, tmp_path_factory) -> dict[str, nn.Module]:
    """The model with each of two adapters, which are in the folder `adapters`."""
    folder = tmp_path_factory.mktemp("server")
    found = {}
    for rank, name in enumerate(("pirate", "legal"), 2):
        found[name] = without_gradients(model)
        add_lora(found[name], LoRA(rank, 8.0, "all-linear"), seed=rank)
        for parameter_name, parameter in found[name].named_parameters():
            if "lora_B" in parameter_name:
                nn.init.normal_(parameter, generator=torch.Generator().manual_seed(rank))
        save_adapter(found[name], folder / "adapters" / name)
    (folder / "secret").mkdir()
    (folder / "adapters" / "link").symlink_to(folder / "secret")
    model.folder = folder / "adapters"
    return found


@pytest.fixture(scope="module")
def client(model, versions):
    engine = Engine(model, rows=4)
    engine.load_adapter("pirate", model.folder / "pirate")
    served = ServedModel("small", byte(), engine, read_adapter=engine.read_adapter)
    app = create_app([served], adapters=model.folder)
    with serve(app) as port, httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
        yield client


def text(client: httpx.Client, name: str, prompt: str = "Mira") -> str:
    body = {"model": name, "prompt": prompt, "max_tokens": 10, "temperature": 0, "ignore_eos": True}
    response = client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    assert response.json()["model"] == name
    return response.json()["choices"][0]["text"]


def expected(model: nn.Module, prompt: str = "Mira") -> str:
    return LanguageModel(model, byte()).generate(prompt, max_new=10, temperature=0, ignore_eos=True)


def error(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]


@pytest.mark.ledger("lora.multi")
def test_requests_choose_adapters_as_models(client, model, versions) -> None:
    listed = {card["id"]: card["parent"] for card in client.get("/v1/models").json()["data"]}
    assert listed == {"small": None, "pirate": "small"}
    assert client.get("/v1/models/pirate").json()["parent"] == "small"
    assert client.post("/v1/load_lora_adapter", json={"lora_name": "law", "lora_path": "legal"}).json() == {
        "status": "ok"
    }
    models = {"small": model, "pirate": versions["pirate"], "law": versions["legal"]}
    jobs = [(name, prompt) for prompt in ("Mira", "the red lamp in the garden") for name in models] * 2
    with ThreadPoolExecutor(len(jobs)) as pool:
        texts = list(pool.map(lambda job: text(client, *job), jobs))
    assert texts == [expected(models[name], prompt) for name, prompt in jobs]
    assert len(set(texts[:3])) == 3
    assert client.post("/v1/unload_lora_adapter", json={"lora_name": "law"}).status_code == 200
    body = {"model": "law", "prompt": "Mira"}
    assert error(client.post("/v1/completions", json=body)) == (404, "model_not_found")
    assert error(client.post("/v1/unload_lora_adapter", json={"lora_name": "law"})) == (404, "adapter_not_found")


def test_the_openai_client_streams_an_adapter(client, versions) -> None:
    api = openai.OpenAI(base_url=f"{client.base_url}/v1", api_key="none")
    assert [card.id for card in api.models.list()] == ["small", "pirate"]
    chunks = api.completions.create(
        model="pirate", prompt="Mira", max_tokens=10, temperature=0, stream=True, extra_body={"ignore_eos": True}
    )
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == expected(versions["pirate"])


def test_load_and_unload_while_streams_run(client, versions) -> None:
    with ThreadPoolExecutor(4) as pool:
        running = [pool.submit(text, client, "pirate") for _ in range(4)]
        for _ in range(3):
            assert client.post("/v1/load_lora_adapter", json={"lora_name": "l", "lora_path": "legal"}).is_success
            assert text(client, "l") == expected(versions["legal"])
            assert client.post("/v1/unload_lora_adapter", json={"lora_name": "l"}).is_success
        assert {future.result() for future in running} == {expected(versions["pirate"])}


@pytest.mark.parametrize(
    "path", ["..", "../secret", "link", "/etc", "nosuch", "a\0b", "x" * 1000, "pirate/../../secret"]
)
def test_paths_stay_in_the_folder(client, path: str) -> None:
    response = client.post("/v1/load_lora_adapter", json={"lora_name": "x", "lora_path": path})
    assert error(response) == (400, "adapter_not_found") and "/tmp" not in response.text


def test_a_link_to_a_file_outside_is_refused(client, model) -> None:
    folder = model.folder / "linked"
    shutil.copytree(model.folder / "legal", folder)
    (folder / "adapter_model.safetensors").unlink()
    (folder / "adapter_model.safetensors").symlink_to("/etc/hostname")
    response = client.post("/v1/load_lora_adapter", json={"lora_name": "x", "lora_path": "linked"})
    assert error(response) == (400, "adapter_not_found")


def test_a_run_whose_checkpoint_is_outside_is_refused(client, model) -> None:
    checkpoints = model.folder / "linked-run" / "checkpoints"
    checkpoints.mkdir(parents=True)
    (checkpoints / "step-1").symlink_to(model.folder.parent / "secret")
    response = client.post("/v1/load_lora_adapter", json={"lora_name": "x", "lora_path": "linked-run"})
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "adapter_not_found"


def test_messages_show_no_folders() -> None:
    from regard.server.adapter_routes import FOLDERS

    text = "/srv/data/base/model.safetensors: not the weights of /home/x/run (a/b stays)"
    assert FOLDERS.sub("", text) == "model.safetensors: not the weights of run (a/b stays)"


@pytest.mark.parametrize(
    "body",
    [{}, {"lora_name": "x"}, {"lora_name": "", "lora_path": "legal"}, {"lora_name": "x", "lora_path": 3},
     {"lora_name": "x", "lora_path": "legal", "other": 1}, {"lora_name": "small", "lora_path": "legal"},
     {"lora_name": "pirate", "lora_path": "legal"}, {"lora_name": "a\nb", "lora_path": "legal"},
     {"lora_name": "x", "lora_path": "legal", "model": "pirate"}],
    ids=str,
)  # fmt: skip
def test_bad_requests_are_refused(client, body: dict) -> None:
    response = client.post("/v1/load_lora_adapter", json=body)
    assert response.status_code in (400, 422) and response.json()["error"]["message"]
    assert [card["id"] for card in client.get("/v1/models").json()["data"]] == ["small", "pirate"]


def damaged_folders(folder: Path, target: Path) -> list[Path]:
    """Copies of an adapter, each with another fault."""
    config = json.loads((folder / "adapter_config.json").read_text())
    tensors = (folder / "adapter_model.safetensors").read_bytes()
    configs = [config | change for change in ({"r": 7}, {"r": 0}, {"r": "x"}, {"use_dora": True}, {"bias": "all"},
               {"target_modules": ["nosuch"]}, {"peft_type": "IA3"}, {"lora_alpha": None})]  # fmt: skip
    files = [(json.dumps(each), tensors) for each in configs]
    files += [("{", tensors), ("[]", tensors), (json.dumps(config), tensors[:-9]), (json.dumps(config), b"")]
    files += [(json.dumps(config), tensors[:9] + bytes([tensors[9] ^ 255]) + tensors[10:])]
    for index, (written, data) in enumerate(files):
        each = target / f"damaged-{index}"
        each.mkdir()
        (each / "adapter_config.json").write_text(written)
        (each / "adapter_model.safetensors").write_bytes(data)
    return sorted(target.glob("damaged-*"))


def test_damaged_adapters_give_a_typed_error(client, model, versions) -> None:
    for folder in damaged_folders(model.folder / "legal", model.folder):
        response = client.post("/v1/load_lora_adapter", json={"lora_name": "x", "lora_path": folder.name})
        assert error(response) == (400, "invalid_adapter"), (folder, response.text)
        assert str(model.folder) not in response.text
    assert text(client, "pirate") == expected(versions["pirate"])


def test_without_a_folder_there_are_no_routes(model) -> None:
    app = create_app([ServedModel("small", byte(), Engine(model, rows=1))])
    with serve(app) as port:
        response = httpx.post(
            f"http://127.0.0.1:{port}/v1/load_lora_adapter", json={"lora_name": "a", "lora_path": "b"}, timeout=60
        )
    assert response.status_code == 404
