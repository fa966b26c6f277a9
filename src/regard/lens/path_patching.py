"""Path patching: what a head does through the direct path to later activations, and not through layers in between.

Activation patching of a head includes all that later layers make of its output. Here the corrupted run gets the head's
output from the clean run while every other sublayer keeps its corrupted output. What the receivers compute in that
run is then patched into a run with nothing else changed. Wang et al. 2022; Goldowsky-Dill et al. 2023.

    path_patching(model, clean, corrupted, metric)                                       # to the logits
    path_patching(model, clean, corrupted, metric, "stack.blocks.5.sublayers.0.body.q")  # to the queries of layer 5
"""

from collections.abc import Sequence

import torch
from torch import nn

from regard.lens.hooks import names, patch, record
from regard.lens.inputs import Metric, ModelInputs, measure
from regard.lens.patching import OnProgress, Patching, cell_edits, repeated, run_both

BODIES = "*stack.blocks.*.sublayers.*.body"


@torch.no_grad()
def path_patching(
    model: nn.Module,
    clean: ModelInputs,
    corrupted: ModelInputs,
    metric: Metric,
    receivers: str | Sequence[str] | None = None,
    senders: str | Sequence[str] = "*.body.z",
    progress: OnProgress | None = None,
) -> Patching:
    """The effects (H,) of the heads of each sender on the metric, by the direct path to the receivers.

    senders: outputs of heads (B, H, L, E). receivers: names or patterns of activations; None: the logits.
    """
    runs = run_both(model, clean, corrupted, metric, senders)
    bodies = [name for name in names(model, BODIES) if name.endswith(".body")]
    with record(model, bodies) as frozen:
        model(*runs.rows)
    effects = {}
    for done, (name, x) in enumerate(runs.recorded.items()):
        if progress is not None:
            progress(done, len(runs.recorded))
        values = []
        for cells, edit in cell_edits(name, x, "head"):
            rows = repeated(runs.rows, cells)
            own = name.rpartition(".")[0]
            kept = {body: y.expand(cells, *y.shape[1:]) for body, y in frozen.items() if body != own}
            with patch(model, {name: edit} | kept):
                if receivers is None:
                    values.append(measure(model, rows, metric))
                    continue
                with record(model, receivers) as received:
                    model(*rows)
            with patch(model, received):
                values.append(measure(model, rows, metric))
        effects[name] = runs.effect(torch.cat(values))
    return Patching(effects, runs.clean, runs.corrupted)
