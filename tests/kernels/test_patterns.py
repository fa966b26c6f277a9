"""Patterns equal their definitions pair by pair; numbers of allowed pairs, and distances reached by several layers."""

import pytest
import torch
from torch import Tensor

from regard.kernels.attention import reference
from regard.kernels.attention.arguments import ScoreOptions
from regard.kernels.attention.mask import Mask, PrefixLM
from regard.kernels.attention.patterns.bigbird import BigBird
from regard.kernels.attention.patterns.block_pattern import BlockSparse
from regard.kernels.attention.patterns.longformer import Longformer
from regard.kernels.attention.patterns.sparse_transformer import FixedPattern, StridedPattern
from regard.kernels.attention.patterns.window import Dilated, SinksAndWindow, Window
from regard.layout import TokenLayout
from regard.parts.attention import Attention
from regard.spec import Spec, SpecError
from tests.kernels.cases import BLOCK_TABLE, MASKS
from tests.laws import block, decoder

N = 41


def allowed_pairs(mask: Mask, n: int = N) -> list[list[bool]]:
    positions = torch.arange(n)
    return mask.allows(positions.unsqueeze(-1), positions).tolist()


def pair_by_pair(allows, n: int = N) -> list[list[bool]]:
    return [[bool(allows(i, j)) for j in range(n)] for i in range(n)]


@pytest.mark.ledger("sp.window")
@pytest.mark.parametrize("w", [1, 2, 7, 8, 9, N - 1, N, N + 1])
def test_window_equals_its_definition(w: int) -> None:
    assert allowed_pairs(Window(w)) == pair_by_pair(lambda i, j: j in range(i - w + 1, i + 1))
    assert allowed_pairs(Window(w, causal=False)) == pair_by_pair(lambda i, j: j in range(i - w, i + w + 1))
    assert sum(allowed_pairs(Window(w))[-1]) == min(w, N)  # a window of w counts the token itself


@pytest.mark.parametrize("w", [1, 3, 5])
@pytest.mark.parametrize("step", [1, 2, 7])
def test_dilated_window_equals_its_definition(w: int, step: int) -> None:
    assert allowed_pairs(Dilated(w, step)) == pair_by_pair(lambda i, j: j in [i - n * step for n in range(w)])
    both_sides = pair_by_pair(lambda i, j: j in [i + n * step for n in range(-w, w + 1)])
    assert allowed_pairs(Dilated(w, step, causal=False)) == both_sides
    assert allowed_pairs(Dilated(N, step)) == pair_by_pair(lambda i, j: j <= i and (i - j) % step == 0)
    assert allowed_pairs(Dilated(w, 1)) == allowed_pairs(Window(w))


@pytest.mark.ledger("sp.strided")
@pytest.mark.parametrize("stride", [2, 6, 7])
def test_sparse_transformer_patterns_equal_their_definitions(stride: int) -> None:
    strided = pair_by_pair(lambda i, j: j <= i and (i - j < stride or (i - j) % stride == 0))
    assert allowed_pairs(StridedPattern(stride)) == strided
    window_and_dilated_rows = zip(allowed_pairs(Window(stride)), allowed_pairs(Dilated(N, stride)), strict=True)
    assert strided == [[a or b for a, b in zip(*rows, strict=True)] for rows in window_and_dilated_rows]
    fixed = pair_by_pair(lambda i, j: j <= i and (i // stride == j // stride or j % stride == stride - 1))
    assert allowed_pairs(FixedPattern(stride)) == fixed
    for mask in (StridedPattern(stride), FixedPattern(stride)):
        one_hop = torch.tensor(allowed_pairs(mask))
        assert torch.equal((one_hop.long() @ one_hop.long() > 0), torch.ones(N, N, dtype=torch.bool).tril())  # two hops


@pytest.mark.ledger("sp.strided")
def test_sparse_transformer_allows_order_n_root_n_pairs() -> None:
    for root in (4, 8, 16):
        n = root * root
        for mask in (StridedPattern(root), FixedPattern(root)):
            max_keys = max(sum(row) for row in allowed_pairs(mask, n))
            assert max_keys <= 2 * root
            assert sum(map(sum, allowed_pairs(mask, n))) <= 2 * n * root


@pytest.mark.ledger("sp.longformer")
def test_longformer_and_sinks_equal_their_definitions() -> None:
    window, sinks = 5, 3
    expected = pair_by_pair(lambda i, j: abs(i - j) <= window or i < sinks or j < sinks)
    assert allowed_pairs(Longformer(window, sinks)) == expected
    causal = pair_by_pair(lambda i, j: j <= i and (i - j <= window or j < sinks))
    assert allowed_pairs(Longformer(window, sinks, causal=True)) == causal
    assert allowed_pairs(SinksAndWindow(sinks, window + 1)) == causal
    assert sum(expected[20]) == 2 * window + 1 + sinks
    assert all(expected[0])
    assert all(row[0] for row in expected)


def test_prefix_is_bidirectional_and_refused_in_a_decoder() -> None:
    assert allowed_pairs(PrefixLM(6)) == pair_by_pair(lambda i, j: j <= i or (i < 6 and j < 6))
    with pytest.raises(SpecError, match="choose a causal mask"):
        decoder(block(Attention(2, mask=PrefixLM(6))))


@pytest.mark.ledger("sp.block")
def test_block_sparse_equals_its_table() -> None:
    def allows(i: int, j: int) -> bool:
        return j // 4 in BLOCK_TABLE[i // 4] if i // 4 < len(BLOCK_TABLE) else i // 4 == j // 4

    assert allowed_pairs(BlockSparse(4, BLOCK_TABLE, causal=False)) == pair_by_pair(allows)
    assert allowed_pairs(BlockSparse(4, BLOCK_TABLE)) == pair_by_pair(lambda i, j: j <= i and allows(i, j))


def random_blocks(mask: BigBird, row: int, blocks: int) -> set[int]:
    """The random blocks of a row, computed with Python's integers.

    The blocks that are neither global nor in the window form equal shares; a hash chooses one block of each.
    """
    end = row - mask.window // 2 if mask.causal else -(-mask.length // mask.block)
    free = [c for c in range(mask.globals, max(end, 0)) if abs(c - row) > mask.window // 2]
    chosen = set()
    for n in range(mask.random):
        share = free[len(free) * n // mask.random : len(free) * (n + 1) // mask.random]
        if share:
            x = (row * 0x9E3779B1 + n * 0x85EBCA77 + mask.seed * 0xC2B2AE3D) % 2**32
            x = (x ^ x >> 16) * 0x7FEB352D % 2**32
            x = (x ^ x >> 15) * 0x846CA68B % 2**32
            chosen.add(share[(x ^ x >> 16) % len(share)])
    return {c for c in chosen if c < blocks}


@pytest.mark.ledger("sp.bigbird")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("seed", [0, 12345678901])
def test_bigbird_equals_its_definition(causal: bool, seed: int) -> None:
    mask = BigBird(3, 3, 2, 2, length=N, seed=seed, causal=causal)
    links = [random_blocks(mask, row, 14) for row in range(14)]

    def allows(i: int, j: int) -> bool:
        row, column = i // 3, j // 3
        near = abs(row - column) <= 1 or row < 2 or column < 2
        return (near or column in links[row]) and (j <= i or not causal)

    assert allowed_pairs(mask) == pair_by_pair(allows)
    assert sum(map(len, links[7:])) >= 12  # of 14: late rows have nearly all their links
    assert allowed_pairs(BigBird(3, 3, 2, 2, length=N, seed=seed + 1, causal=causal)) != allowed_pairs(mask)


@pytest.mark.ledger("sp.bigbird")
def test_random_links_shorten_paths_to_a_few_hops() -> None:
    """Counts hops from the first to the last block that is not global, along paths without global blocks."""

    def hops(random: bool) -> int:
        mask = BigBird(1, 3, 1, 3, length=512, seed=1)
        links = torch.tensor(allowed_pairs(mask if random else Window(1, False), 512))[1:, 1:]
        links = links | links.T
        reached, count = torch.zeros(511, dtype=torch.bool), 0
        reached[0] = True
        while not reached[-1]:
            reached, count = links[reached].any(0), count + 1
        return count

    assert hops(random=False) == 510
    assert hops(random=True) <= 6


@pytest.mark.ledger("sp.window.depth")
@pytest.mark.parametrize(("layers", "w"), [(1, 5), (4, 3), (3, 4)])
def test_stacked_windows_reach_layers_times_window(layers: int, w: int) -> None:
    n = 24
    x = torch.randn(1, 1, n, 4, dtype=torch.float64, requires_grad=True)
    y = x
    for _ in range(layers):
        y = reference.attend(y, y, y, TokenLayout.whole(1, n), ScoreOptions(Window(w), 0.5))
    (gradient,) = torch.autograd.grad(y[0, 0, -1].sum(), x)
    reached = gradient[0, 0].abs().sum(-1) > 0
    span = layers * (w - 1) + 1  # tokens, including the last one
    assert reached[n - span :].all()
    assert not reached[: n - span].any()


@pytest.mark.parametrize("name", MASKS)
def test_masks_round_trip_through_specs_and_hash(name: str) -> None:
    mask = MASKS[name]
    assert Spec.from_dict(mask.to_dict()) == type(mask).from_toml(mask.to_toml()) == mask
    assert hash(mask) == hash(Spec.from_dict(mask.to_dict()))
    attends_to_later_keys = torch.tensor(allowed_pairs(mask)).triu(1).any() if name != "full" else True
    assert bool(attends_to_later_keys) != mask.causal


@pytest.mark.parametrize(
    ("build_mask", "message"),
    [
        (lambda: Window(0), "size=0 must be positive"),
        (lambda: Dilated(2, 0), "step=0 must be positive"),
        (lambda: StridedPattern(1), "at least 2"),
        (lambda: FixedPattern(4, 4), "smaller than block=4"),
        (lambda: Longformer(4, 0), "use window for none"),
        (lambda: BigBird(4, 2), "window=2 must be odd"),
        (lambda: BlockSparse(4, ()), "layout is empty"),
        (lambda: BlockSparse(4, ((0, 0),)), "row 0 of the layout"),
        (lambda: SinksAndWindow(0, 4), "sinks=0 must be positive"),
        (lambda: PrefixLM(0), "prefix=0 must be positive"),
    ],
)
def test_invalid_patterns_are_refused(build_mask, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        build_mask()


def weights_of(mask: Mask, n: int) -> Tensor:
    q = torch.randn(1, 1, n, 4, dtype=torch.float64)
    return reference.attention_weights(q, q, TokenLayout.whole(1, n), ScoreOptions(mask))[0, 0]


@pytest.mark.ledger("sp.window")
@pytest.mark.parametrize("w", [7, 8, 9])
def test_only_keys_in_the_window_have_positive_weights(w: int) -> None:
    assert torch.equal(weights_of(Window(w), N) > 0, torch.tensor(allowed_pairs(Window(w))))
