"""Identities of the attention layer: its projections, symmetries, FLOPs and cache."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from regard.engine.stores.contiguous import Contiguous
from regard.kernels.attention.mask import Full
from regard.layout import TokenLayout
from regard.models.stack import Repeat, Stack
from regard.parts.attention import Attention, use_backend
from regard.parts.block import Block, Sublayer
from regard.parts.feedforward import SwiGLU
from regard.parts.recurrent import RNN
from tests.parts.attention_layer import LENGTH, WIDTH, attention, bytes_of, flops, random, record, saved_bytes


@pytest.mark.ledger("attn.proj")
def test_queries_keys_and_values_are_projections_of_one_sequence() -> None:
    module, x = attention(1), random(1, LENGTH, WIDTH)
    taps = record(module, x)
    for name, projection in (("q", module.q_proj), ("k", module.k_proj), ("v", module.v_proj)):
        assert (taps[name][0, 0] - x[0] @ projection.weight.T).abs().max() < 1e-13
        for t in range(LENGTH):  # per token
            assert (taps[name][0, 0, t] - projection.weight @ x[0, t]).abs().max() < 1e-13


@pytest.mark.ledger("attn.asymmetry")
def test_separate_query_and_key_matrices_make_attention_asymmetric() -> None:
    module, x = attention(1), random(1, LENGTH, WIDTH)
    taps = record(module, x)
    scores = (taps["q"] @ taps["k"].mT)[0, 0]
    assert (scores - scores.T).abs().max() > 1
    module.k_proj.weight.copy_(module.q_proj.weight)
    tied = record(module, x)
    scores = (tied["q"] @ tied["k"].mT)[0, 0]
    assert (scores - scores.T).abs().max() < 1e-13
    # The query is a function of feature 0, the key of feature 1 and the value of feature 2.
    module = attention(1, width=3)
    for projection, weight in (("q_proj", [[9.0, 0, 0]]), ("k_proj", [[0, 9.0, 0]]), ("v_proj", [[0, 0, 1.0]])):
        getattr(module, projection).weight.zero_()[:1] = torch.tensor(weight)
    i, j = [1.0, 0.0, 5.0], [0.0, 1.0, 6.0]
    taps = record(module, torch.tensor([[i, j]], dtype=torch.float64))
    assert taps["weights"][0, 0, 0, 1] > 0.999
    assert taps["weights"][0, 0, 1, 0] == 0.5
    assert taps["z"][0, 0, 0, 0].item() == pytest.approx(6)


def encoder() -> Stack:
    block = Block((Sublayer(Attention(2, mask=Full())), Sublayer(SwiGLU(24))))
    stack = Stack((Repeat((block,), 3),), WIDTH).double()
    for n, parameter in enumerate(stack.parameters()):
        if parameter.dim() > 1:
            parameter.data = random(*parameter.shape, seed=n) * 0.5
    return stack


@pytest.mark.ledger("attn.equivariance", "attn.invariance")
def test_without_positions_a_permutation_of_tokens_permutes_outputs() -> None:
    x = random(1, LENGTH, WIDTH)
    for model in (attention(), encoder()):

        def run(x: Tensor, model: nn.Module = model) -> Tensor:
            out = model(x, TokenLayout.whole(1, LENGTH))
            return out[0] if isinstance(out, tuple) else out

        for seed in range(3):
            order = torch.randperm(LENGTH, generator=torch.Generator().manual_seed(seed))
            out, permuted = run(x), run(x[:, order])
            assert (permuted - out[:, order]).abs().max() < 1e-12
            assert (permuted - out).abs().max() > 0.1  # not invariant …
            assert (permuted.mean(1) - out.mean(1)).abs().max() < 1e-12  # … unless the outputs are pooled


@pytest.mark.ledger("attn.path")
def test_gradients_between_distant_tokens_vanish_in_an_rnn_and_not_in_attention() -> None:
    rnn_gradients = []
    for length in (2, 16, 128, 1024):
        module = attention(1, width=2)
        module.q_proj.weight.copy_(torch.tensor([[0.0, 0.0], [2**0.5, 0.0]], dtype=torch.float64))
        module.k_proj.weight.copy_(torch.eye(2))
        module.v_proj.weight.copy_(torch.eye(2))
        module.o_proj.weight.copy_(torch.eye(2))
        x = torch.zeros(1, length, 2, dtype=torch.float64)
        x[0, -1, 0], x[0, 0, 1] = 1.0, math.log(length - 1)  # the weight from the last token to the first is 1/2
        jacobian = torch.autograd.functional.jacobian(
            lambda x, m=module: m(x, TokenLayout.whole(1, x.shape[1]))[0, -1], x
        )
        assert jacobian[0, 0, 0, 0].item() == pytest.approx(0.5, abs=1e-12)
        rnn = nn.RNN(2, 2, bias=False, dtype=torch.float64)
        rnn.weight_hh_l0.data = 0.9 * torch.eye(2, dtype=torch.float64)
        inputs = random(length, 2).requires_grad_()
        rnn_gradients.append(torch.autograd.grad(rnn(inputs)[0][-1].sum(), inputs)[0][0].norm().item())
    assert rnn_gradients == sorted(rnn_gradients, reverse=True)
    assert rnn_gradients[-1] < 1e-30


@pytest.mark.ledger("attn.cost")
@pytest.mark.parametrize("length", [8, 16, 64])
def test_flops_are_projections_and_the_square_of_the_length(length: int) -> None:
    module, x = attention(4), random(1, length, WIDTH)
    use_backend(module, "reference")
    assert flops(module, x) == 8 * length * WIDTH**2 + 4 * length**2 * WIDTH
    assert Attention(4).flops(WIDTH, length, length) == flops(module, x)


def growth(measure: Callable[[int], float], length: int = 256) -> float:
    """The exponent with which a quantity grows from length n to 2n."""
    return torch.tensor(measure(2 * length) / measure(length)).log2().item()


def longest_path(output: Tensor) -> int:
    """The longest chain of operations in autograd's graph."""
    assert output.grad_fn is not None
    depth: dict[object, int] = {}
    pending = [output.grad_fn]
    while pending:
        node = pending[-1]
        inputs = [following for following, _ in node.next_functions if following is not None]
        if unknown := [following for following in inputs if following not in depth]:
            pending += unknown
        else:
            depth[pending.pop()] = 1 + max((depth[following] for following in inputs), default=0)
    return depth[output.grad_fn]


@pytest.mark.ledger("attn.vs.rnn")
def test_compute_memory_and_depth_grow_with_the_length_as_predicted() -> None:
    rnn = nn.RNN(WIDTH, WIDTH, batch_first=True, dtype=torch.float64)
    reference, fused = attention(1), attention(1)
    use_backend(reference, "reference")
    use_backend(fused, "sdpa")

    def random_input(length: int) -> Tensor:
        return random(1, length, WIDTH).requires_grad_()

    def rnn_flops(length: int) -> int:
        with FlopCounterMode(display=False) as counter:
            rnn(random_input(length))
        return counter.get_total_flops()

    def training_bytes(module: nn.Module) -> Callable[[int], int]:
        return lambda length: saved_bytes(lambda: module(random_input(length), TokenLayout.whole(1, length)))

    # Compute: O(nd²) against O(n²d), and O(nd²) for the projections.
    assert rnn_flops(64) == 4 * 64 * WIDTH**2
    assert flops(reference, random_input(64)) == 4 * 64**2 * WIDTH + 8 * 64 * WIDTH**2
    # Memory for the backward: O(n) against O(n²), or O(n) in tiles.
    assert growth(lambda n: saved_bytes(lambda: rnn(random_input(n)))) == pytest.approx(1, abs=0.05)
    assert growth(training_bytes(reference)) == pytest.approx(2, abs=0.2)
    assert growth(training_bytes(fused)) == pytest.approx(1, abs=0.05)
    # State for decoding: constant against the keys and values of all earlier tokens.
    assert rnn(random_input(64))[1].numel() == rnn(random_input(128))[1].numel() == WIDTH

    def cache_bytes(length: int) -> int:
        return bytes_of(Contiguous(((Attention(1).memory(WIDTH),),), 1, length - 1, torch.float64))

    assert growth(cache_bytes) == 1
    assert cache_bytes(64) == 2 * 64 * WIDTH * 8

    # Operations that depend on each other: proportional to the length against a constant number.
    recurrence = RNN().build(WIDTH).double()
    depths = [longest_path(recurrence(random_input(n), TokenLayout.whole(1, n))[:, -1]) for n in (16, 32, 64)]
    assert depths[2] - depths[1] == 2 * (depths[1] - depths[0]) > 16
    assert len({longest_path(reference(random_input(n), TokenLayout.whole(1, n))[:, -1]) for n in (16, 32, 64)}) == 1

    # Order: an RNN depends on it, attention without positions does not.
    x, backwards = random_input(LENGTH), torch.arange(LENGTH - 1, -1, -1)
    layout = TokenLayout.whole(1, LENGTH)
    assert (rnn(x)[0] - rnn(x[:, backwards])[0][:, backwards]).abs().max() > 0.01
    assert (reference(x, layout) - reference(x[:, backwards], layout)[:, backwards]).abs().max() < 1e-12
