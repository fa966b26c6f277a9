"""More experts at equal compute per token lower the loss, but without a balance loss the router favours a few of them.

Decoders of two layers on the Python manual, which differ in the feed-forward layers: dense; eight experts of half that
size, of which two are chosen; and eight of the same size, of which one is chosen. So a token uses equally many weights.
Those with experts are trained with and without the balance loss of Switch. Measured on pages that are held out: the
loss, and per layer the share of the choices that each expert gets. The effective number of experts is exp of the
entropy of these shares: 8 if all are used equally. An expert is idle if it gets less than a quarter of an even share.

Shazeer et al. 2017; Fedus et al. 2021. Larger models have more use for capacity.
"""

# ledger: moe.balance.need
# ledger: moe.capacitywin

import torch
from torch import Tensor

from regard.data.sources.files import Pydoc
from regard.labs.experiment import Bench, Check, Findings, Plot
from regard.labs.fit import fit, generator
from regard.labs.mamba_language import draw_rows, held_out_loss
from regard.labs.small_models import parameter_count
from regard.labs.vocabulary_size import text_of
from regard.lens.hooks import record
from regard.models.decoder import Decoder, DecoderModule
from regard.models.stack import Repeat
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.body import Body
from regard.parts.experts import Experts
from regard.parts.feedforward import SwiGLU
from regard.parts.position.rope import Rope
from regard.parts.router import RouterModule
from regard.text.train import bpe

VOCAB, WIDTH, HIDDEN, LAYERS, ROW = 512, 64, 64, 2, 64
COUNT = 8  # experts


def experts(top_k: int, balance: float) -> Experts:
    return Experts(COUNT, top_k, SwiGLU(HIDDEN // top_k), balance=balance)


DENSE = "dense"
BODIES: dict[str, Body] = {
    DENSE: SwiGLU(HIDDEN),
    "2 of 8": experts(2, 0.01),
    "2 of 8, no balance": experts(2, 0.0),
    "1 of 8": experts(1, 0.01),
    "1 of 8, no balance": experts(1, 0.0),
}


def run(bench: Bench) -> Findings:
    steps, rows, tested = bench.training(450, 2), bench.setting(8, 2), bench.setting(128, 2)
    train, held_out = manual(bench)
    losses, shares, table = {}, {}, []
    for name in BODIES:
        model = train_decoder(bench, name, train, steps, rows)
        losses[name] = held_out_loss(model, held_out, tested, ROW)
        row: dict[str, float | str] = {"feed-forward": name, "weights": parameter_count(model), "loss": losses[name]}
        if name != DENSE:
            shares[name] = loads(model, draw_rows(generator(0), held_out, tested, ROW).tokens)
        table.append(row | usage_columns(shares.get(name)))
    used = {name: effective(share) for name, share in shares.items()}
    idle = {name: int((share < 0.25 / COUNT).sum()) for name, share in shares.items()}
    checks = []
    for name in ("2 of 8", "1 of 8"):
        free = f"{name}, no balance"
        checks += [
            Check(f"{name}: without the balance loss at most half of the experts are in use: effectively 4 or fewer, "
                  "mean of the layers", f"{used[free]:.1f}", used[free] <= COUNT / 2),
            Check(f"{name}: it leaves a quarter of the experts idle or more", f"{idle[free]} of {LAYERS * COUNT}",
                  idle[free] >= LAYERS * COUNT / 4),
            Check(f"{name}: with the balance loss effectively 7 or more are in use", f"{used[name]:.1f}",
                  used[name] >= COUNT - 1),
            Check(f"{name}: the waste costs: without the balance loss the loss is higher",
                  f"{losses[free]:.3f} and {losses[name]:.3f}", losses[free] > losses[name]),
            Check(f"{name}: with it the loss is below that of the dense model, by 1 % or more",
                  f"{losses[name]:.3f} and {losses[DENSE]:.3f}", losses[name] <= 0.99 * losses[DENSE]),
        ]  # fmt: skip
    ranked = {name: list(enumerate(share.sort(1, descending=True).values.mean(0).tolist(), 1))
              for name, share in shares.items()}  # fmt: skip
    groups = tuple(name.replace(", ", "\n") for name in losses)
    plots = [
        Plot("", "nats per token", {"": list(enumerate(losses.values()))}, "held-out pages", groups=groups),
        Plot("expert of a layer, by rank", "share of the choices", ranked, f"even: {1 / COUNT:g}"),
    ]
    return Findings(table, checks, plots, f"{steps * rows * ROW:,} tokens of training; width {WIDTH}.")


def usage_columns(shares: Tensor | None) -> dict[str, float | str]:
    if shares is None:
        return {"experts in use": "", "largest share": ""}
    return {"experts in use": effective(shares), "largest share": shares.max().item()}


def effective(shares: Tensor) -> float:
    """exp of the entropy of each layer's shares (layers, X), mean of the layers"""
    return (-torch.special.xlogy(shares, shares).sum(1)).exp().mean().item()


def manual(bench: Bench) -> tuple[Tensor, Tensor]:
    """Ids of the Python manual: the pages for training, and those that are held out with this seed."""
    train, held_out = (text_of(examples, bench.setting(10_000, 4)) for examples in Pydoc().open(bench.seed))
    tokenizer = bpe([train], VOCAB)
    return torch.tensor(tokenizer.encode(train)), torch.tensor(tokenizer.encode(held_out))


def train_decoder(bench: Bench, name: str, ids: Tensor, steps: int, rows: int) -> DecoderModule:
    torch.manual_seed(bench.seed)
    block = Block((Sublayer(Attention(4, position=Rope())), Sublayer(BODIES[name])))
    model = Decoder(VOCAB, WIDTH, (Repeat((block,), LAYERS),)).build()
    fit(bench, name, model, lambda rng: draw_rows(rng, ids, rows, ROW), steps, 4e-3)
    return model


@torch.no_grad()
def router_choices(model: DecoderModule, tokens: Tensor) -> Tensor:
    """(layers, B · L, k) the experts that are chosen for each token"""
    with record(model, "stack.blocks.*.body.router") as recorded:
        model(tokens)
    found = []
    for name, logits in recorded.items():
        router = model.get_submodule(name)
        assert isinstance(router, RouterModule)
        found.append(router.route(logits).chosen)
    return torch.stack(found)


def loads(model: DecoderModule, tokens: Tensor) -> Tensor:
    """(layers, X) the share of the choices that each expert gets"""
    choices = router_choices(model, tokens).flatten(1)
    return torch.stack([layer.bincount(minlength=COUNT) for layer in choices]) / choices.shape[1]
