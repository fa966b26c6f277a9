"""Few heads are overloaded and many have too few dimensions; heads can share keys and values, but not all of them.

Decoders of one width, with equal matrices, differ in the number of heads that share them: from one head of 64
dimensions to 32 of two. Others have eight heads that share fewer keys and values: two for all (grouped-query attention,
GQA) or one (multi-query, MQA), which also have fewer weights. All are trained on the same tokens of stories in the same
order. Measured: the loss on held-out stories. A difference within 1 % counts as none, and one in order must occur with
every seed.

Vaswani et al. 2017; Shazeer 2019; Ainslie et al. 2023.
"""

# ledger: mha.headcount gqa.quality

import torch

from regard.labs.experiment import Bench, Check, Findings, Plot
from regard.labs.fit import fit
from regard.labs.mamba_language import VOCAB, draw_rows, encode_stories, held_out_loss
from regard.labs.small_models import decoder_spec, parameter_count
from regard.parts.attention import Attention
from regard.parts.position.rope import Rope

WIDTH, ROW, SHARED = 64, 64, 8  # SHARED: the number of heads of grouped attention
COUNTS = (1, 2, 4, 8, 16, 32)
SAME = 0.01


def run(bench: Bench) -> Findings:
    steps, rows = bench.training(500, 2), bench.setting(8, 2)
    train, held_out = encode_stories(bench.setting(1000, 40), bench.setting(200, 20))
    losses, table = {}, []
    for heads, kv_heads in [*((heads, heads) for heads in COUNTS), (SHARED, 2), (SHARED, 1)]:
        torch.manual_seed(bench.seed)
        model = decoder_spec(Attention(heads, kv_heads, position=Rope()), VOCAB, WIDTH).build()
        label = f"{heads} heads, {kv_heads} of keys and values"
        fit(bench, label, model, lambda rng: draw_rows(rng, train, rows, ROW), steps)
        losses[heads, kv_heads] = held_out_loss(model, held_out, bench.setting(64, 2), ROW)
        table.append({"heads": heads, "of keys and values": kv_heads, "dimensions": WIDTH // heads,
                      "weights": parameter_count(model), "held-out loss": losses[heads, kv_heads]})  # fmt: skip
    by_count = {heads: losses[heads, heads] for heads in COUNTS}
    best = min(by_count, key=by_count.__getitem__)
    all_heads, grouped, single = losses[SHARED, SHARED], losses[SHARED, 2], losses[SHARED, 1]
    near = [heads for heads in COUNTS if by_count[heads] <= (1 + SAME) * by_count[best]]

    def excess(loss: float, other: float) -> str:
        return f"{100 * (loss / other - 1):+.1f} % ({loss:.3f} and {other:.3f})"

    checks = [
        Check("one head has a higher loss than the best number, by more than 1 %", excess(by_count[1], by_count[best]),
              by_count[1] > (1 + SAME) * by_count[best]),
        Check(f"so have {COUNTS[-1]} heads", excess(by_count[COUNTS[-1]], by_count[best]),
              by_count[COUNTS[-1]] > (1 + SAME) * by_count[best]),
        Check("several numbers are within 1 % of the best, so that none is a law", ", ".join(map(str, near)),
              len(near) > 1),
        Check("GQA has the loss of as many keys and values as heads, within 1 %", excess(grouped, all_heads),
              grouped < (1 + SAME) * all_heads),
        Check("MQA has a higher loss than GQA", excess(single, grouped), single > grouped),
        Check("MQA has a higher loss than as many keys and values as heads, by more than 1 %",
              excess(single, all_heads), single > (1 + SAME) * all_heads),
    ]  # fmt: skip
    shared = [(0, all_heads), (1, grouped), (2, single)]
    plots = [
        Plot("heads", "nats per token", {"loss": list(by_count.items())}, "held-out stories", "x"),
        Plot("", "nats per token", {"loss": shared}, f"{SHARED} heads", groups=("8 k/v heads", "2: GQA", "1: MQA")),
    ]
    return Findings(table, checks, plots, f"{steps * rows * ROW:,} tokens of training; width {WIDTH}, two layers.")
