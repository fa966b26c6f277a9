"""A pattern equals the layers that it describes, in Python, TOML, JSON and on the command line."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from regard.kernels.attention.mask import Causal, Full
from regard.kernels.attention.patterns.window import Dilated, SinksAndWindow, Window
from regard.models.decoder import Decoder
from regard.models.pattern import Tiled, retile, tile
from regard.models.stack import Repeat
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.cross_attention import CrossAttention
from regard.parts.experts import Experts
from regard.parts.feedforward import SwiGLU
from regard.parts.linear_attention import LinearAttention
from regard.parts.norm import NoNorm
from regard.parts.position.alibi import Alibi
from regard.parts.position.base import NoPosition
from regard.parts.position.rope import Rope
from regard.parts.position.rope_scaling import LinearScaling
from regard.parts.short_convolution import ShortConvolution
from regard.spec import SpecError
from tests.cli.conftest import regard
from tests.laws import OTHERS, block, build, decoder, error, random_ids

GQA = Attention(4, 2, position=Rope(), softcap=20.0)
BASE = block(GQA)
SCALED_ROPE = Rope(500.0, scaling=LinearScaling(4.0))


def mixers(pattern: str, depth: int, base: Block = BASE) -> list:
    runs = tile(base, pattern, depth)
    return [b.sublayers[0].body for run in runs for _ in range(run.times) for b in run.blocks]


attention = partial(replace, GQA)  # GQA with changed fields


def test_a_pattern_repeats_up_to_the_depth() -> None:
    window, full = block(attention(mask=Window(256))), block(attention(position=NoPosition()))
    pattern = "3*window(256), full(no_position)"
    assert tile(BASE, pattern, 24) == (Repeat((window, window, window, full), 6),)
    assert tile(BASE, pattern, 6) == (Repeat((window, window, window, full)), Repeat((window, window)))
    assert tile(BASE, pattern, 2) == (Repeat((window, window)),)


@pytest.mark.parametrize(
    ("term", "expected"),
    [
        ("full", GQA),
        ("causal", attention(mask=Causal())),
        ("window(8)", attention(mask=Window(8))),
        ("window(size=8)", attention(mask=Window(8))),
        ("sinks(4, 8)", attention(mask=SinksAndWindow(4, 8))),
        ("dilated(8, 2)", attention(mask=Dilated(8, 2))),
        ("window(8, position=rope(base=500, scaling=linear(4)))", attention(mask=Window(8), position=SCALED_ROPE)),
        ("window(8, alibi, gate=head)", attention(mask=Window(8), position=Alibi(), gate="head")),
        ("full(sinks=true)", attention(sinks=True)),
        ("rope(5e2, layout=interleaved)", attention(position=Rope(500.0, layout="interleaved"))),
        ("full(kv_heads=1, softcap=3.5)", attention(kv_heads=1, softcap=3.5)),
        ("linear", LinearAttention(4)),
        ("linear(2, bias=true)", LinearAttention(2, bias=True)),
        ("convolution(3)", ShortConvolution(3)),
        ("attention(8)", attention(heads=8)),
    ],
)
def test_a_term_changes_the_mixer(term: str, expected: object) -> None:
    assert mixers(term, 1) == [expected]


def test_a_term_can_change_the_feed_forward() -> None:
    runs = tile(BASE, "window(8), full + experts(4, 2)", 2)
    assert runs[0].blocks[1] == Block((Sublayer(GQA), Sublayer(Experts(4, 2, SwiGLU(40)))))
    assert tile(BASE, "swiglu(8) + window(3)", 1)[0].blocks[0].sublayers[1].body == SwiGLU(8)


def test_a_term_leaves_the_other_sublayers_unchanged() -> None:
    base = Block((Sublayer(ShortConvolution(3), NoNorm()), *BASE.sublayers), style="parallel", dropout=0.1)
    changed = tile(base, "window(8)", 1)[0].blocks[0]
    assert changed.sublayers[0] == base.sublayers[0] and changed.sublayers[2] == base.sublayers[2]
    assert changed.sublayers[1].body == attention(mask=Window(8)) and changed.style == "parallel"
    with_cross_attention = Block((Sublayer(CrossAttention(4)), *BASE.sublayers))
    assert tile(with_cross_attention, "window(8)", 1)[0].blocks[0].sublayers[0] == Sublayer(CrossAttention(4))


def test_in_an_encoder_full_and_windows_are_bidirectional() -> None:
    base = block(Attention(4, mask=Full()))
    assert [m.mask for m in mixers("window(8), full, window(8, causal=true)", 3, base)] == [
        Window(8, causal=False), Full(), Window(8)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("windw(3)", "there is no mask, position, mixer or feed-forward 'windw'; did you mean 'window'?"),
        ("3*", "expected a term such as window(256) or full, found 'the end'"),
        ("3 window(2)", "expected '*', found 'window'"),
        ("٣*full", "unexpected character '٣'"),
        ("window(3", "expected ')', found 'the end'"),
        ("window(3) full", "expected ',' or the end, found 'full'"),
        ("window(3) $", "unexpected character '$'"),
        ("", "expected a term"),
        ("0*full", "0 repetitions of a layer; use 1 to 10000"),
        ("1.5*full", "1.5 repetitions of a layer; use 1 to 10000"),
        ("window", "window needs size"),
        ("window(0)", "size=0 must be positive"),
        ("window(2, 3, 4)", "window takes 2 values (size, causal), found 3"),
        ("window(3, size=2)", "size is given twice"),
        ("window(size=3, size=2)", "window has size twice"),
        ("window(size=3, 2)", "a positional value after a named one"),
        ("window(3, sofcap=2)", "window has no 'sofcap'; did you mean 'softcap'?"),
        ("linear(4, basi=true)", "linear has no 'basi'; did you mean 'bias'?"),
        ("window(3, position=rop)", "there is no kind 'rop'; did you mean 'rope'?"),
        ("full(rmsnorm)", "as in field=rmsnorm"),
        ("full(gate=heads)", "'heads': did you mean 'head'?"),
        ("adamw", "feed-forward 'adamw'"),
        ("experts(2, 4)", "top_k=4 must be from 1 to count=2"),
    ],
)
def test_wrong_patterns_are_refused(pattern: str, message: str) -> None:
    with pytest.raises(SpecError) as raised:
        tile(BASE, pattern, 4)
    assert message in str(raised.value) and repr(pattern) in str(raised.value)


def test_a_block_that_the_term_cannot_change_is_refused() -> None:
    with pytest.raises(SpecError, match="linear_attention, swiglu, and none has a mask"):
        tile(block(LinearAttention(4)), "window(8)", 2)
    with pytest.raises(SpecError, match="depth=0 must be positive"):
        tile(BASE, "full", 0)


def test_a_pattern_in_a_file_equals_the_expanded_layers() -> None:
    expanded = Decoder(31, 24, tile(BASE, "window(4), full(no_position)", 5))
    assert Decoder(31, 24, Tiled(BASE, "window(4), full(no_position)", 5)) == expanded  # ty: ignore
    toml = """
        vocab = 31
        width = 24
        [layers]
        kind = "tiled"
        pattern = "window(4), full(no_position)"
        depth = 5
        [[layers.block.sublayers]]
        body = { kind = "attention", heads = 4, kv_heads = 2, position = { kind = "rope" }, softcap = 20 }
        [[layers.block.sublayers]]
        body = { kind = "swiglu", hidden = 40 }
    """
    assert Decoder.from_toml(toml) == expanded
    for loaded in (Decoder.from_json(expanded.to_json()), Decoder.from_toml(expanded.to_toml())):
        assert loaded == expanded
    with pytest.raises(SpecError, match="did you mean 'window'"):
        Decoder.from_toml(toml.replace("window(4)", "windw(4)"))


def test_tiled_layers_can_be_mixed_with_other_runs() -> None:
    first, tiled = Repeat((block(attention(mask=Causal())),)), Tiled(BASE, "window(4)", 3)
    mixed = Decoder(31, 24, (first, tiled))  # ty: ignore
    assert mixed.layers == (first, Repeat((block(attention(mask=Window(4))),), 3))
    assert Tiled.from_json(tiled.to_json()) == tiled


def test_a_tiled_model_equals_its_expanded_spec() -> None:
    spec = retile(decoder(block(LinearAttention(4)), BASE), "window(4), linear")
    assert len(spec.blocks) == 4 and spec.blocks[0] == block(attention(mask=Window(4)))
    tokens = random_ids(1, 9)
    expanded = Decoder.from_json(spec.to_json())
    assert error(build(spec)(tokens), build(expanded)(tokens)) == 0
    assert retile(OTHERS["encoder"], "window(4)").layers[0].blocks[0].sublayers[0].body.mask == Window(4, False)  # ty: ignore
    with pytest.raises(SpecError, match="has no field `layers`"):
        retile(OTHERS["encoder-decoder"], "window(4)")


def test_the_command_line_accepts_a_pattern(tmp_path: Path) -> None:
    small = ("--model.width=24", "--tokenizer.by=byte", "--model.layers.0.times=3")
    run = tmp_path / "run"
    steps = ("--train.steps=1", "--data.rows=1", "--data.length=32")
    result = regard("train", "llama", "--pattern", "window(4), full(no_position)", "--out", run, *small, *steps)
    assert result.exit_code == 0, result.output
    model = Decoder.from_dict(json.loads((run / "config.json").read_text())["model"])
    masks = [block.sublayers[0].body.mask for block in model.blocks]  # ty: ignore
    assert masks == [Window(4), Causal(), Window(4)]
    assert regard("train", "--resume", run, "--pattern", "full").exit_code == 2
    plans = [json.loads(regard("plan", "llama", "--json", "--pattern", p, *small).stdout) for p in ("full", "linear")]
    assert plans[0] != plans[1]
