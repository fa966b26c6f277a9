"""`regard plan`: names, sizes and options, printed as a table and as JSON."""

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from regard.adapt.quantized import count_stored_weights, quantize_linears
from regard.checkpoint import save
from regard.checkpoint.quantized_layers import stored_tensors
from regard.cli import app
from regard.engine.engine import Engine
from regard.engine.memory import bytes_of
from regard.engine.request import Sampling
from regard.formats.integers import Integer
from regard.formats.names import format_named
from regard.kernels.attention.patterns.window import Window
from regard.models.base import build_on_meta
from regard.models.presets import bert, transformer_2017
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.body import Body
from regard.parts.experts import Experts, GroupedLinear
from regard.parts.feedforward import SwiGLU
from regard.parts.linear_attention import LinearAttention
from regard.parts.position.rope import Rope
from regard.planning import plan
from tests.laws import decoder


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["plan", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.stdout


def test_a_published_model_is_planned_with_all_options():
    data = json.loads(
        run(
            "llama-3.1-8b",
            "--context",
            "8192",
            "--dtype",
            "float16",
            "--weights",
            "int4",
            "--lora",
            "16",
            "--targets",
            "q_proj,v_proj",
            "--device",
            "rtx4090",
            "--draft",
            "100M",
            "--json",
        )  # fmt: skip
    )
    assert data["parameters"]["total"] == 8_030_261_248
    assert data["cache_bytes"]["kv_per_token"] == 131_072
    assert data["lora"]["parameters"] == 6_815_744 and data["lora_bytes"]["adapter_in_float16"] == 13_631_488
    assert data["on_rtx4090"]["cached_tokens_that_fit"] == (24 * 10**9 - 8_030_261_248 // 2) // 131_072
    assert data["on_rtx4090"]["decode_tokens_per_second"] > 100
    assert data["training_run"]["tokens_per_parameter"] > 1000
    traffic = data["traffic_bytes_head_dim_128"]
    assert traffic["materialized_scores"] == 2 * (4 * 8192 * 128 + 4 * 8192**2) > traffic["tiled"]
    assert 1 < data["speculation"]["speedup"] < data["speculation"]["tokens_per_pass"]


def test_a_size_is_planned_as_a_model_of_about_that_size():
    for name, size in (("7B", 7e9), ("2T", 2e12)):
        assert json.loads(run(name, "--json"))["parameters"]["total"] == pytest.approx(size, rel=0.1)


def test_a_published_model_and_a_size_can_be_overridden():
    assert json.loads(run("7B", "--model.vocab=100", "--json"))["parameters"]["embedding"] < 1e6
    tied = json.loads(run("llama-7b", "--model.tied=true", "--json"))["parameters"]
    assert tied["total"] == 6_607_343_616 and "head" not in tied


def test_a_spec_file_and_a_model_folder_are_planned(tmp_path):
    """The same encoder as a spec file and as a folder with weights."""
    spec = bert(vocab=30, width=8, layers=2, heads=2, hidden=16)
    (tmp_path / "encoder.json").write_text(spec.to_json())
    save(spec.build(seed=0), tmp_path / "encoder")
    for source in ("encoder.json", "encoder"):
        data = json.loads(run(str(tmp_path / source), "--json"))
        assert data["parameters"]["total"] == plan(spec).parameters


def test_the_table_shows_active_parameters_and_the_reach_of_windows():
    text = run("mixtral-8x7b", "--dtype", "float16")
    assert "12.9 G (27.6%)" in text and "93.4 GB (87 GiB)" in text
    assert "131,041" in run("mistral-7b")


def test_activations_are_counted_on_request():
    assert json.loads(run("gpt2", "--context", "64", "--activations", "--json"))["training_bytes"]["activations"] > 0
    with pytest.raises(ValueError, match="activations are counted for decoders, not for kind 'encoder'"):
        run("vit-b16", "--activations")


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["llama-7b", "--lora", "4", "--targets", "q"], "no linear layer is named 'q'"),
        (["llama-7b", "--device", "h10"], "there is no device 'h10'; did you mean 'h100'"),
        (["llama-7b", "--weights", "int5"], "there is no format 'int5'"),
        (["transformer-2017"], "has no context"),
        (["7B", "--context", str(2**63)], f"context={2**63} must be from 1 to 1,000,000,000,000"),
        (["7B", "--batch", str(2**63)], f"batch={2**63} must be from 1 to"),
        (["7B", "--tokens", "-1"], "tokens=-1.0 must be from 1 to"),
        (["7B", "--tokens", "nan"], "tokens=nan must be from 1 to"),
        (["7B", "--context", "1", "--cache", "int8"], "give a --context of at least 2"),
        (["99999999T"], "a model of 79,824 layers is too large to count; give at most 10,000"),
        (["llama", f"--model.layers.0.times={2**63}"], "layers is too large to count"),
        (["demo", f"--model.width={2**62}"], "this model is too large: .*; lower its width, layers or vocab"),
        (["llama", f"--model.vocab={2**63}"], "this model is too large: .*; lower its width, layers or vocab"),
        (["llama-8b"], "'llama-8b' is neither a file or folder nor a known name; did you mean 'llama-7b'"),
        (["٧B"], "'٧B' is neither a file or folder nor a known name"),
        (["llama-8b"], "published models: bert-base, clip-b32, .*; models: .*minilm.*; recipes: .*demo, "),
    ],
)
def test_wrong_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        run(*arguments)


def simple(mixer: Body) -> Block:
    return Block((Sublayer(mixer), Sublayer(SwiGLU(64))))


ROTARY = Attention(4, 2, position=Rope())
MODELS = {
    "attention": decoder(simple(ROTARY)),
    "window and recurrence": decoder(
        simple(Attention(4, 2, position=Rope(), mask=Window(5))), simple(LinearAttention(4))
    ),
    "tied": replace(decoder(simple(ROTARY)), tied=True),
    "experts": decoder(Block((Sublayer(ROTARY), Sublayer(Experts(4, 2, SwiGLU(32)))))),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_bytes_of_a_cache_are_those_of_the_engine(name: str, tmp_path):
    caches = ("int8", "fp8", "int4:3", "sinks:2+9", "window:9", "h2o:12", "snapkv:12", "int4:1000000", "h2o:1000000")
    spec = MODELS[name]
    (tmp_path / "spec.json").write_text(spec.to_json())
    options = [argument for cache in caches for argument in ("--cache", cache)]
    data = json.loads(run(str(tmp_path / "spec.json"), "--context", "40", "--batch", "3", *options, "--json"))
    for cache in (None, *caches):
        engine = Engine(spec.build(seed=0), rows=3, capacity=40, store="contiguous", cache=cache)
        if cache == "snapkv:12":  # which grows with the sequences
            engine.generate([1] * 30, Sampling(max_new=4, temperature=0))
        assert data["store_bytes"][cache or "all_tokens"] == bytes_of(engine.store), cache
    if name == "attention":  # a ring buffer is larger than a store of few tokens
        growth = data["store_bytes_per_further_token"]
        assert growth["sinks:2+9"] == growth["h2o:12"] == 0 < growth["int8"] < growth["all_tokens"]


def test_the_cache_of_an_encoder_decoder_includes_its_source(tmp_path):
    spec = transformer_2017(vocab=50, width=64, heads=4, hidden=128, layers=2)
    (tmp_path / "spec.json").write_text(spec.to_json())
    data = json.loads(run(str(tmp_path / "spec.json"), "--context", "24", "--cache", "int8", "--json"))
    engine = Engine(spec.build(seed=0), rows=1, capacity=24, source_capacity=24, store="contiguous", cache="int8")
    assert data["store_bytes"]["int8"] == bytes_of(engine.store)


@pytest.mark.parametrize("name", MODELS)
def test_the_bytes_of_quantized_weights_are_those_of_the_model(name: str, tmp_path):
    spec, formats = replace(MODELS[name], width=64), ("int8", "int4", "nf4", "fp8", "q8_0")
    (tmp_path / "spec.json").write_text(spec.to_json())
    options = [argument for format in formats for argument in ("--quantize", format)]
    data = json.loads(run(str(tmp_path / "spec.json"), "--context", "8", *options, "--json"))
    for format in formats:
        model = spec.build(seed=0)
        quantize_linears(model, format_named(format))
        stored = sum(tensor.nbytes for tensor in stored_tensors(model).values())
        kept = sum(parameter.nbytes for parameter in model.parameters())
        assert data["quantized_bytes"][format] == stored + kept, format
        weights = count_stored_weights(model)
        assert data["bits_per_quantized_weight"][format] == pytest.approx(8 * stored / weights, abs=1e-3)


def test_stored_experts_are_read_if_a_token_of_the_batch_is_routed_to_them():
    spec = MODELS["experts"]
    model = build_on_meta(spec)
    quantize = {name: Integer(8) for name, module in model.named_modules() if isinstance(module, GroupedLinear)}
    numbers = {batch: plan(spec, 8, batch, formats=quantize) for batch in (1, 64)}
    weights = [model.get_submodule(name).get_parameter("weight") for name in quantize]
    experts = sum(weight.numel() for weight in weights)
    scales = 4 * sum(weight[..., 0].numel() for weight in weights)
    others = 4 * (numbers[1].parameters - experts)
    assert numbers[1].weight_bytes() == others + experts + scales
    assert plan(spec, 8, weights="float32", formats=quantize).weight_bytes() == 4 * numbers[1].parameters
    read, read_float = (
        found[64].weights_read - found[1].weights_read
        for found in (numbers, {batch: plan(spec, 8, batch) for batch in (1, 64)})
    )
    assert read_float - read == pytest.approx((4 * experts - experts - scales) / 2, rel=0.02), "two of four experts"


def test_a_cache_that_a_model_cannot_have_is_refused(tmp_path):
    (tmp_path / "encoder.json").write_text(bert(vocab=30, width=8, layers=2, heads=2, hidden=16).to_json())
    for name, arguments, message in (
        ("encoder.json", ("--cache", "int8"), "keeps no keys and values"),
        ("llama-7b", ("--cache", "int7"), "there is no cache 'int7'"),
        ("llama-7b", ("--cache", "int8", "--dtype", "int8"), "not --dtype int8"),
        ("llama-7b", ("--quantize", "int9"), "format='int9' is unknown"),
    ):
        with pytest.raises(ValueError, match=message):
            run(str(tmp_path / name) if name.endswith("json") else name, *arguments)


@pytest.mark.ledger("kv.dominates", exact=True)
def test_the_cache_of_many_long_sequences_is_larger_than_the_weights():
    """Llama 3.1 8B in BF16 has 16 GB of weights, and 64 sequences of 8,192 tokens have four times as much cache."""
    weights = 2 * 8_030_261_248
    sizes = {}
    for batch, context in ((1, 1024), (64, 8192)):
        options = ("--dtype", "bfloat16", "--batch", str(batch), "--context", str(context), "--cache", "int8", "--json")
        sizes[batch] = json.loads(run("llama-3.1-8b", *options))["store_bytes"]
    assert sizes[1]["all_tokens"] < 0.01 * weights
    assert sizes[64]["all_tokens"] > 4 * weights and sizes[64]["int8"] > 2 * weights
