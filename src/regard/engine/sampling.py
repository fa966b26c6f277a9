"""Sampling: the next token of each row of a batch, whose rows have different settings.

    penalties -> logit bias -> custom processors -> banned tokens
      -> temperature -> top-k -> top-p -> min-p -> typical-p -> one uniform number u -> the first token with cdf > u

u is a function of (seed, step) and rows are independent, so the tokens of a request do not depend on the other requests
of the batch. A filter is a cutoff: logits below it are dropped, ties are kept. Holtzman et al. 2020 (top-p), Nguyen et
al. 2024 (min-p), Meister et al. 2022 (typical-p), Keskar et al. 2019 (repetition penalty).
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from regard.compat import HAS_TRITON
from regard.engine.logits_processors import process
from regard.engine.request import Request, Sampling, Token, TokenHistory
from regard.layout import to_device

# Streams of random numbers beside that of the tokens, xor the seed of a request
DRAW_DRAFT, ACCEPT = 0x6A09E667F3BCC908, 0xBB67AE8584CAA73B


class Best(NamedTuple):
    """What is returned beside tokens, if requests ask for alternatives."""

    ids: Tensor  # (B, n) of the most likely tokens
    logprobs: Tensor  # (B, n)
    ranks: Tensor  # (B,) how many tokens are more likely than the chosen one, plus 1
    entropies: Tensor  # (B,) of the distributions over the vocabulary, in nats


class Sampled:
    """The next tokens of some requests. They are copied from a GPU while it continues."""

    def __init__(
        self,
        ids: Tensor,
        logprobs: Tensor,
        best: Best | None = None,
        counts: Sequence[int] = (),
        errors: Mapping[int, str] | None = None,
    ):
        """ids, logprobs: (B,). counts: how many of the best each request gets."""
        self.ids, self.logprobs, self.best, self.counts, self.errors = ids, logprobs, best, counts, errors or {}
        self.copies = [tensor.to("cpu", non_blocking=True) for tensor in (ids, logprobs, *(best or ()))]
        self.copied = torch.cuda.Event() if ids.is_cuda else None
        if self.copied is not None:
            self.copied.record()

    def read(self) -> list[Token | str]:
        """The token of each request, or the reason why the request has none."""
        if self.copied is not None:
            self.copied.synchronize()
        ids, logprobs, *best = (copy.tolist() for copy in self.copies)
        tokens: list[Token | str] = [*with_best(ids, logprobs, best, self.counts)]
        for i, error in self.errors.items():
            tokens[i] = error
        for i in self.copies[1].isnan().nonzero().flatten().tolist():
            tokens[i] = "the model's logits for this request are not finite"
        return tokens


def sample(
    logits: Tensor, requests: Sequence[Request], separately: bool = False, ahead: Sequence[int] | None = None
) -> Sampled:
    """The next token of each request from its row of (B, V) logits.

    ahead: for each row, how many tokens after the next one its token is; only for settings that do not read tokens.

    separately: settings without a kernel of their own are computed one request at a time, because torch chooses the
    order of sums, and of equal logits, by the size of the batch.
    """
    plain = [i for i, r in enumerate(requests) if uses_kernel(r)] if has_kernel(logits) else []
    if len(plain) == len(requests):
        return Sampled(*sample_by_kernel(logits, requests, ahead))
    if separately and len(requests) > 1:
        return sample_separately(logits, requests, plain)
    raw, logprobs = logits, log_softmax(logits)  # (B, V); a NaN or +inf makes the whole row NaN
    logits = logits.to(logprobs.dtype)
    logits, errors = process(penalize_rows(logits, requests), requests)
    ids = choose(logits, requests, ahead)
    chosen = logprobs.gather(-1, ids.unsqueeze(-1)).squeeze(-1)  # (B,)
    if plain:  # by the kernel here too: a token must not depend on the settings of other requests
        rows = to_device(torch.tensor(plain), logits.device)
        steps = None if ahead is None else [ahead[i] for i in plain]
        plain_ids, plain_logprobs = sample_by_kernel(raw[rows], [requests[i] for i in plain], steps)
        ids, chosen = ids.index_copy(0, rows, plain_ids), chosen.index_copy(0, rows, plain_logprobs)
    counts = [r.sampling.top_logprobs for r in requests]
    return Sampled(ids, chosen, best_of(chosen, logprobs, max(counts)) if any(counts) else None, counts, errors)


def sample_separately(logits: Tensor, requests: Sequence[Request], plain: Sequence[int]) -> Sampled:
    """As `sample`: those of `plain` by the kernel, all others one at a time, each in a tensor of its own."""
    counts = [r.sampling.top_logprobs for r in requests]
    size, n = len(requests), min(max(counts), logits.shape[-1])
    ids = torch.zeros(size, dtype=torch.int64, device=logits.device)
    logprobs = torch.zeros(size, dtype=torch.promote_types(logits.dtype, torch.float32), device=logits.device)
    # A request that asks for fewer than n of the best leaves the rest as they are: in the last places of the order.
    last = torch.iinfo(torch.int64).max
    best, errors = (
        Best(
            ids.new_full((size, n), last),
            logprobs.new_full((size, n), -torch.inf),
            torch.ones_like(ids),
            torch.zeros_like(logprobs),
        ),
        dict[int, str](),
    )
    if plain:
        rows = to_device(torch.tensor(plain), logits.device)
        ids[rows], logprobs[rows] = sample_by_kernel(logits[rows], [requests[i] for i in plain])
    for i in sorted(set(range(size)) - set(plain)):
        one = sample(logits[i : i + 1].clone(), [requests[i]])
        ids[i], logprobs[i] = one.ids[0], one.logprobs[0]
        if 0 in one.errors:
            errors[i] = one.errors[0]
        if one.best is not None:
            best.ids[i, : counts[i]], best.logprobs[i, : counts[i]] = one.best.ids[0], one.best.logprobs[0]
            best.ranks[i], best.entropies[i] = one.best.ranks[0], one.best.entropies[0]
    return Sampled(ids, logprobs, best if n else None, counts, errors)


def has_kernel(logits: Tensor) -> bool:
    return logits.is_cuda and HAS_TRITON and logits.dtype in (torch.float32, torch.bfloat16, torch.float16)


def uses_kernel(request: Request) -> bool:
    drawn = request.draft is not None and request.draft.probabilities is not None
    return request.sampling.plain and request.history is None and not drawn


def sample_by_kernel(
    logits: Tensor, requests: Sequence[Request], ahead: Sequence[int] | None = None
) -> tuple[Tensor, Tensor]:
    """Ids (B,) and their log-probabilities (B,) by one kernel, for requests with plain settings."""
    from regard.kernels.triton_sampling import sample_rows

    settings = np.column_stack([[r.sampling.filters for r in requests], random_numbers(requests, 0, ahead)])  # (B, 5)
    return sample_rows(logits, to_device(torch.from_numpy(settings), logits.device))


def penalize_rows(logits: Tensor, requests: Sequence[Request]) -> Tensor:
    """Penalize the rows of the requests that have penalties."""
    penalized = [i for i, r in enumerate(requests) if r.history is not None]
    if not penalized:
        return logits
    histories = [r.history for r in requests if r.history is not None]
    changed = penalize(logits[penalized], histories, [requests[i].sampling for i in penalized])
    return logits.index_copy(0, torch.tensor(penalized, device=logits.device), changed.to(logits.dtype))


def choose(logits: Tensor, requests: Sequence[Request], ahead: Sequence[int] | None = None) -> Tensor:
    """(B, V) -> (B,) ids, any id for a row that is not finite."""
    ids = logits.max(-1).indices  # on CPUs twice as fast as argmax
    random = [i for i, r in enumerate(requests) if r.sampling.temperature > 0]
    if random:
        filtered = apply_filters(logits[random], [requests[i].sampling for i in random])
        steps = None if ahead is None else [ahead[i] for i in random]
        ids[random] = draw(filtered, random_numbers([requests[i] for i in random], 0, steps))
        for row, i in zip(filtered, random, strict=True):
            if (draft := requests[i].draft) is not None and draft.ids and draft.probabilities is not None:
                ids[i] = verify_drawn(row.softmax(-1), draft.probabilities[0], draft.ids[0], requests[i])
    for i, request in enumerate(requests):
        if request.forced_id is not None:
            ids[i] = request.forced_id
    return ids


def apply_filters(logits: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """Apply temperature and filters: (B, V) float64, -inf for dropped tokens."""
    temperature, min_p = columns(logits, [(s.temperature, s.min_p) for s in samplings])
    logits = (logits - logits.amax(-1, keepdim=True)) / temperature  # with the largest at 0, no temperature overflows
    lowest = min_p.log()  # (B, 1) the smallest logit that is kept: p ≥ min_p · p_best
    filtered = [i for i, s in enumerate(samplings) if s.top_k or s.top_p < 1]
    if filtered:
        lowest[filtered] = lowest[filtered].maximum(cutoff(logits[filtered], [samplings[i] for i in filtered]))
    logits = logits.masked_fill(logits < lowest, -torch.inf)
    typical = [i for i, s in enumerate(samplings) if s.typical_p < 1]
    if typical:
        logits[typical] = keep_typical(logits[typical], [samplings[i] for i in typical])
    return logits


def cutoff(logits: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """(B, 1) the smallest logit that top-k and then top-p keep; only tokens that may be kept are sorted."""
    vocab = logits.shape[-1]
    top_k, top_p = columns(logits, [(s.top_k, s.top_p) for s in samplings])
    total = logits.logsumexp(-1, keepdim=True)
    # The other tokens together have a probability below 1 - top_p.
    possible = logits - total >= ((1 - top_p) / vocab).log()
    count = possible.sum(-1, keepdim=True).where(top_k == 0, top_k.long()).clamp(1, vocab)  # (B, 1)
    best = logits.topk(int(count.max())).values  # (B, n)
    best = best.masked_fill(torch.arange(best.shape[-1], device=best.device) >= count, -torch.inf)
    p = (best - total.where(top_k == 0, best.logsumexp(-1, keepdim=True))).exp()
    nucleus = (p.cumsum(-1) - p < top_p).sum(-1, keepdim=True)  # (B, 1) the fewest tokens that reach top_p
    return best.gather(-1, nucleus.where(top_p < 1, count).clamp(min=1).minimum(count) - 1)


def keep_typical(logits: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """Keep the tokens whose -log p is closest to the entropy: the fewest that together reach a mass of typical_p."""
    logp = logits.log_softmax(-1)
    entropy = -(logp.exp() * logp.masked_fill(logp.isinf(), 0)).sum(-1, keepdim=True)  # (B, 1)
    distance, order = (-logp - entropy).abs().sort(-1)  # (B, V); dropped tokens are at an infinite distance
    (mass,) = columns(logits, [(s.typical_p,) for s in samplings])
    last = (logp.exp().gather(-1, order).cumsum(-1) < mass).sum(-1, keepdim=True).clamp(max=logits.shape[-1] - 1)
    return logits.masked_fill((-logp - entropy).abs() > distance.gather(-1, last), -torch.inf)


def draw(logits: Tensor, uniforms: np.ndarray) -> Tensor:
    """Inverse-CDF sampling in float64: (B, V) -> (B,). Dropped tokens have probability 0 and are never drawn."""
    cdf = logits.softmax(-1).cumsum(-1)  # (B, V)
    u = to_device(torch.from_numpy(uniforms), logits.device).unsqueeze(-1)  # (B, 1)
    return torch.searchsorted(cdf, u * cdf[:, -1:], right=True).squeeze(-1).clamp(max=logits.shape[-1] - 1)


def verify_drawn(p: Tensor, q: Tensor, id: int, request: Request) -> int:
    """A token that is distributed as p (V,), from one that was drawn from q (V,). Leviathan et al. 2023.

    id with probability min(1, p(id) / q(id)), else one drawn from (p - q)₊, normalized, which never is id.
    """
    q = q.to(p)
    if random_numbers([request], ACCEPT)[0] * float(q[id]) < float(p[id]):
        return id
    rest = (p - q).clamp_min(0)
    rest = rest if bool(rest.any()) else p  # p = q up to rounding
    return int(draw(rest.log().unsqueeze(0), random_numbers([request])))


def random_numbers(requests: Sequence[Request], stream: int = 0, ahead: Sequence[int] | None = None) -> np.ndarray:
    """(B,) for the next token of each request, or the one `ahead` tokens later. Streams are independent."""
    seeds, steps = [r.seed ^ stream for r in requests], [len(r.new) + r.unread for r in requests]
    return uniform(seeds, steps if ahead is None else [step + more for step, more in zip(steps, ahead, strict=True)])


def uniform(seeds: Sequence[int], steps: Sequence[int]) -> np.ndarray:
    """(B,) numbers in [0, 1), each a function of (seed, step): SplitMix64, Steele et al. 2014."""
    bits = mix(np.array(seeds, np.uint64)) + (np.array(steps, np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    return (mix(bits) >> np.uint64(11)) / 2**53


def mix(x: np.ndarray) -> np.ndarray:
    """The output function of SplitMix64, on uint64, modulo 2**64."""
    x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return x ^ x >> np.uint64(31)


def penalize(logits: Tensor, histories: Sequence[TokenHistory], samplings: Sequence[Sampling]) -> Tensor:
    """
    repetition, for tokens of the prompt and new ones:  l > 0: l / r      l < 0: l · r
    presence and frequency, for new tokens:             l - presence - frequency · count
    """
    counts = torch.stack([h.counts for h in histories])  # (B, V)
    present = torch.stack([h.prompt for h in histories]) | (counts > 0)
    settings = [(s.repetition_penalty, s.presence_penalty, s.frequency_penalty) for s in samplings]
    repetition, presence, frequency = columns(logits, settings)
    logits = torch.where(present, torch.where(logits > 0, logits / repetition, logits * repetition), logits)
    return logits - presence * (counts > 0) - frequency * counts


def log_softmax(logits: Tensor) -> Tensor:
    """Log-probabilities in at least float32, (B, V)."""
    if has_kernel(logits):
        from regard.kernels.triton_sampling import log_softmax_rows

        return log_softmax_rows(logits)
    return logits.log_softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))


def best_of(chosen: Tensor, logprobs: Tensor, count: int) -> Best:
    """chosen: (B,) of the logprobs (B, V)."""
    best = logprobs.topk(min(count, logprobs.shape[-1]))
    ranks = (logprobs > chosen.unsqueeze(-1)).sum(-1) + 1
    p = logprobs.exp()
    return Best(best.indices, best.values, ranks, torch.special.entr(p, out=p).sum(-1))


def with_best(ids: Sequence[int], logprobs: list[float], best: list[list], counts: Sequence[int]) -> list[Token]:
    """Tokens with the entries of a Best as lists, or without them if `best` is empty."""
    if not best:
        return [Token(id, logprob, (), None) for id, logprob in zip(ids, logprobs, strict=True)]
    best_ids, best_logprobs, *facts = best
    tops = pair_best(best_ids, best_logprobs, counts)
    rows = zip(ids, logprobs, tops, zip(*facts, strict=True), strict=True)
    return [Token(id, logprob, top, None, *(fact if top else ())) for id, logprob, top, fact in rows]


def pair_best(
    ids: list[list[int]], logprobs: list[list[float]], counts: Sequence[int]
) -> list[tuple[tuple[int, float], ...]]:
    """The best (id, logprob) of each row, as many as its entry of `counts`; of equal ones the lowest ids first."""
    pairs = [zip(*row, strict=True) for row in zip(ids, logprobs, strict=True)]
    ranked = [sorted(row, key=lambda pair: (-pair[1], pair[0])) for row in pairs]
    return [tuple(row[:count]) for row, count in zip(ranked, counts, strict=True)]


def columns(like: Tensor, rows: Sequence[tuple[float, ...]]) -> tuple[Tensor, ...]:
    """One (B, 1) float64 tensor per setting."""
    return to_device(torch.tensor(rows, dtype=torch.float64), like.device).unsqueeze(-1).unbind(1)
