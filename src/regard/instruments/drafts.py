"""Speculative decoding: a draft model proposes k tokens, the model verifies them in one pass and adds one of its own.

    tokens per pass   1 + α + … + α^k          speed-up   (1 + α + … + α^k) / (1 + k·c)

α is the probability that a draft token is accepted, c the cost of a draft step in passes of the model. The rounds are
those of an engine with two small models (examples.py); their speed is measured here. Leviathan et al. 2022.
"""

import time
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

from torch import Tensor

from regard.engine.engine import Engine
from regard.engine.request import Request, Sampling
from regard.engine.speculation.draft_length import DraftCosts
from regard.engine.speculation.draft_model import DraftModel
from regard.instruments.examples import FACTS, LENGTH, START, example_subject, ids, trained
from regard.instruments.instrument import Instrument, Panel, Quiz, Selection, Slider
from regard.instruments.panels import bars, lines, numbers, table, tokens
from regard.planning.speed import best_drafts, expected_tokens, speedup

SMALLER, SAME = "a smaller model", "the model itself"
LONGEST, NEW = 8, 20  # tokens of a draft; new tokens
ACCEPTED, OWN, REJECTED = 1.0, 0.5, 0.0  # tints


class DraftRound(NamedTuple):
    draft: list[int]
    accepted: int


class RecordedDrafts(DraftModel):
    """A draft model that keeps its drafts, and how many of their tokens were accepted."""

    rounds: tuple[DraftRound, ...] = ()

    def observe(self, request: Request, inputs: Sequence[int], accepted: int, logits: Tensor) -> None:
        self.rounds = (*self.rounds, DraftRound(list(inputs[1:]), accepted))


class DraftedRun(NamedTuple):
    ids: list[int]  # the new tokens; the first one follows from the prompt, without a draft
    rounds: tuple[DraftRound, ...]
    plain_seconds: float
    draft_seconds: float  # of drafting, and of verifying
    verify_seconds: float

    @property
    def acceptance(self) -> float:
        """Of the draft tokens that were verified: those after a rejected one were not."""
        accepted = sum(r.accepted for r in self.rounds)
        return accepted / sum(min(r.accepted + 1, len(r.draft)) for r in self.rounds)

    @property
    def speedup(self) -> float:
        return self.plain_seconds / (self.draft_seconds + self.verify_seconds)


@cache
def run_engines(draft: str, length: int, subject: str) -> DraftedRun:
    """The sentence about a subject, generated plainly and in rounds with drafts of this length."""
    model = example_subject().model
    prompt, sampling = ids([START, "the", "old", subject]), Sampling(max_new=NEW, temperature=0)
    drafter = RecordedDrafts(model if draft == SAME else trained("draft"))
    drafting = Engine(model, rows=1, capacity=LENGTH, speculation=drafter, draft_tokens=length)
    assert drafting.speculation is not None
    drafting.speculation.costs = DraftCosts(1.0, 0.0)  # drafts of this length, whether they pay or not
    seconds, found = [], []
    for engine in (Engine(model, rows=1, capacity=LENGTH), drafting):
        request = engine.submit(prompt, sampling)
        while not request.new:
            engine.step()
        start = time.perf_counter()
        while request.finish is None:
            engine.step()
        seconds.append(time.perf_counter() - start)
        found.append([token.id for token in request.new])
    assert found[0] == found[1], "drafts do not change the tokens"
    drafted = drafting.speculation.statistics.draft_seconds
    return DraftedRun(found[1], drafter.rounds, seconds[0], drafted, seconds[1] - drafted)


def output_panel(run: DraftedRun) -> Panel:
    """The new tokens, by where they come from."""
    decode = example_subject().tokenizer.decode_token
    tints, notes = [OWN], ["prompt"]
    for number, (_, accepted) in enumerate(run.rounds, 1):
        tints += [ACCEPTED] * accepted + [OWN]
        notes += [f"{number}: draft"] * accepted + [f"{number}: own"]
    count = len(run.ids)
    return tokens(
        "what was generated; dark: accepted tokens of drafts, light: the model's own",
        [decode(id) for id in run.ids], (tints + [OWN] * count)[:count], (notes + ["no draft"] * count)[:count],
    )  # fmt: skip


def round_panel(run: DraftedRun, number: int) -> Panel:
    """One round: the draft, with its accepted prefix, and the model's own token after it."""
    decode, (draft, accepted) = example_subject().tokenizer.decode_token, run.rounds[number]
    start = 1 + sum(r.accepted + 1 for r in run.rounds[:number])
    own = run.ids[start + accepted]
    notes = ["accepted"] * accepted + ["rejected"] + ["not read"] * len(draft)
    return tokens(
        f"round {number + 1}: {len(draft)} proposed, {accepted} accepted, and one of the model's own",
        [decode(id) for id in (*draft, own)],
        [ACCEPTED] * accepted + [REJECTED] * (len(draft) - accepted) + [OWN],
        [*notes[: len(draft)], "own"],
    )


def speculative_rounds(
    acceptance: float, length: int, cost: float, draft: str, subject: str, number: int
) -> list[Panel]:
    run, lengths = run_engines(draft, length, subject), range(LONGEST + 1)
    verified, passes = len(run.ids) - 1, len(run.rounds)
    plain_passes = verified - sum(r.accepted + 1 for r in run.rounds)  # steps without a draft, at the end
    counted = verified / (passes * (1 + length * cost) + plain_passes)
    decode = example_subject().tokenizer.decode_token
    rows = [
        (i, " ".join(map(decode, r.draft)), r.accepted, r.accepted + 1)
        for i, r in enumerate(run.rounds, 1)
    ]  # fmt: skip
    best = best_drafts(acceptance, cost, LONGEST)
    return [
        round_panel(run, min(number, passes) - 1),
        lines(
            f"speed-up for α = {acceptance:g} and c = {cost:g}",
            {
                "with the cost of drafts": [(k, speedup(acceptance, k, cost)) for k in lengths],
                "all accepted": [(k, speedup(1.0, k, cost)) for k in lengths],
                "tokens per pass": [(k, expected_tokens(acceptance, k)) for k in lengths],
            },
            "tokens per draft k",
            "times as fast",
            marks={"k": length},
        ),
        numbers(
            {
                "tokens per pass": expected_tokens(acceptance, length),
                "cost of a round, in passes": 1 + length * cost,
                "speed-up": speedup(acceptance, length, cost),
                f"speed-up if all {length} of {length} are accepted": speedup(1.0, length, cost),
                "the best k": best,
                "speed-up with it": speedup(acceptance, best, cost),
            },
            "by the formula",
        ),
        output_panel(run),
        table("rounds of the engine", ("round", "proposed", "accepted", "new tokens"), rows),
        bars(
            f"measured here: {verified} tokens of the example model",
            {"plain": 1000 * run.plain_seconds, "drafting": 1000 * run.draft_seconds,
             "verifying": 1000 * run.verify_seconds},
            "ms",
        ),
        numbers(
            {
                "acceptance in these rounds": run.acceptance,
                "tokens per round": (verified - plain_passes) / passes,
                f"speed-up of these rounds if c were {cost:g}": counted,
                "measured speed-up": run.speedup,
            },
            "the rounds",
        ),
    ]  # fmt: skip


INSTRUMENTS = (
    Instrument(
        "speculative-rounds", "Speculative rounds",
        "A small model proposes k tokens; one pass of the large one keeps those that it agrees with, and adds one.",
        r"\text{speed-up} = \frac{1 + \alpha + \dots + \alpha^k}{1 + k\,c}",
        (
            Slider("acceptance", "acceptance α", 0.0, 1.0, 0.8, 0.05),
            Slider("length", "tokens per draft k", 1, LONGEST, 5),
            Slider("cost", "cost of a draft step c", 0.0, 1.0, 0.1, 0.05),
            Selection("draft", "draft model of the rounds", (SMALLER, SAME), SMALLER),
            Selection("subject", "sentence about", tuple(FACTS), "key"),
            Slider("number", "round", 1, 10, 1),
        ),
        Quiz(
            "5 of 5 tokens are accepted in every round, and a draft step costs a tenth of a pass. Is decoding 5 times "
            "as fast?",
            "No, 4.0 times: a round gives 6 tokens, the model's own included, and costs 1 + 5 · 0.1 = 1.5 passes.",
            {"acceptance": 1.0, "length": 5, "cost": 0.1, "draft": SAME},
        ),
        speculative_rounds,
        ("engine/speculation/draft_model.py", "engine/speculation/speculation.py",
         "planning/speed.py"),
    ),
)  # fmt: skip
