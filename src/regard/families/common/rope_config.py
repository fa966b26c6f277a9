"""The settings of RoPE: `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (4).

A config may have both, for example after `rope_scaling` was added to a config of version 5, as model cards advise for
YaRN. As in transformers, `rope_scaling` then replaces `rope_parameters` as a whole. A base or rotated fraction that
only the replaced settings have is refused, because transformers silently takes the default of its class.
"""

from typing import Any

from regard.families.common.config_reader import Config
from regard.parts.position.base import Position
from regard.parts.position.rope import PairLayout, Rope
from regard.parts.position.rope_scaling import DynamicNTK, LinearScaling, Llama3, LongRope, Scaling, Yarn
from regard.spec import suggest_name

ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3", "longrope")
YARN_OPTIONS = ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate")


def read_rope(
    hf_config: Config, base: float = 10000.0, share: float | None = None, layout: PairLayout = "half"
) -> Rope:
    """The rope of a config. `base` and `share` are the defaults of the family's class.

    `share` is the fraction of each head that is rotated; with None the family rotates whole heads only.
    """
    base, found_share = hf_config.number("rope_theta", base), hf_config.number("partial_rotary_factor", share or 1.0)
    settings, replaced = hf_config.nested("rope_scaling"), hf_config.nested("rope_parameters")
    if not settings.values:
        settings, replaced = replaced, settings
    for key, default in (("rope_theta", base), ("partial_rotary_factor", found_share)):
        if not settings.has(key) and replaced.number(key, default) != default:
            rule = f"would be lost, because rope_scaling replaces rope_parameters; add {key} to rope_scaling"
            raise replaced.error(key, replaced.values[key], rule)
    return read_rope_settings(settings, hf_config, base, share, layout)


def read_rope_settings(
    settings: Config, hf_config: Config, base: float, share: float | None = None, layout: PairLayout = "half"
) -> Rope:
    """The rope of these settings, which are one of perhaps several groups inside `hf_config`."""
    found = settings.number("partial_rotary_factor", hf_config.number("partial_rotary_factor", share or 1.0))
    if share is None and found != 1:
        raise hf_config.error("partial_rotary_factor", found, "is not supported, only 1.0 is: whole heads are rotated")
    return Rope(settings.number("rope_theta", base), found, layout, read_scaling(settings, hf_config))


def read_scaling(settings: Config, hf_config: Config) -> Scaling | None:
    """The scaling for contexts beyond the trained length; the lengths may be outside the settings, in `hf_config`."""
    rope_type = settings.value("rope_type", (str,), settings.value("type", (str,), "default"))
    if rope_type == "default":
        return None
    if rope_type == "linear":
        return LinearScaling(settings.number("factor"))
    context = hf_config.integer("max_position_embeddings")
    hf_config.finite("max_position_embeddings", context)  # an integer may be too large to be divided as a float
    if rope_type == "dynamic":
        return DynamicNTK(settings.number("factor"), context)
    # Phi-3 has this length outside the settings, where it has priority.
    length = settings.integer("original_max_position_embeddings", context)
    length = hf_config.integer("original_max_position_embeddings", length)
    factor = settings.number("factor", context / max(length, 1))
    attention_factor = settings.number_or_none("attention_factor")
    match rope_type:
        case "yarn":
            mscale, mscale_all_dim = settings.number_or_none("mscale"), settings.number_or_none("mscale_all_dim")
            fast, slow = settings.number("beta_fast", 32.0), settings.number("beta_slow", 1.0)
            truncate = settings.flag("truncate", True)
            return Yarn(factor, length, fast, slow, attention_factor, mscale, mscale_all_dim, truncate)
        case "llama3":
            low, high = settings.number("low_freq_factor"), settings.number("high_freq_factor")
            return Llama3(factor, length, low, high)
        case "longrope":
            short, long = (settings.numbers(key) for key in ("short_factor", "long_factor"))
            return LongRope(short, long, factor, length, attention_factor)
    raise settings.error("rope_type", rope_type, f"is not supported; {suggest_name(rope_type, ROPE_TYPES)}")


def rope_parameters(position: Position, share: float = 1.0) -> dict[str, Any]:
    """The settings as transformers 5 writes them; `share` is the default of the family's class."""
    if not isinstance(position, Rope):
        return {"rope_type": "default"}
    settings: dict[str, Any] = {"rope_theta": position.base}
    if position.share != share:
        settings["partial_rotary_factor"] = position.share
    return settings | scaling_settings(position.scaling)


def scaling_settings(scaling: Scaling | None) -> dict[str, Any]:
    match scaling:
        case LinearScaling():
            return {"rope_type": "linear", "factor": scaling.factor}
        case DynamicNTK():
            return {"rope_type": "dynamic", "factor": scaling.factor}
        case Yarn():
            options = {name: getattr(scaling, name) for name in YARN_OPTIONS if getattr(scaling, name) is not None}
            return {"rope_type": "yarn", **extended(scaling), **options}
        case Llama3():
            frequencies = {name: getattr(scaling, name) for name in ("low_freq_factor", "high_freq_factor")}
            return {"rope_type": "llama3", **extended(scaling), **frequencies}
        case LongRope():
            factors = {"short_factor": list(scaling.short), "long_factor": list(scaling.long)}
            if scaling.attention_factor is not None:
                factors["attention_factor"] = scaling.attention_factor
            return {"rope_type": "longrope", **extended(scaling), **factors}
    return {"rope_type": "default"}


def extended(scaling: Yarn | Llama3 | LongRope) -> dict[str, Any]:
    """The trained length, and the factor by which it is extended."""
    return {"factor": scaling.factor, "original_max_position_embeddings": scaling.length}
