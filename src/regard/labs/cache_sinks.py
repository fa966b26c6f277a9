"""A cache of the newest tokens alone loses the model's predictions; with a few of the first tokens it keeps them.

SmolLM2 reads the Python manual through caches of 128 tokens (StreamingLLM): the newest ones, or the first 1, 2, 4 or 8
and the newest others, at positions counted inside the cache. Measured: the loss from the position on at which caches of
the newest tokens have lost all of the first ones. Baselines: the cache of all tokens; and the text read again in
windows of 128, which start at every 64th token, for their second half: they have no longer context than the caches, and
each has a first token of its own. If a cache does no worse than these, the lost context explains its loss.

Xiao et al. 2023 (StreamingLLM).
"""

# ledger: kv.sinks.need

import math
from itertools import pairwise

import torch
from torch import Tensor

from regard.engine.caches import parse_cache
from regard.engine.memory import bytes_of
from regard.engine.stores.contiguous import Contiguous
from regard.evals.cached_loss import cached_losses
from regard.labs.experiment import Bench, Check, Findings, Plot
from regard.labs.trained_model import read_manual
from regard.models.decoder import DecoderModule

FULL, AFRESH = "all tokens", "windows read afresh"
SINKS = (0, 1, 2, 4, 8)  # first tokens that are kept


def run(bench: Bench) -> Findings:
    kept, length, chunk = bench.setting((128, 1024, 32), (16, 64, 8))
    model, ids = read_manual(bench, 1, length + 1)
    caches = {FULL: None} | {name_of(sinks): description(sinks, kept) for sinks in SINKS}
    losses = {}
    for name, cache in bench.each("caches", caches.items()):
        losses[name] = torch.cat(list(cached_losses(model, ids, cache, chunk)), 1)[0]  # (length,)
        bench.show(f"{name}: {losses[name][2 * kept :].mean():.3f}")
    afresh = read_afresh(model, ids, kept)
    late = {name: float(loss[2 * kept :].mean()) for name, loss in losses.items()} | {AFRESH: afresh}
    harm = {name: loss - late[FULL] for name, loss in late.items()}
    apart = max(float((losses[name] - losses[FULL])[: kept // 2].abs().max()) for name in losses)
    sizes = [cache_bytes(model, caches[name_of(4)], tokens) for tokens in (length, 100_000)]
    none, one, four, eight = (name_of(sinks) for sinks in (0, 1, 4, 8))
    checks = [
        Check("without the first tokens the perplexity is more than twice that of the cache of all tokens",
              f"{math.exp(late[none]):.1f} and {math.exp(late[FULL]):.1f}", harm[none] > math.log(2)),
        Check("the lost context is less than half of this harm: windows read afresh have less than half of it",
              f"{harm[AFRESH]:.2f} and {harm[none]:.2f} nats", harm[AFRESH] < harm[none] / 2),
        Check("four first tokens restore it: a loss at most 5 % above that of windows read afresh",
              f"{late[four]:.3f} and {late[AFRESH]:.3f}", late[four] <= 1.05 * late[AFRESH]),
        Check("the first token alone removes more than half of the harm",
              f"{harm[one]:.2f} of {harm[none]:.2f} nats are left", harm[one] < harm[none] / 2),
        Check("eight first tokens instead of four change the loss by at most 2 %",
              f"{late[eight]:.3f} and {late[four]:.3f}", abs(late[eight] / late[four] - 1) <= 0.02),
        Check("before anything is evicted, all caches give the same losses, up to 1e-3", f"{apart:.1g}", apart < 1e-3),
        Check("a cache for 100,000 tokens has the bytes of one for this text", f"{sizes[1]:,}", sizes[0] == sizes[1]),
    ]  # fmt: skip
    table = [{"cache": name, "nats per token": loss, "perplexity": math.exp(loss)} for name, loss in late.items()]
    drawn = (FULL, none, one, four)
    plots = [
        Plot("position", "nats per token", {name: by_position(losses[name], length // 8) for name in drawn},
             f"caches of {kept} tokens"),
        Plot("first tokens that are kept", "nats per token", {
            f"cache of {kept} tokens": [(sinks, late[name_of(sinks)]) for sinks in SINKS],
            AFRESH: [(sinks, afresh) for sinks in SINKS], FULL: [(sinks, late[FULL]) for sinks in SINKS],
        }, f"from position {2 * kept} on"),
    ]  # fmt: skip
    remark = "Seeds draw other sections of the manual; the model is the same."
    return Findings(table, checks, plots, remark)


def name_of(sinks: int) -> str:
    return f"first {sinks} and newest" if sinks else "newest"


def description(sinks: int, kept: int) -> str:
    return f"sinks:{sinks}+{kept - sinks}" if sinks else f"window:{kept}"


@torch.no_grad()
def read_afresh(model: DecoderModule, ids: Tensor, window: int) -> float:
    """The mean loss of the second half of windows that start at every half window."""
    rows = ids[0].unfold(0, window + 1, window // 2)  # (windows, window + 1)
    late = rows[3:]  # those whose second half is at 2 · window or later
    logits = model(late[:, :-1])
    losses = -logits.log_softmax(-1).gather(-1, late[:, 1:, None]).squeeze(-1)
    return float(losses[:, window // 2 :].mean())


def by_position(losses: Tensor, size: int) -> list[tuple[float, float]]:
    """The means of pieces of a text, at their middles."""
    edges = range(0, len(losses) + 1, size)
    return [((start + stop) / 2, float(losses[start:stop].mean())) for start, stop in pairwise(edges)]


def cache_bytes(model: DecoderModule, cache: str | None, tokens: int) -> int:
    assert cache is not None
    memory = parse_cache(cache).declare(model.spec.memory())
    return bytes_of(Contiguous(memory, 1, tokens, torch.float32))
