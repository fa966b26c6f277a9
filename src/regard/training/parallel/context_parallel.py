"""Context parallelism: every process holds a part of each sequence, and ring attention connects the parts.

    process r of R:   the r-th chunk from the front and the r-th from the end, of 2R chunks (zigzag)

So all processes compute equally many pairs of a causal mask (kernels/attention/ring_attention.py). Positions and
segments are split with the tokens, so documents may be packed. The losses of the tokens are summed over the processes
like those of different rows. Bodies other than attention must treat every token alone.
"""

from functools import partial

from torch import nn

from regard.data.batch import Batch
from regard.kernels.attention import ring_attention
from regard.models.decoder import Decoder
from regard.models.stack import bodies_of
from regard.parts.attention import Attention, AttentionModule
from regard.spec import require
from regard.training.parallel.mesh import Processes

DIVIDED_KEYS = "context parallelism divides the keys over processes, and none has all scores; use one process"


def use_ring_attention(model: nn.Module, processes: Processes) -> None:
    """Compute all attention of the model over the processes along `context`."""
    check_context(model.spec)
    mesh = processes.submesh("context")
    assert mesh is not None, "context > 1"
    for module in model.modules():
        if isinstance(module, AttentionModule):
            vars(module)["attend"] = partial(ring_attention.attend, group=mesh.get_group())
            module.scores.unavailable = module.pattern.unavailable = DIVIDED_KEYS


def check_context(spec: object) -> None:
    """Raise SpecError if a model of this spec needs the whole sequence outside of attention."""
    require(isinstance(spec, Decoder), f"parallel: context > 1 supports decoders, not {spec}; use shard or tensor")
    assert isinstance(spec, Decoder)
    require(
        not spec.ahead,
        "parallel: context > 1 does not support ahead blocks, whose targets are in other parts; use shard",
    )
    for body in bodies_of(spec.layers):
        require(
            not body.mixes or type(body) is Attention,
            f"parallel: context > 1, but {body.kind} reads the whole sequence and only attention can be distributed; "
            "use shard",
        )
        require(
            not isinstance(body, Attention) or body.dropout == 0 and body.max_exact_cache is None,
            f"parallel: context > 1 supports no dropout in attention and no frequencies that depend on the length; "
            f"found {body}",
        )


def split_columns(batch: Batch, processes: Processes) -> Batch:
    """The tokens of this process; all fields must be (B, L)."""
    size = processes.sizes.context
    if size == 1:
        return batch
    rows, length = batch.tokens.shape
    for name, field in batch.items():
        require(
            field.shape == (rows, length),
            f"parallel: context={size} splits fields of shape {(rows, length)}, but {name} has {tuple(field.shape)}; "
            "use shard",
        )
    columns = ring_attention.zigzag_shares(length, size)[processes.index("context")].to(batch.tokens.device)
    return Batch(**{name: field[:, columns] for name, field in batch.items()})
