"""Experts in the keys and tensor names of most families: `mlp.gate` is the router, each expert has its own matrices.

transformers computes one balance loss over the tokens of all layers, ours one per layer, which are added up. The
coefficient is divided by the number of layers, so that both are equal if the routing is the same in all layers.
"""

from typing import Any, TypeVar

from regard.families.common.config_reader import Config
from regard.families.common.decoder import LAYER
from regard.families.common.names import FEEDFORWARD
from regard.families.common.roundtrip import bodies
from regard.models.decoder import Decoder
from regard.parts.body import Body
from regard.parts.experts import Experts
from regard.weights.ops import StackTensors
from regard.weights.table import Link

MixerType = TypeVar("MixerType", bound=Body)


def expert_links(prefix: str, router: str = "gate", names: dict[str, str] | None = None) -> tuple[Link, ...]:
    """The router and the matrices of the experts; `names` maps the foreign names of the matrices to ours."""
    ours = f"{FEEDFORWARD}.body.experts"
    names = names or {"{proj}": "{proj}"}
    return (
        Link(f"{prefix}.{router}.weight", f"{FEEDFORWARD}.body.router.proj.weight"),
        *(
            Link(f"{prefix}.experts.{{each}}.{name}.weight", f"{ours}.{proj}.weight", StackTensors())
            for name, proj in names.items()
        ),
    )


EXPERTS = expert_links(f"{LAYER}.mlp")


def balance_per_layer(hf_config: Config, layers: int) -> float:
    """The coefficient of the balance loss per layer; `layers` is the number of layers with experts."""
    return hf_config.number("router_aux_loss_coef") / max(layers, 1)


def dense_layers(model: Decoder) -> list[int]:
    """The indices of the layers without experts."""
    return [n for n, block in enumerate(model.blocks) if not isinstance(block.sublayers[-1].body, Experts)]


def mixer_and_experts(model: Decoder, mixer: type[MixerType]) -> tuple[MixerType, Experts]:
    """The bodies of the first layer with experts."""
    dense = {*dense_layers(model)}
    first = next((block for n, block in enumerate(model.blocks) if n not in dense), model.blocks[0])
    return bodies(first, mixer, Experts)


def routing_config(model: Decoder, experts: Experts) -> dict[str, Any]:
    layers = len(model.blocks) - len(dense_layers(model))
    return {"num_experts_per_tok": experts.top_k, "router_aux_loss_coef": experts.balance * layers}
