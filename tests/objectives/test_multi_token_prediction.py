"""Multi-token prediction: the losses of heads for later tokens are added to that of the next token."""

import torch

from regard.data.batch import Batch
from regard.models.decoder import Decoder
from regard.models.outputs import materialize
from regard.models.stack import Repeat
from regard.objectives.base import layout_of
from regard.objectives.next_token import next_token
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.feedforward import SwiGLU
from regard.parts.position.rope import Rope

BLOCK = Block((Sublayer(Attention(2, position=Rope())), Sublayer(SwiGLU(24))))


def packed_batch() -> Batch:
    """Two documents and padding in one row, one document in another."""
    tokens = torch.randint(11, (2, 9), generator=torch.Generator().manual_seed(0))
    segments = torch.tensor([[0, 0, 0, 0, 1, 1, 1, -1, -1], [0] * 9])
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0, 1], list(range(9))])
    weights = (segments >= 0).float()
    weights[1, 4] = 3.0
    return Batch(tokens=tokens, targets=tokens.roll(-1, 1), weights=weights, positions=positions, segments=segments)


def test_heads_for_later_tokens_have_their_own_targets() -> None:
    model = Decoder(11, 16, (Repeat((BLOCK,), 2),), ahead=(BLOCK, BLOCK)).build(seed=0).double()
    batch = packed_batch()
    loss, count, metrics = next_token(model, batch)
    out = model(batch.tokens, layout_of(batch), outputs=True)
    expected = 0.0
    for distance, logits in enumerate(map(materialize, (out.logits, *out.ahead_logits))):
        log_p = logits.log_softmax(-1)
        for row in range(2):
            for t in range(9 - distance):
                if batch.segments[row, t] == batch.segments[row, t + distance]:
                    target, weight = batch.targets[row, t + distance], batch.weights[row, t + distance]
                    expected -= (weight * log_p[row, t, target]).item()
    assert abs(loss.item() - expected) < 1e-9
    assert count == batch.weights.sum()
    assert {"ahead_1", "ahead_2"} <= metrics.keys()
    loss.backward()
    assert all(p.grad is not None for p in model.ahead.parameters())


def test_heads_for_later_tokens_do_not_change_the_logits_of_the_next() -> None:
    without_heads = Decoder(11, 16, (Repeat((BLOCK,), 2),)).build(seed=0)
    with_heads = Decoder(11, 16, (Repeat((BLOCK,), 2),), ahead=(BLOCK,)).build(seed=1)
    with_heads.load_state_dict(without_heads.state_dict(), strict=False)
    tokens = packed_batch().tokens
    assert torch.equal(without_heads(tokens), with_heads(tokens))
