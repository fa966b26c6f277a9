"""Training tokens/s compared with GPT-2 in transformers.

6 layers, 6 heads, width 384, context 256, batch 8, vocabulary 65, float32, AdamW.
"""

from collections.abc import Callable

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from benchmarks.timing import interleave
from regard.data.batch import Batch
from regard.models.decoder import Decoder
from regard.models.stack import Repeat
from regard.objectives.next_token import next_token
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.feedforward import FeedForward
from regard.parts.norm import LayerNorm
from regard.parts.position.learned import Learned
from regard.training.optimizer import AdamW
from regard.training.step import take_step

LAYERS, HEADS, WIDTH, CONTEXT, ROWS, VOCAB = 6, 6, 384, 256, 8, 65


def build_regard_step() -> Callable[[], object]:
    block = Block((
        Sublayer(Attention(HEADS, bias=True), LayerNorm()),
        Sublayer(FeedForward(4 * WIDTH, "gelu_tanh"), LayerNorm()),
    ))  # fmt: skip
    spec = Decoder(VOCAB, WIDTH, (Repeat((block,), LAYERS),), position=Learned(CONTEXT), norm=LayerNorm())
    model = spec.build(seed=0)
    optimizer = AdamW().build(model, lr=1e-3)
    tokens = torch.randint(VOCAB, (ROWS, CONTEXT + 1))
    positions = torch.arange(CONTEXT).expand(ROWS, CONTEXT)
    batch = Batch(
        tokens=tokens[:, :-1], targets=tokens[:, 1:], weights=torch.ones(ROWS, CONTEXT), positions=positions,
        segments=torch.zeros(ROWS, CONTEXT, dtype=torch.long),
    )  # fmt: skip
    return lambda: take_step(model, next_token, batch, optimizer, clip=1.0)


def build_transformers_step() -> Callable[[], object]:
    config = GPT2Config(
        vocab_size=VOCAB, n_positions=CONTEXT, n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
    )  # fmt: skip
    model = GPT2LMHeadModel(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    tokens = torch.randint(VOCAB, (ROWS, CONTEXT))

    def step() -> None:
        model(tokens, labels=tokens).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def measure(rounds: int = 20) -> dict[str, object]:
    rates = interleave(
        {"regard": build_regard_step(), "transformers": build_transformers_step()}, rounds, ROWS * CONTEXT
    )
    return {"train_tokens_per_second": rates, "train_ratio": round(rates["regard"] / rates["transformers"], 3)}
