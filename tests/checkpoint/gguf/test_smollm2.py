"""SmolLM2-135M-Instruct in Q4_1, a published model: logits, ids and generations equal those of `transformers`."""

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import nn

import regard
from regard.checkpoint import load
from regard.checkpoint.gguf import export_gguf
from regard.engine.engine import Engine
from regard.engine.request import Sampling
from regard.find_model import PACKAGED, locate
from regard.text.chat import encode_chat, render
from regard.text.tokenizer import Tokenizer
from regard.text.write_gguf import gguf_metadata
from regard.training.history import read_history
from tests.cli.conftest import regard as command
from tests.laws import error
from tests.text.sample_texts import MIXED

pytestmark = pytest.mark.skipif(
    PACKAGED["smollm2"].path is None, reason=f"smollm2 is not installed: {PACKAGED['smollm2'].install_command}"
)
CHAT = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load("smollm2")


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return load("smollm2")


@pytest.fixture(scope="module")
def theirs() -> Any:
    transformers.utils.logging.disable_progress_bar()
    file = locate("smollm2")
    return transformers.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)


@pytest.mark.slow
@torch.no_grad()
def test_logits_and_weights_equal_those_of_transformers(model: nn.Module, theirs: Any, tokenizer: Tokenizer) -> None:
    ids = torch.tensor([encode_chat(tokenizer, CHAT)])
    assert error(model(ids), theirs(ids).logits) < 1e-5
    their_weights = dict(theirs.named_parameters())
    assert torch.equal(model.get_parameter("embedding.weight"), their_weights["model.embed_tokens.weight"])
    query = model.get_parameter("stack.blocks.29.sublayers.0.body.q_proj.weight")
    assert torch.equal(query, their_weights["model.layers.29.self_attn.q_proj.weight"])


def test_ids_equal_those_of_transformers(tokenizer: Tokenizer) -> None:
    file = locate("smollm2")
    theirs = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    for text in MIXED:
        has_other_digits = any(char.isnumeric() and not char.isascii() for char in text)
        if not has_other_digits:  # transformers does not split such digits; the original tokenizer and llama.cpp do
            assert tokenizer.encode(text, special=True) == theirs.encode(text, add_special_tokens=False)
    conversation = [
        *CHAT,
        {"role": "assistant", "content": "Paris."},
        {"role": "user", "content": "And of <|im_end|> Spain?"},
    ]
    assert tokenizer.chat_template is not None
    for messages in (CHAT, [{"role": "system", "content": "Be brief."}, *conversation]):
        text = render(tokenizer.chat_template, messages)
        assert text == theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert encode_chat(tokenizer, CHAT) == theirs.apply_chat_template(CHAT, add_generation_prompt=True)["input_ids"]


def test_the_model_answers_a_question(model: nn.Module, tokenizer: Tokenizer) -> None:
    generated = Engine(model, rows=1, capacity=64).generate(  # ty: ignore
        encode_chat(tokenizer, CHAT), Sampling(max_new=8, temperature=0, stop_ids=tokenizer.stop_ids)
    )
    assert "Paris" in tokenizer.decode([token.id for token in generated])


@pytest.mark.slow
@torch.no_grad()
def test_forty_greedy_tokens_equal_those_of_transformers(model: nn.Module, theirs: Any, tokenizer: Tokenizer) -> None:
    ids = encode_chat(tokenizer, CHAT)
    expected = theirs.generate(torch.tensor([ids]), max_new_tokens=40, do_sample=False, eos_token_id=-1)[0, len(ids) :]
    generated = Engine(model, rows=1, capacity=128).generate(ids, Sampling(max_new=40, temperature=0))  # ty: ignore
    assert [token.id for token in generated] == expected.tolist()


@pytest.mark.slow
@torch.no_grad()
def test_model_and_tokenizer_round_trip_through_a_file(model: nn.Module, tokenizer: Tokenizer, tmp_path: Path) -> None:
    export_gguf(model, tmp_path / "again.gguf", "llama", "f32", gguf_metadata(tokenizer, 49152))
    reloaded = load(tmp_path / "again.gguf")
    assert reloaded.spec == model.spec
    assert all(map(torch.equal, reloaded.parameters(), model.parameters()))
    assert all(
        Tokenizer.load(tmp_path / "again.gguf").encode(text, True) == tokenizer.encode(text, True) for text in MIXED
    )


@pytest.mark.slow
def test_an_adapter_learns_a_style_and_gives_the_same_logits_in_peft(theirs: Any, tmp_path: Path) -> None:
    """Six steps; examples/style trains until nine of ten held-out answers have the style."""
    things = ("gold", "rain", "a horse", "a fork", "silk", "a drum", "moss", "a ferry", "lime", "an owl", "tin", "jam")
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"What is {thing}?"},
                {"role": "assistant", "content": f"In short, {thing} is something that most people know."},
            ]
        }
        for thing in things
    ]
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, rows)))
    options = ("--adapter.rank=8", "--data.rows=1", "--data.length=128", "--data.held_out=1", "--train.steps=6")
    options += ("--train.lr=1e-3", "--train.schedule.warmup=1", "--train.evaluate_every=2")
    result = command("tune", "sft", "smollm2", "--data", tmp_path / "chats.jsonl", "--out", tmp_path / "run", *options)
    assert result.exit_code == 0, result.exception
    first, *_, last = read_history(tmp_path / "run" / "metrics.jsonl").evaluations
    assert last.loss < 0.8 * first.loss
    assert command("export", tmp_path / "run", tmp_path / "adapter").exit_code == 0
    adapted = peft.PeftModel.from_pretrained(theirs, tmp_path / "adapter").eval()
    tuned = regard.load(tmp_path / "run", device="cpu")
    ids = torch.tensor([encode_chat(tuned.tokenizer, CHAT)])
    with torch.no_grad():
        expected, logits = adapted(ids).logits, tuned.model(ids)
        adapted.unload()
        assert error(logits, expected) < 1e-5 < 0.1 < error(logits, theirs(ids).logits)


@pytest.mark.slow
def test_every_command_accepts_the_name_of_the_model(tmp_path: Path) -> None:
    question = f"{CHAT[0]['content']}\n\n"
    assert "Paris" in command("chat", "smollm2", "--temperature", 0, "--max-new", 10, stdin=question).output
    assert "Paris" in command("generate", "smollm2", "-p", "The capital of France is", "--temperature", 0).output
    assert '"total": 134515008' in command("plan", "smollm2", "--json").output
    assert command("import", "smollm2", tmp_path / "ours").exit_code == 0
    assert command("export", tmp_path / "ours", tmp_path / "again.gguf", "--gguf", "q8_0").exit_code == 0
    assert command("generate", tmp_path / "again.gguf", "-p", "The capital of France is", "--max-new", 2).exit_code == 0
