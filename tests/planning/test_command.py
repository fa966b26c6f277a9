"""`regard plan`: names, sizes and options, printed as a table and as JSON."""

import json

import pytest
from typer.testing import CliRunner

from regard.checkpoint import save
from regard.cli import app
from regard.models.presets import bert
from regard.planning import plan


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
        (["llama-8b"], "'llama-8b' is neither a file or folder nor a known name; did you mean 'llama-7b'"),
        (["llama-8b"], "published models: bert-base, clip-b32, .*; models: .*minilm.*; recipes: .*demo, "),
    ],
)
def test_wrong_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        run(*arguments)
