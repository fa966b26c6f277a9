"""RoPE's settings both ways: `rope_parameters` (transformers 5), or `rope_theta` beside `rope_scaling` (4)."""

from typing import Any

from regard.families.common.config_reader import Config, FamilyError
from regard.parts.position.base import Position
from regard.parts.position.rope import PairLayout, Rope
from regard.parts.position.rope_scaling import DynamicNTK, LinearScaling, Llama3, LongRope, Scaling, Yarn
from regard.spec import nearest

KINDS = ("default", "linear", "dynamic", "yarn", "llama3", "longrope")


def rope(theirs: Config, base: float = 10000.0, share: float | None = None, layout: PairLayout = "half") -> Rope:
    """The rope of a whole model; `base` and `share` are the family's own defaults (None: all of a head turns)."""
    settings = theirs.table("rope_parameters" if theirs.has("rope_parameters") else "rope_scaling")
    return rope_of(settings, theirs, theirs.number("rope_theta", base), share, layout)


def rope_of(
    settings: Config, theirs: Config, base: float, share: float | None = None, layout: PairLayout = "half"
) -> Rope:
    """The rope that these settings describe; a config may have several."""
    turning = settings.number("partial_rotary_factor", theirs.number("partial_rotary_factor", share or 1.0))
    if share is None and turning != 1:
        raise FamilyError(f"{theirs.model_type}: partial_rotary_factor={turning}, but here all of a head turns")
    return Rope(settings.number("rope_theta", base), turning, layout, scaling(settings, theirs))


def scaling(settings: Config, theirs: Config) -> Scaling | None:
    """How it is stretched past the length it was trained on, which the config around it may have to say."""
    kind = settings.value("rope_type", (str,), settings.value("type", (str,), "default"))
    if kind == "default":
        return None
    if kind == "linear":
        return LinearScaling(settings.number("factor"))
    reach = theirs.integer("max_position_embeddings")
    theirs.real("max_position_embeddings", reach)  # a length that no float holds is refused before it is divided
    if kind == "dynamic":
        return DynamicNTK(settings.number("factor"), reach)
    inside = settings.integer("original_max_position_embeddings", reach)
    length = theirs.integer("original_max_position_embeddings", inside)  # beside the settings (Phi-3), it counts first
    factor = settings.number("factor", reach / max(length, 1))
    given = settings.number("attention_factor") if settings.has("attention_factor") else None
    match kind:
        case "yarn":
            mscale, all_dim = (settings.number(k) if settings.has(k) else None for k in ("mscale", "mscale_all_dim"))
            fast, slow = settings.number("beta_fast", 32.0), settings.number("beta_slow", 1.0)
            return Yarn(factor, length, fast, slow, given, mscale, all_dim, settings.flag("truncate", True))
        case "llama3":
            low, high = settings.number("low_freq_factor"), settings.number("high_freq_factor")
            return Llama3(factor, length, low, high)
        case "longrope":
            short, long = (settings.numbers(key) for key in ("short_factor", "long_factor"))
            return LongRope(short, long, factor, length, given)
    raise FamilyError(f"{settings.model_type}: rope_type={kind!r} has no part here; {nearest(kind, KINDS)}")


def rope_parameters(position: Position, share: float = 1.0) -> dict[str, Any]:
    """As transformers 5 writes them; `share` is the family's own default."""
    if not isinstance(position, Rope):
        return {"rope_type": "default"}
    written: dict[str, Any] = {"rope_theta": position.base}
    if position.share != share:
        written["partial_rotary_factor"] = position.share
    found = position.scaling
    match found:
        case LinearScaling():
            written |= {"rope_type": "linear", "factor": found.factor}
        case DynamicNTK():
            written |= {"rope_type": "dynamic", "factor": found.factor}
        case Yarn():
            written |= {"rope_type": "yarn", "factor": found.factor, "original_max_position_embeddings": found.length}
            names = ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate")
            written |= {name: getattr(found, name) for name in names if getattr(found, name) is not None}
        case Llama3():
            written |= {"rope_type": "llama3", "factor": found.factor, "original_max_position_embeddings": found.length}
            written |= {name: getattr(found, name) for name in ("low_freq_factor", "high_freq_factor")}
        case LongRope():
            written |= {"rope_type": "longrope", "short_factor": list(found.short), "long_factor": list(found.long)}
            written |= {"factor": found.factor, "original_max_position_embeddings": found.length}
            written |= {} if found.attention_factor is None else {"attention_factor": found.attention_factor}
        case _:
            written["rope_type"] = "default"
    return written
