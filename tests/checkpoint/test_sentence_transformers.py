"""Sentence encoders: embeddings equal those of `transformers`, and invalid folders are refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers

import regard
from regard.checkpoint import CheckpointError, export, load, save
from regard.checkpoint.model_folder import read_spec_and_table
from regard.find_model import PACKAGED, locate
from regard.models.heads import Pooled
from regard.text.tokenizer import Tokenizer
from tests.laws import assert_equal_weights, error, layout_with_padding

needs_minilm = pytest.mark.skipif(
    PACKAGED["minilm"].path is None, reason=f"minilm is not installed: {PACKAGED['minilm'].install_command}"
)
SENTENCES = ["A man is eating food.", "Someone eats a meal.", "The girl plays the violin, naïvely… 日本 🙂", "no"]


@needs_minilm
@torch.no_grad()
def test_minilm_embeddings_equal_those_of_transformers(tmp_path: Path) -> None:
    transformers.utils.logging.disable_progress_bar()
    folder, ours, tokenizer = locate("minilm"), load("minilm"), Tokenizer.load("minilm")
    assert ours.spec.head == Pooled("mean")
    batch = transformers.AutoTokenizer.from_pretrained(folder)(SENTENCES, padding=True, return_tensors="pt")
    hidden = transformers.BertModel.from_pretrained(folder).eval()(**batch).last_hidden_state
    mask = batch["attention_mask"].unsqueeze(-1)
    expected = F.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)

    ids = [tokenizer.encode_with_special_tokens(sentence) for sentence in SENTENCES]
    assert ids == [padded[: len(row)] for padded, row in zip(batch["input_ids"].tolist(), ids, strict=True)]
    layout = layout_with_padding([len(row) for row in ids], batch["input_ids"].shape[1], left=False)
    assert error(ours(batch["input_ids"], layout), expected) < 1e-5
    for row, embedding in zip(ids, expected, strict=True):
        assert error(ours(torch.tensor([row]))[0], embedding) < 1e-5
    similar, different = (expected[0] @ expected[n] for n in (1, 2))
    assert similar > 0.5 > different

    save(ours, tmp_path / "saved", tokenizer)
    loaded = load(tmp_path / "saved")
    assert_equal_weights(loaded, ours)
    assert error(loaded(batch["input_ids"], layout), ours(batch["input_ids"], layout)) < 1e-5


@needs_minilm
@torch.no_grad()
def test_sentences_are_truncated_to_the_length_of_the_sentence_encoder() -> None:
    """sentence_bert_config.json limits a sentence to 256 tokens, although MiniLM has 512 positions."""
    transformers.utils.logging.disable_progress_bar()
    llm, folder, text = regard.load("minilm", device="cpu"), locate("minilm"), "an owl saw a vole " * 100
    batch = transformers.AutoTokenizer.from_pretrained(folder)(
        text, truncation=True, max_length=256, return_tensors="pt"
    )
    hidden = transformers.BertModel.from_pretrained(folder).eval()(**batch).last_hidden_state
    assert llm.model.spec.context == hidden.shape[1] == 256
    assert error(llm.embed(text), F.normalize(hidden.mean(1), dim=-1)[0]) < 1e-5


@needs_minilm
@torch.no_grad()
def test_an_exported_sentence_encoder_is_the_same_here_and_in_transformers(tmp_path: Path) -> None:
    transformers.utils.logging.disable_progress_bar()
    ours, ids = load("minilm"), torch.arange(1000, 1012).view(2, 6)
    export(ours, tmp_path / "out", "bert")
    reloaded = load(tmp_path / "out")
    assert reloaded.spec == ours.spec
    assert_equal_weights(reloaded, ours)
    assert error(reloaded(ids), ours(ids)) < 1e-5
    theirs, original = (transformers.BertModel.from_pretrained(f).eval() for f in (tmp_path / "out", locate("minilm")))
    for part in ("embeddings", "encoder"):  # the file has no pooler
        assert_equal_weights(theirs.get_submodule(part), original.get_submodule(part))
    assert error(theirs(ids).last_hidden_state, original(ids).last_hidden_state) < 1e-5
    for name in ("modules.json", "1_Pooling/config.json", "sentence_bert_config.json"):
        found, expected = (json.loads((f / name).read_text()) for f in (tmp_path / "out", locate("minilm")))
        if isinstance(found, dict):  # each file may omit or list pooling modes that are false
            found, expected = ({key: value for key, value in d.items() if value} for d in (found, expected))
        assert found == expected


def write_encoder(path: Path, modules: Any, pooling: dict[str, Any]) -> Path:
    config = transformers.BertConfig(
        vocab_size=30, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8,
        architectures=["BertModel"],
    )  # fmt: skip
    config.save_pretrained(path)
    (path / "modules.json").write_text(json.dumps(modules))
    (path / "1_Pooling").mkdir()
    (path / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return path


def modules(*kinds: str, path: str = "1_Pooling") -> list[dict[str, str]]:
    return [
        {"type": f"sentence_transformers.models.{kind}", "path": path if n == 1 else ""} for n, kind in enumerate(kinds)
    ]


MEAN = {"word_embedding_dimension": 8, "pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}


def test_pooling_becomes_the_head_of_the_encoder(tmp_path: Path) -> None:
    spec, _ = read_spec_and_table(
        write_encoder(tmp_path, modules("Transformer", "Pooling"), {"pooling_mode_cls_token": True})
    )
    assert spec.head == Pooled("cls", normalize=False)  # ty: ignore


@pytest.mark.parametrize(("length", "context"), [(20, 20), (None, 512), (9999, 512)])
def test_the_context_is_the_shorter_of_both_limits(length: int | None, context: int, tmp_path: Path) -> None:
    folder = write_encoder(tmp_path, modules("Transformer", "Pooling"), MEAN)
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": length}))
    spec, _ = read_spec_and_table(folder)
    assert spec.context == context  # ty: ignore


def test_a_negative_length_is_refused(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path, modules("Transformer", "Pooling"), MEAN)
    (folder / "sentence_roberta_config.json").write_text('{"max_seq_length": -1}')
    with pytest.raises(CheckpointError, match="max_seq_length=-1 must be a positive integer or null"):
        read_spec_and_table(folder)


@pytest.mark.parametrize(
    ("module_list", "pooling", "message"),
    [
        (
            modules("Transformer", "Pooling", "Dense"),
            MEAN,
            "lists Transformer, Pooling, Dense; the modules must be",
        ),
        (modules("Transformer", "Pooling", path="../x"), MEAN, "'../x' must be the name of a folder inside"),
        (modules("Transformer", "Pooling", path="other"), MEAN, "config.json is missing"),
        ([{"type": 3}], MEAN, "must be a list of modules"),
        ({"a": 1}, MEAN, "must be a list of modules"),
        (
            modules("Transformer", "Pooling"),
            {"pooling_mode_max_tokens": True},
            "pooling modes are pooling_mode_max_tokens",
        ),
        (modules("Transformer", "Pooling"), MEAN | {"pooling_mode_cls_token": True}, "exactly one of"),
        (modules("Transformer", "Pooling"), {}, "pooling modes are empty"),
    ],
)
def test_unsupported_modules_are_refused(
    module_list: Any, pooling: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_spec_and_table(write_encoder(tmp_path, module_list, pooling))
