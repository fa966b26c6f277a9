"""Reading a foreign config, and writing one: every value is typed, whatever is not understood is refused by name.

A family's `config(spec)` writes down what it can and `expressed` reads it back: if that is not the spec it came from,
the first place where they differ is what the foreign class has no word for. So no family lists what it lacks.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from regard.models.decoder import Decoder
from regard.models.stack import Repeat
from regard.parts.attention import Attention
from regard.parts.block import Block
from regard.parts.feedforward import PositionWise
from regard.spec import Spec, nearest

REQUIRED: Any = object()


class FamilyError(ValueError):
    """A foreign config that our parts cannot express, or a spec that a foreign class cannot."""


class Config:
    """A foreign config.json; a default is what the foreign class itself takes when the key is absent."""

    def __init__(self, model_type: str, values: Mapping[str, Any]):
        self.model_type, self.values = model_type, values

    def integer(self, key: str, default: Any = REQUIRED) -> int:
        return self.value(key, (int,), default)

    def number(self, key: str, default: Any = REQUIRED) -> float:
        return float(self.value(key, (int, float), default))

    def flag(self, key: str, default: Any = REQUIRED) -> bool:
        return self.value(key, (bool,), default)

    def choice(self, key: str, words: Mapping[str, Any], default: Any = REQUIRED) -> Any:
        """What a word of theirs is called here."""
        word = self.value(key, (str,), default)
        if word not in words:
            raise FamilyError(f"{self.model_type}: {key}={word!r} has no part here; {nearest(word, words)}")
        return words[word]

    def only(self, key: str, allowed: Any) -> None:
        """Refuse a setting whose other values no part can express."""
        found = self.values.get(key)
        if found is not None and found != allowed:
            raise FamilyError(f"{self.model_type}: {key}={found!r:.80} has no part here; only {allowed!r} is read")

    def rope_base(self, default: float = 10000.0) -> float:
        """Both spellings: `rope_parameters` (transformers 5), or `rope_theta` beside `rope_scaling` (4)."""
        settings = self.values.get("rope_parameters") or self.values.get("rope_scaling") or {}
        if not isinstance(settings, Mapping):
            raise FamilyError(f"{self.model_type}: rope settings should be a table, found {settings!r:.80}")
        rope = Config(f"{self.model_type}: rope", settings)
        for key in ("rope_type", "type"):
            rope.only(key, "default")
        rope.only("partial_rotary_factor", 1.0)
        return rope.number("rope_theta", self.number("rope_theta", default))

    def value(self, key: str, types: tuple[type, ...], default: Any) -> Any:
        found = self.values.get(key)
        if found is None:
            found = default
        if found is REQUIRED:
            raise FamilyError(f"{self.model_type}: the config has no {key!r}")
        if type(found) not in types:
            names = " or ".join(t.__name__ for t in types)
            raise FamilyError(f"{self.model_type}: {key}={found!r:.80} should be {names}")
        return found


def expressed(model_type: str, spec: Decoder, config: dict, read: Callable[[dict], Decoder]) -> dict:
    """The config, if reading it gives this spec back; otherwise the difference by name."""
    back = read(config)
    if spelled_out(back) != spelled_out(spec):
        where, ours, theirs = difference(spelled_out(spec), spelled_out(back))
        raise FamilyError(
            f"a {model_type} model cannot express {where}={ours!r:.120}, only {theirs!r:.120}; "
            f"change the spec or keep the folder in our own format"
        )
    return config


def first_block(spec: Decoder, *bodies: type) -> tuple[Any, ...]:
    """The bodies of the first block, if they are of these kinds: what a family writes its config from."""
    block = spec.blocks[0]
    found = tuple(sublayer.body for sublayer in block.sublayers)
    if len(found) != len(bodies) or not all(map(isinstance, found, bodies)):
        kinds, wanted = ", ".join(b.kind for b in found), ", ".join(b.__name__ for b in bodies)
        raise FamilyError(f"its blocks hold {kinds}; this family's hold {wanted}")
    return found


def spelled_out(spec: Any, width: int = 0) -> Any:
    """The same model in one spelling: defaults filled in, each block a run, no dropout (a training choice)."""
    if isinstance(spec, Decoder):
        width = spec.width
        spec = dataclasses.replace(spec, dropout=0.0, layers=tuple(Repeat((block,)) for block in spec.blocks))
    if isinstance(spec, Attention):
        heads, kv_heads, head_dim = spec.sizes(width)
        filled = {
            "kv_heads": kv_heads,
            "head_dim": head_dim,
            "out_bias": spec.bias if spec.out_bias is None else spec.out_bias,
            "scale": head_dim**-0.5 if spec.scale is None else spec.scale,
        }
        return dataclasses.replace(spec, **filled, dropout=0.0)
    if isinstance(spec, PositionWise):
        return dataclasses.replace(spec, hidden=spec.hidden_dim(width), dropout=0.0)
    if isinstance(spec, Block):
        spec = dataclasses.replace(spec, dropout=0.0)
    if isinstance(spec, Spec):
        values = {f.name: spelled_out(getattr(spec, f.name), width) for f in dataclasses.fields(spec)}
        return dataclasses.replace(spec, **values)
    return tuple(spelled_out(s, width) for s in spec) if isinstance(spec, tuple) else spec


def difference(ours: Any, theirs: Any, where: str = "decoder") -> tuple[str, Any, Any]:
    """The first place where two specs differ: its path and both values."""
    if isinstance(ours, Spec) and type(ours) is type(theirs):
        names = [f.name for f in dataclasses.fields(ours)]
        pairs = [(f"{where}.{n}", getattr(ours, n), getattr(theirs, n)) for n in names]
    elif isinstance(ours, tuple) and isinstance(theirs, tuple) and len(ours) == len(theirs):
        pairs = [(f"{where}[{n}]", a, b) for n, (a, b) in enumerate(zip(ours, theirs, strict=True))]
    else:
        return where, ours, theirs
    return next(difference(a, b, path) for path, a, b in pairs if a != b)
