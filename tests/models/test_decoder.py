"""The decoder as a whole: frozen names, seeds, tied heads, initial loss, and causality."""

import math

import pytest
import torch
import torch.nn.functional as F

from regard.layout import TokenLayout
from regard.models.decoder import Decoder
from regard.models.encoder import Encoder
from regard.models.outputs import materialize
from regard.models.stack import Repeat
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.body import Body
from regard.parts.cross_attention import CrossAttention
from regard.parts.feedforward import FeedForward, SwiGLU
from regard.parts.input import Tokens
from regard.parts.latent_attention import LatentAttention
from regard.parts.linear_attention import LinearAttention
from regard.parts.native_sparse_attention import NativeSparse
from regard.parts.norm import LayerNorm
from regard.parts.position.alibi import Alibi
from regard.parts.position.learned import Learned
from regard.parts.position.t5 import T5Buckets
from regard.parts.scored_attention import ScoredAttention
from regard.parts.short_convolution import ShortConvolution
from regard.spec import SpecError
from tests.laws import MODELS, VOCAB, build, error, random_ids

LLAMA = Block((Sublayer(Attention(4, 2)), Sublayer(SwiGLU(40))))
STATE_DICT_KEYS = {
    "llama": (
        Decoder(VOCAB, 24, (Repeat((LLAMA,), 1),), tied=False),
        """embedding.weight stack.blocks.0.sublayers.0.norm.weight stack.blocks.0.sublayers.0.body.q_proj.weight
        stack.blocks.0.sublayers.0.body.k_proj.weight stack.blocks.0.sublayers.0.body.v_proj.weight
        stack.blocks.0.sublayers.0.body.o_proj.weight stack.blocks.0.sublayers.1.norm.weight
        stack.blocks.0.sublayers.1.body.gate_proj.weight stack.blocks.0.sublayers.1.body.up_proj.weight
        stack.blocks.0.sublayers.1.body.down_proj.weight norm.weight head.weight""",
    ),
    "gpt2": (
        Decoder(
            VOCAB,
            24,
            (Repeat((Block((Sublayer(FeedForward(40), LayerNorm()),)),), 1),),
            position=Learned(8),
            norm=LayerNorm(),
        ),
        """embedding.weight position.table.weight stack.blocks.0.sublayers.0.norm.weight
        stack.blocks.0.sublayers.0.norm.bias stack.blocks.0.sublayers.0.body.up_proj.weight
        stack.blocks.0.sublayers.0.body.up_proj.bias stack.blocks.0.sublayers.0.body.down_proj.weight
        stack.blocks.0.sublayers.0.body.down_proj.bias norm.weight norm.bias head.weight""",
    ),
    "linear, alibi": (
        Decoder(
            VOCAB,
            24,
            (Repeat((Block((Sublayer(LinearAttention(2, bias=True)), Sublayer(Attention(2, position=Alibi())))),)),),
        ),
        """embedding.weight stack.blocks.0.sublayers.0.norm.weight stack.blocks.0.sublayers.0.body.q_proj.weight
        stack.blocks.0.sublayers.0.body.q_proj.bias stack.blocks.0.sublayers.0.body.k_proj.weight
        stack.blocks.0.sublayers.0.body.k_proj.bias stack.blocks.0.sublayers.0.body.v_proj.weight
        stack.blocks.0.sublayers.0.body.v_proj.bias stack.blocks.0.sublayers.0.body.o_proj.weight
        stack.blocks.0.sublayers.0.body.o_proj.bias stack.blocks.0.sublayers.1.norm.weight
        stack.blocks.0.sublayers.1.body.q_proj.weight stack.blocks.0.sublayers.1.body.k_proj.weight
        stack.blocks.0.sublayers.1.body.v_proj.weight stack.blocks.0.sublayers.1.body.o_proj.weight
        norm.weight head.weight""",
    ),
    "narrow embeddings": (
        Decoder(VOCAB, 24, (Repeat((Block((Sublayer(FeedForward(40, bias=False)),)),)),), embedding_dim=10),
        """embedding.weight widen.weight stack.blocks.0.sublayers.0.norm.weight
        stack.blocks.0.sublayers.0.body.up_proj.weight stack.blocks.0.sublayers.0.body.down_proj.weight norm.weight
        narrow.weight head.weight""",
    ),
}


@pytest.mark.parametrize("name", STATE_DICT_KEYS)
def test_state_dict_keys_are_frozen(name: str) -> None:
    """Checkpoints depend on these names: a change here needs a way to read the old ones."""
    spec, keys = STATE_DICT_KEYS[name]
    assert list(spec.build().state_dict()) == keys.split()


def test_blocks_are_repeated_in_order() -> None:
    a, b = Block((Sublayer(SwiGLU(8)),)), Block((Sublayer(FeedForward(8)),))
    spec = Decoder(VOCAB, 8, (Repeat((a,)), Repeat((a, b), 2)))
    assert spec.blocks == [a, a, b, a, b]
    assert len(spec.build().stack.blocks) == 5


@pytest.mark.parametrize("name", MODELS)
def test_a_seed_determines_the_weights_and_leaves_the_global_generator_unchanged(name: str) -> None:
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    first, same_seed, other_seed = (MODELS[name].build(seed).state_dict() for seed in (1, 1, 2))
    assert torch.equal(torch.rand(3), expected)
    assert all(torch.equal(first[key], same_seed[key]) for key in first)
    assert not torch.equal(first["embedding.weight"], other_seed["embedding.weight"])


@pytest.mark.parametrize("name", [name for name in MODELS if "no norms" not in name])  # norms bound the logits
def test_an_untrained_model_has_a_loss_of_about_ln_v(name: str) -> None:
    tokens = random_ids(4, 32)
    loss = F.cross_entropy(MODELS[name].build(0)(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    assert 0 < loss.item() - math.log(VOCAB) < 1  # logits of deviation 1 cost half a nat more than uniform ones


@pytest.mark.parametrize("name", MODELS)
def test_no_token_depends_on_a_later_one(name: str) -> None:
    model, tokens = build(MODELS[name]), random_ids(1, 12)
    changed = tokens.clone()
    changed[0, 7] = (changed[0, 7] + 1) % VOCAB
    before, after = model(tokens)[0], model(changed)[0]
    assert error(after[:7], before[:7]) < 1e-13  # experts group other tokens, so their sums are rounded differently
    assert error(after[7], before[7]) > 1e-3


@pytest.mark.parametrize("name", MODELS)
def test_every_weight_gets_a_finite_gradient(name: str) -> None:
    model, tokens = build(MODELS[name]).requires_grad_(), random_ids(2, 12)
    F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith(("correction", "noise_proj.weight")):
            continue  # a correction affects only the choice of experts; noise is used in training only
        assert parameter.grad.isfinite().all(), parameter_name
        # A bias of the keys adds the same number to all scores of a query, which softmax ignores.
        assert parameter.grad.any() or parameter_name.endswith("k_proj.bias"), parameter_name


def test_a_tied_head_is_the_embedding() -> None:
    tied, untied = (Decoder(VOCAB, 24, (Repeat((LLAMA,)),), tied=tied).build() for tied in (True, False))
    assert tied.head.weight is tied.embedding.weight
    assert untied.head.weight is not untied.embedding.weight
    assert "head.weight" not in dict(tied.named_parameters())


@pytest.mark.parametrize("tied", [True, False])
def test_embeddings_of_another_width_are_projected_to_and_from_the_stack(tied: bool) -> None:
    """logits = E W_out norm(stack(W_in e_t)), written out; the logits for the loss are the same."""
    fields = {"embedding_dim": 10, "embedding_scale": 2.0, "head_bias": True, "ahead": (LLAMA,)}
    spec = Decoder(VOCAB, 24, (Repeat((LLAMA,)),), tied=tied, **fields)
    model, tokens = build(spec), random_ids(2, 9)
    assert model.embedding.weight.shape == model.head.weight.shape == (VOCAB, 10)
    embeddings = model.embedding.weight[tokens] @ model.widen.weight.T * 2.0  # (B, L, 24)
    hidden = model.stack(embeddings, TokenLayout.whole(2, 9))[0]
    expected = model.norm(hidden) @ model.narrow.weight.T @ model.head.weight.T + model.head.bias
    assert error(model(tokens), expected) < 1e-13
    outputs = model(tokens, outputs=True)
    assert error(materialize(outputs.logits), expected) < 1e-13
    assert materialize(outputs.ahead_logits[0]).shape == expected.shape
    assert error(model.logits(model.hidden(tokens)), expected) < 1e-13


def test_positions_past_the_learned_table_are_refused() -> None:
    model = MODELS["learned, layernorm, gelu"].build()
    with pytest.raises(ValueError, match="position 64 is beyond the 64 learned positions"):
        model(random_ids(1, 65))


def test_a_shared_bias_must_fit_the_heads() -> None:
    with pytest.raises(ValueError, match="its table has heads=2, but attention has heads=4"):
        Decoder(VOCAB, 24, (Repeat((LLAMA,), 1),), position=T5Buckets(heads=2))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (ShortConvolution(), "no attention of the stack reads its table"),
        (Attention(4, position=Alibi()), "attention has position=Alibi.*which replaces the stack's bias"),
        (Attention(4, position=T5Buckets()), "which replaces the stack's bias"),
    ],
    ids=["no attention", "alibi", "another table"],
)
def test_a_shared_bias_that_would_be_ignored_is_refused(body: Body, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        Decoder(VOCAB, 24, (Repeat((Block((Sublayer(body),)),), 1),), position=T5Buckets(heads=4))


@pytest.mark.parametrize("body", [Attention(5), LinearAttention(5), CrossAttention(5)], ids=lambda body: body.kind)
def test_a_width_that_the_heads_do_not_divide_is_refused_in_the_spec(body: Body) -> None:
    layers = (Repeat((Block((Sublayer(body),)),), 1),)
    with pytest.raises(SpecError, match=f"{body.kind.removeprefix('cross_')}: width=24 is not divisible by heads=5"):
        Decoder(VOCAB, 24, layers)
    with pytest.raises(SpecError, match="width=24 is not divisible by heads=5; choose one of 1, 2, 3, 4"):
        Encoder(Tokens(VOCAB), 24, layers)


def test_tokens_outside_the_vocabulary_are_refused() -> None:
    model = STATE_DICT_KEYS["llama"][0].build()
    with pytest.raises(ValueError, match=r"tokens have shape \(5,\), but a model takes \(batch, length\)"):
        model(random_ids(1, 5)[0])
    for token_id in (VOCAB, -1):
        with pytest.raises(ValueError, match=f"token id {token_id} is outside 0 … {VOCAB - 1}"):
            model(torch.full((1, 2), token_id))


@pytest.mark.parametrize(
    "mixer", [ScoredAttention(4, "dot"), LatentAttention(4, 8, 6, 4), NativeSparse(4, 2)], ids=lambda mixer: mixer.kind
)
def test_a_shared_bias_must_fit_every_mixer_that_uses_it(mixer: Body) -> None:
    """A bias of one head would be broadcast to four without an error."""
    block = Block((Sublayer(mixer),))
    with pytest.raises(ValueError, match=f"its table has heads=1, but {mixer.kind} has heads=4"):
        Decoder(VOCAB, 24, (Repeat((block,), 1),), position=T5Buckets(heads=1))
    with pytest.raises(ValueError, match=f"its table has heads=2, but {mixer.kind} has heads=4"):
        Decoder(VOCAB, 24, (Repeat((Block((Sublayer(Attention(2)),)),)),), position=T5Buckets(heads=2), ahead=(block,))
