"""The mixer of Bengio's neural language model (2003): its equation, its window, and the effect of token order."""

import pytest
import torch
from torch import Tensor, nn

from regard.layout import TokenLayout
from regard.models.decoder import Decoder, DecoderModule
from regard.models.encoder import Encoder
from regard.models.heads import Pooled
from regard.models.stack import Repeat
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.body import Body
from regard.parts.feedforward import FeedForward
from regard.parts.input import Tokens
from regard.parts.norm import NoNorm
from regard.parts.position.base import NoPosition, Position
from regard.parts.position.sinusoidal import Sinusoidal
from regard.parts.recurrent import LSTM, RNN
from regard.parts.state import FixedSize
from regard.parts.window_mlp import WindowMLP
from regard.verification.trial import randomize_weights
from tests.laws import error

WIDTH, VOCAB = 4, 11


def bengio(hidden: int = 9, width: int = WIDTH, vocab: int = VOCAB) -> Decoder:
    """Bengio's model: a hidden layer over the concatenated embeddings of five tokens predicts the next token."""
    return Decoder(
        vocab,
        width,
        (Repeat((Block((Sublayer(WindowMLP(5, hidden), NoNorm()),), keep=0.0),)),),
        norm=NoNorm(),
        tied=False,
    )


def randomized(model: nn.Module) -> nn.Module:
    randomize_weights(model)
    return model


@pytest.mark.ledger("anc.mlp.lm")
def test_equals_its_equation() -> None:
    model = randomized(bengio().build(seed=0).double())
    body = model.stack.blocks[0].sublayers[0].body
    tokens = torch.randint(VOCAB, (1, 8), generator=torch.Generator().manual_seed(0))
    embeddings = model.embedding(tokens)[0]
    for t in range(8):
        window = [embeddings[t - i] if t >= i else torch.zeros(WIDTH, dtype=torch.float64) for i in range(5)]
        hidden = torch.tanh(body.up_proj(torch.cat(window)))
        assert error(model(tokens)[0, t], model.head(body.down_proj(hidden))) <= 1e-14
    assert model.spec.memory() == ((FixedSize({"tail": (4, WIDTH)}),),)  # decoding needs the last four tokens
    assert error(model(tokens[:, -5:])[:, -1], model(tokens)[:, -1]) <= 1e-14


@pytest.mark.ledger("anc.mlp.lm")
def test_learns_a_rule_over_three_tokens() -> None:
    """The next token follows from the last three, so the loss falls far below the entropy of single tokens."""
    torch.manual_seed(0)
    tokens = torch.tensor([ord(c) % VOCAB for c in "the cat sat on the mat and the rat sat on the cat " * 8])
    frequencies = tokens.bincount() / len(tokens)
    unigram = torch.special.entr(frequencies).sum().item()
    model = bengio(32, 16).build(seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(40):
        loss = nn.functional.cross_entropy(model(tokens[None, :-1])[0], tokens[1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert unigram > 1.8 and loss.item() < 0.25 * unigram


def influence(model: DecoderModule, tokens: Tensor) -> Tensor:
    """Returns the largest gradient of the last logits with respect to each embedding, (L,)."""
    embeddings = model.embedding(tokens).detach().requires_grad_()
    logits = model(tokens, TokenLayout.whole(*tokens.shape), embeddings=embeddings)
    (gradient,) = torch.autograd.grad(logits[0, -1].sin().sum(), embeddings)
    return gradient[0].abs().amax(-1)


@pytest.mark.ledger("anc.mlp.fixed")
def test_tokens_outside_the_window_have_no_influence() -> None:
    model = randomized(bengio().build(seed=0))
    found = influence(model, torch.arange(9)[None])
    assert (found[:4] == 0).all() and (found[4:] > 0).all()


@pytest.mark.ledger("anc.mlp.fixed")
@pytest.mark.parametrize("length", [3, 6])
def test_the_window_has_exactly_five_tokens(length: int) -> None:
    """The linear layer accepts five tokens only; the mixer truncates longer sequences and zero-pads shorter ones."""
    body = randomized(WindowMLP(5, 9).build(WIDTH))
    vectors = torch.randn(1, length, WIDTH, generator=torch.Generator().manual_seed(0))
    with pytest.raises(RuntimeError, match=f"1x{length * WIDTH} and {5 * WIDTH}x9"):
        body.up_proj(vectors.flatten(1))
    found = body(vectors, TokenLayout.whole(1, length))[:, -1]
    last_five = torch.cat([vectors.flip(1), torch.zeros(1, 2, WIDTH)], 1)[:, :5]
    assert error(found, body.down_proj(torch.tanh(body.up_proj(last_five.flatten(1))))) <= 1e-6


@pytest.mark.ledger("anc.mlp.layer")
def test_layers_are_linear_maps_with_an_activation_between() -> None:
    """Feed-forward layers have no state: no token affects another, in the same forward or a later one."""
    block = Block((Sublayer(FeedForward(7, "tanh"), NoNorm()),), keep=0.0)
    model = randomized(Decoder(VOCAB, WIDTH, (Repeat((block,), 2),), norm=NoNorm()).build(seed=0).double())
    bodies = [block.sublayers[0].body for block in model.stack.blocks]
    chain = nn.Sequential(
        *(layer for body in bodies for layer in (body.up_proj, nn.Tanh(), body.down_proj)), model.head
    )
    tokens = torch.randint(VOCAB, (2, 5), generator=torch.Generator().manual_seed(0))
    assert error(model(tokens), chain(model.embedding(tokens))) <= 1e-14
    assert error(model(tokens)[:, 3:], model(tokens[:, 3:])) <= 1e-14
    assert model.spec.memory() == ((None,), (None,))
    with pytest.raises(RuntimeError, match=f"2x{WIDTH + 1} and {WIDTH}x7"):
        bodies[0](torch.zeros(2, WIDTH + 1, dtype=torch.float64))


BODIES: dict[str, Body] = {
    "window": WindowMLP(3),
    "rnn": RNN(),
    "lstm": LSTM(),
    "attention with positions": Attention(2),
}


@pytest.mark.ledger("anc.mlp.bow")
def test_only_the_bag_of_words_ignores_order() -> None:
    """Four tokens with embeddings of few bits, so that their mean is exact in any order."""
    dog_bites_man, man_bites_dog = torch.tensor([[3, 1, 7, 5]]), torch.tensor([[7, 1, 3, 5]])

    def build_encoder(body: Body, position: Position) -> nn.Module:
        block = Block((Sublayer(body, NoNorm()),), keep=0.0)
        model = Encoder(Tokens(VOCAB), WIDTH, (Repeat((block,)),), position, head=Pooled("mean")).build(seed=0)
        randomized(model)
        for parameter in model.parameters():
            parameter.data = (parameter * 64).round() / 64
        return model

    bag = build_encoder(FeedForward(1, "identity"), NoPosition())
    assert torch.equal(bag(dog_bites_man), bag(man_bites_dog))
    assert not torch.equal(bag(dog_bites_man), bag(torch.tensor([[3, 1, 8, 5]])))
    for name, body in BODIES.items():
        ordered = build_encoder(body, Sinusoidal() if "positions" in name else NoPosition())
        assert error(ordered(dog_bites_man), ordered(man_bites_dog)) > 1e-3, name
