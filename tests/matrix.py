"""The matrix of features: every mixer and mask with every position scheme, in every store.

`python -m tests.matrix` prints it. The parts are those of the models in tests/laws.py. A cell is `pass`, or the type of
the error that rejects the combination or the operation.
"""

import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import torch

from regard.kernels.attention.mask import Causal, Mask
from regard.models.base import Model
from regard.models.encoder_decoder import EncoderDecoder, cross_attention_of
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.body import Body
from regard.parts.cross_attention import CrossAttention
from regard.parts.feedforward import SwiGLU
from regard.parts.latent_attention import LatentAttention
from regard.parts.position.base import NoPosition, Position
from regard.parts.position.rope import Rope
from regard.parts.position.rope2d import Rope2D
from regard.parts.position.rope_scaling import LongRope
from regard.parts.position.t5 import T5Buckets
from regard.spec import Spec, SpecError, field_types, parse_spec
from regard.verification.length import nested_specs
from regard.verification.outcome import within_tolerance
from regard.verification.report import attempt
from regard.verification.trial import Trial
from regard.verification.trials import trials
from tests.laws import ENCODER, MODELS, OTHERS, build, decoder

LENGTH = 9
# operation: the law that tests it, with a store and without one
STORE_LAWS = {
    "cached": "cached = whole",
    "chunked": "chunked = whole",
    "batched": "uneven chunks = whole",
    "left pad": "ragged decode = alone",
    "packed": "packed is refused by a store",
    "rewind": "rewound = recomputed",
    "fork": "forked = recomputed",
}
FRESH_LAWS = {"batched": "batched = alone", "left pad": "padded left = right = alone", "packed": "packed = separate"}
COLUMNS = [
    *((store, operation) for store in ("contiguous", "paged") for operation in STORE_LAWS),
    *(("fresh", operation) for operation in FRESH_LAWS),
]
Row = dict[tuple[str, str], str]


def parts_of_type(kind: type) -> Iterator[Spec]:
    """All parts of that type in the models of tests/laws.py, in their order."""
    for spec in (MODELS | OTHERS).values():
        yield from (part for part in nested_specs(spec) if isinstance(part, kind))


@cache
def mixers() -> dict[str, Body]:
    """One mixer of every kind, without positions, and attention with every kind of causal mask; four heads each."""
    found: dict[str, Body] = {}
    for body in (part for part in parts_of_type(Body) if isinstance(part, Body) and part.mixes and part.causal):
        preferred = getattr(body, "heads", 4) == 4 or body.kind not in {b.kind for b in found.values()}
        name = f"{body.kind} from a source" if getattr(body, "source", False) else body.kind
        if preferred and getattr(found.get(name), "heads", 0) != 4:
            found[name] = replace(body, position=NoPosition()) if takes_position(body) else body
    found["attention"] = Attention(4, 2)
    for mask in parts_of_type(Mask):
        if isinstance(mask, Mask) and mask.causal and mask != Causal():
            found.setdefault(f"attention, {mask.kind}", Attention(4, 2, mask=mask))
    return found


@cache
def positions() -> dict[str, Position]:
    """One position of every kind, RoPE with every kind of scaling, and T5's buckets in attention and in the stack."""
    found: dict[str, Position] = {}
    for position in (part for part in parts_of_type(Position) if isinstance(part, Position)):
        name = position.kind
        if isinstance(position, Rope) and position.scaling is not None:
            name = f"rope, {position.scaling.kind}"
        if getattr(position, "heads", None) is not None:
            name = f"{name} of the stack"
        found.setdefault(name, position)
    return found


def takes_position(body: Body) -> bool:
    return "position" in field_types(type(body)) and not isinstance(body, CrossAttention)


def model_of(mixer: Body, position: Position) -> Model | Spec:
    """Two layers of the mixer with this position in the mixer or in the stack; SpecError if it fits neither."""
    mixer, position = with_matching_sizes(mixer, position)
    in_mixer = fits(position, "attention") and (takes_position(mixer) or not fits(position, "stack"))
    body = parse_spec(mixer.to_dict() | {"position": position.to_dict()}, mixer.kind) if in_mixer else mixer
    block = Block((Sublayer(body), Sublayer(SwiGLU(40))))
    spec = decoder(block, position=NoPosition() if in_mixer else position)
    return spec if cross_attention_of(mixer) is None else EncoderDecoder(ENCODER, spec)


def with_matching_sizes(mixer: Body, position: Position) -> tuple[Body, Position]:
    """The mixer and the position, resized so that no combination is refused only because of sizes."""
    if isinstance(position, Rope2D) and "head_dim" in field_types(type(mixer)):
        mixer = replace(mixer, head_dim=8)
    if isinstance(mixer, LatentAttention) and isinstance(position, Rope) and isinstance(position.scaling, LongRope):
        pairs = mixer.rope_dim // 2
        scaling = replace(position.scaling, short=position.scaling.short[:pairs], long=position.scaling.long[:pairs])
        position = replace(position, scaling=scaling)
    if isinstance(position, T5Buckets) and position.heads is not None:
        position = replace(position, heads=mixer.bias_heads or 1)
    return mixer, position


def fits(position: Position, place: str) -> bool:
    try:
        position.check_place(place)
    except SpecError:
        return False
    return True


def row(mixer: Body, position: Position) -> Row:
    try:
        model = build(model_of(mixer, position))
    except SpecError:
        return dict.fromkeys(COLUMNS, SpecError.__name__)
    trial = trials(model, LENGTH)[""]
    return {column: cell(column, trial) for column in COLUMNS}


def cell(column: tuple[str, str], trial: Trial) -> str:
    store, operation = column
    law = FRESH_LAWS[operation] if store == "fresh" else STORE_LAWS[operation]
    outcome = attempt(law, trial if store == "fresh" else trial.with_store(store))
    if not within_tolerance(outcome, torch.float64):
        return f"FAIL: {outcome.note}"
    return {"compared": "pass", "refused": ValueError.__name__, "not applicable": ""}[outcome.result]


def matrix() -> Iterator[tuple[str, str, Row]]:
    for mixer, body in mixers().items():
        for name, position in positions().items():
            yield mixer, name, row(body, position)


def main() -> int:
    print(
        f"{'mixer':36} {'position':24} " + " ".join(f"{f'{store[0]}:{operation}':>13}" for store, operation in COLUMNS)
    )
    failures = 0
    for mixer, position, cells in matrix():
        print(f"{mixer:36} {position:24} " + " ".join(f"{cells[column]:>13.13}" for column in COLUMNS), flush=True)
        failures += sum(not cell or cell.startswith("FAIL") for cell in cells.values())
    print(f"c: contiguous, p: paged, f: fresh (no cache). {failures} cells are empty or failed.")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
