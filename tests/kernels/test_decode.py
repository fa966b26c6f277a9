"""Attention of decode steps with split keys equals the reference: contiguous keys and pages, all supported options."""

import pytest
import torch
from torch import Tensor

from regard.engine.stores.contiguous import Contiguous
from regard.engine.stores.paged import Paged
from regard.kernels.attention import backend, choose_once, decode, reference, select_backend
from regard.kernels.attention.arguments import Pages, ScoreOptions, describe, gather_pages
from regard.kernels.attention.mask import Causal, Full, Mask
from regard.kernels.attention.patterns.longformer import Longformer
from regard.kernels.attention.patterns.window import SinksAndWindow, Window
from regard.layout import TokenLayout
from regard.models.decoder import Decoder
from regard.models.stack import Repeat
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.feedforward import SwiGLU
from regard.parts.position.rope import Rope
from regard.parts.state import PerToken
from tests.kernels.cases import HEADS, bias_of
from tests.kernels.triton_device import DEVICE

KEYS, DIM, VALUE_DIM = 70, 16, 32
MASKS: dict[str, Mask] = {
    "causal": Causal(),
    "full": Full(),
    "window": Window(9),
    "window of one": Window(1),
    "window, both sides": Window(6, causal=False),
    "sinks and window": SinksAndWindow(3, 7),
}


def inputs(heads: str, queries: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, TokenLayout]:
    """Two rows of different lengths, with KEYS keys."""
    h, k = HEADS[heads]
    shapes = (2, h, queries, DIM), (2, k, KEYS, DIM), (2, k, KEYS, VALUE_DIM)
    q, k, v = (torch.randn(shape, dtype=dtype, device=DEVICE) for shape in shapes)
    ends = torch.tensor([[37], [KEYS]], device=DEVICE)
    positions = ends - queries + torch.arange(queries, device=DEVICE)
    return q, k, v, TokenLayout(positions).with_keys(torch.arange(KEYS, device=DEVICE).expand(2, KEYS))


def to_pages(x: Tensor, block: int, seed: int) -> Pages:
    """The same keys in blocks of a pool, in random order and between blocks of other rows."""
    rows, heads, keys, dim = x.shape
    blocks = -(-keys // block)
    order = torch.randperm(rows * blocks + 2, generator=torch.Generator().manual_seed(seed))
    table = order[: rows * blocks].view(rows, blocks).to(x.device)
    pool = torch.full((len(order), block, heads, dim), 1e4, dtype=x.dtype, device=x.device)
    padded = torch.zeros(rows, blocks * block, heads, dim, dtype=x.dtype, device=x.device)
    padded[:, :keys] = x.transpose(1, 2)
    pool[table] = padded.unflatten(1, (blocks, block))
    return Pages(pool.flatten(0, 1), table, block)


def options_of(mask: Mask, bias: str | None = None, cap: float | None = None, sinks: bool = False) -> ScoreOptions:
    score_bias = bias_of(bias, torch.float32)
    if score_bias is not None:
        vars(score_bias).update(
            {name: x.detach().to(DEVICE) for name, x in vars(score_bias).items() if torch.is_tensor(x)}
        )
    return ScoreOptions(
        mask, 0.3, score_bias, cap, torch.tensor([0.5, -1.0, 2.0, 0.1], device=DEVICE) if sinks else None
    )


def error(found: Tensor, q: Tensor, k: Tensor, v: Tensor, layout: TokenLayout, options: ScoreOptions) -> float:
    exact = reference.attend(q.double(), k.double(), v.double(), layout, options)
    return ((found - exact).abs().max() / exact.abs().max().clamp_min(1)).item()


CASES = [  # heads, queries, (bias, cap, sinks), block; each mask is tested with one of them
    ("grouped-query", 1, (None, None, False), 16),
    ("multi-query", 3, ("slopes", 1.5, True), 4),
    ("multi-head", 2, ("buckets", None, True), 5),
]


@pytest.mark.parametrize("n, mask", list(enumerate(MASKS)), ids=list(MASKS))
def test_contiguous_and_paged_keys_equal_the_reference(n: int, mask: str) -> None:
    heads, queries, extra, block = CASES[n % len(CASES)]
    q, k, v, layout = inputs(heads, queries)
    options = options_of(MASKS[mask], *extra)
    assert error(decode.attend(q, k, v, layout, options), q, k, v, layout, options) <= 2e-6
    pages = [to_pages(x, block, seed=n) for x in (k, v)]
    slots = pages[0].shape[2]
    paged_layout = TokenLayout(layout.positions).with_keys(
        torch.arange(slots, device=DEVICE).expand(2, slots), valid=occupied_slots(slots)
    )
    assert error(decode.attend(q, *pages, paged_layout, options), q, k, v, layout, options) <= 2e-6


def occupied_slots(slots: int) -> Tensor:
    """(2, slots): whether each slot of a row holds a key."""
    return torch.arange(slots, device=DEVICE).expand(2, slots) < KEYS


def test_keys_in_any_order_with_empty_slots_equal_the_reference() -> None:
    """As in a ring store: positions in any order, some slots empty."""
    q, k, v, layout = inputs("grouped-query", 2)
    order = torch.stack([torch.randperm(KEYS) for _ in range(2)]).to(DEVICE)
    layout = TokenLayout(layout.positions).with_keys(order, valid=torch.rand(2, KEYS, device=DEVICE) > 0.3)
    for mask in (Causal(), Window(20)):
        options = options_of(mask, "slopes")
        assert error(decode.attend(q, k, v, layout, options), q, k, v, layout, options) <= 2e-6


@pytest.mark.parametrize("sinks", [False, True])
def test_query_without_keys_is_zero(sinks: bool) -> None:
    q, k, v, layout = inputs("grouped-query", 1)
    valid = torch.ones(2, KEYS, dtype=torch.bool, device=DEVICE)
    valid[0] = False
    out = decode.attend(
        q, k, v, TokenLayout(layout.positions).with_keys(layout.key_positions, valid), options_of(Causal(), sinks=sinks)
    )
    assert not out[0].any()
    assert out[1].abs().min() > 0


@pytest.mark.parametrize("splits", [1, 2, 5])
def test_any_number_of_splits_equals_the_reference(splits: int) -> None:
    from regard.kernels.attention.triton.decode_kernels import launch

    q, k, v, layout = inputs("grouped-query", 1)
    out = launch(
        q, k, v, None, 0, layout.positions, layout.key_positions, None, -1, 0, 0, 0.3, None, "none", None, None,
        block=16, splits=splits,
    )  # fmt: skip
    assert error(out, q, k, v, layout, ScoreOptions(Causal(), 0.3)) <= 2e-6


def test_gathered_pages_equal_the_contiguous_keys() -> None:
    x = torch.randn(2, 3, 20, 4)
    pages = to_pages(x, 5, seed=0)
    assert pages.shape == x.shape == gather_pages(pages).shape
    assert pages.dtype == x.dtype
    assert torch.equal(gather_pages(pages), x)
    assert gather_pages(x) is x


def test_paged_store_returns_pages_to_attention_only() -> None:
    x = torch.randn(1, 2, 5, 8)
    for memory, expected_type in ((Attention(4, 2).memory(32), Pages), (PerToken({"k": (2, 8), "v": (2, 8)}), Tensor)):
        store = Paged(((memory,),), 1, 32, torch.float32, block=4, blocks=8)
        store.reserve(0, 5)
        layout = TokenLayout.whole(1, 5)
        k, _, layout = store.begin_forward(layout)[0][0].extend(layout, k=x, v=x)
        assert isinstance(k, expected_type)
        assert torch.equal(gather_pages(k)[:, :, :5], x)
        assert layout.key_positions.shape == (1, k.shape[2])


def test_unsupported_arguments_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v, layout = inputs("grouped-query", 1)
    with pytest.raises(ValueError, match="decode needs a CUDA GPU, not cpu; choose another backend, or auto"):
        backend("decode")(q.cpu(), k.cpu(), v.cpu(), layout, options_of(Causal()))
    monkeypatch.setattr(decode, "cannot_run_triton", lambda device: None)
    refusals = {
        "supports up to 16 queries per row": (torch.randn(2, 4, 17, DIM), k, v, options_of(Causal())),
        "supports a head_dim of 16, 32, 64, 128, 256": (q[..., :12], k[..., :12], v, options_of(Causal())),
        "needs q, k and v in one dtype of": (q.double(), k.double(), v.double(), options_of(Causal())),
        "does not support the mask Longformer": (q, k, v, options_of(Longformer(4, 2, causal=True))),
        "has no dropout": (q, k, v, ScoreOptions(Causal(), dropout=0.1)),
        "has no gradients": (q.requires_grad_(), k, v, options_of(Causal())),
    }
    for reason, (q, k, v, options) in refusals.items():
        assert reason in decode.unsupported_reason(describe(q, k, v, layout, options))
    with torch.no_grad():
        assert decode.unsupported_reason(describe(q, k, v, layout, options_of(Causal()))) is None
    uncached = describe(q, k, v, TokenLayout.whole(2, 1), options_of(Causal()))
    assert decode.slower_reason(uncached) == "decode is for cached keys"


@torch.no_grad()
def decoded_and_whole_logits(kind: str, compile: bool) -> tuple[Tensor, Tensor]:
    """The logits of a sequence decoded token by token with a store, and those of one forward of the whole sequence."""
    block = Block((Sublayer(Attention(4, 2, DIM, position=Rope())), Sublayer(SwiGLU(32))))
    model = Decoder(50, 32, (Repeat((block,), 2),)).build(seed=0).to(DEVICE).eval().requires_grad_(False)
    memory, length = model.spec.memory(), 9
    store = (
        Contiguous(memory, 2, 16, torch.float32, DEVICE)
        if kind == "contiguous"
        else Paged(memory, 2, 16, torch.float32, DEVICE, block=4, blocks=8)
    )
    assert all(store.reserve(row, length) for row in range(2))
    store.upload()  # a compiled step does not
    tokens = torch.randint(50, (2, length), device=DEVICE)

    def step(token: Tensor, positions: Tensor) -> Tensor:
        return model(token, layout := TokenLayout(positions), store.begin_forward(layout))

    run_step = torch.compile(step, fullgraph=True) if compile else step
    found = [run_step(tokens[:, t : t + 1], torch.full((2, 1), t, device=DEVICE)) for t in range(length)]
    return torch.cat(found, 1), model(tokens)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["contiguous", "paged"])
def test_decoded_model_equals_the_whole_forward(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "cannot_run_triton", lambda device: None)
    choose_once.cache_clear()
    for compile in (False, True):
        found, expected = decoded_and_whole_logits(kind, compile)
        assert (found - expected).abs().max() <= 1e-5
    choose_once.cache_clear()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["contiguous", "paged"])
@pytest.mark.parametrize("compile", [False, True])
def test_decoded_model_equals_the_whole_forward_on_a_gpu(kind: str, compile: bool) -> None:
    found, expected = decoded_and_whole_logits(kind, compile)
    assert (found - expected).abs().max() <= 1e-4


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mask", MASKS)
def test_error_is_at_most_twice_that_of_pytorch(mask: str, dtype: torch.dtype) -> None:
    for heads, queries in (("grouped-query", 1), ("multi-query", 7)):
        q, k, v, layout = inputs(heads, queries, dtype)
        options = options_of(MASKS[mask])
        sdpa_error = error(backend("sdpa")(q, k, v, layout, options), q, k, v, layout, options)
        decode_error = error(backend("decode")(q, k, v, layout, options), q, k, v, layout, options)
        assert decode_error <= 2 * sdpa_error + torch.finfo(dtype).eps


@pytest.mark.gpu
def test_auto_chooses_decode_and_compiles_in_one_graph() -> None:
    q, k, v, layout = inputs("grouped-query", 1, torch.bfloat16)
    options = options_of(Causal())
    assert select_backend(q, k, v, layout, options) == ("decode", "decode is the fastest and supports these arguments")
    step = torch.compile(lambda q: backend("auto")(q * 1.0, k, v, layout, options), fullgraph=True)
    assert torch.equal(step(q), backend("decode")(q, k, v, layout, options))
