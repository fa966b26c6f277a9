"""FalconMamba (Zuo et al. 2024): Mamba with a norm without weights on Δ's low rank, B and C, for steadier training."""

from typing import Any

from regard.families import mamba
from regard.families.common.config_reader import Config
from regard.families.common.roundtrip import bodies, check_roundtrip
from regard.models.decoder import Decoder
from regard.parts.norm import RMSNorm
from regard.parts.ssm.mamba import Mamba
from regard.weights.table import Table


def spec(config: dict[str, Any]) -> Decoder:
    theirs = Config("falcon_mamba", config)
    return mamba.decoder(theirs, RMSNorm(theirs.number("mixer_rms_eps", 1e-6), weight=False))


def config(model: Decoder) -> dict[str, Any]:
    (body,) = bodies(model.blocks[0], Mamba)
    written = mamba.written("falcon_mamba", "FalconMambaForCausalLM", model)
    return check_roundtrip("falcon_mamba", model, written | {"mixer_rms_eps": getattr(body.norm, "eps", None)}, spec)


def table(model: Decoder) -> Table:
    return mamba.TABLE
