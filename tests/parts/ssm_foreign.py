"""Tiny Mamba layers of `transformers`, our specs of the same layers, and the conversion of their weights to ours."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import BambaConfig, FalconMambaConfig, JambaConfig, Mamba2Config, MambaConfig, Zamba2Config
from transformers.models.bamba.modeling_bamba import BambaMixer
from transformers.models.falcon_mamba.modeling_falcon_mamba import FalconMambaMixer
from transformers.models.jamba.modeling_jamba import JambaMambaMixer
from transformers.models.mamba.modeling_mamba import MambaMixer
from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer
from transformers.models.zamba2.modeling_zamba2 import Zamba2MambaMixer

from regard.parts.body import Body
from regard.parts.norm import RMSNorm
from regard.parts.ssm.mamba import Mamba
from regard.parts.ssm.mamba2 import Mamba2

WIDTH, RANK, STATE = 24, 3, 4


@dataclass(frozen=True)
class Pair:
    theirs: Callable[[], nn.Module]
    ours: Body


def falcon() -> nn.Module:
    config = FalconMambaConfig(hidden_size=WIDTH, state_size=STATE, time_step_rank=RANK, num_hidden_layers=1)
    return FalconMambaMixer(config, 0, initialize_mixer_weights=False)


def jamba() -> nn.Module:
    config = JambaConfig(
        hidden_size=WIDTH, mamba_d_state=STATE, mamba_dt_rank=RANK, mamba_proj_bias=True, num_hidden_layers=1
    )
    return JambaMambaMixer(config, 0)


def mamba(**options) -> nn.Module:
    return MambaMixer(
        MambaConfig(hidden_size=WIDTH, state_size=STATE, time_step_rank=RANK, num_hidden_layers=1, **options), 0
    )


def mamba2(**options) -> nn.Module:
    config = Mamba2Config(
        hidden_size=WIDTH, state_size=STATE, head_dim=8, num_heads=6, chunk_size=4, num_hidden_layers=1, **options
    )
    return Mamba2Mixer(config, 0)


def bamba() -> nn.Module:
    config = BambaConfig(
        hidden_size=WIDTH, mamba_n_heads=6, mamba_d_head=8, mamba_n_groups=2, mamba_d_state=STATE, mamba_chunk_size=4,
        num_hidden_layers=1,
    )  # fmt: skip
    return BambaMixer(config, 0)


def zamba2() -> nn.Module:
    config = Zamba2Config(
        hidden_size=WIDTH, n_mamba_heads=6, mamba_ngroups=2, mamba_d_state=STATE, chunk_size=4, time_step_min=0.5,
        num_attention_heads=2,
    )  # fmt: skip
    return Zamba2MambaMixer(config, 0)


PAIRS = {
    "mamba": Pair(mamba, Mamba(STATE, rank=RANK)),
    "mamba, biases": Pair(
        lambda: mamba(use_bias=True, use_conv_bias=False, conv_kernel=3),
        Mamba(STATE, rank=RANK, taps=3, bias=True, conv_bias=False),
    ),
    "falcon mamba": Pair(falcon, Mamba(STATE, rank=RANK, norm=RMSNorm(1e-6, weight=False))),
    "jamba": Pair(jamba, Mamba(STATE, rank=RANK, bias=True, norm=RMSNorm(1e-6))),
    "mamba2": Pair(lambda: mamba2(n_groups=1), Mamba2(STATE, 8)),
    "mamba2, groups, limits": Pair(
        lambda: mamba2(n_groups=3, use_bias=True, time_step_limit=(0.4, 0.9)),
        Mamba2(STATE, 8, groups=3, bias=True, shortest=0.4, longest=0.9),
    ),
    "bamba": Pair(bamba, Mamba2(STATE, 8, groups=2)),
    "zamba2": Pair(zamba2, Mamba2(STATE, 8, groups=2, norm_parts=2, shortest=0.5)),
}


def to_our_names(theirs: Mapping[str, Tensor], ours: Body) -> dict[str, Tensor]:
    """Renames the tensors of transformers (weights or gradients) to our names, and splits fused tensors."""
    found = {}
    for name, tensor in theirs.items():
        module_name, _, leaf = name.partition(".")
        if module_name == "in_proj":
            found |= split(tensor, leaf, *IN_PROJ_SPLITS[type(ours)](ours))
        elif module_name == "x_proj":
            found |= split(tensor, leaf, ("rank_proj", RANK), ("b_proj", STATE), ("c_proj", STATE))
        elif module_name == "conv1d":
            found[f"conv.{leaf}"] = tensor.squeeze(1).t().flip(0) if leaf == "weight" else tensor
        elif module_name == "norm":
            found |= {f"norms.{i}.weight": part for i, part in enumerate(tensor.chunk(ours.norm_parts))}
        else:
            found[NAMES.get(name, name.replace("out_proj", "o_proj"))] = tensor
    return found


NAMES = {
    "dt_proj.weight": "step_proj.weight",
    "dt_proj.bias": "step_bias",
    "dt_bias": "step_bias",
    "dt_layernorm.weight": "rank_norm.weight",
    "b_layernorm.weight": "b_norm.weight",
    "c_layernorm.weight": "c_norm.weight",
}
IN_PROJ_SPLITS = {
    Mamba: lambda spec: (("in_proj", 2 * WIDTH), ("gate_proj", 2 * WIDTH)),
    Mamba2: lambda spec: (
        ("gate_proj", 2 * WIDTH),
        ("in_proj", 2 * WIDTH),
        ("b_proj", spec.groups * STATE),
        ("c_proj", spec.groups * STATE),
        ("step_proj", 2 * WIDTH // spec.head_dim),
    ),
}


def split(tensor: Tensor, leaf: str, *sizes: tuple[str, int]) -> dict[str, Tensor]:
    parts = tensor.split([size for _, size in sizes])
    return {f"{name}.{leaf}": part for (name, _), part in zip(sizes, parts, strict=True)}


def build_pair(name: str, dtype: torch.dtype) -> tuple[nn.Module, nn.Module]:
    """Returns (theirs, ours) with the same weights, drawn with a large deviation."""
    pair = PAIRS[name]
    torch.manual_seed(0)
    theirs = pair.theirs().eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(0.5 if parameter.dim() == 1 else 0.0, 0.4, generator=generator)
    ours = pair.ours.build(WIDTH).eval()
    ours.load_state_dict(to_our_names(dict(theirs.named_parameters()), pair.ours))
    return theirs.to(dtype), ours.to(dtype)
