"""Every kind of model with every objective: tiny recipes, and the table of docs/models-and-objectives.md.

`python -m tests.cli.pairs` writes the page. A new kind of model, head, input or objective needs a row or column here.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from regard.checkpoint import save
from regard.checkpoint.sentence_transformers import without_sentence_head
from regard.families import detect_family
from regard.families.common.config_reader import FamilyError
from regard.kinds import OBJECTIVES
from regard.models.base import Model
from regard.objectives.base import Objective, PairError
from regard.objectives.defaults import check_pair
from regard.spec import class_of, parse_spec
from regard.text.train import byte
from regard.training.recipe import fill_model

PAGE = Path(__file__).parents[2] / "docs" / "models-and-objectives.md"
WIDTH, LENGTH = 16, 40
LAYERNORM = {"kind": "layernorm", "eps": 1e-12}
ATTENTION = {"kind": "attention", "heads": 2, "bias": True}
FEEDFORWARD = {"kind": "feedforward", "hidden": 24}
PATCHES = {"kind": "patches", "size": [4, 4], "image": [8, 8], "channels": 3}
FRAMES = {"kind": "frames", "channels": 4}


def stack(*bodies: Mapping[str, Any], norm: Mapping[str, Any] | None = None, **block: Any) -> dict[str, Any]:
    """The layers of a model with one block."""
    sublayers = [{"body": dict(body), **({} if norm is None else {"norm": norm})} for body in bodies]
    return {"width": WIDTH, "layers": [{"blocks": [{"sublayers": sublayers, **block}]}]}


def decoder(*bodies: Mapping[str, Any], **options: Any) -> dict[str, Any]:
    return {"kind": "decoder", **stack(*bodies), **options}


def bert(head: Mapping[str, Any] | None, **attention: Any) -> dict[str, Any]:
    return {
        "kind": "encoder",
        **stack(ATTENTION | attention, FEEDFORWARD, norm=LAYERNORM, style="post"),
        "input": {"kind": "tokens", "types": 2},
        "position": {"kind": "learned", "length": LENGTH},
        "embedding_norm": LAYERNORM,
        **({} if head is None else {"head": head}),
    }


def vision(head: Mapping[str, Any] | None, norm: Mapping[str, Any] = LAYERNORM, **patches: Any) -> dict[str, Any]:
    return {
        "kind": "encoder",
        **stack(ATTENTION, FEEDFORWARD, norm=norm),
        "input": PATCHES | patches,
        "position": {"kind": "learned", "length": 5 + patches.get("registers", 0)},
        "norm": norm,
        **({} if head is None else {"head": head}),
    }


def encoder_decoder(input: Mapping[str, Any]) -> dict[str, Any]:
    """A T5 if its input is a sequence of tokens."""
    attention = {"kind": "attention", "heads": 2, "scale": 1.0}
    gated = {"kind": "gated", "hidden": 24, "activation": "gelu_tanh"}
    buckets = {"kind": "t5_buckets", "buckets": 8, "distance": 16, "heads": 2}
    cross = {"kind": "cross_attention", "heads": 2, "scale": 1.0}
    source = {"input": input, "norm": {"kind": "rmsnorm"}, "position": {**buckets, "bidirectional": True}}
    return {
        "kind": "encoder_decoder",
        "shared": input["kind"] == "tokens",
        "source": stack(attention, gated) | source,
        "target": stack(attention, cross, gated) | {"position": buckets},
    }


def clip_vision(head: Mapping[str, Any] | None) -> dict[str, Any]:
    layers = stack(ATTENTION, CLIP_MLP, norm=CLIP_NORM)
    return {**vision(head, CLIP_NORM, bias=False), **layers, "embedding_norm": CLIP_NORM}


def clip() -> dict[str, Any]:
    text = stack(ATTENTION | {"mask": {"kind": "causal"}}, CLIP_MLP, norm=CLIP_NORM)
    position, head = {"kind": "learned", "length": LENGTH}, {"kind": "pooled", "pool": "last", "dim": 8}
    return {
        "kind": "dual_encoder",
        "image": clip_vision({"kind": "pooled", "pool": "cls", "dim": 8}),
        "text": {**text, "position": position, "norm": CLIP_NORM, "head": head},
        "end": SEPARATOR,
    }


CLIP_NORM = {"kind": "layernorm"}
CLIP_MLP = FEEDFORWARD | {"activation": "quick_gelu"}
SEPARATOR = 6  # the id of [SEP], which ends a text
ROPE = {"kind": "attention", "heads": 2, "position": {"kind": "rope"}}
SWIGLU = {"kind": "swiglu", "hidden": 24}
EXPERTS = {"kind": "experts", "count": 4, "top_k": 2, "expert": SWIGLU}
BERT_DENSE = {"activation": "gelu", "norm": LAYERNORM}
MASKED_LM = {"kind": "masked_lm", "dense": BERT_DENSE}
LSTM = stack({"kind": "lstm"}, norm={"kind": "no_norm"}, keep=0.0)
CODES, SMALL_MLP = {"shape": [3, 8, 8], "latent": 4}, {"hidden": [8]}
GENERATIVE = ("autoencoder", "vae", "gan")
MODELS: dict[str, dict[str, Any]] = {
    "decoder, attention": decoder(ROPE, SWIGLU, context=64),
    "decoder, attention, `ahead` blocks": decoder(
        ROPE, SWIGLU, context=64, ahead=[{"sublayers": [{"body": ROPE}, {"body": SWIGLU}]}]
    ),
    "decoder, experts": decoder(ROPE, EXPERTS, context=64),
    "decoder, Mamba": decoder({"kind": "mamba"}),
    "decoder, Mamba and attention": decoder({"kind": "mamba"}, ROPE, SWIGLU),
    "decoder, LSTM": {"kind": "decoder", **LSTM, "norm": {"kind": "no_norm"}},
    "encoder without a head": bert(None),
    "encoder, `pooler` head": bert({"kind": "pooler"}),
    "encoder, `masked_lm` head": bert(MASKED_LM),
    "encoder, `masked_lm` head, mask `prefix_lm`": bert(MASKED_LM, mask={"kind": "prefix_lm", "prefix": 1}),
    "encoder, `pretraining` head": bert(
        {
            "kind": "pretraining",
            "words": MASKED_LM,
            "pair": {"labels": 2, "dense": {"activation": "tanh"}},
        }
    ),
    "encoder, `classification` head": bert({"kind": "classification", "dense": {"activation": "tanh"}}),
    'encoder, `classification` head, `pool="none"`': bert({"kind": "classification", "pool": "none"}),
    "encoder, `pooled` head": bert({"kind": "pooled"}),
    "encoder of patches without a head": vision(None),
    "encoder of patches, `classification` head": vision({"kind": "classification"}),
    "encoder of patches, `distilled` head": vision({"kind": "distilled"}, registers=1),
    "encoder of patches, `pooled` head": vision({"kind": "pooled", "pool": "cls"}),
    "encoder of frames, `classification` head": {
        "kind": "encoder",
        **stack(ATTENTION, FEEDFORWARD, norm=LAYERNORM),
        "input": FRAMES,
        "head": {"kind": "classification", "pool": "mean"},
    },
    "encoder-decoder": encoder_decoder({"kind": "tokens"}),
    "encoder-decoder, source of patches": encoder_decoder(PATCHES),
    "encoder-decoder, source of frames": encoder_decoder(FRAMES),
    "seq2seq": {"kind": "seq2seq", "source": LSTM, "target": LSTM | {"norm": {"kind": "no_norm"}, "tied": False}},
    "dual encoder": clip(),
    "interleaved": {
        "kind": "interleaved",
        "vision": clip_vision(None),
        "decoder": decoder(ROPE, SWIGLU, context=64),
        "features": [-2],
    },
    "autoencoder": {"kind": "autoencoder", **CODES, "encoder": SMALL_MLP, "decoder": SMALL_MLP},
    "variational autoencoder": {"kind": "vae", **CODES, "encoder": SMALL_MLP, "decoder": SMALL_MLP},
    "GAN": {"kind": "gan", **CODES, "generator": SMALL_MLP, "discriminator": SMALL_MLP | {"spectral_norm": True}},
}


def spec(row: str, objective: Objective | None = None, vocab: int = 300) -> Model:
    head = getattr(objective, "head_options", None) or {"labels": 1}
    model = parse_spec(fill_model(MODELS[row], vocab, head), "model", Model)
    assert isinstance(model, Model)
    return model


def objective_of(kind: str) -> Objective:
    objective = class_of(kind, "objective", Objective)()
    assert isinstance(objective, Objective)
    return objective


def refusal(row: str, kind: str) -> str | None:
    """The error with which the pair is refused; None if it is accepted."""
    objective = objective_of(kind)
    try:
        check_pair(objective, spec(row, objective))
    except PairError as error:
        return str(error)
    return None


REFUSALS = {(row, kind): refusal(row, kind) for row in MODELS for kind in OBJECTIVES}
TRAINED = [pair for pair, reason in REFUSALS.items() if reason is None]
REFUSED = [pair for pair, reason in REFUSALS.items() if reason is not None]


def example(row: str, kind: str, n: int) -> dict[str, Any]:
    """One example that the objective needs; images have the values 0 to 1."""
    animal, place = ("cat", "dog", "hen")[n % 3], ("barn", "park")[n % 2]
    text, other = f"The {animal} number {n} is in the {place}.", f"In the {place} there is {animal} {n}."
    image = [[[(n * (x + y + c) % 7) / 7 for x in range(8)] for y in range(8)] for c in range(3)]
    signal = [[(n * (x + c) % 7) / 7 for x in range(12)] for c in range(4)]
    model = MODELS[row]
    default = {"kind": "patches" if model["kind"] in GENERATIVE else "tokens"}
    input = model.get("source", model).get("input", default)["kind"]
    data = {"tokens": {"text": text}, "patches": {"image": image}, "frames": {"signal": signal}}[input]
    match kind:
        case "translation":
            return {**({"source": text} if input == "tokens" else data), "target": other}
        case "classification":
            return {**data, "label": animal}
        case "regression":
            return {**data, "label": n / 10}
        case "token_classification":
            words = text.split()
            return {"tokens": words, "labels": ["THING" if word in (animal, place) else "O" for word in words]}
        case "relevance":
            return {"first": text, "second": other, "label": n % 2, "group": n // 2}
        case "embeddings":
            return {"anchor": text, "positive": other, "negatives": [f"The {place} is closed."]}
        case "contrastive" | "image_text":
            return {"image": image, "text": text}
        case "reconstruction" | "vae" | "gan":
            return data
        case "bert_pretraining":
            return {"text": f"{text} {other}"}
        case "reward" | "dpo" | "simpo" | "orpo":
            return {"prompt": f"Cat {n}?", "chosen": f" In the {place}.", "rejected": f" The {animal}."}
        case "kto":
            return {"prompt": f"Cat {n}?", "completion": f" The {animal}.", "label": n % 2 == 0}
        case "reinforce" | "rloo" | "grpo" | "ppo":
            return {"prompt": f"Cat {n}?", "letters": animal}
    return {"text": text}


def reward(prompts: list[str], completions: list[str], letters: list[str]) -> list[float]:
    """For a completion with many of the letters, and a short one."""
    return [
        sum(text.count(letter) for letter in wanted) - len(text) / 10
        for text, wanted in zip(completions, letters, strict=True)
    ]


ROLLOUTS = {"reward": "tests.cli.pairs:reward", "max_new": 4, "kl": 0.1}
OPTIONS = {  # of objectives; resuming after step 2 is inside of a rollout of 4 steps
    "span_corruption": {"sentinels": 8},
    "reinforce": ROLLOUTS,
    "rloo": ROLLOUTS | {"group": 2, "epochs": 4},
    "grpo": ROLLOUTS | {"group": 2, "epochs": 2, "updates": 2},
    "reconstruction": {"noise": 0.1},
    "gan": {"loss": "wasserstein", "critic_steps": 2},  # resuming after step 2 begins with the generator
    "ppo": ROLLOUTS | {"epochs": 2, "updates": 2, "target_kl": 0.01, "horizon": 8},
}


def recipe(row: str, kind: str, folder: Path) -> dict[str, Any]:
    """The tables of a recipe of four steps, with its data in the folder."""
    data = folder / "data.jsonl"
    data.write_text("\n".join(json.dumps(example(row, kind, n)) for n in range(24)), encoding="utf-8")
    options: dict[str, dict[str, Any]] = dict(OPTIONS)
    if kind == "distillation" and REFUSALS[row, kind] is None:
        tokenizer = byte()
        save(spec(row, vocab=tokenizer.vocab_size).build(1), folder / "teacher", tokenizer)
        options[kind] = {"teacher": str(folder / "teacher"), "weight": 0.5}
    return {
        "model": MODELS[row],
        "objective": {"kind": kind, **options.get(kind, {})},
        "data": {"path": str(data), "rows": 2, "length": LENGTH, "held_out": 1},
        "tokenizer": {"by": "byte"},
        "train": {
            "steps": 4,
            "save_every": 2,
            "evaluate_every": 2,
            "schedule": {"kind": "constant", "warmup": 1},
        },
    }


def family_of(row: str, objective: Objective | None = None) -> str | None:
    """The family of `transformers` that the model is exported as; None if it is refused."""
    try:
        return detect_family(without_sentence_head(spec(row, objective)))
    except FamilyError:
        return None


def page() -> str:
    header = ["model", *(f"`{kind}`" for kind in OBJECTIVES), "exported as"]
    rows = []
    for row in MODELS:
        cells = ["✓" if refusal(row, kind) is None else "–" for kind in OBJECTIVES]
        rows.append([row, *cells, f"`{family}`" if (family := family_of(row)) else "–"])
    lines = [f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header), *rows)]
    return f"""# Models and objectives

{len(TRAINED)} of {len(MODELS) * len(OBJECTIVES)} pairs of a kind of model and an
[objective](topics/training.md#objectives) can be trained (✓). `regard train` refuses the others (–) before it reads any
data, with an error that names the objectives that train the model.

A test trains every pair by `regard train`, stops it, resumes it with the same result, loads it with `regard.load`, and
exports it with `regard export`: as a model of the family in the last column, which `transformers` loads; if no family
fits (–), the export is refused, and the model remains in regard's own format. Which family fits depends on the parts of
a model; the table has one small model per row. `python -m tests.cli.pairs` writes this page.

{chr(10).join(lines)}
"""


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
