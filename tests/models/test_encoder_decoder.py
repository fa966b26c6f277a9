"""The encoder-decoder equals torch.nn.Transformer, is the same in every store, and has the published size of 2017."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from regard.engine.stores.contiguous import Contiguous
from regard.engine.stores.paged import Paged
from regard.kernels.attention.mask import Causal, Full
from regard.layout import Source, TokenLayout
from regard.models.base import build_on_meta
from regard.models.decoder import Decoder
from regard.models.encoder import Encoder
from regard.models.encoder_decoder import EncoderDecoder
from regard.models.heads import Pooled
from regard.models.presets import transformer_2017
from regard.models.stack import Repeat
from regard.parts.attention import Attention, AttentionModule
from regard.parts.block import Block, Sublayer
from regard.parts.cross_attention import CrossAttention, CrossAttentionModule
from regard.parts.feedforward import FeedForward, SwiGLU
from regard.parts.input import Tokens
from regard.parts.norm import LayerNorm, NoNorm
from regard.parts.patches import Patches
from regard.parts.position.rope import Rope
from regard.parts.position.t5 import T5Buckets
from regard.parts.scored_attention import ScoredAttention
from regard.spec import SpecError
from tests.laws import VOCAB, WIDTH, error, layout_with_padding, random_ids, randomize_weights
from tests.models.reference_weights import fill, randomized

LENGTH, SOURCE, CAPACITY = 9, 7, 16
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5}
ENCODER_BLOCK = Block((Sublayer(Attention(3, mask=Full(), position=Rope())), Sublayer(SwiGLU(24))))
DECODER_BLOCK = Block(
    (Sublayer(Attention(4, 2, position=Rope())), Sublayer(CrossAttention(4, 2)), Sublayer(SwiGLU(40)))
)
CROSS_BLOCK = Block((Sublayer(CrossAttention(4, source_width=12)), Sublayer(SwiGLU(40))))
IMAGE = Encoder(Patches((2, 2), (4, 4)), WIDTH, (Repeat((ENCODER_BLOCK,)),))


def encoder_decoder(source: Encoder, *blocks: Block, **target: object) -> EncoderDecoder:
    return EncoderDecoder(source, Decoder(VOCAB, WIDTH, (Repeat(blocks, 2),), **target))


MODELS = {
    "2017": transformer_2017(VOCAB, WIDTH, 4, 40, 2),
    "grouped, rope": encoder_decoder(Encoder(Tokens(VOCAB), WIDTH, (Repeat((ENCODER_BLOCK,), 2),)), DECODER_BLOCK),
    "another width, cross-attention in every other layer": encoder_decoder(
        Encoder(Tokens(VOCAB), 12, (Repeat((Block((Sublayer(Attention(2, mask=Full())),)),)),)),
        Block((Sublayer(Attention(4, position=Rope())), Sublayer(SwiGLU(40)))),
        CROSS_BLOCK,
        tied=False,
    ),
    "additive scores of a source": encoder_decoder(
        Encoder(Tokens(VOCAB), 12, (Repeat((Block((Sublayer(Attention(2, mask=Full())),)),)),)),
        Block((Sublayer(Attention(4, position=Rope())), Sublayer(ScoredAttention(2, source=True, source_width=12)))),
    ),
    "t5 buckets in both stacks": encoder_decoder(
        Encoder(
            Tokens(VOCAB),
            WIDTH,
            (Repeat((Block((Sublayer(Attention(4, mask=Full())),)),), 2),),
            T5Buckets(8, 16, bidirectional=True, heads=4),
        ),
        Block((Sublayer(Attention(4)), Sublayer(CrossAttention(4)), Sublayer(SwiGLU(40)))),
        position=T5Buckets(8, 16, heads=4),
    ),
}
STORES = {
    "contiguous": lambda spec, dtype: Contiguous(spec.memory(), 3, CAPACITY, dtype, source=12),
    "paged": lambda spec, dtype: Paged(spec.memory(), 3, CAPACITY, dtype, block=4, source=12, blocks=12),
}


def build(spec: EncoderDecoder, dtype: torch.dtype = torch.float64) -> nn.Module:
    model = spec.build(seed=0).to(dtype).eval().requires_grad_(False)
    randomize_weights(model, seed=1)
    return model


def open_store(kind: str, spec: EncoderDecoder, dtype: torch.dtype) -> Contiguous | Paged:
    store = STORES[kind](spec, dtype)
    assert all(store.reserve(row, CAPACITY) for row in range(store.rows))
    return store


def forward_cached(
    model: nn.Module, store: Contiguous | Paged, source: Tensor | None, tokens: Tensor, start: int
) -> Tensor:
    """Logits of tokens at the positions from `start` on; the source is given in the first forward only."""
    layout = TokenLayout(torch.arange(start, start + tokens.shape[1]).expand_as(tokens))
    return model(source, tokens, layout=layout, states=store.begin_forward(layout))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("kind", STORES)
@pytest.mark.parametrize("prefill", [1, 4, 8])
@pytest.mark.ledger("cross.once")
def test_cached_and_chunked_equal_whole(name: str, dtype: torch.dtype, kind: str, prefill: int) -> None:
    """A prefill of several tokens with the source, then one token per forward with the cached source."""
    model, source, tokens = build(MODELS[name], dtype), random_ids(2, SOURCE, seed=5), random_ids(2, LENGTH)
    store = open_store(kind, model.spec, dtype)
    found = [forward_cached(model, store, source, tokens[:, :prefill], 0)]
    found += [forward_cached(model, store, None, tokens[:, t : t + 1], t) for t in range(prefill, LENGTH)]
    assert error(torch.cat(found, 1), model(source, tokens)) <= TOLERANCE[dtype]


@pytest.mark.parametrize("name", MODELS)
def test_paged_equals_contiguous(name: str) -> None:
    model, source, tokens = build(MODELS[name], torch.float32), random_ids(2, SOURCE, seed=5), random_ids(2, LENGTH)
    stores = [open_store(kind, model.spec, torch.float32) for kind in STORES]
    for start, stop in ((0, 4), (4, 5), (5, LENGTH)):
        contiguous, paged = (
            forward_cached(model, store, None if start else source, tokens[:, start:stop], start) for store in stores
        )
        assert torch.equal(contiguous, paged)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
@pytest.mark.parametrize("source_left", [False, True], ids=["source right", "source left"])
@pytest.mark.ledger("cross.module")
def test_padded_batch_equals_each_alone(name: str, dtype: torch.dtype, left: bool, source_left: bool) -> None:
    model, source, tokens = build(MODELS[name], dtype), random_ids(3, SOURCE, seed=5), random_ids(3, LENGTH)
    source_layout = layout_with_padding([3, SOURCE, 1], SOURCE, source_left)
    layout = layout_with_padding([LENGTH, 1, 5], LENGTH, left)
    found = model(source, tokens, source_layout, layout)
    for row in range(3):
        source_valid, valid = source_layout.valid[row], layout.valid[row]
        alone = model(source[row : row + 1, source_valid], tokens[row : row + 1, valid])
        assert error(found[row, valid], alone[0]) <= TOLERANCE[dtype]


@pytest.mark.parametrize("kind", STORES)
@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
def test_rows_of_different_lengths_decode_as_each_alone(kind: str, left: bool) -> None:
    """Sources and prompts of different lengths; the rows of the store differ from those of the batch."""
    model, source, tokens = build(MODELS["grouped, rope"]), random_ids(2, SOURCE, seed=5), random_ids(2, LENGTH)
    store, rows, lengths = open_store(kind, model.spec, torch.float64), torch.tensor([2, 0]), [2, 5]
    source_layout, layout = layout_with_padding([3, SOURCE], SOURCE, left), layout_with_padding(lengths, 5, left)
    prompt = tokens.gather(1, layout.positions)
    layout = replace(layout, rows=rows)
    model(source, prompt, source_layout, layout, store.begin_forward(layout))
    alone = [model(source[r : r + 1, source_layout.valid[r]], tokens[r : r + 1])[0] for r in range(2)]
    for step in range(3):
        positions = torch.tensor(lengths).unsqueeze(-1) + step
        layout = TokenLayout(positions, rows=rows)
        logits = model(None, tokens.gather(1, positions), layout=layout, states=store.begin_forward(layout))
        assert error(logits[:, 0], torch.stack([alone[r][lengths[r] + step] for r in range(2)])) <= 1e-9


@pytest.mark.parametrize("name", MODELS)
def test_packed_pairs_equal_separate_ones(name: str) -> None:
    """In a row with several pairs, each target attends to the source of its pair only."""
    model, target_lengths, source_lengths = build(MODELS[name]), [3, 1, 5], [2, 4, 1]

    def pack(sizes: list[int], seed: int) -> tuple[list[Tensor], Tensor, TokenLayout]:
        sequences = [random_ids(1, size, seed=seed + size) for size in sizes]
        positions = torch.cat([torch.arange(size) for size in sizes]).unsqueeze(0)
        segments = torch.repeat_interleave(torch.arange(3), torch.tensor(sizes)).unsqueeze(0)
        return sequences, torch.cat(sequences, 1), TokenLayout(positions, segments, consecutive=True)

    separate_sources, source, source_layout = pack(source_lengths, 20)
    separate_targets, tokens, layout = pack(target_lengths, 40)
    separate = torch.cat([model(s, t) for s, t in zip(separate_sources, separate_targets, strict=True)], 1)
    assert error(model(source, tokens, source_layout, layout), separate) <= 1e-9


@pytest.mark.ledger("cross.once")
def test_a_source_is_projected_once() -> None:
    model, calls = build(MODELS["2017"]), Counter()
    for name, module in model.named_modules():
        if isinstance(module, CrossAttentionModule):
            module.k_proj.register_forward_hook(lambda *_, name=name: calls.update([name]))
    model.source.register_forward_hook(lambda *_: calls.update(["source"]))
    store, tokens = open_store("contiguous", model.spec, torch.float64), random_ids(2, LENGTH)
    forward_cached(model, store, random_ids(2, SOURCE), tokens[:, :1], 0)
    for t in range(1, LENGTH):
        forward_cached(model, store, None, tokens[:, t : t + 1], t)
    assert len(calls) == 2 and set(calls.values()) == {1}


@pytest.mark.ledger("model.autoregressive")
@pytest.mark.parametrize("kind", STORES)
def test_greedy_generation_is_the_same_with_and_without_a_cache(kind: str) -> None:
    """Without a cache every step computes the whole sequence, with a cache one token."""
    model, source = build(MODELS["grouped, rope"]), random_ids(2, SOURCE, seed=5)
    store, uncached = open_store(kind, model.spec, torch.float64), torch.zeros(2, 1, dtype=torch.int64)
    cached = uncached
    for t in range(LENGTH):
        uncached = torch.cat([uncached, model(source, uncached)[:, -1:].argmax(-1)], 1)
        step = forward_cached(model, store, None if t else source, cached[:, -1:], t)
        cached = torch.cat([cached, step.argmax(-1)], 1)
    assert torch.equal(cached, uncached)
    assert len(uncached.unique()) > 3


def test_a_missing_source_is_refused() -> None:
    model = build(MODELS["2017"])
    with pytest.raises(ValueError, match="cross-attention has no source"):
        model(None, random_ids(1, 3))


def attention_weights(theirs: nn.MultiheadAttention, prefix: str) -> dict[str, Tensor]:
    weights, biases = theirs.in_proj_weight.chunk(3), theirs.in_proj_bias.chunk(3)
    found = {f"{prefix}{n}_proj.weight": w for n, w in zip("qkv", weights, strict=True)}
    found |= {f"{prefix}{n}_proj.bias": b for n, b in zip("qkv", biases, strict=True)}
    return found | {f"{prefix}o_proj.{n}": p for n, p in theirs.out_proj.named_parameters()}


def layer_weights(theirs: nn.Module, prefix: str) -> dict[str, Tensor]:
    mixers = [theirs.self_attn, theirs.multihead_attn] if hasattr(theirs, "multihead_attn") else [theirs.self_attn]
    found, last = {}, f"{prefix}sublayers.{len(mixers)}."
    for i, mixer in enumerate(mixers):
        found |= attention_weights(mixer, f"{prefix}sublayers.{i}.body.")
    for i in range(len(mixers) + 1):
        norm = getattr(theirs, f"norm{i + 1}")
        found |= {f"{prefix}sublayers.{i}.norm.{n}": p for n, p in norm.named_parameters()}
    for name, linear in (("up", theirs.linear1), ("down", theirs.linear2)):
        found |= {f"{last}body.{name}_proj.{n}": p for n, p in linear.named_parameters()}
    return found


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")  # a warning of torch about a fast path that is not used
@pytest.mark.parametrize("pre", [False, True], ids=["post", "pre"])
@pytest.mark.ledger("model.encdec", "cross.module")
def test_encoder_decoder_equals_the_transformer_of_torch(pre: bool) -> None:
    """Outputs and gradients are equal, with a padded source and a norm after each stack."""
    theirs = randomized(nn.Transformer(WIDTH, 4, 2, 3, 40, dropout=0.0, batch_first=True, norm_first=pre))
    norm, style = LayerNorm(), "pre" if pre else "post"
    feedforward = Sublayer(FeedForward(40, "relu"), norm)
    encoder_block = Block((Sublayer(Attention(4, mask=Full(), bias=True), norm), feedforward), style)
    self_attention = Sublayer(Attention(4, bias=True), norm)
    cross_attention = Sublayer(CrossAttention(4, bias=True), norm)
    decoder_block = Block((self_attention, cross_attention, feedforward), style)
    spec = EncoderDecoder(
        Encoder(Tokens(VOCAB), WIDTH, (Repeat((encoder_block,), 2),), norm=norm),
        Decoder(VOCAB, WIDTH, (Repeat((decoder_block,), 3),), norm=norm),
        shared=True,
    )
    table = nn.Embedding(VOCAB, WIDTH).double().weight
    tensors = {"source.input.table.weight": table}
    for stack, name in ((theirs.encoder, "source"), (theirs.decoder, "target")):
        for i, layer in enumerate(stack.layers):
            tensors |= layer_weights(layer, f"{name}.stack.blocks.{i}.")
        tensors |= {f"{name}.norm.{n}": p for n, p in stack.norm.named_parameters()}
    ours = fill(spec.build(), tensors)
    source, tokens, layout = (
        random_ids(2, SOURCE, seed=5),
        random_ids(2, LENGTH),
        layout_with_padding([4, SOURCE], SOURCE),
    )
    hidden = theirs(
        table[source],
        table[tokens],
        tgt_mask=nn.Transformer.generate_square_subsequent_mask(LENGTH, dtype=torch.float64),
        src_key_padding_mask=~layout.valid,
        memory_key_padding_mask=~layout.valid,
        tgt_is_causal=True,
    )
    expected, found = hidden @ table.T, ours(source, tokens, layout)
    assert error(found, expected) <= 1e-12
    for value in (found, expected):
        value.sin().sum().backward()
    for layer, block in zip(theirs.decoder.layers, ours.target.stack.blocks, strict=True):
        grads = [getattr(block.sublayers[1].body, f"{n}_proj").weight.grad for n in "qkv"]
        assert error(torch.cat(grads), layer.multihead_attn.in_proj_weight.grad) <= 1e-9
    for layer, block in zip(theirs.encoder.layers, ours.source.stack.blocks, strict=True):
        assert error(block.sublayers[1].body.up_proj.weight.grad, layer.linear1.weight.grad) <= 1e-9


@pytest.mark.ledger("cross.module")
def test_cross_attention_equals_the_attention_of_torch() -> None:
    theirs = randomized(nn.MultiheadAttention(WIDTH, 4, kdim=12, vdim=12, batch_first=True))
    ours = CrossAttention(4, bias=True, source_width=12).build(WIDTH)
    tensors = {f"{n}_proj.weight": getattr(theirs, f"{n}_proj_weight") for n in "qkv"}
    tensors |= {f"{n}_proj.bias": bias for n, bias in zip("qkv", theirs.in_proj_bias.chunk(3), strict=True)}
    fill(ours, tensors | {f"o_proj.{n}": p for n, p in theirs.out_proj.named_parameters()})
    x, source = torch.randn(2, 3, WIDTH).double(), torch.randn(2, SOURCE, 12).double()
    layout = layout_with_padding([4, SOURCE], SOURCE)
    expected, _ = theirs(x, source, source, key_padding_mask=~layout.valid)
    assert error(ours(x, TokenLayout.whole(2, 3).with_source(Source(source, layout))), expected) <= 1e-12


def cross_attention_by_loop(module: CrossAttentionModule, x: Tensor, source: Tensor) -> Tensor:
    """softmax(q k / √E) v, head by head and token by token."""
    q, k, v = module.q_proj(x), module.k_proj(source), module.v_proj(source)
    size = q.shape[-1] // module.heads
    rows = []
    for t in range(len(x)):
        heads = []
        for h in range(module.heads):
            g = h // (module.heads // module.kv_heads)
            q_slice, kv_slice = slice(h * size, (h + 1) * size), slice(g * size, (g + 1) * size)
            scores = torch.stack([q[t, q_slice] @ k[s, kv_slice] / size**0.5 for s in range(len(source))])
            weights = scores.exp() / scores.exp().sum()
            heads.append(sum(weights[s] * v[s, kv_slice] for s in range(len(source))))
        rows.append(module.o_proj(torch.cat(heads)))
    return torch.stack(rows)


@pytest.mark.ledger("cross.module", "cross.modal")
def test_queries_of_one_sequence_attend_to_another() -> None:
    """Equal to a loop with patches of an image and with tokens as source; gradients pass gradcheck."""
    module = CrossAttention(4, 2, bias=True, source_width=12).build(WIDTH).double()
    image = Encoder(Patches((2, 2), (4, 6)), 12, (Repeat((Block((Sublayer(SwiGLU(8)),)),)),)).build(0).double()
    patches, _ = image.encode(torch.randn(1, 3, 4, 6, dtype=torch.float64))
    assert patches.x.shape == (1, 7, 12)
    hidden = torch.randn(1, 5, 12, dtype=torch.float64)
    x = torch.randn(1, 3, WIDTH, dtype=torch.float64, requires_grad=True)
    for source in (patches, Source(hidden, TokenLayout.whole(1, 5))):
        layout = TokenLayout.whole(1, 3).with_source(source)
        assert error(module(x, layout)[0], cross_attention_by_loop(module, x[0], source.x[0])) <= 1e-12
    hidden.requires_grad_()

    def run(x: Tensor, hidden: Tensor) -> Tensor:
        return module(x, TokenLayout.whole(1, 3).with_source(Source(hidden, TokenLayout.whole(1, 5))))

    assert torch.autograd.gradcheck(run, (x, hidden), fast_mode=True)


@pytest.mark.ledger("cross.modal")
def test_a_decoder_attends_to_an_image() -> None:
    block = Block((Sublayer(Attention(4, position=Rope())), Sublayer(CrossAttention(4)), Sublayer(SwiGLU(24))))
    model = build(encoder_decoder(IMAGE, block))
    images, tokens = torch.randn(2, 3, 4, 4, dtype=torch.float64), random_ids(2, 5)
    store = open_store("paged", model.spec, torch.float64)
    first = forward_cached(model, store, images, tokens[:, :3], 0)
    second = forward_cached(model, store, None, tokens[:, 3:], 3)
    assert error(torch.cat([first, second], 1), model(images, tokens)) <= 1e-9
    assert not torch.allclose(model(images, tokens), model(images.flip(0), tokens))


@pytest.mark.ledger("model.base2017", "cross.three")
def test_the_base_model_of_2017_has_its_published_size() -> None:
    """Projections have no biases, as in the paper's equations; its 65M parameters are for another vocabulary."""
    model = build_on_meta(transformer_2017())

    def count(module: nn.Module) -> int:
        return sum(p.numel() for p in module.parameters())

    assert count(model.source.stack) == 18_902_016
    assert count(model.target.stack) == 25_199_616
    assert count(model.source.input) == 37_000 * 512 == 18_944_000
    assert count(model) == 63_045_632
    mixers = [module for module in model.modules() if isinstance(module, AttentionModule)]
    kinds = Counter((type(m) is CrossAttentionModule, m.mask.causal) for m in mixers)
    assert kinds == {(False, False): 6, (False, True): 6, (True, False): 6}  # encoder, decoder, cross-attention
    assert {(m.heads, m.q_proj.out_features // m.heads) for m in mixers} == {(8, 64)}
    assert model.source.input.table.weight is model.target.embedding.weight is model.target.head.weight


@pytest.mark.ledger("mask.parallel")
def test_one_forward_equals_one_per_prefix() -> None:
    model, source, tokens = build(MODELS["2017"]), random_ids(1, SOURCE, seed=5), random_ids(1, LENGTH)
    whole = model(source, tokens)
    for t in range(1, LENGTH):
        assert error(model(source, tokens[:, :t])[:, -1], whole[:, t - 1]) <= 1e-9


ENCODER = Encoder(Tokens(VOCAB), WIDTH, (Repeat((ENCODER_BLOCK,)),))
BLOCK_WITHOUT_CROSS_ATTENTION = Block((Sublayer(Attention(4)),))
REFUSED = {
    "does not attend to the source": lambda: encoder_decoder(ENCODER, BLOCK_WITHOUT_CROSS_ATTENTION),
    "but it has width 12; set source_width=12": lambda: encoder_decoder(replace(ENCODER, width=12), DECODER_BLOCK),
    "head, whose output is not used": lambda: encoder_decoder(replace(ENCODER, head=Pooled()), DECODER_BLOCK),
    "the source's input is patches; use Tokens": lambda: replace(encoder_decoder(IMAGE, DECODER_BLOCK), shared=True),
    "needs embedding tables of the same size; the source's is 30 × 24, the target's 31 × 24": lambda: replace(
        encoder_decoder(replace(ENCODER, input=Tokens(30)), DECODER_BLOCK), shared=True
    ),
    "queries attend to the whole source": lambda: CrossAttention(4, mask=Causal()),
}


@pytest.mark.parametrize("message", REFUSED)
def test_wrong_specs_are_refused(message: str) -> None:
    with pytest.raises(SpecError, match=message):
        REFUSED[message]()


def test_a_target_without_a_final_norm_round_trips() -> None:
    spec = transformer_2017()
    assert spec.target.norm == NoNorm()
    assert EncoderDecoder.from_toml(spec.to_toml()) == spec
    assert EncoderDecoder.from_json(spec.to_json()) == spec
