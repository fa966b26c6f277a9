"""Scores and patterns of every attention: recorded, patched, differentiated; without hooks nothing changes."""

import pytest
import torch
from torch import Tensor

from regard.engine.stores.contiguous import Contiguous
from regard.engine.stores.paged import Paged
from regard.kernels.attention.mask import Full
from regard.kernels.attention.patterns.longformer import Longformer
from regard.kernels.attention.patterns.window import Window
from regard.kernels.attention.reference import per_head
from regard.layout import TokenLayout
from regard.lens import attention_maps, names, patch, record, shapes
from regard.models.decoder import Decoder
from regard.models.encoder import Encoder
from regard.models.encoder_decoder import EncoderDecoder
from regard.models.stack import Repeat
from regard.parts import tap
from regard.parts.attention import Attention
from regard.parts.big_bird_attention import BigBirdAttention
from regard.parts.block import Block, Sublayer
from regard.parts.body import Body
from regard.parts.cross_attention import CrossAttention
from regard.parts.experts import Experts
from regard.parts.feedforward import FeedForward, SwiGLU
from regard.parts.global_attention import GlobalAttention
from regard.parts.input import Tokens
from regard.parts.latent_attention import LatentAttention
from regard.parts.linformer import Linformer
from regard.parts.position.alibi import Alibi
from regard.parts.position.rope import Rope
from regard.parts.rwkv import ChannelMixing
from regard.parts.scored_attention import ScoredAttention
from regard.parts.window_mlp import WindowMLP
from regard.verification.trial import randomize_weights

IDS = torch.randint(31, (2, 12), generator=torch.Generator().manual_seed(3))
BODY = "stack.blocks.0.sublayers.0.body"
CAUSAL = {
    "grouped-query": Attention(4, 2, position=Rope()),
    "window, sinks, cap": Attention(4, mask=Window(4), sinks=True, softcap=2.0),
    "alibi": Attention(4, 1, position=Alibi()),
    "latent": LatentAttention(4, 6, 4, 4),
    "additive": ScoredAttention(2),
    "general": ScoredAttention(2, score="general"),
}
BOTH_SIDES = {
    "full": Attention(4, mask=Full()),
    "global": GlobalAttention(2, mask=Longformer(2)),
    "big bird": BigBirdAttention(4, block=2, links=0),
    "linformer": Linformer(2, 16, 4),
}


def build(body: Body, encoder: bool = False):
    layers = (Repeat((Block((Sublayer(body), Sublayer(SwiGLU(24)))),), 2),)
    model = (Encoder(Tokens(31), 16, layers) if encoder else Decoder(31, 16, layers)).build(seed=0).double().eval()
    randomize_weights(model)
    return model


def models():
    cases = [(name, body, False) for name, body in CAUSAL.items()]
    cases += [(name, body, True) for name, body in BOTH_SIDES.items()]
    return pytest.mark.parametrize("body, encoder", [pytest.param(b, e, id=name) for name, b, e in cases])


@models()
def test_every_attention_has_scores_and_patterns_and_listening_changes_no_logits(body: Body, encoder: bool) -> None:
    model = build(body, encoder)
    with torch.no_grad():
        expected = model(IDS)
        with record(model, "*") as recorded:
            assert (model(IDS) - expected).abs().max() <= 1e-12
        assert torch.equal(model(IDS), expected)
    scores, pattern = recorded[f"{BODY}.scores"], recorded[f"{BODY}.pattern"]
    if not getattr(body, "sinks", False):
        assert torch.allclose(scores.softmax(-1), pattern)
        assert torch.allclose(pattern.sum(-1), torch.ones(()).double())
    assert (pattern[scores == -torch.inf] == 0).all() and pattern.std(-1).max() > 0.1
    if f"{BODY}.v" in recorded and not isinstance(body, GlobalAttention):
        z = pattern @ per_head(recorded[f"{BODY}.v"], recorded[f"{BODY}.q"])
        assert (z - recorded[f"{BODY}.z"]).abs().max() <= 1e-12
    if hasattr(model.get_submodule(BODY), "attention_map") and not isinstance(body, GlobalAttention):
        assert (attention_maps(model, IDS)[0] - pattern).abs().max() <= 1e-12


@models()
def test_a_patched_pattern_or_score_changes_only_its_head_and_row(body: Body, encoder: bool) -> None:
    model = build(body, encoder)

    def first_key_only(pattern: Tensor) -> Tensor:
        new = pattern.clone()
        new[:, 1, 7] = 0
        new[:, 1, 7, 0] = 1
        return new

    def by_scores(scores: Tensor) -> Tensor:
        """The same, except that sinks keep their weight; a key that the mask hides gets a score."""
        new = scores.clone()
        new[:, 1, 7] = -torch.inf
        new[:, 1, 7, 0] = 40.0
        return new

    with torch.no_grad():
        before = model(IDS)
        with patch(model, {f"{BODY}.pattern": first_key_only}):
            patched = model(IDS)
        with patch(model, {f"{BODY}.scores": by_scores}), record(model, BODY) as recorded:
            assert torch.allclose(model(IDS), patched, rtol=0, atol=1e-9)
        with record(model, BODY) as own:
            model(IDS)
    assert not torch.allclose(patched, before)
    changed = (recorded[BODY] - own[BODY]).abs().amax((0, 2)) > 1e-12
    assert changed.nonzero().flatten().tolist() == [7]


@torch.no_grad()
def test_cross_attention_patterns_are_recorded() -> None:
    def stack(*bodies: Body) -> tuple[Repeat, ...]:
        return (Repeat((Block(tuple(Sublayer(body) for body in bodies)),)),)

    spec = EncoderDecoder(
        Encoder(Tokens(31), 16, stack(Attention(2, mask=Full()))),
        Decoder(31, 16, stack(Attention(4), CrossAttention(2))),
    )
    model = spec.build(seed=0).double().eval()
    randomize_weights(model)
    expected = model(IDS[:, :7], IDS)
    with record(model, "*.body.*") as recorded:
        assert (model(IDS[:, :7], IDS) - expected).abs().max() <= 1e-12
    name = "target.stack.blocks.0.sublayers.1.body"
    pattern = recorded[f"{name}.pattern"]
    assert pattern.shape == (2, 2, 12, 7)
    assert (pattern @ recorded[f"{name}.v"] - recorded[f"{name}.z"]).abs().max() <= 1e-12


def test_the_gradient_of_a_pattern_is_that_of_the_output_times_the_values() -> None:
    model = build(CAUSAL["grouped-query"])
    with record(model, [f"{BODY}.?", f"{BODY}.pattern", f"{BODY}.scores"], grad=True) as recorded:
        value = model(IDS).sin().sum()
    q, v, z, pattern, scores = (recorded[f"{BODY}.{tap}"] for tap in ("q", "v", "z", "pattern", "scores"))
    of_z, of_pattern, of_scores = torch.autograd.grad(value, (z, pattern, scores))
    assert torch.allclose(of_pattern, of_z @ per_head(v, q).mT, atol=1e-12)
    jacobian = pattern * (of_pattern - (pattern * of_pattern).sum(-1, keepdim=True))
    assert torch.allclose(of_scores, jacobian, atol=1e-12) and of_scores.abs().max() > 1e-3


def test_a_query_without_keys_has_a_zero_pattern_and_finite_gradients() -> None:
    model = build(BOTH_SIDES["full"], encoder=True)
    positions = torch.arange(12).expand(2, 12)
    layout = TokenLayout(positions, valid=(positions < 9) & (torch.tensor([[1], [0]]) > 0))
    with record(model, f"{BODY}.pattern", grad=True) as recorded:
        value = model(IDS, layout).sum()
    pattern = recorded[f"{BODY}.pattern"]
    assert pattern[1].count_nonzero() == 0
    assert torch.autograd.grad(value, pattern)[0].isfinite().all()


def test_only_layers_with_a_hook_on_scores_or_pattern_leave_their_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls, original = build(CAUSAL["grouped-query"]), [], tap.attend_edited
    monkeypatch.setattr(tap, "attend_edited", lambda *args: calls.append(args) or original(*args))
    with torch.no_grad():
        expected = model(IDS)
        with record(model, ["*.body.q", "*.body.z", "*.neurons"]):
            assert torch.equal(model(IDS), expected)
        assert not calls
        with record(model, f"{BODY}.pattern"):
            model(IDS)
    assert len(calls) == 1


@torch.no_grad()
@pytest.mark.parametrize("kind", ["contiguous", "paged"])
@pytest.mark.parametrize("name", ["grouped-query", "latent"])
def test_the_pattern_of_a_cached_step_is_the_last_row(name: str, kind: str) -> None:
    model = build(CAUSAL[name])
    store = Contiguous(model.spec.memory(), rows=1, capacity=16, dtype=torch.float64)
    if kind == "paged":
        store = Paged(model.spec.memory(), 1, 16, torch.float64, block=4, blocks=4)
        store.reserve(0, 12)
    first, last = TokenLayout.whole(1, 11), TokenLayout(torch.tensor([[11]]))
    model(IDS[:1, :11], first, store.begin_forward(first))
    with record(model, f"{BODY}.pattern") as step:
        model(IDS[:1, 11:], last, store.begin_forward(last))
    pattern = step[f"{BODY}.pattern"][0, :, 0]
    assert (pattern[:, :12] - attention_maps(model, IDS[0])[0][:, -1]).abs().max() <= 1e-9
    assert pattern[:, 12:].count_nonzero() == 0


def test_patterns_of_a_compiled_model_are_recorded() -> None:
    model = build(CAUSAL["grouped-query"])
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        expected = compiled(IDS)
        with record(model, "*.pattern") as recorded:
            compiled(IDS)
        assert len(recorded) == 2 and torch.equal(compiled(IDS), expected)


def test_a_tap_that_is_unavailable_says_why() -> None:
    model = build(CAUSAL["grouped-query"])
    model.get_submodule(BODY).pattern.unavailable = "keys are divided"
    model(IDS)
    with record(model, f"{BODY}.pattern"), pytest.raises(ValueError, match="keys are divided"):
        model(IDS)


@torch.no_grad()
@pytest.mark.parametrize(
    "body", [FeedForward(20), SwiGLU(20), Experts(4, 2, SwiGLU(20), SwiGLU(20)), ChannelMixing(20), WindowMLP(3, 20)]
)
def test_neurons_times_the_last_matrix_are_the_output(body: Body) -> None:
    model = Decoder(31, 16, (Repeat((Block((Sublayer(body),)),)),)).build(seed=0).double().eval()
    expected = model(IDS)
    with record(model, "*") as recorded:
        assert torch.equal(model(IDS), expected)
    neurons = [name for name in recorded if name.endswith(".neurons")]
    assert len(neurons) == 1 + isinstance(body, Experts)
    for name in neurons:
        assert recorded[name].shape[-1] == 20
        if f"{BODY}.experts.neurons" != name:
            down_proj = name.removesuffix("neurons") + "down_proj"
            assert torch.equal(model.get_submodule(down_proj)(recorded[name]), recorded[down_proj])
    with patch(model, {"*.neurons": torch.zeros_like}):
        assert not torch.allclose(model(IDS), expected)


def test_names_and_shapes_list_every_activation() -> None:
    model = build(CAUSAL["grouped-query"])
    found = shapes(model, IDS)
    assert found[f"{BODY}.pattern"] == found[f"{BODY}.scores"] == (2, 4, 12, 12)
    assert found["stack.blocks.1"] == (2, 12, 16) and found["stack.blocks.1.sublayers.1.body.neurons"] == (2, 12, 24)
    assert list(found).index("stack.input") < list(found).index(f"{BODY}.q") < list(found).index("stack.blocks.0")
    assert set(found) <= set(names(model)) and "stack.blocks" not in names(model)
    assert names(model, "*.pattern") == [f"stack.blocks.{i}.sublayers.0.body.pattern" for i in (0, 1)]
