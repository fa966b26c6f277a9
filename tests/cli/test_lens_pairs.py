"""The commands of `regard lens` on an encoder-decoder and an encoder: each works, or names what to use instead."""

import json
import math
from pathlib import Path

import pytest
import torch

from regard import load, save
from regard.lens import ablate, activation_patching, logit_difference
from regard.models.decoder import Decoder
from regard.models.encoder import Encoder
from regard.models.encoder_decoder import EncoderDecoder
from regard.models.stack import Repeat
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.cross_attention import CrossAttention
from regard.parts.feedforward import SwiGLU
from regard.parts.input import Tokens
from regard.parts.linear_attention import LinearAttention
from regard.text.train import bpe
from tests.cli.conftest import regard
from tests.laws import randomize_weights

TEXT = "[INST] hi [/INST]"
SOURCE = ("--text", "a red lamp")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """An encoder-decoder with linear attention in its decoder, an encoder and a decoder."""
    tokenizer = bpe([TEXT, "a red lamp, an old lamp"] * 4, vocab=300)
    tokenizer.decoder_start = 7
    vocab, mlp = tokenizer.vocab_size, Sublayer(SwiGLU(24))
    plain = Repeat((Block((Sublayer(Attention(2)), mlp)),), 2)
    source = Encoder(Tokens(vocab), 16, (plain,))
    target = Repeat((Block((Sublayer(LinearAttention(2)), Sublayer(CrossAttention(2)), mlp)),), 2)
    specs = {
        "pair": EncoderDecoder(source, Decoder(vocab, 16, (target,))),
        "encoder": source,
        "decoder": Decoder(vocab, 16, (plain,)),
    }
    folder = tmp_path_factory.mktemp("lens")
    for name, spec in specs.items():
        model = spec.build(seed=0)
        randomize_weights(model, seed=1)
        save(model, folder / name, tokenizer)
    return {name: folder / name for name in specs}


def refusal(*arguments: object) -> str:
    return str(regard("lens", *arguments).exception)


@pytest.mark.parametrize("name", ["decoder", "pair"])
def test_tokens_with_brackets_are_not_markup(folders: dict[str, Path], name: str) -> None:
    found = regard("lens", folders[name], "--text", TEXT)
    assert found.exit_code == 0 and "[/INST]" in found.stdout.replace("\n", "")


def test_implied_matrices_of_a_pair_have_entropies(folders: dict[str, Path], tmp_path: Path) -> None:
    arguments = ("lens", folders["pair"], *SOURCE, "--target", "an old")
    found = json.loads(regard(*arguments, "--json").stdout, parse_constant=pytest.fail)
    kinds = {(entry["attention"], entry["kind"].split(",")[0]) for entry in found["maps"]}
    assert kinds == {("encoder", "attention"), ("decoder", "linear attention"), ("cross", "attention")}
    size = max(len(found["source"]), len(found["target"]))
    assert len(found["maps"]) == 12 and all(0 <= entry["entropy"] <= math.log(size) for entry in found["maps"])
    assert "implied matrix" in regard(*arguments).stdout.replace("\n", "")
    assert "written:" in regard(*arguments, "-o", tmp_path / "cross.png").stderr


def test_the_logit_lens_of_a_pair_ends_with_its_own_prediction(folders: dict[str, Path]) -> None:
    llm = load(folders["pair"], "cpu")
    layers = json.loads(regard("lens", "logits", folders["pair"], *SOURCE, "--target", "an old", "--json").stdout)
    source = llm.tokenizer.encode_with_special_tokens("a red lamp", special=True)
    with torch.no_grad():
        logits = llm.model(torch.tensor([source]), torch.tensor([[7, *llm.tokenizer.encode("an old")]]))
    best = logits[0, -1].softmax(-1).topk(4)
    assert list(layers) == ["target.stack.input", "target.stack.blocks.0", "target.stack.blocks.1"]
    last = layers["target.stack.blocks.1"]
    assert [entry["token"] for entry in last] == [llm.tokenizer.decode_token(id) for id in best.indices.tolist()]
    assert [entry["probability"] for entry in last] == pytest.approx(best.values.tolist(), abs=1e-5)
    assert "leave --target out" in refusal("logits", folders["decoder"], *SOURCE, "--target", "an")


def test_the_logit_of_a_pair_is_split_into_the_terms_of_its_decoder(folders: dict[str, Path]) -> None:
    llm = load(folders["pair"], "cpu")
    arguments = ("--target", "an old", "--token", "a", "--json")
    terms = json.loads(regard("lens", "attribute", folders["pair"], *SOURCE, *arguments).stdout)
    source = llm.tokenizer.encode_with_special_tokens("a red lamp", special=True)
    with torch.no_grad():
        logits = llm.model(torch.tensor([source]), torch.tensor([[7, *llm.tokenizer.encode("an old")]]))
    assert sum(terms.values()) == pytest.approx(float(logits[0, -1, llm.tokenizer.single_id("a")]), abs=1e-4)
    assert "stack.blocks.1.sublayers.1.body.head 1" in terms  # of attention to the source


def test_the_heads_of_an_encoder_are_scored(folders: dict[str, Path]) -> None:
    found = json.loads(regard("lens", "heads", folders["encoder"], "--length", 8, "--sequences", 1, "--json").stdout)
    assert len(found["scores"]["induction"]) == 2


def test_heads_of_all_three_attentions_are_ablated(folders: dict[str, Path]) -> None:
    llm = load(folders["pair"], "cpu")
    each = json.loads(regard("lens", "ablate", folders["pair"], *SOURCE, "--json").stdout)
    assert [entry["attention"] for entry in each] == ["encoder"] * 4 + ["decoder"] * 4 + ["cross"] * 4
    rows = torch.tensor([llm.tokenizer.encode_with_special_tokens("a red lamp", special=True)]), torch.tensor([[7]])
    with torch.no_grad():
        whole = llm.model(*rows)[0, -1].log_softmax(-1)
        with ablate(llm.model, heads=[(1, 0)], stack="target", to_source=True):
            ablated = llm.model(*rows)[0, -1].log_softmax(-1)
    effect = float((whole.exp() * (whole - ablated)).sum())
    assert each[10]["divergence"] == pytest.approx(effect, abs=1e-5) and effect > 1e-4
    cross = ("--heads", "1.0", "--part", "cross", "--json")
    one = json.loads(regard("lens", "ablate", folders["pair"], *SOURCE, *cross).stdout)
    assert one["divergence"] == pytest.approx(effect, abs=1e-5)
    assert "choose --part encoder, decoder or cross" in refusal("ablate", folders["pair"], *SOURCE, "--heads", "1.0")
    assert "leave --part out" in refusal("ablate", folders["decoder"], *SOURCE, "--part", "cross")


def test_the_source_of_a_pair_is_patched(folders: dict[str, Path], tmp_path: Path) -> None:
    llm = load(folders["pair"], "cpu")
    texts = ("--clean", "a red lamp", "--corrupted", "a hi lamp", "--answer", "a", "--wrong", "h")
    found = json.loads(regard("lens", "patch", folders["pair"], *texts, "--json").stdout)
    ids = [llm.tokenizer.encode_with_special_tokens(text, special=True) for text in ("a red lamp", "a hi lamp")]
    metric = logit_difference(*(llm.tokenizer.single_id(token) for token in ("a", "h")))
    expected = activation_patching(llm.model, (ids[0], [7]), (ids[1], [7]), metric, "source.stack.blocks.?").effects
    assert set(found["effects"]) == {*expected, "source.stack.input"}
    for name, effects in expected.items():
        assert found["effects"][name] == pytest.approx(effects.tolist(), abs=1e-4)
    both = ("--names", "*.stack.input", "--target", "an")
    assert "different numbers of cells" in refusal("patch", folders["pair"], *texts, *both, "-o", tmp_path / "a.png")
    assert "target.stack.input" in regard("lens", "patch", folders["pair"], *texts, *both).stdout


def test_commands_that_do_not_show_a_pair_name_others(folders: dict[str, Path], tmp_path: Path) -> None:
    pair = folders["pair"]
    assert "score_heads(model.source, vocab)" in refusal("heads", pair)
    assert "`regard lens ablate`" in refusal("report", pair, *SOURCE, "-o", tmp_path / "report.html")


def test_an_encoder_predicts_no_next_token(folders: dict[str, Path]) -> None:
    message = "EncoderModule predicts no next token"
    assert message in refusal("ablate", folders["encoder"], *SOURCE, "--heads", "0.1")
    texts = ("--clean", "a red", "--corrupted", "a old", "--answer", "a", "--wrong", "h")
    assert message in refusal("patch", folders["encoder"], *texts)
