"""Every answer of a quiz is what the instrument shows: the numbers in its words, at the controls that it sets."""

import math
from collections.abc import Callable

import pytest

from regard.instruments import INSTRUMENTS, Instrument, Panel
from tests.instruments.test_figures import panel, shown


def of(panels: list[Panel], kind: str, index: int = 0) -> Panel:
    return [found for found in panels if found["kind"] == kind][index]


def numbers(panels: list[Panel]) -> dict:
    return {item["label"]: item["value"] for found in panels if found["kind"] == "numbers" for item in found["items"]}


def largest(row: list[float]) -> int:
    return row.index(max(row))


def one_linear_map(panels: list[Panel]) -> None:
    elsewhere = panel("feed-forward", "bars", activation="identity", node="y1", x1=-2.0, x2=1.0, x3=2.0)["values"]
    assert of(panels, "bars")["values"] == pytest.approx(elsewhere, abs=1e-6)
    at_defaults, moved = (panel("feed-forward", "bars", x1=x1)["values"] for x1 in (1.0, -2.0))  # of y1, with ReLU
    assert at_defaults != moved


def vanishing(panels: list[Panel]) -> None:
    assert numbers(panels)["gradient at the first step"] == pytest.approx(0.0004, abs=5e-5)
    assert numbers(panels)["steps"] == 6 + 1


def open_cell(panels: list[Panel]) -> None:
    assert numbers(panels)["c at the end"] == 1.0 and numbers(panels)["∂c_T/∂c_0 by autograd"] == 1


def one_state(panels: list[Panel]) -> None:
    state, other = ([y for _, y in series["points"]] for series in of(panels, "lines")["series"])
    assert state[:6] == [1.0] * 6 and state[6] < 1 and state[11] == pytest.approx(0.1, abs=0.03)
    assert min(other) > 0.9 and numbers(panels)["numbers in the state"] == 48


def alignment(panels: list[Panel]) -> None:
    weights = of(panels, "heatmap")
    assert weights["columns"][3] == "opens" and weights["values"][0][2] > 0.9
    assert largest(weights["values"][4]) == 4 and weights["values"][4][4] > 0.5  # the state after “opens”


def exact_splits(panels: list[Panel]) -> None:
    exact = {by: shown("tokens", by=by)["put back together"] for by in ("words", "characters", "bytes", "byte pairs")}
    assert exact.pop("words") == "“Thecookbakesunusualbreads!”" and set(exact.values()) == {"exactly"}
    assert numbers(panels)["put back together"] == "exactly"


def adjectives(panels: list[Panel]) -> None:
    assert set(of(panels, "bars")["labels"]) == {"red", "small", "warm", "good", "new"}


def second_key(panels: list[Panel]) -> None:
    assert largest(of(panels, "bars")["values"]) == 1
    found = {a: largest(panel("one-query", "bars", angle=a, length=4.0)["values"]) for a in (89, 91, 180, -136, -134)}
    assert found == {89: 2, 91: 1, 180: 1, -136: 1, -134: 0}


def without_scale(panels: list[Panel]) -> None:
    entropy, deviation = "entropy of the row, nats", "deviation of the scores"
    scaled = shown("self-attention")
    assert (numbers(panels)[entropy], scaled[entropy]) == pytest.approx((0.15, 1.13), abs=5e-3)
    assert numbers(panels)[deviation] == pytest.approx(8 * scaled[deviation], rel=1e-4)


def halved(panels: list[Panel]) -> None:
    assert shown("five-tokens")["deviation of the scaled scores"] == pytest.approx(6.6, abs=0.05)
    assert numbers(panels)["largest entropy of a row"] > 5 * shown("five-tokens")["largest entropy of a row"]


def repeated_adjective(panels: list[Panel]) -> None:
    weights = of(panels, "heatmap")
    assert weights["columns"][2] == "old" and weights["values"][-1][2] == pytest.approx(0.98, abs=5e-3)
    others = [panel("heads", "heatmap", head=head)["values"][-1][2] for head in (0, 2, 3)]
    assert max(others) < 0.9


def blocked(panels: list[Panel]) -> None:
    assert numbers(panels)["blocked cells"] == 45 and shown("masks")["blocked cells"] == 6


def cross(panels: list[Panel]) -> None:
    assert [largest(row) for row in of(panels, "heatmap")["values"]] == [2, 1, 6, 0, 3]
    assert of(panels, "heatmap")["columns"][3] == "opens" and of(panels, "heatmap")["columns"][0] == "the"
    assert of(panels, "tokens")["pieces"] == ["kivo", "sen", "bako", "tum", "lura"]


def merged(panels: list[Panel]) -> None:
    assert numbers(panels)["one matrix W_down W_up instead differs by"] < 1e-6


def equal_rows(panels: list[Panel]) -> None:
    rows = of(panels, "heatmap", 1)["values"]
    assert rows[0] == pytest.approx(rows[1], abs=1e-4)
    batch = panel("norms", "heatmap", 1, kind="BatchNorm")["values"]
    assert batch[0] != pytest.approx(batch[1], abs=0.1)


def without_path(panels: list[Panel]) -> None:
    ratio = "gradient at the input / at the output"
    with_path, without = shown("residual", depth=24)[ratio], numbers(panels)[ratio]
    assert (with_path, without) == pytest.approx((3.3, 0.03), rel=0.15)
    assert with_path / without == pytest.approx(100, rel=0.1)


def swish(panels: list[Panel]) -> None:
    curve = of(panels, "lines")["series"][1]["points"]
    x, y = min(curve, key=lambda point: point[1])
    assert x == pytest.approx(-1.28, abs=0.05) and y == pytest.approx(-0.28, abs=2e-3)
    below = [y for x, y in curve if x < -1e-6]
    assert all(y < 0 for y in below) and len(set(below)) == len(below)


def half_the_width(panels: list[Panel]) -> None:
    assert numbers(panels)["dot product with itself"] == pytest.approx(16)


def same_score(panels: list[Panel]) -> None:
    scores = [of(panels, "table")["rows"][0][3], panel("rope", "table", m=2, n=5)["rows"][0][3]]
    assert scores[0] == pytest.approx(scores[1], abs=1e-5)


def longer(panels: list[Panel]) -> None:
    rows = {row[0]: row for row in of(panels, "table", 1)["rows"]}
    assert numbers(panels)["choose"] == "ALiBi"
    assert all(rows[name][2:4] == ["no", "runs"] for name in ("ALiBi", "T5 buckets", "none"))


def most_weights(panels: list[Panel]) -> None:
    counts = dict(zip(of(panels, "bars")["labels"], of(panels, "bars")["values"], strict=True))
    assert numbers(panels)["its weights in all layers"] == counts.pop("target feedforward") == 12_598_272
    counts.pop("embedding")
    assert max(counts.values()) == counts["source feedforward"] == 12_598_272
    assert 2 * counts["source attention"] == pytest.approx(12_598_272, rel=2e-3)


def cross_shape(panels: list[Panel]) -> None:
    shapes = {row[0]: row[1] for row in of(panels, "table")["rows"]}
    assert shapes["decoder: weights on the source"] == "4 × 4 × 6"


def last_layer(panels: list[Panel]) -> None:
    guesses = of(panels, "table", 1)["rows"]
    assert guesses[-1][1] == "stone" and "stone" not in (guesses[0][1], guesses[1][1])
    assert [row[3] for row in guesses[1:]] == pytest.approx([0.07, 0.9998], abs=5e-3)


def hot(panels: list[Panel]) -> None:
    first = [of(panels, "bars")["values"][0], panel("generation", "bars")["values"][0]]
    assert first == pytest.approx([0.5, 0.998], abs=6e-3)


def one_way(panels: list[Panel]) -> None:
    both = panel("masked-words", "bars")
    assert both["labels"][0] == "old" and both["values"][0] == pytest.approx(0.9997, abs=1e-4)
    found = dict(zip(of(panels, "bars")["labels"], of(panels, "bars")["values"], strict=True))
    sixth = 1 - sum(found.values())  # five are listed
    assert set(found) < {"old", "red", "small", "warm", "good", "new"}
    assert all(0.13 <= value <= 0.22 for value in (*found.values(), sixth))
    assert numbers(panels)["attends to positions"] == "0, 1, 2"


def patches(panels: list[Panel]) -> None:
    assert numbers(panels)["tokens with [CLS]"] == 37 and shown("patches", patch="2")["tokens with [CLS]"] == 145


def reach(panels: list[Panel]) -> None:
    assert numbers(panels)["measured reach, tokens"] == 9
    assert numbers(panels)["L · w, if a window does not count the token itself"] == 12
    assert shown("window", layers=4, size=4)["measured reach, tokens"] == 13


def exact_tiles(panels: list[Panel]) -> None:
    assert numbers(panels)["difference from plain attention"] < 1e-12


def four_times(panels: list[Panel]) -> None:
    before = panel("memory-wall", "bars", tokens=14)["values"]
    grown = [b / a for a, b in zip(before, of(panels, "bars")["values"], strict=True)]
    assert grown[:2] == pytest.approx([3.94, 2], abs=5e-3)


def entries(panels: list[Panel]) -> None:
    assert of(panels, "bars")["values"] == [16, 4]
    flops = {n: panel("associativity", "bars", 1, tokens=n, head_dim=8)["values"] for n in (7, 8, 9)}
    assert flops[7][0] < flops[7][1] and flops[8][0] == flops[8][1] and flops[9][0] > flops[9][1]


def damped(panels: list[Panel]) -> None:
    values = [y for _, y in of(panels, "lines")["series"][0]["points"]]
    assert values == pytest.approx([0.9**k * math.cos(0.5 * k) for k in range(32)], abs=1e-5)


def active(panels: list[Panel]) -> None:
    shares = [numbers(panels)[f"Mixtral 8x7B, {name}"] for name in ("active per token", "all weights")]
    assert shares == ["12.9 G", "46.7 G"] and round(100 * 12.9 / 46.7) == 28


def cache(panels: list[Panel]) -> None:
    assert round(numbers(panels)["GB (10⁹)"], 2) == 2.68 and numbers(panels)["GiB (2³⁰)"] == 2.5


def shared_blocks(panels: list[Panel]) -> None:
    first, second = of(panels, "heatmap")["values"]
    assert first[:2] == second[:2] == [1, 2] and first[2] != second[2]
    assert of(panels, "table")["rows"][1][2] == 10 and numbers(panels)["prompt tokens found in the cache"] == 8
    alone = panel("blocks", "heatmap", steps=4, shared=False)["values"]
    assert not set(alone[0][:3]) & set(alone[1][:3])


def more_sequences(panels: list[Panel]) -> None:
    rate = "tokens per second"
    assert numbers(panels)[rate] / shown("prefill-decode")[rate] == pytest.approx(50, rel=0.02)
    assert panel("prefill-decode", "table")["rows"][1][-1] == "memory bandwidth"


def quarter(panels: list[Panel]) -> None:
    share = "share of the multi-head cache"
    assert numbers(panels)[share] == 0.25 and shown("sharing", heads=8, kv_heads=1)[share] == 0.125


def rank(panels: list[Panel]) -> None:
    assert sum(y > 1e-6 for _, y in of(panels, "lines")["series"][0]["points"]) == 4


def stored_weight(panels: list[Panel]) -> None:
    assert numbers(panels)["stored as W′"] == "0.62012" and numbers(panels)["error |W − W′|"] == "0.00012"
    assert min(range(17), key=lambda n: abs(n / 16 - 0.62)) / 16 == 0.625


def all_accepted(panels: list[Panel]) -> None:
    assert numbers(panels)["speed-up"] == 4.0 and numbers(panels)["tokens per pass"] == 6.0
    assert numbers(panels)["cost of a round, in passes"] == 1.5 and numbers(panels)["acceptance in these rounds"] == 1
    assert all(row[2:] == [5, 6] for row in of(panels, "table")["rows"])


def compute_shares(panels: list[Panel]) -> None:
    shares = of(panels, "bars")
    assert shares["labels"][0] == "pretrain" and 5 < shares["values"][0] < 90 and sum(shares["values"]) > 99.9


RANKS = ("r 1", "r 128")


def room_for_rewards(panels: list[Panel]) -> None:
    bits, weights = of(panels, "bars", 2)["values"]
    assert bits == 320_000 and round(weights / 1e6, 2) == 2.62 and round(weights / bits) == 8
    (low, *_), (high, *_) = ([line for line in of(panels, "lines", 1)["series"] if line["name"] == r] for r in RANKS)
    assert low["points"][-1][3] < high["points"][-1][2], "most new rules: rank 1 has learned less than rank 128"


def misspelt(panels: list[Panel]) -> None:
    typo = {"question": "vistors climing towr"}
    assert of(panels, "table", 1)["rows"][0][1] == "The house > Visitors"
    assert numbers(panels)["passages found"] == "2 of 2"
    words = panel("retrieval", "table", 1, method="words", **typo)["rows"]
    assert {row[4] for row in words} == {0} and shown("retrieval", method="words", **typo)["sources in the prompt"] == 0


def stalemate(panels: list[Panel]) -> None:
    accuracy, value = ([y for _, y in of(panels, "lines", i)["series"][0]["points"]] for i in (0, 1))
    assert accuracy[4] > 0.9 and sum(accuracy[-10:]) / 10 == pytest.approx(0.5, abs=0.12)
    assert value[-1] == pytest.approx(-1.386, abs=0.15) and round(math.log(4), 3) == 1.386
    lost = 0.5 + 0.5 / 2  # D knows the data of the lost blob, and guesses elsewhere
    assert lost == 3 / 4


def no_overlap(panels: list[Panel]) -> None:
    assert numbers(panels)["JSD, nats"] == pytest.approx(0.693, abs=5e-4) and numbers(panels)["JSD, bits"] == 1
    assert numbers(panels)["slope of the JSD with the distance"] == 0 and numbers(panels)["accuracy of D*"] == 1


def room_to_copy(panels: list[Panel]) -> None:
    digits, shuffled = (dict(series["points"]) for series in of(panels, "lines")["series"][:2])
    assert digits[64] < 0.1 and shuffled[64] > 0.5 and shuffled[4] > 1
    assert numbers(panels)["saved: 1 − code / input"] == "0.00 %"


def between_the_dots(panels: list[Panel]) -> None:
    found = numbers(panels)
    shares = [
        float(found[f"{name}: random places near a digit"].split()[0]) for name in ("VAE, β = 0.4", "autoencoder")
    ]
    assert shares == pytest.approx([99, 84], abs=0.6)


def no_kl(panels: list[Panel]) -> None:
    title = of(panels, "scatter")["title"]
    outside, digits = map(int, title.split("; ")[1].split(" are")[0].split(" of "))
    assert outside > digits / 2
    divergences = dict(of(panels, "lines")["series"][1]["points"])
    assert divergences[0.03] == max(divergences.values())
    name = "generated: near a held-out digit"
    before, after = (float(shown("two-pulls", beta=beta)[name].split()[0]) for beta in (0, 2))
    assert before < after


def nearest_or_sharpest(panels: list[Panel]) -> None:
    assert of(panels, "bars")["values"][1:] == pytest.approx([0.71, 1.03], abs=0.006)
    cells = {row[0]: row[1:] for row in of(panels, "table")["rows"]}
    near = [float(cell.split()[0]) for cell in cells["samples near a real digit"]]
    assert max(near) == near[1]
    steady = cells["range of samples near a digit, second half of training"]
    assert [cell.split()[0] for cell in steady[1:]] == ["0.4", "8.4"]


ANSWERS: dict[str, Callable[[list[Panel]], None]] = {
    "feed-forward": one_linear_map,
    "recurrence": vanishing,
    "lstm": open_cell,
    "bottleneck": one_state,
    "alignment": alignment,
    "tokens": exact_splits,
    "embeddings": adjectives,
    "one-query": second_key,
    "self-attention": without_scale,
    "five-tokens": halved,
    "heads": repeated_adjective,
    "masks": blocked,
    "cross-attention": cross,
    "feed-forward-layer": merged,
    "norms": equal_rows,
    "residual": without_path,
    "gated-unit": swish,
    "sinusoids": half_the_width,
    "rope": same_score,
    "position-choice": longer,
    "encoder-decoder": most_weights,
    "trace": cross_shape,
    "sandwich": last_layer,
    "generation": hot,
    "masked-words": one_way,
    "patches": patches,
    "window": reach,
    "tiles": exact_tiles,
    "memory-wall": four_times,
    "associativity": entries,
    "convolution-recurrence": damped,
    "experts": active,
    "kv-cache": cache,
    "blocks": shared_blocks,
    "prefill-decode": more_sequences,
    "sharing": quarter,
    "precision": stored_weight,
    "speculative-rounds": all_accepted,
    "retrieval": misspelt,
    "phases": compute_shares,
    "lora": rank,
    "lora-rates": room_for_rewards,
    "adversarial-training": stalemate,
    "best-discriminator": no_overlap,
    "code-size": room_to_copy,
    "dots-and-clouds": between_the_dots,
    "two-pulls": no_kl,
    "generative-table": nearest_or_sharpest,
}


@pytest.mark.ledger("fig.quiz")
@pytest.mark.parametrize("instrument", INSTRUMENTS.values(), ids=lambda instrument: instrument.id)
def test_the_answer_is_what_the_instrument_shows(instrument: Instrument) -> None:
    quiz = instrument.quiz
    assert quiz.question.endswith("?") and quiz.answer.endswith(".") and quiz.setting
    ANSWERS[instrument.id](instrument.panels(quiz.setting))
