"""In deep pre-norm stacks the residual stream dwarfs late sublayers, which can be skipped; small initial weights help.

A pre-norm stack of 32 thin layers (see deep-stacks) is trained on characters of stories twice: from Xavier's weights,
and with the weights into the residual stream divided by √(2·depth). Measured after every layer: the size of what the
layer adds, relative to the size of the stream that it adds it to, before and after training; and the rise of the loss
on held-out stories if a quarter of the layers is skipped, the second or the last.
"""

# ledger: blk.prenorm.idle

import torch
from torch import Tensor

from regard.labs.deep_stacks import LENGTH, ROWS, thin_stack
from regard.labs.experiment import Bench, Check, Findings, Plot
from regard.labs.fit import fit, generator
from regard.labs.gru_or_lstm import encode_stories, mean_loss
from regard.labs.mamba_language import draw_rows
from regard.lens import ablate, record
from regard.models.base import Scheme
from regard.models.decoder import DecoderModule

SCHEMES: dict[str, Scheme] = {"Xavier": "xavier", "divided by √(2·depth)": "fan_in"}


def run(bench: Bench) -> Findings:
    depth, steps = bench.setting(32, 4), bench.training(200, 2)
    train, held_out = (encode_stories(split, bench.setting(1000, 10)) for split in ("train", "held-out"))
    test = draw_rows(generator(0), held_out, bench.setting(128, 4), LENGTH)
    quarters = {"second": range(depth // 4, depth // 2), "last": range(3 * depth // 4, depth)}
    new, trained, losses, rises = {}, {}, {}, {}
    for name, scheme in SCHEMES.items():
        model = thin_stack("pre-norm", depth, bench.seed, scheme)
        new[name] = added(model, test.tokens)
        fit(bench, name, model, lambda rng: draw_rows(rng, train, ROWS, LENGTH), steps)
        trained[name], losses[name] = added(model, test.tokens), mean_loss(model, test)
        for quarter, layers in quarters.items():
            with ablate(model, layers=layers):
                rises[name, quarter] = mean_loss(model, test) - losses[name]
    plain, small = SCHEMES

    def late(shares: list[float]) -> float:
        """The mean of the last quarter, relative to that of the first."""
        return sum(shares[-(depth // 4) :]) / sum(shares[: depth // 4])

    checks = [
        Check("Xavier, new: layers of the last quarter add less than half as much, relative to the stream, as those of "
              "the first", f"{late(new[plain]):.2f}", late(new[plain]) < 0.5),
        Check("and so after training", f"{late(trained[plain]):.2f}", late(trained[plain]) < 0.5),
        Check("skipping the last quarter costs less than 0.1 nats", f"{rises[plain, 'last']:.3f}",
              rises[plain, "last"] < 0.1),
        Check("and less than skipping the second quarter", f"{rises[plain, 'second']:.3f}",
              rises[plain, "last"] < rises[plain, "second"]),
        Check("divided weights: new, the last quarter adds relatively more", f"{late(new[small]):.2f}",
              late(new[small]) > late(new[plain])),
        Check("divided weights: skipping the last quarter costs more", f"{rises[small, 'last']:.3f}",
              rises[small, "last"] > rises[plain, "last"]),
        Check("divided weights: the loss is lower", f"{losses[small]:.3f} and {losses[plain]:.3f}",
              losses[small] < losses[plain]),
    ]  # fmt: skip
    table = [
        {"initial weights": name, "loss": losses[name], "last to first, new": late(new[name])}
        | {"last to first, trained": late(trained[name])}
        | {f"loss without the {quarter} quarter": losses[name] + rises[name, quarter] for quarter in quarters}
        for name in SCHEMES
    ]
    lines = {f"{name}, {when}": list(enumerate(shares, 1)) for when, of in (("new", new), ("trained", trained))
             for name, shares in of.items()}  # fmt: skip
    bars = {name: [(i, rises[name, quarter]) for i, quarter in enumerate(quarters)] for name in SCHEMES}
    plots = [
        Plot("layer", "size added, relative to the stream", lines, "pre-norm", "y"),
        Plot("quarter skipped", "rise of the loss, nats", bars, groups=tuple(quarters)),
    ]
    return Findings(table, checks, plots, f"{depth} thin layers, {steps} steps of training.")


@torch.no_grad()
def added(model: DecoderModule, tokens: Tensor) -> list[float]:
    """Per layer the mean of ‖what it adds‖ / ‖the stream before it‖ over the tokens."""
    with record(model, ["stack.input", *(f"stack.blocks.{i}" for i in range(len(model.stack.blocks)))]) as recorded:
        model(tokens)
    streams = list(recorded.values())
    return [float(((after - before).norm(dim=-1) / before.norm(dim=-1)).mean())
            for before, after in zip(streams, streams[1:], strict=False)]  # fmt: skip
