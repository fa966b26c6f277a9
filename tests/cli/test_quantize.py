"""`regard quantize`: the folder that it writes, its figures, and what it refuses."""

import json
from pathlib import Path

import pytest
import tokenizers
import torch
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

import regard as package
from regard.adapt.fake_quantized import FakeQuantization, FakeQuantizedLinear, fake_quantize
from regard.adapt.quantized import QuantizedLinear, quantize_linears
from regard.adapt.w8a8 import W8A8Linear
from regard.checkpoint import load
from regard.cli.quantize import print_results
from regard.formats.integers import Integer
from regard.quantization.quantize_model import LayerResult
from regard.text.tokenizer import Tokenizer
from tests.cli.conftest import regard

FEW = ("--tokens", 256, "--test-tokens", 256, "--length", 64)


@pytest.fixture(scope="module")
def quantized(demo_run: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict]:
    out = tmp_path_factory.mktemp("models") / "int4"
    result = regard("quantize", demo_run, out, "--format", "int4", "--group", 32, *FEW, "--json")
    assert result.exit_code == 0, result.output
    return out, json.loads(result.stdout)


@pytest.mark.ledger("q.ptq")
def test_the_folder_has_the_planned_size_and_the_perplexity_that_was_printed(
    quantized: tuple[Path, dict], demo_run: Path
) -> None:
    out, summary = quantized
    stored = sum(file.stat().st_size for file in out.glob("*.safetensors"))
    assert summary["bytes"] < stored < summary["bytes"] + 20_000 and summary["bytes"] < 0.4 * summary["bytes_before"]
    assert all(layer["error"] < layer["nearest_error"] for layer in summary["layers"])
    assert summary["left"]["head"].startswith("the output layer")
    assert 0.9 < summary["perplexity"] / summary["perplexity_before"] < 1.1
    llm = package.load(out)
    assert repr(llm).split("parameters=")[1] == repr(package.load(demo_run)).split("parameters=")[1]
    assert sum(isinstance(module, QuantizedLinear) for module in llm.model.modules()) == len(summary["layers"])
    assert llm.tokenizer.decode(llm.encode("Anna is here.")) == "Anna is here."


def test_the_folder_is_planned_as_it_is_stored(quantized: tuple[Path, dict], demo_run: Path) -> None:
    out, summary = quantized
    plans = {path: json.loads(regard("plan", path, "--json").stdout) for path in (out, demo_run)}
    stored, whole = plans[out]["weight_bytes"]["stored"], plans[demo_run]["weight_bytes"]["float32"]
    assert (stored, whole) == (summary["bytes"], summary["bytes_before"])
    reads = {path: found["bytes_read_per_step"]["weights"] for path, found in plans.items()}
    assert stored - reads[out] == whole - reads[demo_run], "an embedding is not quantized"
    assert "weights as stored, others in float32" in regard("plan", out).stdout
    as_float = json.loads(regard("plan", out, "--weights", "float32", "--json").stdout)
    assert as_float["bytes_read_per_step"] == plans[demo_run]["bytes_read_per_step"]


def test_commands_read_the_folder(quantized: tuple[Path, dict], tmp_path: Path) -> None:
    out, _ = quantized
    result = regard("generate", out, "--prompt", "Anna", "--max-new", 4, "--device", "cpu")
    assert result.exit_code == 0, result.output
    result = regard("quantize", out, tmp_path / "again", *FEW)
    assert "is stored as integer already; quantize the model that it was made from" in str(result.exception)
    assert list(tmp_path.iterdir()) == []


def test_adapters_are_trained_on_the_folder(quantized: tuple[Path, dict], tmp_path: Path) -> None:
    out, _ = quantized
    data = tmp_path / "text.txt"
    data.write_text("Anna goes to the kitchen.\n" * 20)
    common = ("--from", out, "--data", data, "--train.steps=2", "--data.rows=2", "--data.length=16")
    result = regard("train", *common, "--out", tmp_path / "run", "--adapter.rank=2")
    assert result.exit_code == 0, result.output
    llm = package.load(tmp_path / "run")
    assert any(isinstance(module, QuantizedLinear) for module in llm.model.modules())
    result = regard("train", *common, "--out", tmp_path / "all")
    assert "is stored in few bits and cannot be trained; train an adapter" in str(result.exception)


def test_a_run_with_rounded_weights_becomes_the_model_that_it_trained(tmp_path: Path) -> None:
    """Its checkpoints are ordinary ones; quantized by its own format, the logits are those of the training forward."""
    run, out = tmp_path / "run", tmp_path / "out"
    sizes = ("--train.steps=2", "--data.rows=2", "--data.length=32", "--data.held_out=1")
    quantize = ("--quantize.format.kind=integer", "--quantize.format.bits=3", "--quantize.format.group=32")
    result = regard("train", "demo", *sizes, *quantize, '--quantize.skip=["*.q_proj"]', "--out", run)
    assert result.exit_code == 0, result.output
    plain, ids = package.load(run).model, torch.arange(20).view(1, 20)
    assert not any(isinstance(module, QuantizedLinear | FakeQuantizedLinear) for module in plain.modules())
    result = regard("quantize", run, out, *FEW, "--json")
    assert result.exit_code == 0, result.output
    summary, quantized = json.loads(result.stdout), package.load(out).model
    assert summary["method"] == "nearest" and summary["format"] == Integer(3, group=32).to_dict()
    assert len(summary["layers"]) == len(fake_quantize(plain, FakeQuantization(Integer(3, group=32), ("*.q_proj",))))
    with torch.no_grad():
        assert torch.equal(quantized(ids), plain(ids))
    (tmp_path / "text.txt").write_text("Anna is here.")
    both = ("--data", tmp_path / "text.txt", "--train.steps=1", *quantize, "--adapter.rank=2")
    result = regard("train", "--from", run, *both, "--out", tmp_path / "no")
    assert "[quantize] rounds weights that are trained" in str(result.exception)


def test_inputs_are_rounded_to_eight_bits_too(demo_run: Path, tmp_path: Path) -> None:
    options = ("--format", "int8", "--activations", "int8", "--method", "smoothquant")
    result = regard("quantize", demo_run, tmp_path / "out", *options, *FEW, "--json")
    assert result.exit_code == 0, result.output
    summary = json.loads(result.stdout)
    assert 0.97 < summary["perplexity"] / summary["perplexity_before"] < 1.03
    layers = [module for module in package.load(tmp_path / "out").model.modules() if isinstance(module, W8A8Linear)]
    assert len(layers) == len(summary["layers"])


def test_a_file_is_split_into_a_sample_and_held_out_text(demo_run: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(f"Anna has {n} apples. Bob has {n + 1}." for n in range(60)))
    result = regard("quantize", demo_run, tmp_path / "out", "--method", "nearest", "--calibrate", text, *FEW)
    assert result.exit_code == 0, result.output
    assert "perplexity" in result.stdout and "in full precision: embedding" in result.stdout
    assert torch.equal(package.load(tmp_path / "out").model.norm.weight, package.load(demo_run).model.norm.weight)


@pytest.fixture(scope="module")
def without_chat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose tokenizer has none of the special tokens of conversations, and no eos."""
    sublayers = package.Sublayer(package.Attention(2, position=package.Rope())), package.Sublayer(package.SwiGLU(64))
    core = tokenizers.Tokenizer(BPE({token: id for id, token in enumerate(sorted(ByteLevel.alphabet()))}, []))
    core.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer, layers = Tokenizer(core), (package.Repeat((package.Block(sublayers),), 1),)
    spec = package.Decoder(vocab=tokenizer.vocab_size, width=32, layers=layers, context=64)
    folder = tmp_path_factory.mktemp("models") / "plain"
    package.save(spec.build(seed=0), folder, tokenizer)
    return folder


def test_generated_stories_are_plain_text_for_other_tokenizers(without_chat: Path, tmp_path: Path) -> None:
    assert without_chat.is_dir() and package.load(without_chat).tokenizer.core.token_to_id("<|user|>") is None
    result = regard("quantize", without_chat, tmp_path / "out", "--format", "int8", *FEW, "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["perplexity"] > 1


@pytest.mark.parametrize("activations", [(), ("--activations", "int8")])
def test_rounding_to_nearest_needs_no_text(
    activations: tuple[str, ...], demo_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights are those that are rounded with a sample, too."""
    options = ("--format", "int8", "--method", "nearest", "--json", *activations)
    result = regard("quantize", demo_run, tmp_path / "with", *options, *FEW)
    assert result.exit_code == 0, result.output
    monkeypatch.setattr("regard.cli.quantize.batches", None)
    result = regard("quantize", demo_run, tmp_path / "without", *options, "--test-tokens", 0)
    assert result.exit_code == 0, result.output
    summary = json.loads(result.stdout)
    assert summary["sample"] == 0 and summary["perplexity"] is None
    assert all(0 < layer["error"] < 0.02 for layer in summary["layers"])
    expected, found = (package.load(tmp_path / name).model.state_dict() for name in ("with", "without"))
    assert expected.keys() == found.keys() and all(torch.equal(found[name], expected[name]) for name in found)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--format", "int9"], "format='int9' is unknown; choose one of int8"),
        (["--format", ""], "format='' is unknown; choose one of int8"),
        (["--group", "7"], "group=7 does not divide"),
        (["--group", "many"], "group='many' is neither a positive number"),
        (["--skip", "*.q_prj"], r"--skip \*.q_prj matches no linear layer"),
        (["--calibrate", "nowhere.txt"], "there is no such file or folder"),
        (["--format", "fp8", "--asymmetric"], "has no zero points"),
        (["--activations", "int8"], "inputs of eight bits need weights in int8, symmetric"),
    ],
)
def test_invalid_options_are_refused(options: list[str], expected: str, demo_run: Path, tmp_path: Path) -> None:
    result = regard("quantize", demo_run, tmp_path / "out", *FEW, *options)
    assert result.exit_code == 1
    with pytest.raises(ValueError, match=expected):
        raise result.exception or AssertionError(result.output)
    assert not (tmp_path / "out").exists()
    (tmp_path / "out").mkdir()
    assert "exists; choose another name" in str(regard("quantize", demo_run, tmp_path / "out").exception)


def test_layers_that_a_format_does_not_fit_are_named(capsys) -> None:
    from torch import nn

    from regard.cli.open_engine import quantize_weights

    model = nn.Sequential(nn.Linear(256, 8), nn.Linear(32, 8))
    quantize_weights(model, "q4_k")
    assert "--quantize q4_k: 1 linear layers stay as they are" in capsys.readouterr().err
    quantize_weights(nn.Sequential(nn.Linear(256, 8), nn.Linear(32, 8)), "int8")
    assert capsys.readouterr().err == ""


def test_an_empty_format_of_the_weights_is_refused(demo_run: Path) -> None:
    refused = regard("generate", demo_run, "--prompt", "Anna", "--max-new", 1, "--quantize", "")
    assert "format='' is unknown" in str(refused.exception)


def test_the_table_of_many_layers_has_the_largest_errors(capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regard.cli.quantize.MOST_SHOWN", 2)
    layers = [LayerResult(f"layer-{i}", Integer(4), 8, error, 0.5) for i, error in enumerate((0.1, 0.4, 0.2, 0.3))]
    summary = {"sample": 9, "bytes": 1, "bytes_before": 2, "perplexity": None}
    print_results(layers, {}, summary)
    printed = capsys.readouterr().out
    assert [name for name in ("layer-0", "layer-1", "layer-2", "layer-3") if name in printed] == ["layer-1", "layer-3"]
    assert printed.index("layer-1") < printed.index("layer-3") and "2 of 4 layers" in printed and "0.2500" in printed
    print_results(layers[:2], {}, summary)
    printed = capsys.readouterr().out
    assert printed.index("layer-0") < printed.index("layer-1") and "median" not in printed


def test_a_quantized_model_is_not_quantized_again(quantized: tuple[Path, dict]) -> None:
    result = regard("generate", quantized[0], "--prompt", "Anna", "--max-new", 2, "--quantize", "int8")
    message = str(result.exception)
    assert message.startswith("--quantize int8: stack.blocks.0.") and "is stored as integer already; leave" in message


def test_exported_folders_have_the_same_logits(demo_run: Path, tmp_path: Path) -> None:
    """In the layout of compressed-tensors, as ordinary weights, and imported again."""
    tokenizer, ids = package.load(demo_run).tokenizer, torch.arange(40).view(2, 20)
    sublayers = package.Sublayer(package.Attention(4, position=package.Rope())), package.Sublayer(package.SwiGLU(64))
    layers = (package.Repeat((package.Block(sublayers),), 2),)
    spec = package.Decoder(vocab=tokenizer.vocab_size, width=32, layers=layers, context=64)
    model = spec.build(seed=0).eval()
    head = model.head
    names = set(quantize_linears(model, Integer(4, False, 32, "float16"))) - {"head"}
    model.head = head
    package.save(model, tmp_path / "int4", tokenizer)
    assert regard("export", tmp_path / "int4", tmp_path / "packed").exit_code == 0
    assert regard("export", tmp_path / "int4", tmp_path / "plain", "--dequantize").exit_code == 0
    settings = json.loads((tmp_path / "packed/config.json").read_text())["quantization_config"]
    assert settings["config_groups"]["group_0"]["weights"]["group_size"] == 32
    assert "quantization_config" not in json.loads((tmp_path / "plain/config.json").read_text())
    assert regard("import", tmp_path / "packed", tmp_path / "imported").exit_code == 0
    for name, count in (("packed", len(names)), ("plain", 0), ("imported", len(names))):
        found = load(tmp_path / name)  # without the kernel for packed weights, which rounds inputs
        assert sum(isinstance(layer, QuantizedLinear) for layer in found.modules()) == count
        with torch.no_grad():
            assert torch.equal(found(ids), model(ids))
    assert "with --dequantize" in str(regard("export", tmp_path / "int4", tmp_path / "x.gguf").exception)
    assert regard("generate", tmp_path / "packed", "-p", "Anna", "--max-new", 4).exit_code == 0
