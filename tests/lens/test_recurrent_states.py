"""The state after each token equals the final state of the sequence up to that token."""

import pytest
import torch
from torch import Tensor

from regard.lens.hooks import patch
from regard.lens.recurrent_states import ROWS, states
from regard.models.decoder import Decoder
from regard.models.stack import Repeat
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.feedforward import SwiGLU
from regard.parts.linear_attention import LinearAttention
from regard.parts.recurrent import GRU, LSTM, RNN
from tests.laws import block, build, decoder, random_ids

SPEC = Decoder(31, 12, (Repeat((Block((Sublayer(LSTM(5)), Sublayer(LinearAttention(2)), Sublayer(SwiGLU(8)))),)),))


@pytest.mark.parametrize("length", [1, 9, ROWS + 3])
def test_states_equal_those_of_each_prefix(length: int) -> None:
    model = build(SPEC)
    ids = torch.randint(31, (length,), generator=torch.Generator().manual_seed(0))
    found = states(model, ids)
    assert {"stack.blocks.0.sublayers.0.h", "stack.blocks.0.sublayers.0.c"} < found.keys()
    assert {name.split(".")[4] for name in found} == {"0", "1"}  # the feed-forward has no state
    assert all(array.shape[0] == length for array in found.values())
    cell = model.stack.blocks[0].sublayers[0].body.recurrence
    x = model.stack.blocks[0].sublayers[0].norm(model.embedding(ids[None]))
    state_arrays: tuple[Tensor, ...] = tuple(x.new_zeros(1, 5) for _ in range(2))
    for t in range(length):
        state_arrays = cell.step(cell.project_inputs(x[:, t]), *state_arrays)
        for name, state in zip("hc", state_arrays, strict=True):
            assert (found[f"stack.blocks.0.sublayers.0.{name}"][t] - state[0]).abs().max() <= 1e-12


def test_a_model_without_recurrences_has_no_states() -> None:
    assert states(build(Decoder(31, 12, (Repeat((Block((Sublayer(Attention(2)),)),)),))), [1, 2, 3]) == {}


def test_batches_and_empty_sequences_are_refused() -> None:
    for ids in (torch.zeros(2, 3, dtype=torch.long), []):
        with pytest.raises(ValueError, match="give one row"):
            states(build(SPEC), ids)


@pytest.mark.parametrize(("mixer", "projection"), [(LSTM(), "h_proj"), (GRU(), "n_proj"), (RNN(), "x_proj")])
def test_projections_of_a_recurrence_can_be_patched(mixer, projection):
    """A patch must disable the fused operation, which does not call the projections."""
    model, tokens = decoder(block(mixer)).build(seed=0), random_ids(6).unsqueeze(0)
    with patch(model, {f"*.{projection}": torch.zeros_like}):
        patched = model(tokens)
    assert not torch.allclose(patched, model(tokens))
