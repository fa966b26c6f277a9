"""FalconMamba (Zuo et al. 2024): Mamba with RMSNorms without weights on the low-rank Δ, on B and on C."""

from typing import Any

from regard.families import mamba
from regard.families.common.config_reader import Config
from regard.families.common.roundtrip import bodies, check_roundtrip
from regard.models.decoder import Decoder
from regard.parts.norm import RMSNorm
from regard.parts.ssm.mamba import Mamba
from regard.weights.table import Table


def spec(config: dict[str, Any]) -> Decoder:
    hf_config = Config("falcon_mamba", config)
    return mamba.read_mamba_decoder(hf_config, RMSNorm(hf_config.number("mixer_rms_eps", 1e-6), weight=False))


def config(model: Decoder) -> dict[str, Any]:
    (mixer,) = bodies(model.blocks[0], Mamba)
    settings = mamba.common_config("falcon_mamba", "FalconMambaForCausalLM", model)
    return check_roundtrip("falcon_mamba", model, settings | {"mixer_rms_eps": getattr(mixer.norm, "eps", None)}, spec)


def table(model: Decoder) -> Table:
    return mamba.TABLE
