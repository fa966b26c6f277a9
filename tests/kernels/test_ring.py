"""Ring attention in several processes equals attention in one, forward and backward, alone and in a model."""

import os
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import Tensor

from regard.kernels.attention import reference, ring_attention
from regard.kernels.attention.arguments import ScoreOptions
from regard.kernels.attention.bias import Buckets
from regard.kernels.attention.mask import Causal, Full, Mask
from regard.kernels.attention.patterns.window import Window
from regard.layout import TokenLayout
from regard.models.decoder import Decoder
from regard.models.stack import Repeat
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.feedforward import SwiGLU
from regard.parts.position.rope import Rope

LENGTH = 48
CASES: dict[str, tuple[Mask, bool, dict]] = {  # mask, packed, other options
    "causal": (Causal(), False, {}),
    "full": (Full(), False, {}),
    "window, packed": (Window(7), True, {}),
    "causal, capped, sinks, biased": (Causal(), False, {"softcap": 3.0, "sinks": True, "bias": True}),
}


def random_case(name: str) -> tuple[list[Tensor], TokenLayout, ScoreOptions, Tensor]:
    """The whole sequence, equal in every process."""
    draws = torch.Generator().manual_seed(1)
    q, k, v, weights = (torch.randn(2, h, LENGTH, 8, dtype=torch.float64, generator=draws) for h in (4, 2, 2, 4))
    mask, packed, more = CASES[name]
    layout = TokenLayout.whole(2, LENGTH)
    if packed:
        segments = (torch.arange(LENGTH) // 20).expand(2, -1)
        layout = TokenLayout(
            torch.arange(LENGTH) % 20 + torch.zeros_like(segments), segments, torch.arange(LENGTH).expand(2, -1) < 45
        )
    sinks = torch.randn(4, dtype=torch.float64, generator=draws).requires_grad_() if "sinks" in more else None
    table = torch.randn(8, 4, dtype=torch.float64, generator=draws).requires_grad_()
    bias = Buckets(table, 16, False) if "bias" in more else None
    options = ScoreOptions(mask, 8**-0.5, bias, more.get("softcap"), sinks)
    return [x.requires_grad_() for x in (q, k, v)], layout, options, weights


def learned(options: ScoreOptions) -> list[Tensor]:
    return [
        x for x in (options.sinks, options.bias.table if isinstance(options.bias, Buckets) else None) if x is not None
    ]


def part(layout: TokenLayout, places: Tensor) -> TokenLayout:
    """The layout of these tokens."""
    segments, valid = (None if x is None else x[:, places] for x in (layout.segments, layout.valid))
    return TokenLayout(layout.positions[:, places], segments, valid)


def check_kernel(name: str, places: Tensor) -> None:
    inputs, layout, options, weights = random_case(name)
    (reference.attend(*inputs, layout, options) * weights).sum().backward()
    expected = [x.grad for x in inputs]
    whole = [x.grad.clone() for x in learned(options)]
    own = [x.detach()[:, :, places].requires_grad_() for x in inputs]
    for x in learned(options):
        x.grad = None
    out = ring_attention.attend(*own, part(layout, places), options)
    valid = slice(None) if layout.valid is None else layout.valid[0, places]
    alone = reference.attend(*inputs, layout, options)[:, :, places]
    assert (out - alone)[:, :, valid].abs().max() < 1e-12
    (out * weights[:, :, places]).sum().backward()
    for x, grad in zip(own, expected, strict=True):
        assert (x.grad - grad[:, :, places]).abs().max() < 1e-12
    for x, grad in zip(learned(options), whole, strict=True):  # each process has the gradient of its own queries
        dist.all_reduce(x.grad)
        assert (x.grad - grad).abs().max() < 1e-12


def check_model(places: Tensor) -> None:
    block = Block((Sublayer(Attention(4, 2, position=Rope())), Sublayer(SwiGLU(24))))
    model = Decoder(50, 16, (Repeat((block,), 2),)).build(seed=0).double()
    tokens = torch.randint(50, (2, LENGTH), generator=torch.Generator().manual_seed(2))
    expected = model(tokens)
    expected.square().sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    for module in model.modules():
        if "attend" in vars(module):
            vars(module)["attend"] = ring_attention.attend
    out = model(tokens[:, places], TokenLayout(places.expand(2, -1)))
    assert (out - expected[:, places]).abs().max() < 1e-12
    out.square().sum().backward()
    for name, parameter in model.named_parameters():
        dist.all_reduce(parameter.grad)
        assert (parameter.grad - gradients[name]).abs().max() < 1e-10, name


def one_process(rank: int, size: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", f"file://{folder}/meet", timeout=timedelta(seconds=60), rank=rank, world_size=size)
    places = ring_attention.zigzag_shares(LENGTH, size)[rank]
    for name in CASES:
        check_kernel(name, places)
    check_model(places)
    dist.destroy_process_group()


@pytest.mark.ledger("ring.attn")
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_split_sequence_equals_the_whole(size: int, tmp_path: Path) -> None:
    multiprocessing.start_processes(one_process, (size, str(tmp_path)), size, start_method="forkserver")


@pytest.mark.ledger("ring.attn")
@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_process_has_equally_many_pairs(size: int) -> None:
    shares = ring_attention.zigzag_shares(LENGTH, size)
    assert shares.flatten().sort().values.equal(torch.arange(LENGTH))
    assert len({int((places + 1).sum()) for places in shares}) == 1  # a token at t attends to t + 1 keys


def test_cached_keys_are_refused() -> None:
    layout = TokenLayout(torch.full((1, 1), 3)).with_keys(torch.arange(4).unsqueeze(0))
    with pytest.raises(ValueError, match="ring attention: the keys must be the queries' own tokens"):
        ring_attention.attend(
            torch.zeros(1, 1, 1, 4), torch.zeros(1, 1, 4, 4), torch.zeros(1, 1, 4, 4), layout, ScoreOptions(Causal())
        )


def test_indivisible_length_is_refused() -> None:
    with pytest.raises(ValueError, match="length=50 is not divisible by 8"):
        ring_attention.zigzag_shares(50, 4)
