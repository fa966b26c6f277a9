"""The size of the cache, its sharing by heads, and small adapters."""

import torch
from torch import nn

from regard.adapt.lora import LoRA, LoRALinear
from regard.instruments.instrument import Instrument, Panel, Quiz, Selection, Slider, Subject
from regard.instruments.panels import bars, diagram, lines, numbers
from regard.models.decoder import Decoder
from regard.models.stack import Repeat
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.planning.cost import Costs
from regard.planning.flops import cached_pairs, uncached_pairs, uncached_projections
from regard.planning.groups import format_bytes
from regard.planning.model_plan import plan
from regard.planning.parameters import Parameters
from regard.planning.training import adapter_parameters, lora_parameters


def cache_costs(layers: int, kv_heads: int, head_dim: int, tokens: int, dtype: str, heads: int | None = None) -> Costs:
    """The costs of a decoder with this cache; its weights are not counted."""
    block = Block((Sublayer(Attention(heads or kv_heads, kv_heads, head_dim)),))
    spec = Decoder(1, 1, (Repeat((block,), layers),))
    return Costs(spec, tokens, 1, dtype, dtype, Parameters({}, 0))


def kv_cache(
    subject: Subject | None, layers: int, kv_heads: int, head_dim: int, tokens: int, batch: int, dtype: str
) -> list[Panel]:
    costs = cache_costs(layers, kv_heads, head_dim, tokens, dtype)
    total = batch * costs.kv_bytes()
    steps = [max(1, tokens * i // 24) for i in range(25)]
    growth = [(n, batch * cache_costs(layers, kv_heads, head_dim, n, dtype).kv_bytes() / 2**30) for n in steps]
    pairs = {
        "with cache": [(n, cached_pairs(n)) for n in steps],
        "without": [(n, uncached_pairs(n)) for n in steps],
    }
    items: dict[str, float | str] = {
        "cache": format_bytes(total),
        "GB (10⁹)": total / 1e9,
        "GiB (2³⁰)": total / 2**30,
        "per token of one sequence": format_bytes(costs.kv_bytes_per_token),
        "keys computed without a cache": f"{uncached_projections(tokens):,}",
        "keys computed with it": f"{tokens:,}",
    }
    if subject is not None and isinstance(subject.model.spec, Decoder):
        served = str(subject.model.embedding.weight.dtype).removeprefix("torch.")
        own = plan(subject.model, context=tokens, batch=batch, dtype=served)
        items[f"{subject.name} at this length, in {served}"] = format_bytes(own.kv_bytes())
    return [
        numbers(items),
        lines("size of the cache", {"cache": growth}, "tokens", "GiB"),
        lines("pairs of query and key to generate n tokens", pairs, "tokens", "pairs", log_y=True),
    ]


def sharing(subject: Subject | None, heads: int, kv_heads: int, head_dim: int, layers: int, tokens: int) -> list[Panel]:
    if heads % kv_heads:
        divisors = [str(n) for n in range(1, heads + 1) if heads % n == 0]
        raise ValueError(f"{heads} query heads cannot share {kv_heads} key heads evenly; choose {', '.join(divisors)}")
    nodes = [{"id": f"q{i}", "label": f"Q{i}", "x": (i + 0.5) / heads, "y": 0.0} for i in range(heads)]
    nodes += [{"id": f"k{i}", "label": f"KV{i}", "x": (i + 0.5) / kv_heads, "y": 1.0} for i in range(kv_heads)]
    edges = [(f"q{i}", f"k{i // (heads // kv_heads)}", 1.0) for i in range(heads)]
    sizes = {n: cache_costs(layers, n, head_dim, tokens, "bfloat16", heads).kv_bytes() for n in {heads, kv_heads, 1}}
    names = {heads: f"multi-head ({heads})", kv_heads: f"chosen ({kv_heads})", 1: "multi-query (1)"}
    items: dict[str, float | str] = {
        "share of the multi-head cache": sizes[kv_heads] / sizes[heads],
        "cache": format_bytes(sizes[kv_heads]),
        "kind": "multi-head" if kv_heads == heads else "multi-query" if kv_heads == 1 else "grouped-query",
    }
    if subject is not None:
        shapes = plan(subject.model, context=1).attention_shapes
        items |= {
            f"{subject.name}: {h} query heads, {k} key heads of {size}": f"{n} layers"
            for (h, k, size), n in shapes.items()
        }
    return [
        diagram("which query heads share keys and values", nodes, edges),
        bars("cache", {names[n]: sizes[n] / 2**20 for n in sorted(sizes, reverse=True)}, "MiB"),
        numbers(items),
    ]


def adapters(subject: Subject | None, rank: int, alpha: float, rows: int, columns: int) -> list[Panel]:
    rank = min(rank, rows, columns)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layer = LoRALinear(nn.Linear(64, 64, bias=False))
        layer.add("adapter", LoRA(rank, alpha, ("q_proj",)), layer.base.weight)
        with torch.no_grad():
            before = float(layer.delta_weight("adapter").abs().max())
            layer.matrix("B", "adapter").normal_(std=0.02)
            singular = torch.linalg.svdvals(layer.delta_weight("adapter").double())
    full, small = rows * columns, adapter_parameters(rank, columns, rows)
    nodes = [
        {"id": "x", "label": "x", "x": 0.0, "y": 0.5},
        {"id": "W", "label": f"W: {rows}×{columns}, frozen", "x": 0.5, "y": 0.15},
        {"id": "A", "label": f"A: {rank}×{columns}", "x": 0.33, "y": 0.85},
        {"id": "B", "label": f"B: {rows}×{rank}", "x": 0.67, "y": 0.85},
        {"id": "y", "label": "y", "x": 1.0, "y": 0.5},
    ]
    edges = [("x", "W", 1.0), ("W", "y", 1.0), ("x", "A", 1.0), ("A", "B", 1.0), ("B", "y", 1.0)]
    items: dict[str, float | str] = {
        "weights of W": f"{full:,}",
        "weights of A and B": f"{small:,}",
        "times fewer": full / small,
        "α / r": alpha / rank,
        "largest change at the start": before,
    }
    if subject is not None:
        count = lora_parameters(subject.model.spec, rank, "all-linear")
        items[f"{subject.name}: adapter of all linear layers"] = f"{count:,} weights"
    return [
        diagram("y = Wx + (α/r) B A x", nodes, edges),
        bars("weights that are trained", {"all of W": full, "A and B": small}),
        lines(
            "singular values of (α/r) B A for a layer of 64 × 64; B drawn at random, nothing is trained",
            {"update": list(enumerate(singular.tolist(), 1))},
            "index",
            "singular value",
        ),
        numbers(items),
    ]


INSTRUMENTS = (
    Instrument(
        "kv-cache", "The KV cache",
        "Keys and values are computed once and kept; without a cache every step would compute all of them again.",
        r"\text{bytes} = 2 \cdot B \cdot L \cdot n \cdot h_{kv} \cdot d_k \cdot b",
        (
            Slider("layers", "layers L", 1, 128, 80),
            Slider("kv_heads", "key/value heads", 1, 128, 8),
            Slider("head_dim", "head dimension", 16, 256, 128, 16),
            Slider("tokens", "tokens n", 128, 131072, 8192, 128),
            Slider("batch", "sequences B", 1, 64, 1),
            Selection("dtype", "format", ("float32", "float16", "bfloat16", "float8"), "float16"),
        ),
        Quiz(
            "A 70B model with 8 key/value heads: how large is the cache of 8,192 tokens?",
            "2.68 GB, which is 2.50 GiB. Numbers printed as “2.50 GB” mean GiB.",
            {"layers": 80, "kv_heads": 8, "head_dim": 128, "tokens": 8192, "batch": 1, "dtype": "float16"},
        ),
        kv_cache, ("planning/cost.py", "parts/attention.py"), reads_model=True,
    ),
    Instrument(
        "sharing", "Heads that share keys and values",
        "Several query heads use the same keys and values; the cache shrinks by their number.",
        r"\text{cache}_{\mathrm{GQA}} / \text{cache}_{\mathrm{MHA}} = h_{kv} / h",
        (
            Slider("heads", "query heads", 1, 32, 8),
            Slider("kv_heads", "key/value heads", 1, 32, 2),
            Slider("head_dim", "head dimension", 16, 256, 64, 16),
            Slider("layers", "layers", 1, 128, 32),
            Slider("tokens", "tokens", 128, 131072, 4096, 128),
        ),
        Quiz(
            "8 query heads share 2 key heads. Which share of the multi-head cache is left?",
            "A quarter; with one key head an eighth.",
            {"heads": 8, "kv_heads": 2},
        ),
        sharing, ("parts/attention.py", "planning/cost.py"), reads_model=True,
    ),
    Instrument(
        "lora", "Low-rank adapters",
        "The frozen weight gets a product of two thin matrices; only these are trained.",
        r"y = Wx + \frac{\alpha}{r}\,BAx, \qquad r\,(d_{in} + d_{out}) \text{ weights instead of } d_{in}\,d_{out}",
        (
            Slider("rank", "rank r", 1, 64, 8),
            Slider("alpha", "α", 1.0, 64.0, 32.0, 1.0),
            Slider("rows", "outputs of W", 64, 8192, 4096, 64),
            Slider("columns", "inputs of W", 64, 8192, 4096, 64),
        ),
        Quiz(
            "How many singular values of the update are not zero?",
            "At most r: the update has rank r, whatever is trained. Here with r = 4.",
            {"rank": 4},
        ),
        adapters, ("adapt/lora.py", "planning/training.py"), reads_model=True,
    ),
)  # fmt: skip
