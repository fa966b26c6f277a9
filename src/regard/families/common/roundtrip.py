"""Writing a foreign config: it is read back, and must give the spec that it came from.

The first place where they differ is what the foreign class has no word for, so no family lists what it lacks.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from regard.families.common.config_reader import FamilyError
from regard.models.base import Model
from regard.models.dual_encoder import DualEncoder
from regard.models.stack import Repeat, unroll
from regard.parts.attention import Attention
from regard.parts.block import Block
from regard.parts.experts import Experts
from regard.parts.feedforward import PositionWise
from regard.parts.latent_attention import LatentAttention
from regard.spec import Spec, SpecError

ModelType = TypeVar("ModelType", bound=Model)
SpecType = TypeVar("SpecType", bound=Spec)


def check_roundtrip(
    model_type: str, model: ModelType, config: dict[str, Any], read: Callable[[dict], ModelType]
) -> dict[str, Any]:
    """The config, if reading it gives this spec back; otherwise the difference by name."""
    try:
        back = canonical(read(config))
    except SpecError as error:  # a word of theirs stands for another part than ours, which then cannot be
        raise FamilyError(f"a {model_type} model cannot express this spec ({error})") from error
    if back != canonical(model):
        found = list(differences(canonical(model), back, model.kind))
        where, ours, theirs = found[0]
        refusal = FamilyError(
            f"a {model_type} model cannot express {where}={ours!r:.120}, only {theirs!r:.120}; "
            f"change the spec or keep the folder in our own format"
        )
        refusal.differences = len(found)
        raise refusal
    return config


def bodies(block: Block, *kinds: type) -> tuple[Any, ...]:
    """The bodies of a block, if they are of these kinds: what a family writes its config from."""
    found = tuple(sublayer.body for sublayer in block.sublayers)
    if len(found) != len(kinds) or not all(map(isinstance, found, kinds)):
        has, wanted = ", ".join(b.kind for b in found), ", ".join(b.__name__ for b in kinds)
        raise FamilyError(f"its blocks hold {has}; this family's hold {wanted}")
    return found


def require_type(part: Any, kind: type[SpecType]) -> SpecType:
    """The part, if it is of the one kind that a family has there."""
    if not isinstance(part, kind):
        raise FamilyError(f"it has {part!r:.80}; this family has {kind.__name__}")
    return part


def canonical(spec: Any, width: int = 0) -> Any:
    """The same model in one spelling: defaults filled in, each block a run, no choices of training (dropout, losses).

    Of a part alone, whose width is not known, sizes stay as they are said.
    """
    if isinstance(spec, tuple):
        return tuple(canonical(s, width) for s in spec)
    if not isinstance(spec, Spec):
        return spec
    width = getattr(spec, "width", width)
    values = {f.name: getattr(spec, f.name) for f in dataclasses.fields(spec)}
    if isinstance(spec, DualEncoder):  # what is trained may begin anywhere
        values |= {"temperature": 1.0, "bias": None if spec.bias is None else 0.0}
    if "layers" in values:
        values["layers"] = tuple(Repeat((block,)) for block in unroll(values["layers"]))
    if "dropout" in values:
        values["dropout"] = 0.0
    if isinstance(spec, Attention) and width:
        _, values["kv_heads"], values["head_dim"] = spec.sizes(width)
        values["out_bias"] = spec.bias if spec.out_bias is None else spec.out_bias
        values["key_bias"] = spec.bias if spec.key_bias is None else spec.key_bias
        values["scale"] = values["head_dim"] ** -0.5 if spec.scale is None else spec.scale
    if isinstance(spec, LatentAttention):
        values["v_dim"] = spec.value_dim
        values["scale"] = (spec.nope_dim + spec.rope_dim) ** -0.5 if spec.scale is None else spec.scale
    if isinstance(spec, Experts):
        router = spec.router
        renormalize = router.renormalizes(spec.top_k)
        best = router.group_best if router.groups > 1 else 1
        values["router"] = dataclasses.replace(router, renormalize=renormalize, group_best=best, jitter=0.0)
        values |= {"balance": 0.0, "z": 0.0, "capacity": None}
    if isinstance(spec, PositionWise) and width:
        values["hidden"] = spec.hidden_dim(width)
    return dataclasses.replace(spec, **{name: canonical(value, width) for name, value in values.items()})


def differences(ours: Any, theirs: Any, where: str) -> Iterator[tuple[str, Any, Any]]:
    """Every place where two specs differ: its path and both values."""
    if isinstance(ours, Spec) and type(ours) is type(theirs):
        for field in dataclasses.fields(ours):
            yield from differences(getattr(ours, field.name), getattr(theirs, field.name), f"{where}.{field.name}")
    elif isinstance(ours, tuple) and isinstance(theirs, tuple) and len(ours) == len(theirs):
        for n, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            yield from differences(a, b, f"{where}[{n}]")
    elif ours != theirs:
        yield where, ours, theirs
