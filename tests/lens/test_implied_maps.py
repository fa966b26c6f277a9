"""Every mixer has a map whose product with its values is its output, or says why it has none."""

import math
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from regard.layout import TokenLayout
from regard.lens import (
    attention_layers,
    attention_maps,
    named_attention_maps,
    patch,
    record,
    relative_weights,
    score_heads,
)
from regard.lens.maps import attention_modules
from regard.models.decoder import Decoder
from regard.models.stack import Repeat
from regard.parts.block import Block, Sublayer
from regard.parts.body import Body
from regard.parts.native_sparse_attention import NativeSparse
from regard.parts.position.rope import Rope
from regard.parts.rwkv import TimeMixing
from regard.parts.ssm.mamba import Mamba
from regard.parts.ssm.mamba2 import Mamba2
from regard.parts.ssm.selective import CHUNK
from regard.parts.tap import HasAttentionMap
from regard.verification.length import nested_specs
from tests import random_specs
from tests.laws import MODELS, OTHERS, VOCAB, build, random_ids

LENGTH = 11
KINDS = [
    "linear_attention", "retention", "gated_linear", "mamba", "mamba2", "rg_lru", "s4", "s4d", "time_mixing",
]  # fmt: skip
BODY = "stack.blocks.0.sublayers.0.body"


def packed_and_padded() -> TokenLayout:
    """A row of two documents, and a row with padding on the left."""
    positions = torch.stack([torch.arange(LENGTH), (torch.arange(LENGTH) - 3).clamp_min(0)])
    positions[0, 4:] -= 4
    segments = torch.stack([(torch.arange(LENGTH) >= 4).long(), torch.zeros(LENGTH).long()])
    return TokenLayout(positions, segments, torch.stack([torch.ones(LENGTH) > 0, torch.arange(LENGTH) >= 3]))


def heads_first(x: Tensor) -> Tensor:
    """(B, L, F) -> (B, F, L, 1): each channel as a head"""
    return x if x.dim() == 4 else x.transpose(1, 2).unsqueeze(-1)


def errors(model: nn.Module, layout: TokenLayout) -> list[float]:
    """The largest error of map @ v against z of every mixer, relative to z."""
    ids, modules = random_ids(2, LENGTH), dict(attention_modules(model))
    for module in modules.values():
        if isinstance(module, HasAttentionMap) and module.map_kind.channels:  # groups of one channel have exact maps
            with record(model, "*.z") as recorded:
                model(ids, layout)
            name = next(n for n, m in modules.items() if m is module)
            module.heads = recorded[f"{name}.z"].shape[-1]
    with record(model, ["*.v", "*.z"]) as recorded:
        model(ids, layout)
    maps = named_attention_maps(model, ids, layout)
    valid = torch.ones(2, LENGTH) > 0 if layout.valid is None else layout.valid
    found = []
    for name, weights in maps.items():
        v, z = (heads_first(recorded[f"{name}.{tap}"]) for tap in "vz")
        error = (weights @ v - z).abs() * valid[:, None, :, None]
        found.append(float(error.max() / max(1.0, float(z.abs().max()))))
    return found


@pytest.mark.parametrize("layout", [TokenLayout.whole(2, LENGTH), packed_and_padded()], ids=["whole", "packed, padded"])
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=4, deadline=None, derandomize=True)
@given(data=st.data())
def test_the_implied_matrix_times_the_values_is_the_output(kind: str, layout: TokenLayout, data: st.DataObject) -> None:
    body = data.draw(random_specs.mixers(4)[kind])
    model = build(Decoder(VOCAB, 32, (Repeat((Block((Sublayer(body),)),)),)))
    found = errors(model, layout)
    assert len(found) == 1 and found[0] <= 1e-9


@pytest.mark.parametrize(
    "name",
    ["encoder, bidirectional linear attention, performer", "encoder, bidirectional s4", "encoder, bidirectional s4d"],
)
def test_bidirectional_matrices_times_the_values_are_the_outputs(name: str) -> None:
    for layout in (TokenLayout.whole(2, LENGTH), packed_and_padded()):
        found = errors(build(OTHERS[name]), layout)
        assert len(found) >= 2 and max(found) <= 1e-9


def test_the_map_of_mamba2_equals_its_equation() -> None:
    """(C_tᵀ B_j) exp(Σ_{j<s≤t} Δ_s a) Δ_j + d [t = j], written out."""
    model, ids = build(MODELS["mamba2, grouped, limited"]), random_ids(1, 7)
    module: Mamba2 = model.get_submodule(BODY)
    inputs: list[Tensor] = []
    handle = module.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    model(ids)
    handle.remove()
    layout = TokenLayout.whole(1, 7)
    _, B, C, delta, _, _ = module.project(inputs[0], layout, module.memory.zeros(inputs[0])["conv"], torch.float64)
    (weights,) = attention_maps(model, ids[0], layer=0)
    for head in range(module.heads):
        group, a = head // (module.heads // module.groups), -math.exp(module.A_log[head])
        for t in range(7):
            for j in range(7):
                decay = math.exp(sum(float(delta[0, head, s]) * a for s in range(j + 1, t + 1)))
                value = float(C[0, group, t] @ B[0, group, j]) * decay * float(delta[0, head, j]) if j <= t else 0.0
                value += float(module.D[head]) if t == j else 0.0
                assert abs(weights[head, t, j] - value) <= 1e-9


def test_the_map_of_a_group_is_the_mean_of_its_channels() -> None:
    for name, body in {"mamba": Mamba(4, 1), "rwkv": TimeMixing(), "rg-lru": None, "s4": None}.items():
        spec = MODELS[name] if body is None else Decoder(VOCAB, 24, (Repeat((Block((Sublayer(body),)),)),))
        model, ids = build(spec), random_ids(LENGTH)
        (grouped,) = attention_maps(model, ids, layer=0)
        groups = len(grouped)
        model.get_submodule(BODY).heads = 24
        (channels,) = attention_maps(model, ids, layer=0)
        assert (channels.unflatten(0, (groups, -1)).mean(1) - grouped).abs().max() <= 1e-12
        part = model.get_submodule(BODY)
        part.heads = groups
        assert 1 < groups < 24


def test_selected_heads_equal_those_of_the_whole_map() -> None:
    for name in ("linear", "gated linear, by channel", "mamba", "mamba2, grouped, limited", "rg-lru", "s4", "rwkv"):
        model, calls = build(MODELS[name]), []
        body = model.get_submodule(BODY)
        original = body.attention_map
        body.attention_map = lambda taps, layout, calls=calls, run=original: (
            calls.append((taps, layout)) or run(taps, layout)
        )
        (whole,) = attention_maps(model, random_ids(LENGTH), layer=0)
        part = original(*calls[0], slice(1, 3))
        assert (part[0] - whole[1:3]).abs().max() <= 1e-12


def all_mixers() -> dict[str, tuple[str, Body]]:
    """A model with each kind of mixer."""
    found: dict[str, tuple[str, Body]] = {}
    for name, spec in (MODELS | OTHERS).items():
        for part in nested_specs(spec):
            if isinstance(part, Body) and part.mixes:
                found.setdefault(part.kind, (name, part))
    return found


@pytest.mark.ledger("lens.maps")
@pytest.mark.parametrize("kind", sorted(all_mixers()))
def test_every_mixer_has_a_map_or_a_reason(kind: str) -> None:
    """The module of a mixer, or one inside it, is listed by attention_modules; no mixer is silently left out."""
    found = [module for _, module in attention_modules(all_mixers()[kind][1].build(24))]
    assert found
    for module in found:
        if not isinstance(module, HasAttentionMap):
            assert len(module.no_attention_map) > 30


def test_kinds_name_what_a_map_is() -> None:
    first, second, *_ = attention_layers(build(MODELS["hybrid"]))
    assert [kind.label for kind in first.kinds] == ["linear attention, implied matrix"] * 3
    assert [kind.label for kind in second.kinds] == ["attention, softmax weights"] * 4
    assert (first.heads, second.heads) == (3, 4) and first.implied and not second.implied
    (mamba,) = attention_layers(build(MODELS["mamba"]))[0].mixers
    assert mamba.kind.label == "Mamba, implied matrix, mean over channels" and mamba.kind.signed
    (recurrent,) = attention_layers(build(MODELS["rnn, gru"]))[0].mixers
    assert recurrent.heads == 0 and recurrent.kind is None and "no linear function" in recurrent.reason


@pytest.mark.parametrize("name", [n for n in MODELS if n in ("linear", "rwkv", "mamba", "retention", "rg-lru")])
def test_declared_properties_hold(name: str) -> None:
    model = build(MODELS[name])
    (weights,), (mixer, *_) = attention_maps(model, random_ids(LENGTH), layer=0), attention_layers(model)[0].mixers
    assert mixer.kind.signed or weights.min() >= 0
    sums = weights.sum(-1)
    assert torch.allclose(sums, torch.ones_like(sums)) == mixer.kind.normalized
    assert torch.allclose(relative_weights(weights).sum(-1), torch.ones_like(sums))


def test_heads_with_implied_matrices_are_scored() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scores = score_heads(build(MODELS["mamba2 and a window"]), vocab=VOCAB, length=8)
    assert all((s is not None) and s.min() >= 0 and s.max() <= 1 for s in scores.scores["previous token"])


def test_long_inputs_of_mamba_are_recorded_whole() -> None:
    """On a CPU a long input runs in chunks, but not while a hook reads its taps."""
    model = build(MODELS["mamba"])
    ids = random_ids(1, CHUNK + 3)
    expected = model(ids)
    with record(model, f"{BODY}.z") as recorded:
        assert (model(ids) - expected).abs().max() <= 1e-9
    assert recorded[f"{BODY}.z"].shape[1] == CHUNK + 3


def test_attention_in_a_recurrence_has_one_row_per_step() -> None:
    """The rows weigh the source, and the model's output follows from the weighted mean of its states."""
    model = build(OTHERS["seq2seq, additive, bidirectional"])
    source, ids = random_ids(2, 7, seed=4), random_ids(2, 5)
    maps = named_attention_maps(model, source, ids)
    (name,) = [n for n in maps if n.startswith("target")]
    weights = maps[name]
    assert weights.shape[2:] == (5, 7) and torch.allclose(weights.sum(-1), torch.ones_like(weights.sum(-1)))
    shorter = named_attention_maps(model, source, ids[:, :3])[name]
    assert (weights[:, :, :3] - shorter).abs().max() <= 1e-12
    with record(model, f"{name}.attention.pattern") as recorded:
        model(source, ids)
    assert torch.equal(recorded[f"{name}.attention.pattern"], weights[:, :, -1:])


NSA = NativeSparse(4, 2, length=4, stride=2, block=4, select=3, window=3, position=Rope())


def test_branches_of_native_sparse_attention_have_patterns() -> None:
    """Each row sums to one over the keys that its branch allows; the gated sum of the three products is the output."""
    model, ids = build(Decoder(VOCAB, 32, (Repeat((Block((Sublayer(NSA),)),)),))), random_ids(2, 23)
    expected = model(ids)
    with record(model, [f"{BODY}.*.pattern", f"{BODY}.gates"]) as recorded:
        assert (model(ids) - expected).abs().max() <= 1e-9
    selected, window = (recorded[f"{BODY}.{branch}.pattern"] for branch in ("selected", "window"))
    for weights in (selected, window):
        assert weights.shape == (2, 4, 23, 23) and weights.triu(1).count_nonzero() == 0
        assert torch.allclose(weights.sum(-1), torch.ones_like(weights.sum(-1)))
    assert window.tril(-3).count_nonzero() == 0
    assert (selected > 0).sum(-1).max() == NSA.select * NSA.block and selected[:, :, -1, 0].min() > 0
    assert recorded[f"{BODY}.compressed.pattern"].shape[:3] == (2, 4, 23)
    assert recorded[f"{BODY}.gates"].shape == (2, 12, 23, 1)
    with patch(model, {f"{BODY}.selected.pattern": lambda a: a}):
        assert (model(ids) - expected).abs().max() <= 1e-9
    with patch(model, {f"{BODY}.selected.pattern": torch.zeros_like, f"{BODY}.gates": closed_gates}):
        without = model(ids)
    with patch(model, {f"{BODY}.gates": lambda g: g.tensor_split(3, 1)[0].new_zeros(g.shape)}):
        assert (model(ids) - without).abs().max() <= 1e-9 and (without - expected).abs().max() > 1e-3


def closed_gates(gates: Tensor) -> Tensor:
    """Only the gate of the selected branch is open."""
    compressed, selected, window = gates.chunk(3, 1)
    return torch.cat([torch.zeros_like(compressed), selected, torch.zeros_like(window)], 1)
