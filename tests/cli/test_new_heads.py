"""`regard train --from` with a new head: encoders and decoders learn other objectives than their own."""

import shutil
from pathlib import Path

import pytest
import torch
import transformers

import regard
from regard.checkpoint.model_folder import load as load_folder
from regard.cli.open_encoder import open_text_encoder
from regard.layout import TokenLayout
from regard.spec import SpecError, toml_lines
from regard.training.new_head import with_new_head, with_weights_of
from regard.training.recipe import Recipe
from regard.training.rewards import load_reward
from regard.training.run import Run
from tests.cli import pairs
from tests.cli.conftest import regard as command
from tests.cli.test_pairs import held_out_loss, last_checkpoint, run_command, write_recipe
from tests.laws import MODELS
from tests.training.tiny import curve

BERT, GPT = "encoder, `masked_lm` head", "decoder, attention"
CLASSIFICATION = {"kind": "classification", "dense": {"activation": "tanh"}}
TAGGER, POOLED = {"kind": "classification", "pool": "none"}, {"kind": "pooled"}


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {BERT: tmp_path_factory.mktemp("bert"), GPT: tmp_path_factory.mktemp("gpt")}
    for (row, folder), kind in zip(folders.items(), ("masked_lm", "next_token"), strict=True):
        run_command("train", write_recipe(row, kind, folder), "--out", folder / "run")
    return {row: folder / "run" for row, folder in folders.items()}


def tuning(base: Path, row: str, kind: str, folder: Path, head: dict | None = None) -> Path:
    """A recipe that starts from the run."""
    written = {key: table for key, table in pairs.recipe(row, kind, folder).items() if key in ("data", "train")}
    written["train"] = {**written["train"], "lr": 0.05}
    if kind == "reward":  # a classification head has another objective by default
        written["objective"] = {"kind": kind}
    written |= {} if head is None else {"head": head}
    (folder / "recipe.toml").write_text("\n".join(toml_lines({"from": str(base), **written})))
    return folder / "recipe.toml"


@pytest.mark.parametrize(
    ("row", "kind", "head", "family"),
    [
        (BERT, "classification", CLASSIFICATION, "bert"),
        (BERT, "token_classification", TAGGER, "bert"),
        (BERT, "embeddings", POOLED, "bert"),
        (GPT, "classification", CLASSIFICATION, None),
        (GPT, "token_classification", TAGGER, None),
        (GPT, "embeddings", POOLED, None),
        (GPT, "classification", {"kind": "classification"}, "llama"),
        (GPT, "reward", {"kind": "classification"}, "llama"),
    ],
)
def test_a_new_head_is_trained_resumed_loaded_and_exported(
    bases: dict[str, Path], row: str, kind: str, head: dict, family: str | None, tmp_path: Path
) -> None:
    run, stopped, exported = tmp_path / "run", tmp_path / "stopped", tmp_path / "exported"
    run_command("train", tuning(bases[row], row, kind, tmp_path, head), "--out", run)
    losses = [line["loss"] for line in curve(run) if "loss" in line]
    assert losses[-1] != losses[0]
    shutil.copytree(run, stopped)
    shutil.rmtree(Run.open(stopped).checkpoint(4))
    run_command("train", "--resume", stopped)
    assert last_checkpoint(stopped) == last_checkpoint(run) and curve(stopped) == curve(run)
    model, expected = regard.load(run, "cpu").model, curve(run)[-1]["held_out_loss"]
    assert model.spec.head.kind == head["kind"] and abs(held_out_loss(model, run) - expected) < 1e-5
    if family is None:
        assert "no family can express this encoder" in str(command("export", run, exported).exception)
    else:
        run_command("export", run, exported)
        assert abs(held_out_loss(load_folder(exported), run) - expected) < 1e-4
    if family == "llama":
        check_with_transformers(run, exported, "LlamaForSequenceClassification")


@pytest.mark.parametrize(
    ("row", "kind", "head"),
    [
        (BERT, "classification", CLASSIFICATION),
        (GPT, "embeddings", POOLED),  # without weights
        (GPT, "reward", {"kind": "classification"}),
    ],
)
def test_a_new_head_is_trained_beside_an_adapter(
    bases: dict[str, Path], row: str, kind: str, head: dict, tmp_path: Path
) -> None:
    run, stopped, further = tmp_path / "run", tmp_path / "stopped", tmp_path / "further"
    recipe = tuning(bases[row], row, kind, tmp_path, head)
    run_command("train", recipe, "--adapter.rank=2", "--out", run)
    shutil.copytree(run, stopped)
    shutil.rmtree(Run.open(stopped).checkpoint(4))
    run_command("train", "--resume", stopped)
    assert last_checkpoint(stopped) == last_checkpoint(run) and curve(stopped) == curve(run)
    model, expected = regard.load(run, "cpu").model, curve(run)[-1]["held_out_loss"]
    check_trained_weights(model, regard.load(bases[row], "cpu").model, Run.open(run).config)
    assert abs(held_out_loss(model, run) - expected) < 1e-5
    if kind == "reward":
        check_uses(run, model)
    regard.merge_lora(model)
    assert abs(held_out_loss(model, run) - expected) < 1e-5
    # another run starts from the merged model with its head
    run_command("train", tuning(run, row, kind, tmp_path), "--out", further, "--train.lr=1e-9")
    assert abs(held_out_loss(regard.load(further, "cpu").model, run) - expected) < 1e-5


def check_uses(run: Path, model: torch.nn.Module) -> None:
    """The commands and rewards use the model with its head."""
    run_command("predict", run, "The cat is here.")
    assert "accuracy" in command("eval", run).stdout
    opened = open_text_encoder(run, "cpu", None, None, "auto")
    assert opened is not None and opened[1].score is not None and opened[0].model.spec == model.spec
    assert isinstance(load_reward(str(run))([{"prompt": "The cat"}], [" is here."])[0], float)


def check_trained_weights(model: torch.nn.Module, base: torch.nn.Module, config: dict) -> None:
    """All weights are those of the base, except adapters and the whole head, which was trained."""
    recipe = Recipe.from_dict(config)
    initial = with_weights_of(base, recipe.model.build(recipe.train.seed, recipe.train.initialize))
    before = dict(initial.named_parameters())
    after = {name.replace(".base.", "."): p for name, p in model.named_parameters() if "lora_" not in name}
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if name.startswith("head.")}
    assert any(p.abs().max() > 0 for name, p in model.named_parameters() if "lora_B" in name)


def test_a_head_beside_an_adapter_is_neither_adapted_nor_frozen(bases: dict[str, Path], tmp_path: Path) -> None:
    recipe, run = tuning(bases[GPT], GPT, "classification", tmp_path, {"kind": "classification"}), tmp_path / "run"
    for option, message in (
        ('--adapter.targets=["q_proj", "labels"]', "select head.labels, a layer of the new head, which is trained"),
        ('--train.freeze=["head.*"]', "matches head.labels.weight, a weight of the new head, which is trained"),
    ):
        result = command("train", recipe, "--adapter.rank=2", option, "--out", run)
        assert message in str(result.exception) and not run.exists()
    recipe.write_text(f"train_head = true\n{tuning(bases[GPT], GPT, 'next_token', tmp_path).read_text()}")
    result = command("train", recipe, "--adapter.rank=2", "--out", run)
    assert "this recipe has no encoder with a head; leave it out" in str(result.exception) and not run.exists()


@torch.no_grad()
def check_with_transformers(run: Path, exported: Path, architecture: str) -> None:
    """The exported classifier is loaded by transformers, and predicts what the trained model predicts."""
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(exported).eval()
    assert type(theirs).__name__ == architecture
    trained = regard.load(run, "cpu")
    texts = ["The cat is here.", "In the barn there is a hen."]
    batch = [torch.tensor(trained.tokenizer.encode(text)) for text in texts]
    pad = trained.tokenizer.pad
    assert trained.model.spec.head.pad == theirs.config.pad_token_id == pad is not None
    ids = torch.nn.utils.rnn.pad_sequence(batch, batch_first=True, padding_value=pad)
    layout = TokenLayout.padded([len(row) for row in batch])
    expected = theirs(ids, attention_mask=layout.valid.long()).logits
    assert (trained.model(ids, layout) - expected).abs().max() < 1e-5
    found, predicted = (regard.load(folder, "cpu").classify(texts) for folder in (run, exported))
    assert [prediction.label for prediction in found] == [prediction.label for prediction in predicted]
    if expected.shape[-1] == 1:
        assert [p.value for p in predicted] == pytest.approx(expected.squeeze(-1).tolist(), abs=1e-5)


@pytest.mark.parametrize("name", [name for name in MODELS if name != "narrow embeddings"])
def test_a_decoder_with_a_new_head_has_the_same_hidden_states(name: str) -> None:
    decoder = MODELS[name].build(0).eval()
    spec = pairs.parse_spec(with_new_head(decoder.spec, {"kind": "pooled"}), "model", pairs.Model)
    assert spec.head.pool == "last"
    encoder = with_weights_of(decoder, spec.build(1)).eval()
    tokens = torch.randint(decoder.spec.vocab, (2, 9), generator=torch.Generator().manual_seed(0))
    assert torch.equal(encoder.encode(tokens)[0].x, decoder.hidden(tokens))


def test_a_classifier_of_a_decoder_has_the_head_of_transformers() -> None:
    head = with_new_head(pairs.spec(GPT), {"kind": "classification", "labels": 3}, pad=5)["head"]
    assert head == {"kind": "classification", "labels": 3, "pool": "last", "bias": False, "pad": 5}
    head = with_new_head(pairs.spec(GPT), {"kind": "classification", "labels": 3, "pool": "mean"}, pad=5)["head"]
    assert head == {"kind": "classification", "labels": 3, "pool": "mean"}


def test_heads_that_make_no_sense_are_refused() -> None:
    with pytest.raises(SpecError, match="first token of a decoder attends to itself only; set it to last or mean"):
        with_new_head(pairs.spec(GPT), {"kind": "classification", "pool": "cls"})
    with pytest.raises(SpecError, match="embeddings of this decoder are projected to its width"):
        with_new_head(MODELS["narrow embeddings"], {"kind": "pooled"})
    with pytest.raises(SpecError, match="of an encoder or a decoder, and this model is a seq2seq"):
        with_new_head(pairs.spec("seq2seq"), {"kind": "pooled"})
