"""Specs are the same in Python, JSON and TOML; an invalid one is refused with its path, its value and a remedy."""

import dataclasses
import json
import typing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regard.adapt.lora import LoRA
from regard.data.sources.base import DataSource
from regard.formats.base import NumberFormat
from regard.kernels.attention.mask import Full
from regard.kinds import TABLES
from regard.models.decoder import Decoder
from regard.models.stack import Repeat
from regard.objectives.base import Objective
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.feedforward import FeedForward, SwiGLU
from regard.parts.linear_attention import LinearAttention
from regard.parts.norm import LayerNorm, RMSNorm
from regard.parts.position.alibi import Alibi
from regard.parts.position.base import NoPosition
from regard.parts.position.learned import Learned
from regard.parts.position.rope import Rope
from regard.parts.position.sinusoidal import Sinusoidal
from regard.parts.short_convolution import ShortConvolution
from regard.spec import Spec, SpecError, class_of, field_types, parse_spec
from regard.training.optimizer import Optimizer
from regard.training.schedule import Schedule
from tests.laws import MODELS, block, decoder

BASES = {
    "parts": Spec,
    "objectives": Objective,
    "sources": DataSource,
    "optimizers": Optimizer,
    "schedules": Schedule,
    "formats": NumberFormat,
}
KINDS = [(table, kind) for table in TABLES for kind in TABLES[table]]
sizes = st.integers(1, 10**6)
scales = st.floats(1e-30, 1e30)
norms = st.builds(LayerNorm, eps=scales, bias=st.booleans()) | st.builds(RMSNorm, eps=scales)
stack_positions = (
    st.builds(Sinusoidal, base=scales) | st.builds(Learned, length=st.integers(10**6)) | st.just(NoPosition())
)
attention_positions = st.builds(Rope, base=scales) | st.sampled_from([NoPosition(), Alibi()])
attentions = st.integers(1, 8).flatmap(
    lambda kv_heads: st.builds(
        Attention,
        heads=st.integers(1, 8).map(lambda groups: groups * kv_heads),
        kv_heads=st.sampled_from([None, kv_heads]),
        head_dim=st.none() | sizes,
        position=attention_positions,
        bias=st.booleans(),
        out_bias=st.none() | st.booleans(),
    )
)
activations = st.sampled_from(["relu", "gelu", "gelu_tanh", "silu"])
bodies = (
    attentions
    | st.builds(LinearAttention, heads=st.integers(1, 8), bias=st.booleans())
    | st.builds(ShortConvolution, taps=st.integers(2, 9))
    | st.builds(FeedForward, hidden=sizes, activation=activations, bias=st.booleans())
    | st.builds(SwiGLU, hidden=sizes, bias=st.booleans())
)
sublayers = st.lists(st.builds(Sublayer, body=bodies, norm=norms), min_size=1, max_size=3).map(tuple)
blocks = st.builds(
    Block, sublayers=sublayers, style=st.sampled_from(["pre", "post"]), dropout=st.floats(0, 1, exclude_max=True)
)
runs = st.builds(Repeat, blocks=st.lists(blocks, min_size=1, max_size=2).map(tuple), times=sizes)
decoders = st.builds(
    Decoder,
    vocab=sizes,
    width=st.integers(1, 9).map(lambda n: n * 2 * 840**2),  # heads are products of two numbers up to 8
    layers=st.lists(runs, min_size=1, max_size=2).map(tuple),
    position=stack_positions,
    norm=norms,
    tied=st.booleans(),
    context=st.none() | sizes,
)


@given(decoders)
def test_specs_round_trip_through_json_and_toml(spec: Decoder) -> None:
    assert Decoder.from_json(spec.to_json()) == spec
    assert Decoder.from_toml(spec.to_toml()) == spec
    assert Decoder.from_dict(spec.to_dict()) == spec
    assert hash(Decoder.from_json(spec.to_json())) == hash(spec)


@pytest.mark.parametrize("name", MODELS)
def test_specs_of_the_law_tests_round_trip(name: str) -> None:
    assert Spec.from_json(MODELS[name].to_json()) == Spec.from_toml(MODELS[name].to_toml()) == MODELS[name]


@pytest.mark.parametrize(("table", "kind"), KINDS)
def test_every_kind_resolves_to_its_class(table: str, kind: str) -> None:
    cls = class_of(kind, "path", BASES[table])
    assert cls.kind_table == table
    assert issubclass(cls, Spec)
    assert dataclasses.fields(cls) is not None
    assert cls.kind.fget(object.__new__(cls)) == kind


def test_a_single_part_round_trips() -> None:
    spec = Attention(4, mask=Full())
    assert Spec.from_json(spec.to_json()) == Spec.from_toml(spec.to_toml()) == spec


def test_all_values_but_none_are_written() -> None:
    written = Attention(4).to_dict()
    assert written["bias"] is False
    assert written["position"] == {"kind": "no_position"}
    assert "kv_heads" not in written


def test_values_are_converted_to_the_types_of_their_fields() -> None:
    """An integer becomes a float, and a list a tuple."""
    assert type(Rope(base=10000).base) is float
    spec = Block([Sublayer(SwiGLU(4))])
    assert type(spec.sublayers) is tuple


ATTENTION = {"kind": "attention", "heads": 4}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (ATTENTION | {"kind": "atention"}, "there is no kind 'atention'; did you mean 'attention'"),
        (ATTENTION | {"kind": 3}, "there is no kind 3"),
        (ATTENTION | {"kind": []}, r"there is no kind \[\]"),
        (ATTENTION | {"kvheads": 2}, "attention has no key 'kvheads'; did you mean 'kv_heads'"),
        (ATTENTION | {"zzz": 2}, "no key 'zzz'; choose one of bias, clip, dropout"),
        ({"kind": "attention"}, "attention needs heads"),
        (ATTENTION | {"heads": "4"}, "Attention.heads: expected int, found '4'"),
        (ATTENTION | {"heads": True}, "Attention.heads: expected int, found True"),
        (ATTENTION | {"heads": 4.0}, "Attention.heads: expected int, found 4.0"),
        (ATTENTION | {"bias": 1}, "Attention.bias: expected bool, found 1"),
        (ATTENTION | {"position": {"kind": "rope", "base": "x"}}, "Rope.base: expected float, found 'x'"),
        (ATTENTION | {"position": {"kind": "rope", "bass": 1}}, r"Attention.position: rope has no key 'bass'.*'base'"),
        (ATTENTION | {"position": {"kind": "swiglu", "hidden": 3}}, "position: expected Position, found SwiGLU"),
        (ATTENTION | {"position": "rope"}, "Attention.position: expected Position, found 'rope'"),
        (ATTENTION | {"position": None}, "Attention.position: expected Position, found None"),
        ({"kind": "rope"}, "expected a spec of the class Attention, found kind='rope'"),
        ({"kind": "rope", "base": float("nan")}, "Rope.base=nan: must be a finite number"),
        ([], "expected a table with a 'kind'"),
    ],
    ids=str,
)
def test_invalid_data_is_refused(data: object, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        Attention.from_dict(data)


def test_an_error_names_the_path_in_the_spec() -> None:
    data = json.loads(MODELS["hybrid"].to_json())
    data["layers"][0]["blocks"][1]["sublayers"][0]["body"]["position"]["kind"] = "ropee"
    path = r"Decoder\.layers\[0\]\.blocks\[1\]\.sublayers\[0\]\.body\.position"
    with pytest.raises(SpecError, match=f"{path}: there is no kind 'ropee'; did you mean 'rope'"):
        Decoder.from_dict(data)


def test_an_error_of_a_part_names_the_setting_for_an_override() -> None:
    attention: dict = {"kind": "attention", "heads": 5}
    block = {"sublayers": [{"body": attention}]}
    data = {"vocab": 9, "width": 24, "layers": [{"blocks": [block]}]}
    body = "layers.0.blocks.0.sublayers.0.body"
    for name, prefix in (("Decoder", ""), ("Recipe.model", "model."), ("Recipe.model.source", "model.source.")):
        with pytest.raises(SpecError, match=f"^{prefix}{body}: attention: width=24 is not divisible by heads=5"):
            parse_spec(data, name, Decoder)
    tiled = {"kind": "tiled", "block": block, "pattern": "full", "depth": 2}  # its layers.0 has no blocks
    with pytest.raises(SpecError, match="^attention: width=24"):
        parse_spec({**data, "layers": [tiled]}, "model", Decoder)
    attention["kv_heads"] = 2
    with pytest.raises(SpecError, match=f"^model.{body}: attention: heads=5 is not divisible by kv_heads=2"):
        parse_spec(data, "model", Decoder)


BLOCK = Block((Sublayer(SwiGLU(4)),))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Attention(12, 5), "heads=12 is not divisible by kv_heads=5; choose one of 1, 2, 3, 4, 6, 12"),
        (lambda: Attention(0), "heads=0 must be positive"),
        (lambda: Attention(4, 0), "kv_heads=0"),
        (lambda: Attention(4, -2), "kv_heads=-2"),
        (lambda: Attention(4, head_dim=0), "head_dim=0 must be positive"),
        (lambda: Attention(5).sizes(12), "width=12 is not divisible by heads=5"),
        (lambda: LinearAttention(5).build(12), "width=12 is not divisible by heads=5"),
        (lambda: LinearAttention(0), "heads=0 must be positive"),
        (lambda: FeedForward(0), "hidden=0 must be positive"),
        (lambda: Attention(4, kvheads=2), "Attention has no field 'kvheads'; did you mean 'kv_heads'"),
        (lambda: FeedForward(4, "gelu_tan"), "activation='gelu_tan': did you mean 'gelu_tanh'"),
        (lambda: LoRA(lora_alpha=16), "LoRA has no field 'lora_alpha'; did you mean 'alpha'"),
        (lambda: LoRA(r=8), "LoRA has no field 'r'; did you mean 'rank'"),
        (lambda: SwiGLU(-1), "hidden=-1 must be positive"),
        (lambda: Learned(0), "length=0 must be positive"),
        (lambda: Rope(0.0), "base=0.0 must be positive"),
        (lambda: Rope().build(5, 1), "head_dim=5 must be even"),
        (lambda: Sinusoidal(-1.0), "base=-1.0 must be positive"),
        (lambda: Block(()), "sublayers is empty"),
        (lambda: Block((Sublayer(SwiGLU(4)),), dropout=1.0), "dropout=1.0 must be in"),
        (lambda: Block((Sublayer(SwiGLU(4)),), style="prenorm"), "style='prenorm': did you mean 'pre'"),
        (lambda: Repeat(()), "blocks is empty"),
        (lambda: Repeat((BLOCK,), 0), "times=0 must be positive"),
        (lambda: Decoder(0, 4, (Repeat((BLOCK,)),)), "vocab=0 must be positive"),
        (lambda: Decoder(4, 0, (Repeat((BLOCK,)),)), "width=0 must be positive"),
        (lambda: Decoder(4, 4, ()), "layers is empty"),
        (lambda: Decoder(4, 4, (Repeat((BLOCK,)),), context=0), "context=0 must be positive"),
        (lambda: decoder(BLOCK, position=Rope()), r"Rope\(.*\) has no effect here; set it in the attention"),
        (lambda: decoder(BLOCK, position=Alibi()), r"Alibi\(.*\) has no effect here; set it in the attention"),
        (lambda: Attention(4, position=Sinusoidal()), r"Sinusoidal\(.*\) has no effect here; set it in the stack"),
        (lambda: Attention(4, position=Learned(8)), r"Learned\(length=8.*\) has no effect here; set it in the stack"),
        (lambda: decoder(block(Attention(4, mask=Full()))), r"a token would attend to later ones in Attention\(.*Full"),
        (lambda: ShortConvolution(1), "taps=1 must be at least 2"),
        (lambda: RMSNorm(eps=-1.0), "eps=-1.0"),
        (lambda: LayerNorm(eps=-1.0), "eps=-1.0"),
    ],
)
def test_contradictory_fields_are_refused(make, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        make()


def test_a_spec_is_immutable() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Rope().base = 3.0


@pytest.mark.parametrize(("table", "kind"), KINDS)
def test_optional_fields_default_to_none(table: str, kind: str) -> None:
    """Files omit None, so an absent key must mean None."""
    cls = class_of(kind, kind, BASES[table])
    for field in dataclasses.fields(cls):
        if type(None) in typing.get_args(field_types(cls)[field.name]):
            assert field.default is None, f"{kind}.{field.name} would be read back as {field.default}"


def test_a_field_that_accepts_none_must_have_the_default_none() -> None:
    """Files leave out None, so None over another default would be read back as that default."""
    optional_choice = typing.Literal["a", None]
    defaults = [(int | None, 8), (Rope | None, Rope()), (optional_choice, "a"), (int | optional_choice, 1)]
    for hint, default in defaults:
        part = dataclasses.make_dataclass("Part", [("hidden", hint, default)], bases=(Spec,), frozen=True)
        with pytest.raises(SpecError, match="Part.hidden accepts None, but None is not its default.*make None"):
            part(None)
    required = dataclasses.make_dataclass("Part", [("hidden", int | None)], bases=(Spec,), frozen=True)
    with pytest.raises(SpecError, match="Part.hidden accepts None, but None is not its default"):
        required(None)
