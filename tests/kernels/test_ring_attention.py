"""Ring attention in several processes equals attention in one, forward and backward, as a kernel and in a model."""

import os
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
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
from tests.forkserver import run_in_each

LENGTH = 48
CASES: dict[str, tuple[Mask, bool, dict]] = {  # mask, packed, extra options
    "causal": (Causal(), False, {}),
    "full": (Full(), False, {}),
    "window, packed": (Window(7), True, {}),
    "causal, capped, sinks, biased": (Causal(), False, {"softcap": 3.0, "sinks": True, "bias": True}),
}


def random_case(name: str) -> tuple[list[Tensor], TokenLayout, ScoreOptions, Tensor]:
    """Inputs of the whole sequence; they are equal in every process."""
    generator = torch.Generator().manual_seed(1)
    q, k, v, weights = (torch.randn(2, h, LENGTH, 8, dtype=torch.float64, generator=generator) for h in (4, 2, 2, 4))
    mask, packed, extras = CASES[name]
    layout = TokenLayout.whole(2, LENGTH)
    if packed:
        segments = (torch.arange(LENGTH) // 20).expand(2, -1)
        layout = TokenLayout(
            torch.arange(LENGTH) % 20 + torch.zeros_like(segments), segments, torch.arange(LENGTH).expand(2, -1) < 45
        )
    sinks = torch.randn(4, dtype=torch.float64, generator=generator).requires_grad_() if "sinks" in extras else None
    table = torch.randn(8, 4, dtype=torch.float64, generator=generator).requires_grad_()
    bias = Buckets(table, 16, False) if "bias" in extras else None
    options = ScoreOptions(mask, 8**-0.5, bias, extras.get("softcap"), sinks)
    return [x.requires_grad_() for x in (q, k, v)], layout, options, weights


def score_parameters(options: ScoreOptions) -> list[Tensor]:
    return [
        x for x in (options.sinks, options.bias.table if isinstance(options.bias, Buckets) else None) if x is not None
    ]


def select_tokens(layout: TokenLayout, positions: Tensor) -> TokenLayout:
    """The layout of these tokens."""
    segments, valid = (None if x is None else x[:, positions] for x in (layout.segments, layout.valid))
    return TokenLayout(layout.positions[:, positions], segments, valid)


def check_kernel(name: str, positions: Tensor) -> None:
    inputs, layout, options, weights = random_case(name)
    (reference.attend(*inputs, layout, options) * weights).sum().backward()
    input_gradients = [x.grad for x in inputs]
    parameter_gradients = [x.grad.clone() for x in score_parameters(options)]
    local_inputs = [x.detach()[:, :, positions].requires_grad_() for x in inputs]
    for x in score_parameters(options):
        x.grad = None
    out = ring_attention.attend(*local_inputs, select_tokens(layout, positions), options)
    valid = slice(None) if layout.valid is None else layout.valid[0, positions]
    expected_out = reference.attend(*inputs, layout, options)[:, :, positions]
    assert (out - expected_out)[:, :, valid].abs().max() < 1e-12
    (out * weights[:, :, positions]).sum().backward()
    for x, grad in zip(local_inputs, input_gradients, strict=True):
        assert (x.grad - grad[:, :, positions]).abs().max() < 1e-12
    for x, grad in zip(score_parameters(options), parameter_gradients, strict=True):
        dist.all_reduce(x.grad)  # each process computes the gradients of its queries
        assert (x.grad - grad).abs().max() < 1e-12


def check_model(positions: Tensor) -> None:
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
    out = model(tokens[:, positions], TokenLayout(positions.expand(2, -1)))
    assert (out - expected[:, positions]).abs().max() < 1e-12
    out.square().sum().backward()
    for name, parameter in model.named_parameters():
        dist.all_reduce(parameter.grad)
        assert (parameter.grad - gradients[name]).abs().max() < 1e-10, name


def run_process(rank: int, size: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo", f"file://{folder}/rendezvous", timeout=timedelta(seconds=240), rank=rank, world_size=size
    )
    positions = ring_attention.zigzag_shares(LENGTH, size)[rank]
    for name in CASES:
        check_kernel(name, positions)
    check_model(positions)
    dist.destroy_process_group()


@pytest.mark.ledger("ring.attn")
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_attention_of_a_split_sequence_equals_that_of_the_whole(size: int, tmp_path: Path) -> None:
    run_in_each(run_process, (size, str(tmp_path)), size)


@pytest.mark.ledger("ring.attn")
@pytest.mark.parametrize("size", [1, 2, 4])
def test_zigzag_shares_have_equally_many_pairs(size: int) -> None:
    shares = ring_attention.zigzag_shares(LENGTH, size)
    assert shares.flatten().sort().values.equal(torch.arange(LENGTH))
    assert len({int((positions + 1).sum()) for positions in shares}) == 1  # a token at t attends to t + 1 keys


def test_cached_keys_are_refused() -> None:
    layout = TokenLayout(torch.full((1, 1), 3)).with_keys(torch.arange(4).unsqueeze(0))
    with pytest.raises(ValueError, match="ring attention: the keys must be the queries' own tokens"):
        ring_attention.attend(
            torch.zeros(1, 1, 1, 4), torch.zeros(1, 1, 4, 4), torch.zeros(1, 1, 4, 4), layout, ScoreOptions(Causal())
        )


def test_indivisible_length_is_refused() -> None:
    with pytest.raises(ValueError, match="length=50 is not divisible by 8"):
        ring_attention.zigzag_shares(50, 4)
