"""Beam search gives the sequences and scores of transformers; diverse groups those of a plain loop without a cache."""

import random
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from regard.checkpoint import load
from regard.engine.beam import Beam, Beams
from regard.engine.engine import Engine
from regard.engine.request import GenerationError, Sampling
from regard.engine.stores.paged import Paged
from tests.families.cases.decoders import SHAPE
from tests.families.cases.encoder_decoders import BART, T5
from tests.families.pairs import Pair, make_pair
from tests.families.test_generate import enlarge_layer_weights

STOPS, PAD = tuple(range(1, 24)), 96  # many, so that sequences of all lengths finish
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", SHAPE),
    "mistral": ("MistralForCausalLM", SHAPE | {"sliding_window": 5}),
    "t5": ("T5ForConditionalGeneration", T5),
    "bart": ("BartForConditionalGeneration", BART),
}
PROMPT, SOURCE = [5, 40, 7, 7, 60, 3, 22], [30, 8, 2, 90, 17, 44]


@pytest.fixture(scope="module", params=MODELS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    pair = make_pair(MODELS[request.param], tmp_path_factory.mktemp("pair"))
    enlarge_layer_weights(pair.theirs)
    pair.theirs.save_pretrained(pair.folder)
    pair.theirs.double()
    pair.ours = load(pair.folder).double()
    return pair


def their_beams(pair: Pair, width: int, max_new: int, **settings: Any) -> list[Beam]:
    encodes = pair.theirs.config.is_encoder_decoder
    inputs = {"decoder_input_ids": torch.tensor([[0, 9]]), "decoder_start_token_id": 0} if encodes else {}
    found = pair.theirs.generate(
        torch.tensor([SOURCE if encodes else PROMPT]), num_beams=width, num_return_sequences=width,
        max_new_tokens=max_new, eos_token_id=list(STOPS), pad_token_id=PAD, do_sample=False, output_scores=True,
        return_dict_in_generate=True, **inputs, **settings,
    )  # fmt: skip
    start = 2 if encodes else len(PROMPT)
    return [
        Beam(tuple(ids[start:].tolist()), score.item())
        for ids, score in zip(found.sequences, found.sequences_scores, strict=True)
    ]


def our_beams(pair: Pair, engine: Engine, beams: Beams, max_new: int, **settings: Any) -> list[Beam]:
    sampling = Sampling(max_new=max_new, temperature=0, stop_ids=STOPS, **settings)
    if pair.theirs.config.is_encoder_decoder:
        return engine.beam_search([0, 9], beams, sampling, source=SOURCE)
    return engine.beam_search(PROMPT, beams, sampling)


def assert_equal_beams(ours: list[Beam], theirs: list[Beam]) -> None:
    assert len(ours) == len(theirs)
    for found, expected in zip(ours, theirs, strict=True):
        assert found.ids == expected.ids[: len(found.ids)]
        assert set(expected.ids[len(found.ids) :]) <= {PAD}
        assert found.score == pytest.approx(expected.score, rel=1e-4)


CASES = [*product((4,), (1.0, -1.5, 2.0), (True, False, "never")), (2, 0.0, "never"), (1, 1.0, False)]


@pytest.mark.parametrize("store", ["paged", "contiguous"])
def test_beams_equal_those_of_transformers(pair: Pair, store: str) -> None:
    engine = Engine(pair.ours, rows=5, capacity=40, chunk=3, store=store)
    lengths = set()
    for width, penalty, early in CASES:
        theirs = their_beams(pair, width, 14, length_penalty=penalty, early_stopping=early) if width > 1 else None
        ours = our_beams(pair, engine, Beams(width, length_penalty=penalty, early_stopping=early), 14)
        if theirs is None:  # one beam is greedy decoding
            greedy = Sampling(max_new=14, temperature=0, stop_ids=STOPS)
            inputs = ([0, 9], greedy, SOURCE) if pair.theirs.config.is_encoder_decoder else (PROMPT, greedy)
            assert ours[0].ids == tuple(token.id for token in engine.generate(*inputs))
        else:
            assert_equal_beams(ours, theirs)
        lengths |= {len(beam.ids) for beam in ours}
    assert len(lengths) > 1, lengths
    assert len(engine.scheduler.free_rows) == 5 and engine.idle


def test_options_apply_as_in_transformers(pair: Pair) -> None:
    engine = Engine(pair.ours, rows=4, capacity=40)
    cases = [
        ({"repetition_penalty": 1.7}, {"repetition_penalty": 1.7}),
        ({"min_new": 9}, {"min_new_tokens": 9}),
        ({"suppress_ids": (3, 8, 60)}, {"suppress_tokens": [3, 8, 60]}),
        ({"bad_words": ((60,), (3, 5))}, {"bad_words_ids": [[60], [3, 5]]}),
        ({"forced_eos_id": 1}, {"forced_eos_token_id": 1}),
    ]
    for ours, theirs in cases:
        assert_equal_beams(our_beams(pair, engine, Beams(4), 12, **ours), their_beams(pair, 4, 12, **theirs))


def plain_diverse_beams(
    model: Any, ids: list[int], width: int, groups: int, penalty: float, max_new: int
) -> list[Beam]:
    """Vijayakumar et al. 2016, with whole forwards and lists: every group is a beam search of its own."""

    def logprobs(new: tuple[int, ...]) -> Tensor:
        return model(torch.tensor([[*ids, *new]]))[0, -1].log_softmax(-1)

    size = width // groups
    running: list[list[Beam]] = [[Beam((), 0.0)] for _ in range(groups)]
    finished: list[list[Beam]] = [[] for _ in range(groups)]
    open_groups = set(range(groups))
    for length in range(1, max_new + 1):
        chosen: list[int] = []
        for g in sorted(open_groups):
            candidates = []
            for beam in running[g]:
                row = logprobs(beam.ids)
                for id in range(len(row)):
                    score = beam.score + row[id].item() - penalty * chosen.count(id)
                    candidates.append(Beam((*beam.ids, id), score))
            candidates.sort(key=lambda beam: -beam.score)
            ends = [beam for beam in candidates[:size] if beam.ids[-1] in STOPS or length == max_new]
            running[g] = [beam for beam in candidates if beam.ids[-1] not in STOPS][:size]
            finished[g] += [Beam(beam.ids, beam.score / length) for beam in ends]
            finished[g] = sorted(finished[g], key=lambda beam: -beam.score)[:size]
            if length < max_new:
                chosen += [beam.ids[-1] for beam in running[g]]
            full = len(finished[g]) == size
            if full and running[g][0].score / length <= finished[g][-1].score:
                open_groups.discard(g)
    return sorted((beam for group in finished for beam in group), key=lambda beam: -beam.score)


@pytest.mark.parametrize("kind", ["attention", "linear", "hybrid"])
@pytest.mark.parametrize(("width", "groups", "penalty"), [(4, 2, 0.7), (6, 3, 4.0), (3, 3, 1.5)])
def test_diverse_groups_equal_a_plain_loop(tiny, kind: str, width: int, groups: int, penalty: float) -> None:
    model = tiny(kind)
    engine = Engine(model, rows=6, capacity=32, store=partial(Paged, block=4))
    sampling = Sampling(max_new=7, temperature=0, stop_ids=STOPS)
    ours = engine.beam_search([3, 9, 4], Beams(width, groups, penalty), sampling)
    with torch.inference_mode():
        expected = plain_diverse_beams(model, [3, 9, 4], width, groups, penalty, 7)
    assert [beam.ids for beam in ours] == [beam.ids for beam in expected]
    assert [beam.score for beam in ours] == pytest.approx([beam.score for beam in expected], abs=1e-9)
    assert ours != engine.beam_search([3, 9, 4], Beams(width), sampling)


def test_other_requests_resume_after_a_search(tiny) -> None:
    model, rng = tiny("hybrid"), random.Random(1)
    engine = Engine(model, rows=4, capacity=40, store=partial(Paged, block=4, blocks=16))
    sampling = Sampling(max_new=12, temperature=0)
    requests = [engine.submit(rng.choices(range(61), k=8), sampling) for _ in range(6)]
    engine.step()
    beams = engine.beam_search([3, 9, 4], Beams(3), sampling)
    while not engine.idle:
        engine.step()
    alone = Engine(model, rows=3)
    assert [beam.ids for beam in alone.beam_search([3, 9, 4], Beams(3), sampling)] == [beam.ids for beam in beams]
    for request in requests:
        expected = alone.generate(request.ids, sampling)
        assert [token.id for token in request.new] == [token.id for token in expected]


def test_wrong_settings_are_refused(tiny) -> None:
    for settings in (
        {"width": 0}, {"groups": 3, "diversity_penalty": 1.0}, {"groups": 2}, {"diversity_penalty": 0.5},
        {"diversity_penalty": -1.0}, {"length_penalty": float("nan")}, {"early_stopping": "always"},
    ):  # fmt: skip
        with pytest.raises(ValueError, match="=.* must |need each other"):
            Beams(**settings)
    engine = Engine(tiny(), rows=2)
    greedy = Sampling(max_new=4, temperature=0)
    with pytest.raises(ValueError, match="width=3 needs as many rows, but the engine has 2"):
        engine.beam_search([1], Beams(3), greedy)
    with pytest.raises(ValueError, match=r"temperature=1.0, but a search does not sample"):
        engine.beam_search([1], Beams(2), Sampling())
    for option in ({"top_k": 3}, {"seed": 1}, {"prompt_logprobs": 0}):
        with pytest.raises(ValueError, match="has no meaning in a search"):
            engine.beam_search([1], Beams(2), Sampling(temperature=0, **option))
    small = Engine(tiny(), rows=2, capacity=32, store=partial(Paged, block=4, blocks=8))
    assert small.beam_search([1] * 9, Beams(2), Sampling(max_new=6, temperature=0))
    with pytest.raises(GenerationError, match="no space for this search"):
        small.beam_search([1] * 15, Beams(2), Sampling(max_new=16, temperature=0))
    assert len(small.scheduler.free_rows) == 2 and len(small.generate([1] * 9, greedy)) == 4
