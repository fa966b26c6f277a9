"""The commands of `regard lens` on a small model, as a user would call them."""

import json
from pathlib import Path

import pytest
import torch

from regard import load, save
from regard.models.decoder import Decoder
from regard.models.presets import transformer_2017
from regard.models.stack import Repeat
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.norm import LayerNorm
from regard.parts.position.learned import Learned
from regard.parts.recurrent import LSTM
from regard.report.page import Page
from regard.text.train import character
from tests.cli.conftest import regard


def test_lens_prints_and_draws_attention_maps(demo_run: Path, tmp_path: Path) -> None:
    found = json.loads(regard("lens", demo_run, "--text", "Anna is in the barn.", "--json").stdout)
    size = len(found["tokens"])
    for entry in found["maps"]:
        assert len(entry["weights"]) == size
        assert all(sum(row) == pytest.approx(1, abs=1e-5) for row in entry["weights"])
    picture = tmp_path / "head.png"
    assert regard("lens", demo_run, "-t", "Anna is", "--layer", 0, "--head", 1, "-o", picture).exit_code == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "no layer 99" in str(regard("lens", demo_run, "-t", "Anna", "--layer", 99).exception)


def test_lens_shows_the_three_attentions_of_an_encoder_decoder(demo_run: Path, tmp_path: Path) -> None:
    tokenizer = load(demo_run).tokenizer
    tokenizer.decoder_start = tokenizer.eos
    model = transformer_2017(tokenizer.vocab_size, 16, 2, 24, 2).build(seed=0)
    save(model, tmp_path / "model", tokenizer)
    found = json.loads(regard("lens", tmp_path / "model", "-t", "Anna is in", "--target", "the barn", "--json").stdout)
    sizes = {kind: {(len(m["weights"]), len(m["weights"][0])) for m in found["maps"] if m["attention"] == kind}
             for kind in ("encoder", "decoder", "cross")}  # fmt: skip
    source, target = len(found["source"]), len(found["target"])
    assert sizes == {"encoder": {(source, source)}, "decoder": {(target, target)}, "cross": {(target, source)}}
    assert len(found["maps"]) == 12 and "cross" in regard("lens", tmp_path / "model", "-t", "Anna is in").stdout
    picture = tmp_path / "cross.png"
    assert regard("lens", tmp_path / "model", "-t", "Anna", "--target", "the", "-o", picture).exit_code == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "source.stack.blocks.*" in regard("lens", "names", tmp_path / "model").stdout
    assert "leave --target out" in str(regard("lens", demo_run, "-t", "Anna", "--target", "is").exception)


def test_lens_names_lists_activations_with_their_shapes(demo_run: Path) -> None:
    found = json.loads(regard("lens", "names", demo_run, "-t", "Anna is", "--json").stdout)
    patterns = [name for name in found if name.endswith(".pattern")]
    assert patterns and all(found[name][2] == found["stack.input"][1] for name in patterns)
    assert "stack.blocks.*.sublayers.2.body.neurons" in regard("lens", "names", demo_run, "*.neurons").stdout
    assert "stack.blocks.0.sublayers.2.body.neurons" in regard("lens", "names", demo_run, "*.neurons", "--all").stdout
    assert "did you mean" in str(regard("lens", "names", demo_run, "stack.block").exception)


def test_lens_heads_scores_every_head(demo_run: Path) -> None:
    found = json.loads(regard("lens", "heads", demo_run, "--length", 8, "--sequences", 1, "--json").stdout)
    assert set(found["scores"]) == set(found["uniform"]) == {
        "previous token", "first token", "duplicate token", "induction"
    }  # fmt: skip
    assert all(0 <= score <= 1 for layers in found["scores"].values() for layer in layers if layer for score in layer)
    plain = [
        regard("lens", "heads", demo_run, "--length", 8, "--sequences", 1, "--threshold", t).stdout for t in (0, 0.99)
    ]
    assert "induction" in plain[0] and "bold" in plain[0] and "no head is of one of these kinds" in plain[1]
    assert "choose fewer" in str(regard("lens", "heads", demo_run, "--length", 100000).exception)


def test_lens_finds_where_a_prediction_arises(demo_run: Path, tmp_path: Path) -> None:
    text = ("--text", "Anna is in the barn. Where is Anna")
    layers = json.loads(regard("lens", "logits", demo_run, *text, "--json").stdout)
    assert list(layers)[:2] == ["stack.input", "stack.blocks.0"] and len(layers["stack.input"]) == 4
    assert layers["stack.input"][0]["probability"] >= layers["stack.input"][1]["probability"]
    assert "'" in regard("lens", "logits", demo_run, *text, "--top", 1).stdout
    terms = json.loads(regard("lens", "attribute", demo_run, *text, "--token", "?", "--minus", ".", "--json").stdout)
    assert any(name.endswith("head 1") for name in terms)
    assert (
        f"{sum(terms.values()):.2f}"
        in regard("lens", "attribute", demo_run, *text, "--token", "?", "--minus", ".").stdout
    )
    assert "is not one token" in str(regard("lens", "attribute", demo_run, *text, "--token", "? Anna").exception)
    prompts = ("--clean", "Anna is in the", "--corrupted", "Ben is in the", "--answer", ".", "--wrong", "?")
    found = json.loads(regard("lens", "patch", demo_run, *prompts, "--json").stdout)
    assert all(len(effects) == len(found["tokens"]) for effects in found["effects"].values())
    picture = tmp_path / "patch.png"
    assert (
        regard("lens", "patch", demo_run, *prompts, "--names", "*.body.z", "--by", "head", "-o", picture).exit_code == 0
    )
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "(0)" in regard("lens", "patch", demo_run, *prompts).stdout


def test_lens_ablates_heads_and_layers(demo_run: Path, tmp_path: Path) -> None:
    text = ("-t", "Anna is in the barn. Where is Anna?")
    each = json.loads(regard("lens", "ablate", demo_run, *text, "--json").stdout)
    assert each and all(entry["divergence"] >= -1e-6 for entry in each)
    first = each[0]
    head = f"{first['layer']}.{first['head']}"
    found = json.loads(regard("lens", "ablate", demo_run, *text, "--heads", head, "--json").stdout)
    assert found["divergence"] == pytest.approx(first["divergence"], abs=1e-4)
    everything = regard("lens", "ablate", demo_run, *text, "--heads", head, "--top", 10**6, "--json")
    assert len(json.loads(everything.stdout)["tokens"]) > 100  # the whole vocabulary
    assert found["tokens"] and "nats" in regard("lens", "ablate", demo_run, *text, "--layers", "0,1").stdout
    assert "KL(whole" in regard("lens", "ablate", demo_run, *text, "--mean-over", "Ben is in the park.").stdout
    picture = tmp_path / "heads.png"
    assert regard("lens", "ablate", demo_run, *text, "-o", picture).exit_code == 0 and picture.exists()
    assert "is not of the form N.N" in str(regard("lens", "ablate", demo_run, *text, "--heads", "4").exception)
    assert "is not of the form N.N" in str(regard("lens", "ablate", demo_run, *text, "--heads", "٠.١").exception)


def test_lens_report_is_one_file_without_requests(demo_run: Path, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    assert regard("lens", "report", demo_run, "-t", "Anna <script> is in the barn.", "-o", page).exit_code == 0
    html = page.read_text(encoding="utf-8")
    assert html.count("data:image/png;base64") >= 4 and "<script" not in html and "http" not in html
    for heading in (
        "What comes next",
        "Attention",
        "What the heads do",
        "Where the prediction arises",
        "residual stream",
    ):
        assert heading in html
    assert 'name="viewport"' in html and "</span><wbr><span" in html  # fits a phone; lines of tokens wrap
    long = regard("lens", "report", demo_run, "-t", "Anna is in the barn. " * 60, "-o", page)
    assert "at most 200, so shorten it" in str(long.exception)


def test_a_report_says_which_parts_a_model_does_not_have(demo_run: Path, tmp_path: Path) -> None:
    """A post-norm stream is no sum, an LSTM has no maps, and the scores of heads fit few learned positions."""
    tokenizer, page = load(demo_run).tokenizer, tmp_path / "report.html"
    attention, norm = Block((Sublayer(Attention(2), LayerNorm()),), style="post"), LayerNorm()
    post = Decoder(tokenizer.vocab_size, 8, (Repeat((attention,)),), Learned(16), norm=norm)
    recurrent = Decoder(tokenizer.vocab_size, 8, (Repeat((Block((Sublayer(LSTM()),)),)),))
    for name, spec, reason in (("post", post, "is no sum of outputs"), ("lstm", recurrent, "No layer has a map")):
        save(spec.build(seed=0), tmp_path / name, tokenizer)
        found = regard("lens", "report", tmp_path / name, "-t", "Anna", "-o", page)
        assert found.exit_code == 0, found.exception
        assert reason in page.read_text("utf-8")


def test_a_report_that_cannot_be_written_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "report.html"
    page.write_text("old")
    monkeypatch.setattr("os.fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space left"):
        Page("new").write(page)
    assert page.read_text() == "old" and list(tmp_path.iterdir()) == [page]


def test_numbers_of_broken_weights_are_null_in_json(tmp_path: Path) -> None:
    tokenizer = character(["ab"])
    model = Decoder(tokenizer.vocab_size, 8, (Repeat((Block((Sublayer(Attention(2)),)),)),)).build(seed=0)
    with torch.no_grad():
        model.embedding.weight.fill_(torch.nan)
    save(model, tmp_path / "nan", tokenizer)
    for command in ((), ("logits",), ("attribute", "--token", "a"), ("ablate",), ("ablate", "--layers", "0")):
        output = regard("lens", *command[:1], tmp_path / "nan", *command[1:], "-t", "ab", "--json").stdout
        assert "null" in output and json.loads(output, parse_constant=pytest.fail)


def test_lens_prints_and_draws_norms_of_recurrent_states(demo_run: Path, tmp_path: Path) -> None:
    found = json.loads(regard("lens", demo_run, "--text", "Anna is in the barn.", "--states", "--json").stdout)
    assert found["norms"] and all(len(norms) == len(found["tokens"]) for norms in found["norms"].values())
    assert "norm of the state" in regard("lens", demo_run, "-t", "Anna is", "--states").stdout
    picture = tmp_path / "states.png"
    assert regard("lens", demo_run, "-t", "Anna is", "--states", "-o", picture).exit_code == 0
    assert picture.stat().st_size > 1000
    assert "no recurrent layer" in str(regard("lens", demo_run, "-t", "Anna", "--states", "--layer", 99).exception)


def test_lens_refuses_empty_and_too_long_texts(demo_run: Path) -> None:
    assert "no tokens" in str(regard("lens", demo_run, "--text", "").exception)
    assert "reads 512; shorten" in str(regard("lens", demo_run, "--text", "Anna is in the barn. " * 200).exception)
