"""The figures that show a model: the small trained ones of the package, or the one that is served."""

import json
import math
from dataclasses import replace
from functools import partial
from random import Random

import pytest
import torch

from regard.engine.engine import Engine
from regard.instruments import INSTRUMENTS, subject_of
from regard.instruments.examples import SHAPES, pair, sentence, specs, trained
from regard.instruments.prefill import arrivals
from regard.instruments.train_examples import EXAMPLES, accuracy
from regard.instruments.translation import PRINTED
from regard.instruments.vocabulary import SERVED
from regard.lens.detectors import score_heads
from regard.models.decoder import Decoder
from regard.models.stack import Repeat
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.experts import Experts
from regard.parts.feedforward import SwiGLU
from regard.text.train import byte
from tests.instruments.test_figures import panel, shown
from tests.laws import MODELS

SENTENCE = "the old key opens the small box"


@pytest.mark.parametrize("name", specs())
def test_the_stored_weights_are_trained(name: str) -> None:
    """On examples that were not used in training. A third of a sentence's words cannot be known."""
    found = sum(accuracy(trained(name), name, seed) for seed in range(100, 103)) / 3
    assert found > {"language-model": 0.75, "draft": 0.75, "masked": 0.75}.get(name, 0.9)
    assert set(EXAMPLES) == set(specs())


@pytest.mark.ledger("fig.5.4")
def test_one_state_loses_symbols_that_a_transformer_keeps() -> None:
    short, long = shown("bottleneck", length=3), shown("bottleneck", length=12)
    assert short["without a mistake, one state (LSTM)"] > 0.97
    assert long["without a mistake, one state (LSTM)"] < 0.15
    assert long["without a mistake, attention (transformer)"] > long["without a mistake, one state (LSTM)"] + 0.3


@pytest.mark.ledger("fig.5.5")
def test_additive_weights_sum_to_1_and_align_the_languages() -> None:
    printed = panel("alignment", "bars", mode=PRINTED)["values"]
    assert printed == pytest.approx([0.62, 0.18, 0.09, 0.06, 0.05])
    weights = torch.tensor(panel("alignment", "heatmap", text=SENTENCE)["values"])
    assert weights.shape == (5, 7) and torch.allclose(weights.sum(-1), torch.ones(5), atol=1e-4)
    assert panel("alignment", "tokens", text=SENTENCE)["pieces"] == ["kivo", "sen", "bako", "tum", "lura"]
    # the encoder reads from left to right, so a word is known from its own state on
    assert [row.argmax().item() >= first for row, first in zip(weights, (2, 1, 6, 5, 3), strict=True)] == [True] * 5


@pytest.mark.ledger("fig.5.12")
def test_cross_attention_finds_the_source_word() -> None:
    printed = panel("cross-attention", "bars", mode=PRINTED)["values"]
    assert printed == pytest.approx([0.55, 0.34, 0.11])
    rng, hits, total = Random(3), 0, 0
    for _ in range(10):
        source, target = pair(rng)
        text = " ".join(source)
        assert panel("cross-attention", "tokens", text=text)["pieces"] == target
        weights = torch.tensor(panel("cross-attention", "heatmap", text=text)["values"])
        hits += sum(row.argmax().item() == key for row, key in zip(weights, (2, 1, 6, 5, 3), strict=True))
        total += len(target)
    assert hits > 0.7 * total
    assert panel("cross-attention", "bars", text=SENTENCE.title()) == panel("cross-attention", "bars", text=SENTENCE)
    for wrong in ("the old key", "old key opens the small box the"):
        with pytest.raises(ValueError, match="write seven words like"):
            panel("cross-attention", "bars", text=wrong)


@pytest.mark.ledger("fig.5.7")
def test_counts_of_words_characters_and_pieces() -> None:
    text = "Transformers are powerful!"
    counts = dict(zip(*(panel("tokens", "bars", text=text)[key] for key in ("labels", "values")), strict=True))
    assert (counts["words"], counts["words and punctuation"], counts["characters"]) == (3, 4, 26)
    numbers = shown("tokens", text=text, by="bytes")
    assert numbers["characters without spaces"] == 24 and numbers["bytes per piece"] == 1
    served = subject_of("tiny", served_decoder(), byte())
    pieces = INSTRUMENTS["tokens"].panels({"text": "été", "by": "the served model"}, served)[0]
    assert len(pieces["pieces"]) == 5 and all(note.isdigit() for note in pieces["notes"])
    with pytest.raises(ValueError, match="no decoder is served"):
        shown("tokens", by="the served model")


@pytest.mark.ledger("fig.5.8")
def test_words_of_a_kind_have_near_embeddings() -> None:
    near = panel("embeddings", "bars", word="old", count=5)["labels"]
    assert sum(word in ("red", "small", "warm", "good", "new") for word in near) >= 4
    drawn = panel("embeddings", "scatter", word="old")["points"]
    assert len(drawn) == 28 and [point["label"] for point in drawn if point["group"] == "chosen"] == ["old"]


@pytest.mark.ledger("fig.5.10")
def test_the_heads_of_a_layer_are_side_by_side() -> None:
    panels = INSTRUMENTS["heads"].panels({"layer": 1})
    maps = [p["values"] for p in panels if p["kind"] == "heatmap"][1:]
    assert len(maps) == 4 and all(sum(row) == pytest.approx(1, abs=1e-4) for rows in maps for row in rows)
    assert shown("heads")["8 heads of 64 in the model of 2017"] == 512
    assert all(p["title"].startswith(f"head {i} · ") for i, p in enumerate(panels[2:6]))


def test_labels_of_heads_are_those_of_the_detectors() -> None:
    model = served_decoder()
    scores = score_heads(model, model.spec.vocab, 32).scores
    subject = subject_of("tiny", model, byte())
    titles = [p["title"] for p in INSTRUMENTS["heads"].panels({"of": SERVED, "text": "a lamp"}, subject)]
    best = max((float(layers[0][0]), kind) for kind, layers in scores.items())  # ty: ignore[not-subscriptable]
    assert titles[2] == "head 0 · " + (f"{best[1]} {best[0]:.2f}" if best[0] > 0.4 else "no label")


def test_heads_of_a_hybrid_are_shown_by_relative_weights() -> None:
    """The implied matrices of Mamba-2 have negative entries, which have no entropy."""
    spec = replace(MODELS["mamba2 and a window"], vocab=byte().vocab_size)
    subject = subject_of("hybrid", spec.build(seed=0), byte())
    for layer in (0, 1):
        panels = INSTRUMENTS["heads"].panels({"of": SERVED, "text": "a lamp", "layer": layer}, subject)
        assert all(0 <= value <= 1 for row in panels[2]["values"] for value in row)
        assert panels[0]["title"].startswith(f"layer {layer}, head 0 (4 layers of 4 heads) · ")


@pytest.mark.ledger("fig.5.18")
def test_predicted_tokens_are_fed_back() -> None:
    rng = Random(11)
    for _ in range(5):
        words = sentence(rng)[1:]
        text, rest = " ".join(words[:3]), words[3:5]
        assert panel("generation", "tokens", text=text, steps=2)["pieces"][4:] == rest  # verb and article follow
    first = panel("generation", "bars")
    assert first["values"] == sorted(first["values"], reverse=True)
    second = panel("generation", "tokens", choice=2)["pieces"]
    assert second[-4] == first["labels"][1]
    assert panel("generation", "bars", temperature=3.0)["values"][0] < first["values"][0]


@pytest.mark.ledger("fig.5.19")
def test_masked_words_are_filled_from_both_sides() -> None:
    text = "the [MASK] key opens the small [MASK] . it is old ."
    filled = panel("masked-words", "tokens", text=text)["pieces"]
    assert (filled[2], filled[7]) == ("old", "box")
    both, one_way = (panel("masked-words", "bars", two_way=two_way)["values"][0] for two_way in (True, False))
    assert both > 0.7 > one_way
    positions = shown("masked-words", text=text)["attends to positions"].split(", ")
    assert positions == [str(i) for i in range(13)]  # itself, position 2, included
    assert shown("masked-words", text=text, two_way=False)["attends to positions"] == "0, 1, 2"
    shares = dict(zip(*(panel("masked-words", "bars", 2)[key] for key in ("labels", "values")), strict=True))
    assert shares["chosen of all"] == pytest.approx(0.15, abs=0.01)
    assert [shares[k] for k in ("[MASK]", "random word", "kept")] == pytest.approx([0.8, 0.1, 0.1], abs=0.02)


@pytest.mark.ledger("fig.000.sandwich")
def test_the_lens_reads_every_layer() -> None:
    guesses = panel("sandwich", "table", 1, text="the red boat carries the old")["rows"]
    assert [row[0] for row in guesses] == ["input", 0, 1] and guesses[-1][1] == "stone"
    assert guesses[-1][2] == guesses[-1][3] > 0.9
    assert shown("sandwich")["log of the vocabulary"] == pytest.approx(math.log(30), abs=1e-4)


@pytest.mark.ledger("fig.5.6")
def test_the_encoder_decoder_of_2017_is_counted_by_part() -> None:
    numbers = shown("encoder-decoder", part=4)
    assert numbers["its weights in all layers"] == 6 * (2 * 512 * 2048 + 512 + 2048)
    halves = shown("encoder-decoder", part=4, layers=3)
    assert halves["its weights in all layers"] == numbers["its weights in all layers"] / 2
    drawn = panel("encoder-decoder", "diagram")
    labels = ["tokens", "sinusoidal", "attention", "feedforward"]
    labels += ["embedding", "sinusoidal", "causal attention", "cross attention", "feedforward", "unembedding"]
    assert [node["label"] for node in drawn["nodes"]] == labels
    assert {"from": "3", "to": "7", "weight": 2.0} in drawn["edges"]
    assert [panel("encoder-decoder", "equation", part=i)["name"] for i in range(1, 11)] == labels
    assert [shown("encoder-decoder", part=i)["its weights in all layers"] for i in (1, 2, 8)] == [
        37000 * 512,
        0,
        6 << 20,
    ]


@pytest.mark.ledger("fig.5.17")
def test_shapes_along_an_encoder_and_a_decoder_layer() -> None:
    shapes = {row[0]: row[1] for row in panel("trace", "table")["rows"]}
    assert shapes["encoder: embeddings and positions"] == shapes["encoder: after the feed-forward layer"] == "6 × 64"
    assert shapes["encoder: hidden channels"] == "6 × 256" and shapes["decoder: weights on the source"] == "4 × 4 × 6"
    with pytest.raises(ValueError, match="heads"):
        panel("trace", "table", width=64, heads=7)


@pytest.mark.ledger("fig.000.vit")
def test_an_image_becomes_patches_and_a_cls_token() -> None:
    numbers = shown("patches")
    assert (numbers["patches"], numbers["tokens with [CLS]"], numbers["numbers per patch"]) == (36, 37, 48)
    assert numbers["tokens of ViT-B/16 at 224 pixels"] == 197
    means = panel("patches", "heatmap", 1, x=6, y=6, patch="12")["values"]
    assert means[0][0] > 2 * max(means[0][1], means[1][0], means[1][1])


@pytest.mark.ledger("fig.000.vit")
@pytest.mark.parametrize("shape", SHAPES)
def test_the_class_token_attends_to_the_shape_and_names_it(shape: str) -> None:
    for x, y in ((6, 6), (12, 9), (18, 17)):
        controls = {"shape": shape, "x": x, "y": y}
        found = panel("patches", "bars", **controls)
        assert found["labels"][max(range(4), key=found["values"].__getitem__)] == shape and max(found["values"]) > 0.9
        weights = panel("patches", "heatmap", 2, **controls)["values"]
        near = sum(
            weights[i][j] for i in range(6) for j in range(6) if abs(4 * j + 2 - x) < 7 and abs(4 * i + 2 - y) < 7
        )
        assert near > (0.55 if shape == "cross" else 0.9)  # in and around the shape, which is 9 pixels wide
    assert "trained" in panel("patches", "heatmap", 2)["title"]
    assert "random weights" in panel("patches", "heatmap", 2, patch="8")["title"]


@pytest.mark.ledger("fig.5.21", "fig.5.27")
def test_gates_and_routing_of_the_served_model_are_shown() -> None:
    subject = subject_of("tiny", served_decoder(), byte())
    given = {"of": SERVED, "text": "lamp", "layer": 1}
    gates = next(p for p in INSTRUMENTS["gated-unit"].panels(given, subject) if p["kind"] == "heatmap")
    assert gates["title"] == "gated unit 1 (3 in tiny), the first twelve channels at “p”"
    gate, up, product = torch.tensor(gates["values"])
    assert torch.allclose(gate * up, product, atol=1e-5) and gate.abs().max() > 0
    routed = next(p for p in INSTRUMENTS["experts"].panels(given, subject) if p["kind"] == "heatmap")
    assert routed["rows"] == list("lamp") and routed["title"].endswith("layer of experts 1 (3 in tiny)")
    assert all(len(row) == 6 and sum(w > 0 for w in row) == 2 for row in routed["values"])
    plain = Decoder(byte().vocab_size, 16, (Repeat((Block((Sublayer(Attention(2)),)),)),)).build(seed=0)
    for id, missing in (("gated-unit", "no gated units"), ("experts", "no experts")):
        with pytest.raises(ValueError, match=missing):
            INSTRUMENTS[id].panels(given, subject_of("plain", plain, byte()))


def served_decoder():
    block = Block((Sublayer(Attention(2)), Sublayer(SwiGLU(24)), Sublayer(Experts(6, 2, SwiGLU(24)))))
    return Decoder(byte().vocab_size, 16, (Repeat((block,), 3),)).build(seed=0)


@pytest.mark.parametrize("id", [id for id, instrument in INSTRUMENTS.items() if instrument.reads_model])
def test_instruments_read_the_served_model(id: str) -> None:
    model, tokenizer = served_decoder(), byte()
    subject = subject_of("tiny", model, tokenizer)
    assert subject is not None and subject.model is not model
    subject = subject._replace(arrivals=partial(arrivals, Engine(served_decoder(), rows=1, capacity=32)))
    names = {control.name for control in INSTRUMENTS[id].controls}
    assert INSTRUMENTS[id].panels({}, subject), "defaults fit every served model"
    given = {name: value for name, value in {"of": SERVED, "text": "a lamp", "word": "a"}.items() if name in names}
    panels = INSTRUMENTS[id].panels(given, subject)
    if "of" in names:
        assert "tiny" in json.dumps(panels)
        with pytest.raises(ValueError, match="no decoder is served"):
            INSTRUMENTS[id].panels(given)
    assert not any(module._forward_hooks for module in model.modules())
    assert subject_of("tiny", torch.nn.Linear(1, 1), tokenizer) is None
