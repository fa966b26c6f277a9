"""Runs of the recipes for encoders and encoder-decoders are exported, and `transformers` computes the same outputs."""

import json
import shutil
from pathlib import Path

import torch
import transformers

from regard.checkpoint.model_folder import load, read_source_family
from regard.layout import TokenLayout
from regard.text.train import byte
from regard.training.run import newest_checkpoint
from tests.cli.conftest import regard

LITTLE_DATA = ("--data.rows=2", "--data.length=48", "--data.held_out=1", "--tokenizer.documents=50", "--train.steps=2")


def trained_and_exported(recipe: str, tmp_path: Path, *options: str) -> tuple[torch.nn.Module, Path]:
    run, out = tmp_path / "run", tmp_path / "exported"
    result = regard("train", recipe, "--out", run, *LITTLE_DATA, *options)
    assert result.exit_code == 0, result.output
    result = regard("export", run, out)
    assert result.exit_code == 0, result.exception
    return load(newest_checkpoint(run)).requires_grad_(False), out


def random_ids(rows: int = 3, length: int = 12) -> torch.Tensor:
    return torch.randint(5, 250, (rows, length), generator=torch.Generator().manual_seed(0))


def test_a_classifier_keeps_its_labels(tmp_path: Path) -> None:
    model, out = trained_and_exported("classify", tmp_path)
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(out).eval().requires_grad_(False)
    names = model.spec.head.label_names
    assert len(names) > 3 and theirs.config.id2label == dict(enumerate(names))
    tokens, tokenizer = random_ids(), transformers.AutoTokenizer.from_pretrained(out)
    assert (model(tokens) - theirs(tokens).logits).abs().max() < 1e-5
    assert tokenizer("Mary went to the park.")["input_ids"]
    again = load(out)
    assert again.spec.head.label_names == names and torch.equal(again(tokens), model(tokens))


def test_a_tagger_keeps_its_labels(tmp_path: Path) -> None:
    head = ('--model.head={ kind = "classification", pool = "none" }', "--objective.kind=token_classification")
    model, out = trained_and_exported("classify", tmp_path, "--data.source=world", "--data.task=entities", *head)
    theirs = transformers.AutoModelForTokenClassification.from_pretrained(out).eval().requires_grad_(False)
    assert set(theirs.config.id2label.values()) == {"O", "PERSON", "PLACE", "THING"}
    assert theirs.config.id2label == dict(enumerate(model.spec.head.label_names))
    assert (model(random_ids()) - theirs(random_ids()).logits).abs().max() < 1e-5


def test_a_sentence_encoder_is_exported_with_its_pooling(tmp_path: Path) -> None:
    model, out = trained_and_exported("embeddings", tmp_path)
    theirs, tokens = transformers.AutoModel.from_pretrained(out).eval().requires_grad_(False), random_ids()
    valid = torch.arange(12) < torch.tensor([[12], [5], [1]])
    hidden = theirs(tokens, attention_mask=valid.long()).last_hidden_state
    mean = (hidden * valid.unsqueeze(-1)).sum(1) / valid.sum(1, keepdim=True)
    layout = TokenLayout(torch.arange(12).expand(3, 12).where(valid, 0), valid=valid)
    expected = torch.nn.functional.normalize(mean, dim=-1)
    assert (model(tokens, layout) - expected).abs().max() < 1e-5
    assert (load(out)(tokens, layout) - expected).abs().max() < 1e-5  # modules.json has the pooling


def test_a_translator_is_exported(tmp_path: Path) -> None:
    model, out = trained_and_exported("translator", tmp_path)
    theirs = transformers.AutoModelForSeq2SeqLM.from_pretrained(out).eval().requires_grad_(False)
    source, target = random_ids(), random_ids(3, 7).flip(-1)
    assert (model(source, target) - theirs(source, decoder_input_ids=target).logits).abs().max() < 1e-5


def test_a_vision_transformer_is_exported(tmp_path: Path) -> None:
    model, out = trained_and_exported("vit", tmp_path)
    theirs = transformers.AutoModelForImageClassification.from_pretrained(out).eval().requires_grad_(False)
    images = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    assert theirs.config.num_labels == 10
    assert (model(images) - theirs(images).logits).abs().max() < 1e-5


def test_a_fine_tuned_folder_keeps_its_family_and_image_processor(tmp_path: Path) -> None:
    config = transformers.DeiTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24, image_size=8, patch_size=4,
        num_channels=1, num_labels=10,
    )  # fmt: skip
    start, run, out = tmp_path / "deit", tmp_path / "run", tmp_path / "exported"
    transformers.DeiTForImageClassification(config).save_pretrained(start)
    processor = transformers.ViTImageProcessor(size={"height": 8, "width": 8}, image_mean=[0.1], image_std=[0.3])
    processor.save_pretrained(start)
    (tmp_path / "recipe.toml").write_text(f'from = "{start}"\ndata.source = "digits"\n')
    steps = ("--train.steps=2", "--train.save_every=1", "--data.rows=4", "--data.held_out=1")
    result = regard("train", tmp_path / "recipe.toml", "--out", run, *steps)
    assert result.exit_code == 0, result.exception
    shutil.rmtree(start)  # a resumed run needs it no more
    result = regard("train", "--resume", run, "--train.steps=3", "--extend")
    assert result.exit_code == 0, result.exception
    assert regard("export", run, out).exit_code == 0
    theirs = transformers.AutoModelForImageClassification.from_pretrained(out).eval().requires_grad_(False)
    assert type(theirs).__name__ == "DeiTForImageClassification"
    assert list(transformers.AutoImageProcessor.from_pretrained(out).image_mean) == [0.1]
    images = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    model = load(newest_checkpoint(run)).requires_grad_(False)
    assert (model(images) - theirs(images).logits).abs().max() < 1e-5


def test_a_new_head_keeps_the_family_only_if_it_can_express_it(tmp_path: Path) -> None:
    tokenizer = byte(("<pad>", "<mask>"))
    config = transformers.RobertaConfig(
        vocab_size=tokenizer.vocab_size, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=24, max_position_embeddings=50, type_vocab_size=1,
    )  # fmt: skip
    transformers.RobertaForMaskedLM(config).save_pretrained(tmp_path / "roberta")
    tokenizer.save(tmp_path / "roberta")
    rows = [{"text": f"number {n}", "label": n % 2} for n in range(30)]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    small = ("--data.rows=2", "--data.length=16", "--data.held_out=1", "--train.steps=1")
    options = ("--from", tmp_path / "roberta", "--data", tmp_path / "data.jsonl", "--head.kind=classification", *small)
    for name, more, family in (("dense", ("--head.dense.activation=tanh",), "roberta"), ("plain", (), None)):
        result = regard("train", *options, *more, "--out", tmp_path / name)
        assert result.exit_code == 0, result.exception
        assert read_source_family(newest_checkpoint(tmp_path / name)) == family


def test_a_t5_is_exported(tmp_path: Path) -> None:
    model, out = trained_and_exported("t5", tmp_path)
    theirs = transformers.AutoModelForSeq2SeqLM.from_pretrained(out).eval().requires_grad_(False)
    assert type(theirs).__name__ == "T5ForConditionalGeneration"
    source, target = random_ids(), random_ids(3, 7).flip(-1)
    expected = theirs(source, decoder_input_ids=target).logits
    assert (model(source, target) - expected).abs().max() < 1e-5 * expected.abs().max()
