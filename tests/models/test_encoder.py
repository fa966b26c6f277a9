"""Encoders: equal to BERT, independent of padding and packing, with every head."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.kernels.attention.mask import Causal, Full, Mask
from regard.kernels.attention.patterns.bigbird import BigBird
from regard.kernels.attention.patterns.longformer import Longformer
from regard.kernels.attention.patterns.window import Window
from regard.layout import TokenLayout
from regard.models.base import build_on_meta
from regard.models.encoder import Encoder
from regard.models.heads import Classification, Dense, MaskedLM, Pooled, PreTraining
from regard.models.outputs import materialize
from regard.models.presets import BERT_DENSE, bert
from regard.models.stack import Repeat
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.experts import Experts
from regard.parts.feedforward import FeedForward, SwiGLU
from regard.parts.input import Tokens
from regard.parts.norm import LayerNorm, RMSNorm
from regard.parts.patches import Patches
from regard.parts.position.base import NoPosition
from regard.parts.position.learned import Learned
from regard.parts.position.rope import Rope
from regard.parts.position.sinusoidal import Sinusoidal
from regard.parts.position.t5 import T5Buckets
from regard.spec import SpecError
from tests.laws import VOCAB, WIDTH, error, layout_with_padding, random_ids, randomize_weights
from tests.models.reference_weights import PROJECTIONS, fill, randomized, renamed

SMALL = {"vocab": VOCAB, "width": WIDTH, "heads": 4, "hidden": 40, "layers": 2, "length": 64}
LENGTH = 12
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5}


def encoder(mask: Mask, rotary: bool = True, **fields: object) -> Encoder:
    attention = Attention(4, 2, position=Rope() if rotary else NoPosition(), mask=mask)
    block = Block((Sublayer(attention), Sublayer(SwiGLU(40))))
    return Encoder(Tokens(VOCAB), WIDTH, (Repeat((block,), 2),), norm=RMSNorm(), **fields)


ENCODERS = {
    "bert": bert(**SMALL),
    "rope": encoder(Full()),
    "window on both sides": encoder(Window(3, causal=False)),
    "longformer": encoder(Longformer(2, globals=2), rotary=False, position=Sinusoidal()),
    "bigbird": encoder(BigBird(4, 3, 1, 1, 64), rotary=False, position=Learned(64)),
    "t5 buckets": encoder(Full(), rotary=False, position=T5Buckets(8, 16, bidirectional=True, heads=4)),
    "causal": encoder(Causal()),
}


def build(spec: Encoder, dtype: torch.dtype = torch.float64) -> nn.Module:
    model = spec.build(seed=0).to(dtype).eval().requires_grad_(False)
    randomize_weights(model, seed=1)
    return model


@pytest.mark.parametrize("name", ENCODERS)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
@pytest.mark.ledger("mask.bidirectional")
def test_padded_batch_equals_each_alone(name: str, dtype: torch.dtype, left: bool) -> None:
    model, tokens = build(ENCODERS[name], dtype), random_ids(4, LENGTH)
    layout = layout_with_padding([1, 5, 11, LENGTH], LENGTH, left)
    found = model(tokens, layout)
    for row, valid in enumerate(layout.valid):
        assert error(found[row, valid], model(tokens[row, valid].unsqueeze(0))[0]) <= TOLERANCE[dtype]


def pack_documents(lengths: list[int], padding: int) -> tuple[list[Tensor], Tensor, TokenLayout]:
    documents = [random_ids(1, length, seed=length) for length in lengths]
    tokens = torch.cat([*documents, torch.zeros(1, padding, dtype=torch.int64)], 1)
    positions = torch.cat([torch.arange(length) for length in [*lengths, padding]]).unsqueeze(0)
    segments = torch.repeat_interleave(torch.arange(len(lengths) + 1), torch.tensor([*lengths, padding])).unsqueeze(0)
    return documents, tokens, TokenLayout(positions, segments, valid=segments < len(lengths), consecutive=True)


@pytest.mark.parametrize("name", ENCODERS)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_packed_equals_separate(name: str, dtype: torch.dtype) -> None:
    model = build(ENCODERS[name], dtype)
    documents, tokens, layout = pack_documents([3, 1, 25, 8], 4)
    separate = torch.cat([model(document) for document in documents], 1)
    assert error(model(tokens, layout)[:, :-4], separate) <= TOLERANCE[dtype]


@pytest.mark.ledger("model.encoder")
def test_a_hidden_state_depends_on_earlier_and_later_tokens() -> None:
    """With a causal mask it depends on earlier tokens only."""
    bidirectional, causal = build(ENCODERS["rope"]), build(ENCODERS["causal"])
    tokens = random_ids(1, 3)
    earlier_changed, later_changed = tokens.clone(), tokens.clone()
    earlier_changed[0, 0] = later_changed[0, 2] = (tokens[0, 0] + 1) % VOCAB
    assert bidirectional(tokens).shape == (1, 3, WIDTH)
    assert not torch.allclose(bidirectional(tokens)[0, 1], bidirectional(earlier_changed)[0, 1])
    assert not torch.allclose(bidirectional(tokens)[0, 1], bidirectional(later_changed)[0, 1])
    assert not torch.allclose(causal(tokens)[0, 1], causal(earlier_changed)[0, 1])
    assert torch.equal(causal(tokens)[0, 1], causal(later_changed)[0, 1])  # only the mask differs


BERT = {
    r"^bert\.": "",
    r"embeddings\.word_embeddings\.": "input.table.",
    r"embeddings\.token_type_embeddings\.": "input.types.",
    r"embeddings\.position_embeddings\.": "position.table.",
    r"^embeddings\.LayerNorm\.": "embedding_norm.",
    r"encoder\.layer\.": "stack.blocks.",
    r"cls\.predictions\.bias": "head.vocab.bias",
    r"cls\.predictions\.transform\.dense\.": "head.dense.dense.",
    r"cls\.predictions\.transform\.LayerNorm\.": "head.dense.norm.",
    r"pooler\.dense\.": "head.dense.dense.",
    r"classifier\.": "head.labels.",
    **PROJECTIONS,
}
HEADS = {
    "BertModel": Pooled("cls", dense=Dense("tanh"), normalize=False),
    "BertForMaskedLM": MaskedLM(BERT_DENSE),
    "BertForSequenceClassification": Classification(3, dense=Dense("tanh"), dropout=0.1),
    "BertForTokenClassification": Classification(3, "none", dropout=0.1),
}


@pytest.fixture(params=HEADS)
def pair(request: pytest.FixtureRequest) -> tuple[nn.Module, nn.Module]:
    """A model of `transformers`, and our model with the same weights."""
    import transformers

    config = transformers.BertConfig(
        vocab_size=VOCAB, hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=4, intermediate_size=40,
        max_position_embeddings=64, num_labels=3,
    )  # fmt: skip
    theirs = randomized(getattr(transformers, request.param)(config))
    ours = bert(**SMALL, head=HEADS[request.param]).build()
    return theirs, fill(ours, renamed(dict(theirs.named_parameters()), BERT))


@pytest.mark.ledger("model.encoder", "mask.bidirectional", "enc.classify")
def test_bert_equals_transformers(pair: tuple[nn.Module, nn.Module]) -> None:
    """Outputs and gradients are equal, with padding and two token types."""
    theirs, ours = pair
    tokens, layout = random_ids(3, LENGTH), layout_with_padding([4, 9, LENGTH], LENGTH)
    types = (torch.arange(LENGTH) > 3).long().expand(3, -1)
    out = theirs(tokens, attention_mask=layout.valid.long(), token_type_ids=types)
    expected = out.pooler_output if hasattr(out, "pooler_output") else out.logits
    found = ours(tokens, layout, types)
    if expected.dim() == 3:  # per token; outputs at padding are undefined
        found, expected = found[layout.valid], expected[layout.valid]
    assert error(found, expected) <= 1e-12
    for value in (found, expected):
        value.square().sum().backward()
    expected_gradients = renamed({name: p.grad for name, p in theirs.named_parameters()}, BERT)
    for name, parameter in ours.named_parameters():
        assert error(parameter.grad, expected_gradients[name].reshape(parameter.shape)) <= 1e-9, name


@pytest.mark.ledger("model.bertbase")
def test_bert_base_has_its_published_size() -> None:
    spec = bert(head=Pooled("cls", dense=Dense("tanh"), normalize=False))
    assert sum(p.numel() for p in build_on_meta(spec).parameters()) == 109_482_240


def pool_by_loop(x: Tensor, positions: Tensor, valid: Tensor, pool: str) -> Tensor:
    """Pooling of one document, token by token."""
    tokens = [t for t in range(len(x)) if valid[t]]
    if pool == "mean":
        return sum(x[t] for t in tokens) / len(tokens)
    order = [int(positions[t]) for t in tokens]
    return x[tokens[order.index(0 if pool == "cls" else max(order))]]


@pytest.mark.parametrize("pool", ["cls", "mean", "last"])
@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
def test_pooling_counts_valid_tokens_only(pool: str, left: bool) -> None:
    model = build(encoder(Full(), head=Pooled(pool, normalize=False)))
    tokens, layout = random_ids(4, LENGTH), layout_with_padding([1, 5, 11, LENGTH], LENGTH, left)
    hidden, found = model.encode(tokens, layout)[0].x, model(tokens, layout)
    for row in range(4):
        expected = pool_by_loop(hidden[row], layout.positions[row], layout.valid[row], pool)
        assert error(found[row], expected) <= 1e-12
        alone = model(tokens[row, layout.valid[row]].unsqueeze(0))[0]
        assert error(found[row], alone) <= 1e-9


@pytest.mark.parametrize("pool", ["cls", "mean", "last"])
def test_a_packed_row_has_one_vector_per_document(pool: str) -> None:
    model = build(encoder(Full(), head=Pooled(pool)))
    documents, tokens, layout = pack_documents([3, 1, 7], 2)
    found = model(tokens, layout)
    assert found.shape == (1, 3, WIDTH)
    assert error(found[0], torch.cat([model(document) for document in documents])) <= 1e-9


def test_sentence_embeddings_have_length_one() -> None:
    model = build(encoder(Full(), head=Pooled("mean", dim=7)))
    found = model(random_ids(3, LENGTH))
    assert found.shape == (3, 7)
    assert error(found.norm(dim=-1), torch.ones(3)) <= 1e-12


@pytest.mark.parametrize("head", [MaskedLM(Dense("gelu", RMSNorm())), Classification(3, "mean"), Pooled("last", 5)])
def test_gradients_pass_gradcheck(head: object) -> None:
    spec = encoder(Full(), head=head)
    model = build(spec).requires_grad_()
    layout = layout_with_padding([2, 4], 4)
    names, weights = zip(*model.named_parameters(), strict=True)

    def run(*values: Tensor) -> Tensor:
        return torch.func.functional_call(model, dict(zip(names, values, strict=True)), (random_ids(2, 4), layout))

    assert torch.autograd.gradcheck(run, weights, fast_mode=True)


@pytest.mark.ledger("emb.table")
def test_an_embedding_lookup_equals_a_product_with_one_hot_vectors() -> None:
    module = Tokens(VOCAB, types=2, scale=3.0).build(WIDTH).double()
    reference = nn.Embedding(VOCAB, WIDTH).double()
    reference.load_state_dict({"weight": module.table.weight})
    tokens, types = random_ids(2, 5), torch.tensor([[0, 0, 1, 1, 1]] * 2)
    one_hot = F.one_hot(tokens, VOCAB).double() @ reference.weight
    assert torch.equal(reference(tokens), one_hot)
    assert torch.equal(module(tokens, types), 3 * one_hot + module.types.weight[types])
    module(tokens, types).sin().sum().backward()
    (3 * one_hot + module.types.weight[types].detach()).sin().sum().backward()
    assert error(module.table.weight.grad, reference.weight.grad) <= 1e-12


@pytest.mark.ledger("emb.table")
def test_a_row_of_the_table_is_the_embedding_of_its_token() -> None:
    module, row = Tokens(2000).build(5), torch.tensor([0.1, 0.3, 0.4, 0.9, 0.8])
    with torch.no_grad():
        module.table.weight[1231] = row
    assert torch.equal(module(torch.tensor([[7, 1231]]))[0, 1], row)


@pytest.mark.ledger("emb.arbitrary")
def test_permuted_ids_with_a_permuted_table_permute_the_logits() -> None:
    """Permuting the tokens and the rows of the table permutes the logits and changes nothing else."""
    model = build(bert(**SMALL, head=MaskedLM(BERT_DENSE)))
    tokens, order = random_ids(2, LENGTH), torch.randperm(VOCAB)  # token t becomes order[t]
    expected = model(tokens)
    for weight in (model.input.table.weight, model.head.vocab.bias):
        weight.copy_(weight.clone()[order.argsort()])
    assert error(model(order[tokens])[..., order], expected) <= 1e-12


@pytest.mark.ledger("emb.table")
def test_unknown_ids_are_refused() -> None:
    model = build(bert(**SMALL))
    with pytest.raises(ValueError, match="token id 31 is outside 0 … 30; encode with"):
        model(torch.tensor([[1, VOCAB]]))
    with pytest.raises(ValueError, match="token id -1 is outside"):
        model(torch.tensor([[1, -1]]))
    with pytest.raises(ValueError, match="type id 2 is outside 0 … 1; give each token"):
        model(random_ids(1, 2), types=torch.tensor([[0, 2]]))
    with pytest.raises(ValueError, match="this model has no type embeddings"):
        build(ENCODERS["rope"])(random_ids(1, 2), types=torch.tensor([[0, 1]]))


def test_a_masked_lm_head_is_tied_to_the_embedding() -> None:
    tied, untied = (bert(**SMALL, head=MaskedLM(tied=tied)).build(0) for tied in (True, False))
    assert tied.head.vocab.weight is tied.input.table.weight
    assert untied.head.vocab.weight is not untied.input.table.weight


def test_an_untrained_masked_model_has_a_loss_of_about_ln_v() -> None:
    model, tokens = bert(**SMALL, head=MaskedLM(BERT_DENSE)).build(0).eval(), random_ids(8, 32)
    loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).item()
    assert 0 < loss - math.log(VOCAB) < 1


def test_embeddings_narrower_than_the_stack_are_projected() -> None:
    """Token, type and position embeddings and their norm are narrow, with projections to the stack and to the head."""
    dense = Dense("gelu", LayerNorm())
    spec = replace(bert(**SMALL, head=MaskedLM(dense)), embedding_dim=7)
    model, tokens = build(spec), random_ids(2, 5)
    x = model.input.table.weight[tokens] + model.input.types.weight[0] + model.position.table.weight[:5]
    x = F.layer_norm(x, (7,), model.embedding_norm.weight, model.embedding_norm.bias, 1e-12)
    widened = x @ model.widen.weight.T + model.widen.bias
    stack_inputs = []
    hook = model.stack.input.register_forward_hook(lambda _, __, out: stack_inputs.append(out))
    logits = model(tokens)
    hook.remove()
    assert error(stack_inputs[0], widened) <= 1e-12
    hidden = model.head.dense(model.encode(tokens)[0].x)  # (B, L, 7)
    assert hidden.shape == (2, 5, 7)
    assert error(logits, hidden @ model.input.table.weight.T + model.head.vocab.bias) <= 1e-12


def test_two_heads_on_one_stack_equal_each_alone() -> None:
    masked_lm, pair_head = MaskedLM(BERT_DENSE), Classification(2, dense=Dense("tanh"))
    model, tokens, layout = (
        build(bert(**SMALL, head=PreTraining(masked_lm, pair_head))),
        random_ids(3, LENGTH),
        layout_with_padding([4, 9, LENGTH], LENGTH),
    )
    found, x = model(tokens, layout), model.encode(tokens, layout)[0].x
    assert (found[0].shape, found[1].shape) == ((3, LENGTH, VOCAB), (3, 2))
    assert torch.equal(found[0], model.head.words(x, layout)) and torch.equal(found[1], model.head.pair(x, layout))
    assert model.head.words.vocab.weight is model.input.table.weight
    outputs = model(tokens, layout, outputs=True)
    assert torch.equal(materialize(outputs.logits), found[0]) and torch.equal(outputs.pair_logits, found[1])


def test_losses_of_experts_reach_the_outputs() -> None:
    block = Block((Sublayer(Attention(2, mask=Full())), Sublayer(Experts(4, 2, FeedForward(20)))))
    model = Encoder(Tokens(VOCAB), WIDTH, (Repeat((block,), 2),)).build(0)
    assert model(random_ids(2, 5), outputs=True).losses.keys() == {"balance"}
    assert not model.eval()(random_ids(2, 5), outputs=True).losses


REFUSED = {
    "masked_lm: patches have no vocabulary": lambda: Encoder(
        Patches((4, 4), (8, 8)), 8, ENCODERS["rope"].layers, head=MaskedLM(BERT_DENSE)
    ),
    "layers is empty": lambda: Encoder(Tokens(5), 8, ()),
    "has no effect here": lambda: Encoder(Tokens(5), 8, ENCODERS["rope"].layers, Rope()),
    "has 5 tokens, its positions support only 4": lambda: Encoder(
        Patches((4, 4), (8, 8)), 8, ENCODERS["rope"].layers, Learned(4)
    ),
    "labels=0 must be positive": lambda: Classification(0),
    "embeddings have 7 channels, the hidden states 24": lambda: replace(
        bert(**SMALL, head=MaskedLM()), embedding_dim=7
    ),
    "context=65 exceeds the 64 positions": lambda: replace(bert(**SMALL), context=65),
    "vocab=0 must be positive": lambda: Tokens(0),
}


@pytest.mark.parametrize("message", REFUSED)
def test_wrong_specs_are_refused(message: str) -> None:
    with pytest.raises(SpecError, match=message):
        REFUSED[message]()
