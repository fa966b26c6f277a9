"""Experts as most families spell them: `mlp.gate` chooses, and every expert's matrices are tensors of their own.

Theirs takes one balance loss over the tokens of all layers together, ours takes one a layer and adds them up, so that a
layer gets its share of theirs. Where all layers choose alike the two are equal.
"""

from typing import TypeVar

from regard.families.common.config_reader import Config
from regard.families.common.roundtrip import bodies
from regard.families.llama import FEEDFORWARD, LAYER
from regard.models.decoder import Decoder
from regard.parts.body import Body
from regard.parts.experts import Experts
from regard.weights.ops import StackTensors
from regard.weights.table import Link

BodyType = TypeVar("BodyType", bound=Body)

EXPERTS = (
    Link(f"{LAYER}.mlp.gate.weight", f"{FEEDFORWARD}.body.router.proj.weight"),
    Link(
        f"{LAYER}.mlp.experts.{{each}}.{{proj}}.weight", f"{FEEDFORWARD}.body.experts.{{proj}}.weight", StackTensors()
    ),
)


def balance(theirs: Config, layers: int) -> float:
    """Of each of so many layers with experts."""
    return theirs.number("router_aux_loss_coef") / max(layers, 1)


def dense(model: Decoder) -> list[int]:
    """The layers without experts."""
    return [n for n, block in enumerate(model.blocks) if not isinstance(block.sublayers[-1].body, Experts)]


def sparse(model: Decoder, mixer: type[BodyType]) -> tuple[BodyType, Experts]:
    """Mixer and experts of the first layer that has experts."""
    without = {*dense(model)}
    first = next((block for n, block in enumerate(model.blocks) if n not in without), model.blocks[0])
    return bodies(first, mixer, Experts)


def routed(model: Decoder, experts: Experts) -> dict[str, float]:
    """What all these families have words for."""
    layers = len(model.blocks) - len(dense(model))
    return {"num_experts_per_tok": experts.top_k, "router_aux_loss_coef": experts.balance * layers}
