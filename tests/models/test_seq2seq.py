"""Sequence to sequence: states and attention equal loops and torch, and models learn a small task."""

import pytest
import torch
from torch import Tensor, nn

from regard.engine.stores.contiguous import Contiguous
from regard.layout import TokenLayout
from regard.models.decoder import Decoder
from regard.models.encoder import Encoder
from regard.models.seq2seq import Seq2Seq, Seq2SeqModule, seq2seq
from regard.models.stack import Repeat
from regard.objectives.translation import translation, translation_batch
from regard.parts.attention_rnn import AttentionRNN
from regard.parts.block import Block, Sublayer
from regard.parts.body import Body
from regard.parts.feedforward import SwiGLU
from regard.parts.input import Tokens
from regard.parts.recurrent import GRU, LSTM, RNN, RecurrentCell
from regard.parts.scored_attention import AdditiveModule, ScoredAttention
from regard.planning import plan
from regard.spec import SpecError
from regard.training.optimizer import AdamW
from regard.training.step import take_step
from regard.verification.trial import randomize_weights
from tests.laws import error

VOCAB, WIDTH, START, END = 15, 6, 1, 2
SOURCE, TARGET = torch.tensor([[3, 8, 4, 4, 7], [5, 3, 9, 6, 8]]), torch.tensor([[1, 4, 9, 12], [1, 7, 7, 3]])


def build_random(spec: Seq2Seq) -> Seq2SeqModule:
    model = spec.build(seed=0).double().eval()
    randomize_weights(model)
    return model


def recurrent_cells(model: nn.Module) -> list[RecurrentCell]:
    return [module for module in model.modules() if isinstance(module, RecurrentCell)]


def encode(model: Seq2SeqModule, source: Tensor) -> Tensor:
    """The outputs of the source's last layer (B, S, D)."""
    return model.source.encode(source)[0].x


@pytest.mark.ledger("anc.seq2seq")
def test_the_target_starts_from_the_final_state_of_the_source() -> None:
    """Equal to two LSTMs of torch.nn with two layers each and our weights."""
    model = build_random(seq2seq(VOCAB, WIDTH, LSTM(), layers=2))
    theirs = [nn.LSTM(WIDTH, WIDTH, 2, batch_first=True).double() for _ in range(2)]
    for side, lstm in zip((model.source, model.target), theirs, strict=True):
        for i, cell in enumerate(recurrent_cells(side)):
            for name, weight in (
                ("weight_ih", cell.x_proj.weight), ("weight_hh", cell.h_proj.weight), ("bias_ih", cell.bias),
                ("bias_hh", torch.zeros_like(cell.bias)),
            ):  # fmt: skip
                getattr(lstm, f"{name}_l{i}").data.copy_(weight)
    _, final_state = theirs[0](model.source.input(SOURCE, None))
    hidden, _ = theirs[1](model.target.embedding(TARGET), final_state)
    logits = model(SOURCE, TARGET)
    assert logits.shape == (2, 4, VOCAB)
    assert error(logits, model.target.head(hidden)) <= 1e-14


@pytest.mark.ledger("anc.bahdanau")
def test_additive_attention_is_computed_before_each_recurrent_step() -> None:
    """Equal to a loop over the target: scores with s_{i-1}, weights, context, the next state, logits."""
    model = build_random(seq2seq(VOCAB, WIDTH, GRU(reset="before"), "additive", bidirectional=True))
    body = model.target.stack.blocks[0].sublayers[0].body
    attention, cell = body.attention, body.recurrence
    logits = model(SOURCE, TARGET)
    for row in range(2):
        h = encode(model, SOURCE[row : row + 1])[0]  # (S, D)
        forward, backward = h.chunk(2, -1)
        s = torch.cat([forward[-1], backward[0]])
        for i, token in enumerate(TARGET[row]):
            x = model.target.embedding(token)
            scores = [attention.v[0] @ torch.tanh(attention.q_proj(s) + attention.k_proj(state)) for state in h]
            alpha = torch.stack(scores).softmax(0)
            assert abs(alpha.sum() - 1) <= 1e-14
            c = sum(weight * state for weight, state in zip(alpha, h, strict=True))
            r_x, z_x, n_x = (cell.x_proj(x) + cell.bias + attention.o_proj(c)).chunk(3)
            r, z = (torch.sigmoid(a + b) for a, b in zip((r_x, z_x), cell.h_proj(s).chunk(2), strict=True))
            s = (1 - z) * s + z * torch.tanh(n_x + cell.n_proj(r * s))
            assert error(logits[row, i], model.target.head(s)) <= 1e-13


@pytest.mark.ledger("anc.bahdanau")
def test_weights_of_additive_attention_sum_to_one_and_pass_gradcheck() -> None:
    attention = ScoredAttention(score_dim=3, source=True).build(WIDTH).double()
    assert isinstance(attention, AdditiveModule)
    s, h = torch.randn(2, 1, 4, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64).unbind()
    layout = TokenLayout.whole(1, 4).cross(
        TokenLayout(torch.arange(4)[None], valid=torch.tensor([[True, True, True, False]]))
    )
    arrays = attention.cached_arrays(h)
    alpha = attention.weights(attention.q_proj(s).unsqueeze(1), arrays["k"], layout)
    assert (alpha.sum(-1) - 1).abs().max() <= 1e-15 and (alpha[..., 3] == 0).all()
    s, h = s.requires_grad_(), h.requires_grad_()
    attend = lambda s, h: attention.output(s, layout, *attention.cached_arrays(h).values())  # noqa: E731
    assert torch.autograd.gradcheck(attend, (s, h), fast_mode=True)


def luong_model(score: str) -> Seq2SeqModule:
    return build_random(seq2seq(VOCAB, WIDTH, LSTM(), score))


@pytest.mark.ledger("anc.luong")
@pytest.mark.parametrize("score", ["dot", "general"])
def test_multiplicative_attention_is_computed_after_each_recurrent_step(score: str) -> None:
    model = luong_model(score)
    attention = model.target.stack.blocks[1].sublayers[0].body
    logits = model(SOURCE, TARGET)
    # the states s_t are those of the model without attention
    without_attention = build_random(seq2seq(VOCAB, WIDTH, LSTM()))
    weights = {name: tensor for name, tensor in model.state_dict().items() if "blocks.1" not in name}
    without_attention.load_state_dict(weights)
    for row in range(2):
        h = encode(model, SOURCE[row : row + 1])[0]
        hidden = hidden_states(without_attention, row)
        for t in range(4):
            w = attention.q_proj.weight if score == "general" else torch.eye(WIDTH, dtype=torch.float64)
            alpha = torch.stack([(w @ hidden[t]) @ state for state in h]).softmax(0)
            c = sum(weight * state for weight, state in zip(alpha, h, strict=True))
            attentional = torch.tanh(attention.o_proj(c) + attention.s_proj(hidden[t]))
            assert error(logits[row, t], model.target.head(attentional)) <= 1e-13


def hidden_states(model: Seq2SeqModule, row: int) -> Tensor:
    """Hidden states (L, D) of a target without attention."""
    head, model.target.head = model.target.head, nn.Identity()
    try:
        return model(SOURCE[row : row + 1], TARGET[row : row + 1])[0]
    finally:
        model.target.head = head


@pytest.mark.ledger("anc.luong")
def test_general_with_the_identity_equals_dot() -> None:
    general, dot = luong_model("general"), luong_model("dot")
    weights = general.state_dict()
    (name,) = (name for name in weights if name.endswith("q_proj.weight"))
    dot.load_state_dict({key: tensor for key, tensor in weights.items() if key != name})
    assert error(general(SOURCE, TARGET), dot(SOURCE, TARGET)) > 1e-3
    weights[name].copy_(torch.eye(WIDTH))
    assert error(general(SOURCE, TARGET), dot(SOURCE, TARGET)) <= 1e-14


def random_pairs(rows: int, generator: torch.Generator) -> tuple[list[list[int]], list[list[int]]]:
    """Random sources; a target is its source reversed, with 6 added to every token id."""
    lengths = torch.randint(3, 5, (rows,), generator=generator).tolist()
    sources = [torch.randint(3, 9, (n,), generator=generator).tolist() for n in lengths]
    return sources, [[6 + token for token in reversed(source)] for source in sources]


def decode_greedily(model: Seq2SeqModule, source: list[int], max_length: int = 8) -> list[int]:
    """Greedy decoding, token by token, with the source only in the first forward."""
    store = Contiguous(model.spec.memory(), 1, max_length, torch.float32, source=8)
    store.reserve(0, max_length)
    generated = [START]
    while generated[-1] != END and len(generated) < max_length:
        layout = TokenLayout(torch.tensor([[len(generated) - 1]]))
        source_ids = torch.tensor([source]) if len(generated) == 1 else None
        generated.append(
            int(
                model(source_ids, torch.tensor([generated[-1:]]), None, layout, store.begin_forward(layout))[
                    0, -1
                ].argmax()
            )
        )
    return generated


TRAINED = {
    "none": pytest.param(LSTM(), "none", False, marks=pytest.mark.ledger("anc.seq2seq")),
    "additive": pytest.param(GRU(), "additive", True, marks=pytest.mark.ledger("anc.bahdanau")),
    "general": pytest.param(LSTM(), "general", False, marks=[pytest.mark.ledger("anc.luong"), pytest.mark.slow]),
}


@pytest.mark.parametrize(("recurrence", "attention", "bidirectional"), TRAINED.values(), ids=TRAINED)
def test_a_model_learns_to_translate_and_reverse(recurrence: Body, attention: str, bidirectional: bool) -> None:
    """Trained by teacher forcing, evaluated by greedy decoding."""
    model = seq2seq(VOCAB, 48, recurrence, attention, bidirectional=bidirectional).build(seed=0)
    generator, optimizer = torch.Generator().manual_seed(0), AdamW().build(model, lr=1e-2)
    steps = [
        take_step(model, translation, translation_batch(*random_pairs(32, generator), START, END), optimizer, clip=1.0)
        for _ in range(150)
    ]
    assert steps[0]["loss"] > 2
    assert sum(step["accuracy"] for step in steps[-5:]) / 5 > 0.9
    model.eval()
    with torch.no_grad():
        correct = sum(
            decode_greedily(model, source)[1:-1] == target
            for source, target in zip(*random_pairs(20, generator), strict=True)
        )
    assert correct >= 14


def test_every_packed_document_needs_a_source() -> None:
    model = build_random(seq2seq(VOCAB, WIDTH))
    layout = TokenLayout(torch.tensor([[0, 1, 0, 1], [0, 1, 2, 3]]), torch.tensor([[0, 0, 1, 1], [0, 0, 0, 0]]))
    with pytest.raises(ValueError, match="has 2 documents, the target 3"):
        model(SOURCE, TARGET, None, layout)


def layers(*bodies: Body) -> tuple[Repeat, ...]:
    return (Repeat((Block(tuple(Sublayer(body) for body in bodies)),)),)


@pytest.mark.parametrize(
    ("source_bodies", "target_bodies", "message"),
    [
        ((LSTM(),), (GRU(),), "the source's state is"),
        ((LSTM(5),), (LSTM(),), "of the same kind and size"),
        ((SwiGLU(8),), (LSTM(),), "no layer of the source is recurrent"),
        ((LSTM(),), (SwiGLU(8),), "no layer of the target is recurrent"),
        ((GRU(),), (AttentionRNN(GRU(), ScoredAttention(source=True, source_width=9)),), "source_width=6"),
    ],
)
def test_states_that_do_not_match_are_refused(source_bodies: tuple, target_bodies: tuple, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        Seq2Seq(Encoder(Tokens(VOCAB), WIDTH, layers(*source_bodies)), Decoder(VOCAB, WIDTH, layers(*target_bodies)))


def test_wrong_attention_of_a_recurrence_is_refused() -> None:
    with pytest.raises(SpecError, match="attention.source=True"):
        AttentionRNN(RNN(), ScoredAttention())
    with pytest.raises(SpecError, match="leave attention.combine out"):
        AttentionRNN(RNN(), ScoredAttention(source=True, combine=True))


def test_the_spec_round_trips_and_can_be_planned() -> None:
    spec = seq2seq(VOCAB, WIDTH, GRU(), "additive", layers=3, bidirectional=True, source_vocab=9)
    assert Seq2Seq.from_json(spec.to_json()) == spec == Seq2Seq.from_toml(spec.to_toml())
    costs = plan(spec, context=20)
    assert costs.parameters == sum(p.numel() for p in spec.build(seed=0).parameters())
    assert costs.state_bytes == 4 * 3 * WIDTH and costs.kv_bytes_per_token == 4 * 2 * WIDTH


def test_a_row_cannot_start_without_its_source():
    model = build_random(seq2seq(VOCAB, WIDTH))
    store = Contiguous(model.spec.memory(), 2, 8, torch.float64, source=8)
    first_row_only = TokenLayout(torch.tensor([[0, 1], [0, 0]]), valid=torch.tensor([[True, True], [False, False]]))
    model(SOURCE, TARGET[:, :2], None, first_row_only, store.begin_forward(first_row_only))
    layout = TokenLayout(torch.tensor([[2, 3], [0, 1]]))
    with pytest.raises(ValueError, match=r"rows \[1\] start here, but there is no source"):
        model(None, TARGET[:, :2], None, layout, store.begin_forward(layout))


def test_a_packed_source_needs_a_packed_target():
    model = build_random(seq2seq(VOCAB, WIDTH))
    packed = TokenLayout(torch.tensor([[0, 1, 0, 1, 2]] * 2), segments=torch.tensor([[0, 0, 1, 1, 1]] * 2))
    with pytest.raises(ValueError, match="the source is packed and the target is not"):
        model(SOURCE, TARGET, packed)


def test_torch_compile_traces_attention_over_the_source() -> None:
    model = seq2seq(11, 8, GRU(reset="before"), "additive").build(0).eval()  # its steps are not fused
    source, target = torch.tensor([[1, 2, 3]]), torch.tensor([[4, 5]])
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.allclose(compiled(source, target), model(source, target), atol=1e-6)
