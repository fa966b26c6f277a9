"""Contrastive search equals a plain loop without a cache, for every kind of state."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from regard.engine.contrastive import ContrastiveOptions
from regard.engine.engine import Engine
from regard.engine.request import Sampling
from regard.engine.stores.paged import Paged
from regard.models.presets import transformer_2017

PROMPT = [3, 9, 4, 17, 9, 9]
GREEDY = Sampling(max_new=12, temperature=0)


@torch.inference_mode()
def plain_contrastive_search(model: Any, ids: list[int], k: int, alpha: float, max_new: int) -> list[int]:
    """Su et al. 2022, equation 5, with a whole forward per candidate."""

    def cosine(first: Tensor, second: Tensor) -> float:
        return (first @ second / first.norm() / second.norm()).item()

    ids, new = list(ids), []
    for _ in range(max_new):
        probabilities = model(torch.tensor([ids]))[0, -1].softmax(-1)
        scores = {}
        for id in probabilities.topk(k).indices.tolist():
            hidden = model.hidden(torch.tensor([[*ids, id]]))[0]
            similar = max(cosine(hidden[-1], earlier) for earlier in hidden[:-1])
            scores[id] = (1 - alpha) * probabilities[id].item() - alpha * similar
        new.append(max(scores, key=scores.__getitem__))
        ids.append(new[-1])
    return new


@pytest.mark.parametrize("store", ["paged", "contiguous"])
@pytest.mark.parametrize("kind", ["attention", "linear", "hybrid", "convolution"])
def test_it_equals_a_plain_loop(tiny, kind: str, store: str) -> None:
    engine = Engine(
        tiny(kind), rows=5, capacity=40, chunk=4, store=partial(Paged, block=4) if store == "paged" else store
    )
    greedy = [token.id for token in engine.generate(PROMPT, GREEDY)]
    for k, alpha in ((4, 0.6), (5, 0.9), (1, 0.5), (3, 0.0)):
        found = engine.contrastive_search(PROMPT, ContrastiveOptions(k, alpha), GREEDY)
        expected = plain_contrastive_search(tiny(kind), PROMPT, k, alpha, 12)
        assert [token.id for token in found] == expected
        assert (expected == greedy) == (k == 1 or alpha == 0)
    assert found[-1].finish == "length" and found[0].logprob <= 0
    assert len(engine.scheduler.free_rows) == 5


def test_settings_apply(tiny) -> None:
    engine = Engine(tiny(), rows=4)
    plain = [token.id for token in engine.contrastive_search(PROMPT, ContrastiveOptions(), GREEDY)]
    stop = Sampling(max_new=12, temperature=0, stop_ids=(plain[5],))
    stopped = engine.contrastive_search(PROMPT, ContrastiveOptions(), stop)
    first = plain.index(plain[5])
    assert [token.id for token in stopped] == plain[: first + 1] and stopped[-1].finish == "stop"
    banned = Sampling(max_new=12, temperature=0, suppress_ids=(plain[0],), forced_bos_id=7)
    found = [token.id for token in engine.contrastive_search(PROMPT, ContrastiveOptions(), banned)]
    assert found[0] == 7 and plain[0] not in found
    full = Engine(tiny(), rows=4, capacity=10).contrastive_search(PROMPT, ContrastiveOptions(), GREEDY)
    assert [token.id for token in full] == plain[:4] and full[-1].finish == "length"


def test_other_requests_resume_after_a_search(tiny) -> None:
    engine = Engine(tiny(), rows=3, capacity=32, store=partial(Paged, block=4, blocks=16))
    requests = [engine.submit([i, 5, i], GREEDY) for i in range(3)]
    engine.step()
    found = engine.contrastive_search(PROMPT, ContrastiveOptions(3), GREEDY)
    while not engine.idle:
        engine.step()
    alone = Engine(tiny(), rows=3)
    undisturbed = alone.contrastive_search(PROMPT, ContrastiveOptions(3), GREEDY)
    assert [token.id for token in found] == [token.id for token in undisturbed]
    for request in requests:
        expected = alone.generate(request.ids, GREEDY)
        assert [token.id for token in request.new] == [token.id for token in expected]


def test_wrong_settings_are_refused(tiny) -> None:
    for settings in ({"candidates": 0}, {"alpha": 1.5}, {"alpha": float("nan")}):
        with pytest.raises(ValueError, match="=.* must be "):
            ContrastiveOptions(**settings)
    with pytest.raises(ValueError, match="candidates=4 needs as many rows, but the engine has 2"):
        Engine(tiny(), rows=2).contrastive_search([1], ContrastiveOptions(), GREEDY)
    with pytest.raises(ValueError, match="a search does not sample"):
        Engine(tiny()).contrastive_search([1], ContrastiveOptions(), Sampling())
    translator = transformer_2017(vocab=61, width=32, heads=4, hidden=40, layers=1).build(seed=0)
    with pytest.raises(ValueError, match="contrastive search is for decoders"):
        Engine(translator, capacity=16).contrastive_search([1], ContrastiveOptions(), GREEDY)
