"""A run with an adapter is exported for PEFT or merged, and an adapter of PEFT is used by the commands."""

import json
from pathlib import Path

import peft
import pytest
import torch
import transformers

from regard.adapt import AdapterError, load_adapter
from regard.load_model import load
from regard.text.train import byte
from regard.training.run import newest_checkpoint
from regard.training_run import train
from tests.cli.conftest import regard

SMALL = {"data.rows": 2, "data.length": 48, "data.held_out": 1, "train.steps": 2, "train.schedule.warmup": 0}
DENSE_HEAD = ("--head.kind=classification", "--head.dense.activation=tanh")
IDS = torch.tensor([[65, 66, 67, 68, 69]])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of transformers with a byte tokenizer."""
    path = tmp_path_factory.mktemp("llama")
    tokenizer = byte(("<|user|>", "<|assistant|>", "<|end|>"))
    config = transformers.LlamaConfig(
        vocab_size=tokenizer.vocab_size, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=64, bos_token_id=None, eos_token_id=tokenizer.eos,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    tokenizer.save(path)
    return path


@pytest.fixture(scope="module")
def tuned(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tuned")
    (path / "text.txt").write_text("a few words to learn\n" * 40)
    overrides = SMALL | {"adapter.rank": 2, "train.lr": 0.02}
    train(start=folder, data=path / "text.txt", out=path / "run", overrides=overrides, device="cpu")
    return path / "run"


@torch.no_grad()
def test_an_adapter_is_exported_for_peft_and_read_back(folder: Path, tuned: Path, tmp_path: Path) -> None:
    expected = load(tuned, "cpu").model(IDS)
    result = regard("export", tuned, tmp_path / "adapter")
    assert result.exit_code == 0, result.exception
    assert "adapter for PEFT, of the llama model" in result.stderr and "does not read" not in result.stderr
    theirs = transformers.LlamaForCausalLM.from_pretrained(folder)
    adapted = peft.PeftModel.from_pretrained(theirs, tmp_path / "adapter").eval()
    assert (adapted(IDS).logits - expected).abs().max() < 1e-5 < (load(folder, "cpu").model(IDS) - expected).abs().max()
    for llm in (load(tmp_path / "adapter", "cpu"), load(folder, "cpu", adapter=tmp_path / "adapter")):
        assert (llm.model(IDS) - expected).abs().max() < 1e-5
    assert torch.equal(load(folder, "cpu", adapter=tuned).model(IDS), expected)


CLASSIFIERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "reward model": ("LlamaForSequenceClassification", ("tune", "reward", "--adapter.rank=2")),
    "classifier": ("LlamaForSequenceClassification", ("train", "--head.kind=classification", "--adapter.rank=2")),
    "bert": ("BertForSequenceClassification", ("train", *DENSE_HEAD, "--adapter.rank=2")),
    "roberta": ("RobertaForSequenceClassification", ("train", *DENSE_HEAD, '--adapter.targets=["q_proj"]')),
    "tagger": (
        "BertForTokenClassification",
        ("train", "--head.kind=classification", "--head.pool=none", "--adapter.rank=2"),
    ),
}


def encoder_folder(family: str, folder: Path) -> Path:
    tokenizer = byte(("<pad>", "<mask>"))
    config = getattr(transformers, f"{family}Config")(
        vocab_size=tokenizer.vocab_size, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=24, max_position_embeddings=64, type_vocab_size=1,
    )  # fmt: skip
    torch.manual_seed(0)
    getattr(transformers, f"{family}ForMaskedLM")(config).save_pretrained(folder)
    tokenizer.save(folder)
    return folder


def classification_data(folder: Path) -> Path:
    """Examples of all objectives of the classifiers."""
    rows = [
        {
            "text": f"number {n}", "label": "abc"[n % 3], "tokens": ["number", str(n)], "labels": ["x", "ab"[n % 2]],
            "prompt": f"number {n}", "chosen": " is even", "rejected": " is odd",
        }
        for n in range(30)
    ]  # fmt: skip
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder / "data.jsonl"


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_a_head_trained_beside_an_adapter_is_exported(name: str, folder: Path, tmp_path: Path) -> None:
    architecture, command = CLASSIFIERS[name]
    family = architecture.partition("For")[0]
    base = folder if family == "Llama" else encoder_folder(family, tmp_path / "base")
    start = (base,) if command[0] == "tune" else ("--from", base)
    data = ("--data", classification_data(tmp_path), "--out", tmp_path / "run", "--train.lr=0.02")
    small = [f"--{key}={value}" for key, value in SMALL.items()]
    trained = regard(*command[:2], *start, *command[2:], *data, *small)
    assert trained.exit_code == 0, trained.exception
    model = load(tmp_path / "run", "cpu").model.requires_grad_(False)
    expected, labels = model(IDS), model.spec.head.labels
    result = regard("export", tmp_path / "run", tmp_path / "adapter")
    assert result.exit_code == 0 and f"{architecture}.from_pretrained(…, num_labels={labels}" in result.stderr
    options = {"pad_token_id": model.spec.head.pad} if family == "Llama" else {}
    theirs = getattr(transformers, architecture).from_pretrained(base, num_labels=labels, **options)
    adapted = peft.PeftModel.from_pretrained(theirs, tmp_path / "adapter").eval()
    assert (adapted(IDS).logits - expected).abs().max() < 1e-5
    assert regard("export", tmp_path / "run", tmp_path / "merged", "--merge").exit_code == 0
    merged = getattr(transformers, architecture).from_pretrained(tmp_path / "merged").eval()
    assert (merged(IDS).logits - expected).abs().max() < 1e-5 and (
        load(tmp_path / "merged", "cpu").model(IDS) - expected
    ).abs().max() < 1e-5
    with pytest.raises(AdapterError, match="was trained together with a head"):
        load_adapter(load(base, "cpu").model, newest_checkpoint(tmp_path / "run"))
    if family == "Llama":  # others have no head without the weights of their class
        again = load(tmp_path / "adapter", "cpu")
        assert (again.model(IDS) - expected).abs().max() < 1e-5
        assert regard("export", tmp_path / "adapter", tmp_path / "again").exit_code == 0
        names = (tmp_path / name / "adapter_model.safetensors" for name in ("adapter", "again"))
        assert len({path.read_bytes() for path in names}) == 1
    else:
        with pytest.raises(AdapterError, match="nor a weight of a head that this model has; merge the adapter in PEFT"):
            load(tmp_path / "adapter", "cpu")


@torch.no_grad()
def test_a_classifier_of_peft_is_read(folder: Path, tmp_path: Path) -> None:
    theirs = transformers.LlamaForSequenceClassification.from_pretrained(folder, num_labels=3, pad_token_id=0)
    adapted = peft.get_peft_model(theirs, peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["q_proj"])).eval()
    torch.manual_seed(1)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    adapted.save_pretrained(tmp_path / "peft")
    llm = load(folder, "cpu", adapter=tmp_path / "peft")
    assert (llm.model(IDS) - adapted(IDS).logits).abs().max() < 1e-5
    with pytest.raises(AdapterError, match="was trained together with a head"):
        load(folder, "cpu").load_adapter("classifier", tmp_path / "peft")


def test_heads_that_peft_cannot_have_are_refused(folder: Path, tmp_path: Path) -> None:
    bert = encoder_folder("Bert", tmp_path / "bert")
    small = [f"--{key}={value}" for key, value in SMALL.items()]
    data = ("--data", classification_data(tmp_path), "--adapter.rank=2", *small)
    for name, start, head in (("llama", folder, DENSE_HEAD), ("bert", bert, DENSE_HEAD[:1])):
        trained = regard("train", "--from", start, *data, *head, "--out", tmp_path / f"{name}-run")
        assert trained.exit_code == 0, trained.exception
        error = str(regard("export", tmp_path / f"{name}-run", tmp_path / f"{name}-adapter").exception)
        assert f"none of {name} models has this head" in error and "regard export --merge" in error


@torch.no_grad()
def test_a_merged_model_is_an_ordinary_folder(folder: Path, tuned: Path, tmp_path: Path) -> None:
    assert regard("export", tuned, tmp_path / "merged", "--merge").exit_code == 0
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    assert (theirs(IDS).logits - load(tuned, "cpu").model(IDS)).abs().max() < 1e-5
    assert (tmp_path / "merged" / "tokenizer.json").is_file()
    assert regard("export", tuned, tmp_path / "merged.gguf").exit_code == 0
    assert "has no adapter to merge" in str(regard("export", folder, tmp_path / "x", "--merge").exception)


def test_commands_use_an_adapter_of_peft(folder: Path, tuned: Path, tmp_path: Path) -> None:
    adapted = peft.get_peft_model(
        transformers.LlamaForCausalLM.from_pretrained(folder),
        peft.LoraConfig(r=2, target_modules=["q_proj", "up_proj"]),
    )
    torch.manual_seed(1)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    adapted.save_pretrained(tmp_path / "peft")
    options = ("--prompt", "a few", "--max-new", 8, "--temperature", 0, "--device", "cpu", "--json")
    result = regard("generate", folder, "--adapter", tmp_path / "peft", *options)
    assert result.exit_code == 0, result.exception
    prompt = torch.tensor([load(folder, "cpu").encode("a few")])
    ids = adapted.generate(prompt, max_new_tokens=8, do_sample=False, eos_token_id=None)
    generated = json.loads(result.stdout)["ids"]
    assert generated == ids[0, prompt.shape[1] :].tolist()[: len(generated)]
    assert generated != json.loads(regard("generate", folder, *options).stdout)["ids"]
    # training continues from it: the adapter is merged
    (tmp_path / "text.txt").write_text("other words\n" * 40)
    overrides = SMALL | {"train.lr": 1e-9}
    train(start=tmp_path / "peft", data=tmp_path / "text.txt", out=tmp_path / "run", overrides=overrides, device="cpu")
    with torch.no_grad():
        assert (load(tmp_path / "run", "cpu").model(IDS) - adapted(IDS).logits).abs().max() < 1e-5


def test_generation_settings_survive_training_and_export(tmp_path: Path) -> None:
    tokenizer = byte(("<pad>", "</s>"))
    config = transformers.BartConfig(
        vocab_size=tokenizer.vocab_size, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=24, decoder_ffn_dim=24, max_position_embeddings=64, pad_token_id=1,
        decoder_start_token_id=2,
    )  # fmt: skip
    model = transformers.BartForConditionalGeneration(config)
    model.generation_config = transformers.GenerationConfig(
        decoder_start_token_id=2, forced_bos_token_id=70, forced_eos_token_id=71, suppress_tokens=[72], num_beams=1,
        max_length=9,
    )  # fmt: skip
    model.save_pretrained(tmp_path / "bart")
    tokenizer.save(tmp_path / "bart")
    settings = model.generation_config.to_diff_dict()
    (tmp_path / "bart" / "generation_config.json").write_text(json.dumps(settings))
    (tmp_path / "pairs.jsonl").write_text(
        "\n".join(json.dumps({"source": f"a{n}", "target": f"b{n}"}) for n in range(30))
    )
    overrides = SMALL | {"data.length": 16}
    for adapter in ({}, {"adapter.rank": 2}):
        run, out = (tmp_path / f"{name}{len(adapter)}" for name in ("run", "out"))
        train(
            start=tmp_path / "bart", data=tmp_path / "pairs.jsonl", out=run, overrides=overrides | adapter, device="cpu"
        )
        generation = load(run, "cpu").generation
        assert (generation.decoder_start_token_id, generation.forced_bos_token_id) == (2, 70)
        assert (generation.forced_eos_token_id, generation.suppress_tokens) == (71, (72,))
        assert regard("export", run, out, *(("--merge",) if adapter else ())).exit_code == 0
        kept = json.loads((out / "generation_config.json").read_text())
        assert {key: kept.get(key) for key in settings} == settings
