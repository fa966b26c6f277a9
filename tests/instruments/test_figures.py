"""The numbers of the ledger's figures, as the instruments show them."""

import math
import tomllib

import pytest
import torch

from regard.instruments import INSTRUMENTS
from regard.parts.position.base import Position
from regard.parts.position.rope import Rope
from regard.parts.position.rope_scaling import Yarn

CACHED = "cached blocks, free to be taken"


def shown(id: str, /, **controls) -> dict:
    """The labelled numbers of an instrument."""
    panels = INSTRUMENTS[id].panels(controls)
    return {item["label"]: item["value"] for p in panels if p["kind"] == "numbers" for item in p["items"]}


def panel(id: str, kind: str, index: int = 0, /, **controls) -> dict:
    return [p for p in INSTRUMENTS[id].panels(controls) if p["kind"] == kind][index]


@pytest.mark.ledger("fig.5.1")
def test_a_feed_forward_network_has_four_inputs_two_hidden_layers_and_two_outputs() -> None:
    drawn = panel("feed-forward", "diagram")
    layers = [[node for node in drawn["nodes"] if node["id"].startswith(letter)] for letter in "xhgy"]
    assert [len(layer) for layer in layers] == [4, 5, 3, 2] and len(drawn["edges"]) == 4 * 5 + 5 * 3 + 3 * 2
    terms = panel("feed-forward", "table")["rows"]  # of output y1, which has no activation and a bias of 0
    titles = [panel("feed-forward", "table", node=node)["title"] for node in ("h1", "y1")]
    assert titles == ["h1 = σ(sum of the last column + b)", "y1 = sum of the last column + b"]
    assert layers[3][0]["value"] == pytest.approx(sum(product for *_, product in terms), abs=1e-5)
    step, derivatives = 1e-2, panel("feed-forward", "bars", activation="tanh")["values"]
    y = [panel("feed-forward", "diagram", activation="tanh", x1=1 + d)["nodes"][12]["value"] for d in (step, -step)]
    assert (y[0] - y[1]) / (2 * step) == pytest.approx(derivatives[0], abs=1e-3)


@pytest.mark.ledger("fig.5.2")
def test_a_recurrence_uses_the_same_weights_and_its_gradient_vanishes() -> None:
    weak, strong = (shown("recurrence", gain=gain) for gain in (0.3, 0.9))
    assert weak["gradient at the first step"] < 0.01 * strong["gradient at the first step"]
    shorter = shown("recurrence", text="the boat left")
    assert shorter["weights, however long the text"] == weak["weights, however long the text"]
    assert weak["all steps in one call differ by"] < 1e-6
    drawn = panel("recurrence", "diagram", text="the boat left")
    assert [node["label"] for node in drawn["nodes"]] == ["h1", "h2", "h3", "the", "boat", "left"]
    assert len(drawn["edges"]) == 3 + 2  # one W_x per word, one W_h between two states


@pytest.mark.ledger("fig.5.3")
def test_an_open_lstm_cell_carries_its_memory() -> None:
    open_cell = shown("lstm", forget=1.0, write=0.0, steps=60, start=1.5)
    assert open_cell["c at the end"] == 1.5 and open_cell["∂c_T/∂c_0 by autograd"] == 1
    closing = shown("lstm", forget=0.5, steps=10)
    assert closing["∂c_T/∂c_0 by autograd"] == closing["Π f"] == pytest.approx(0.5**10, rel=1e-5)


@pytest.mark.ledger("fig.5.3")
def test_a_click_on_a_part_of_the_cell_opens_its_equation() -> None:
    drawn, equations = panel("lstm", "diagram"), INSTRUMENTS["lstm"].equations
    assert drawn["sets"] == "part" and len(drawn["nodes"]) == len(equations) == 7
    for node in drawn["nodes"]:
        opened = panel("lstm", "equation", part=node["id"])
        assert opened["title"].startswith(f"{node['label']}, the ") and opened["name"] == node["id"]
    c, f, i, g, now, o, h = (node["value"] for node in drawn["nodes"])
    assert now == pytest.approx(f * c + i * g, rel=1e-4) and h == pytest.approx(o * math.tanh(now), rel=1e-4)


@pytest.mark.ledger("fig.000.sweep")
def test_the_query_of_the_start_gives_20() -> None:
    assert shown("one-query")["output"] == 20.0 and shown("one-query")["sum of exp"] == pytest.approx(5.0562, abs=1e-4)
    assert panel("one-query", "bars")["values"] == pytest.approx([0.4011, 0.1978, 0.4011], abs=1e-4)
    at_135 = panel("one-query", "bars", angle=135, length=4.0)["values"]
    assert max(at_135) == at_135[1]


@pytest.mark.ledger("fig.5.9")
def test_scores_are_divided_by_8_and_rows_sum_to_1() -> None:
    scaled, raw = shown("self-attention"), shown("self-attention", scaled=False)
    assert scaled["√d_k"] == 8 and scaled["sum of the row"] == 1.0
    deviation = "deviation of the scores"
    assert raw[deviation] == pytest.approx(8 * scaled[deviation], rel=1e-4)
    assert raw["entropy of the row, nats"] < scaled["entropy of the row, nats"]
    hot = shown("self-attention", temperature=4.0)
    assert hot[deviation] == pytest.approx(scaled[deviation] / 4, rel=1e-4)
    weights = panel("self-attention", "heatmap")["values"]
    assert len(weights) == 4 and all(sum(row) == pytest.approx(1, abs=1e-5) for row in weights)
    values = [panel("self-attention", "heatmap", 1, query=i)["values"] for i in range(1, 5)]
    mixed = sum(w * torch.tensor(v) for w, (_, _, _, v, _) in zip(weights[1], values, strict=True))
    assert values[1][4] == pytest.approx(mixed.tolist(), abs=1e-4)  # the output is the weighted sum of the values


@pytest.mark.ledger("fig.001.heatmap")
def test_five_tokens_equal_the_results_of_r() -> None:
    drawn = panel("five-tokens", "heatmap")
    assert drawn["scale"] == "unit" and drawn["rows"] == drawn["columns"]
    assert drawn["values"][1] == pytest.approx([0.052, 0.001, 0, 0.002, 0.944], abs=5e-4)
    outputs = panel("five-tokens", "heatmap", 1)["values"]
    assert outputs[0] == pytest.approx([-2.871, -1.431, -1.750, -0.112], abs=6e-4)
    causal = panel("five-tokens", "heatmap", causal=True)["values"]
    assert causal[1] == pytest.approx([0.978, 0.022, 0, 0, 0], abs=5e-4)
    numbers = shown("five-tokens")
    assert numbers["deviation of the scaled scores"] == pytest.approx(6.6, abs=0.05)
    assert numbers["largest entropy of a row"] == pytest.approx(0.231, abs=5e-4)


@pytest.mark.ledger("fig.5.11")
def test_a_causal_mask_blocks_6_of_16_cells() -> None:
    assert shown("masks")["blocked cells"] == 6 and shown("masks", tokens=10)["blocked cells"] == 45
    cells = panel("masks", "heatmap")["values"]
    assert all((cells[i][j] is None) == (j > i) for i in range(4) for j in range(4))
    assert cells[3] == [0.25] * 4
    assert shown("masks", kind="full")["attends to later tokens"] == "yes"
    assert shown("masks", kind="window", tokens=8, size=3, query=8)["keys of query 8"] == 3
    assert shown("masks", kind="first tokens and window", tokens=8, size=3, first=2, query=8)["keys of query 8"] == 5


@pytest.mark.ledger("fig.5.13")
def test_the_feed_forward_layer_has_2_1_million_weights_and_attention_1_05() -> None:
    numbers = shown("feed-forward-layer")
    assert (numbers["feed-forward"], numbers["attention"], numbers["ratio"]) == (2_097_152, 1_048_576, 2)
    merged = "one matrix W_down W_up instead differs by"
    assert shown("feed-forward-layer", activation="identity")[merged] < 1e-6 < 0.1 < numbers[merged]


@pytest.mark.ledger("fig.5.14")
def test_norms_of_rows_and_columns() -> None:
    x = torch.tensor([[1.0, 2, 3, 4], [2, 4, 6, 8], [-1, 0, 1, 0], [5, 5, 6, 4]])
    after = panel("norms", "heatmap", 1)["values"]
    assert torch.allclose(torch.tensor(after), torch.nn.functional.layer_norm(x, (4,)), atol=1e-4)
    assert after[0] == pytest.approx(after[1], abs=1e-4)  # the second token is twice the first
    batch = torch.tensor(panel("norms", "heatmap", 1, kind="BatchNorm")["values"])
    assert batch.mean(0).abs().max() < 1e-5 and batch[0, 0] != batch[1, 0]
    with pytest.raises(ValueError, match="no number"):
        shown("norms", values="1 2; x 4")


@pytest.mark.ledger("fig.5.15")
def test_without_the_residual_path_gradients_vanish() -> None:
    ratio = "gradient at the input / at the output"
    assert shown("residual", depth=24)[ratio] > 10 * shown("residual", depth=24, skip=0.0)[ratio]
    for style in ("pre", "post", "parallel"):
        gradients = [y for _, y in panel("residual", "lines", style=style, depth=6)["series"][0]["points"]]
        assert len(gradients) == 7 and gradients[-2] > 0.05 * gradients[-1]  # the norm at the output does not hide it


@pytest.mark.ledger("fig.5.15")
def test_the_block_is_drawn_from_its_spec() -> None:
    def into(style: str, label: str) -> set[str]:
        """What leads to the first part of this kind."""
        drawn = panel("residual", "diagram", style=style)
        labels = {node["id"]: node["label"] for node in drawn["nodes"]}
        first = next(id for id in labels if labels[id] == label)
        return {labels[edge["from"]] for edge in drawn["edges"] if edge["to"] == first}

    assert into("pre", "attention") == into("parallel", "attention") == {"layernorm"}
    assert into("post", "attention") == {"x"} and into("post", "layernorm") == {"+"}
    assert into("pre", "feedforward") == {"layernorm"} and into("post", "feedforward") == {"layernorm"}
    skip = [edge["weight"] for edge in panel("residual", "diagram", skip=0.5)["edges"]]
    assert skip.count(0.5) == 2  # one residual path per sublayer


@pytest.mark.ledger("fig.5.21")
def test_a_gated_unit_has_as_many_weights_and_swish_a_minimum() -> None:
    (_, _, plain, a), (_, _, gated, b) = panel("gated-unit", "table")["rows"]
    assert (plain, gated) == (3072, 2048) and a == b
    curve = panel("gated-unit", "lines")["series"][1]["points"]
    assert min(y for _, y in curve) == pytest.approx(-0.2785, abs=1e-3)
    assert shown("gated-unit", gate=0.0, up=3.0)["gate · W_up x"] == 0


@pytest.mark.ledger("fig.5.16")
def test_sinusoids_have_a_dot_product_of_half_the_width_with_themselves() -> None:
    for position in (0, 7, 40):
        assert shown("sinusoids", width=32, position=position)["dot product with itself"] == pytest.approx(16)
    assert panel("sinusoids", "heatmap", 1, position=7)["values"] == [panel("sinusoids", "heatmap")["values"][7]]
    row = panel("sinusoids", "heatmap", width=4)["values"][3]
    assert row == pytest.approx([math.sin(3), math.cos(3), math.sin(0.03), math.cos(0.03)], abs=1e-5)


@pytest.mark.ledger("fig.5.20")
def test_rotated_scores_depend_on_the_distance() -> None:
    scores = {round(row[3], 4) for row in panel("rope", "table", m=2, n=5)["rows"]}
    assert scores == {round(panel("rope", "table", m=100, n=103)["rows"][0][3], 4)}
    angle = "angle per position, radians"
    assert shown("rope", scaling="linear")[angle] == pytest.approx(shown("rope")[angle] / 4)


@pytest.mark.ledger("fig.000.poschoice")
def test_questions_lead_to_a_position_scheme() -> None:
    chosen = {
        (model, longer, tuned): shown("position-choice", model=model, longer=longer, tuned=tuned)["choose"]
        for model in ("decoder", "encoder")
        for longer in ("never", "32 times")
        for tuned in (True, False)
    }
    assert chosen["decoder", "never", True] == "RoPE" and chosen["decoder", "32 times", False] == "ALiBi"
    assert chosen["decoder", "32 times", True] == "RoPE with YaRN" and chosen["encoder", "never", False] == "learned"
    for longer, factor in (("4 times", 4.0), ("32 times", 32.0)):
        line = panel("position-choice", "table", longer=longer)["rows"][0][0]
        assert Position.from_dict(tomllib.loads(line)["position"]) == Rope(scaling=Yarn(factor, 2048))
    rows = {row[0]: row[1:] for row in panel("position-choice", "table", 1)["rows"]}
    assert rows["RoPE"][1] == rows["ALiBi"][1] == "no" != rows["sinusoidal"][1]
    assert rows["learned"][2] == "refused"
    assert rows["RoPE"][3] == "2 of 8 pairs" and rows["RoPE with YaRN"][3] == "0 of 8 pairs"


@pytest.mark.ledger("fig.5.22")
def test_windows_reach_as_far_as_the_jacobian() -> None:
    numbers, formula = shown("window"), "L(w − 1) + 1, at most the tokens"
    assert numbers["measured reach, tokens"] == numbers[formula] == 9
    short = shown("window", layers=6, size=8, tokens=16)
    assert short["measured reach, tokens"] == short[formula] == 16
    assert numbers["pairs of causal attention"] == 16 * 17 / 2
    assert numbers["L · w, if a window does not count the token itself"] == 12
    assert numbers["32 layers with 4,096"] == 131_041
    assert shown("window", layers=1, size=5)["measured reach, tokens"] == 5


@pytest.mark.ledger("fig.5.26")
def test_tiles_give_the_result_of_plain_attention() -> None:
    assert shown("tiles")["difference from plain attention"] < 1e-12
    steps = panel("tiles", "table")["rows"]
    assert [row[0] for row in steps] == [1, 2, 3, 4]
    assert [row[1] for row in steps] == sorted(row[1] for row in steps)
    stored, tiled = panel("tiles", "bars")["values"]
    assert stored > 5 * tiled


@pytest.mark.ledger("fig.000.wall")
def test_stored_scores_grow_with_the_square() -> None:
    (stored, tiles, *_), (stored2, tiles2, *_) = (
        panel("memory-wall", "bars", tokens=n)["values"] for n in (16, 17)
    )  # fmt: skip
    assert 3.8 < stored2 / stored < 4 and tiles2 / tiles == pytest.approx(2, rel=1e-3)


@pytest.mark.ledger("fig.000.assoc")
def test_the_other_order_builds_4_instead_of_16_entries() -> None:
    assert panel("associativity", "bars")["values"] == [16, 4]
    assert shown("associativity", tokens=64, head_dim=16)["relative difference of the results"] < 1e-12
    assert shown("associativity", head_dim=16)["equal cost at n"] == 16


@pytest.mark.ledger("fig.000.dual")
def test_convolution_equals_recurrence() -> None:
    for signal in ("impulse", "step", "wave"):
        assert shown("convolution-recurrence", signal=signal, turn=0.5)["largest difference"] < 1e-12
    points = panel("convolution-recurrence", "lines", decay=0.5)["series"][0]["points"]
    assert [y for _, y in points[:4]] == pytest.approx([1, 0.5, 0.25, 0.125])


@pytest.mark.ledger("fig.5.27")
def test_two_of_eight_experts_are_chosen() -> None:
    weights = panel("experts", "heatmap")["values"]
    assert all(len(row) == 8 and sum(w > 0 for w in row) == 2 and sum(row) == pytest.approx(1) for row in weights)
    assert sum(panel("experts", "bars")["values"]) == 2 * len(weights)
    numbers = shown("experts")
    assert 0.25 < numbers["active share of this layer"] < 0.26
    assert numbers["Mixtral 8x7B, all weights"] == "46.7 G" and numbers["Mixtral 8x7B, active per token"] == "12.9 G"


@pytest.mark.ledger("fig.5.23")
def test_the_cache_of_8192_tokens_of_a_70b_model_takes_2_50_gib() -> None:
    numbers = shown("kv-cache")
    assert numbers["GiB (2³⁰)"] == 2.5 and numbers["GB (10⁹)"] == 2.68435
    assert shown("kv-cache", tokens=4096)["GiB (2³⁰)"] == 1.25
    assert shown("kv-cache", batch=4)["per token of one sequence"] == "328 kB (320 KiB)"
    with_cache, without = (s["points"][-1][1] for s in panel("kv-cache", "lines", 1)["series"])
    assert with_cache == 8192 * 8193 / 2 and without > 2000 * with_cache


@pytest.mark.ledger("fig.5.23")
def test_blocks_are_those_of_the_engine() -> None:
    """The tables that the instrument shows are those that a paged store gives to requests as they grow."""
    lengths = [panel("blocks", "table", steps=n)["rows"][0][4] for n in range(1, 12)]
    assert lengths == [8 + n for n in range(11)]  # one token per step, after the prompt
    for steps in (1, 2, 6, 9):
        tables, rows = panel("blocks", "heatmap", steps=steps)["values"], panel("blocks", "table", steps=steps)["rows"]
        blocks = [[block for block in table if block is not None] for table in tables]
        assert [len(of) for of in blocks] == [-(-row[4] // 4) for row in rows]
        assert 0 not in {block for of in blocks for block in of}  # it belongs to no request
    apart = panel("blocks", "heatmap", steps=4, shared=False)["values"]
    assert not {*apart[0]} & {*apart[1]} - {None} and shown("blocks", steps=4)["prompt tokens found in the cache"] == 8
    ended = panel("blocks", "tokens", steps=20)["notes"]
    assert set(ended) == {"cached", "free"} and ended.count("cached") == shown("blocks", steps=20)[CACHED]


@pytest.mark.ledger("fig.5.24")
def test_prefill_is_limited_by_compute_and_decode_by_memory() -> None:
    (prefill, decode) = panel("prefill-decode", "table")["rows"]
    assert prefill[-1] == "compute" and decode[-1] == "memory bandwidth"
    assert shown("prefill-decode", batch=32)["tokens per second"] > 20 * shown("prefill-decode")["tokens per second"]
    measured = panel("prefill-decode", "bars", 1)
    assert measured["labels"] == ["prefill of 8 and token 1", *(f"token {i}" for i in range(2, 7))]
    assert min(measured["values"]) > 0
    numbers = shown("prefill-decode")
    assert numbers["measured time to the first token, ms"] > 0 and numbers["time per later token, ms"] > 0
    with pytest.raises(ValueError, match="exceed the 1,024 of gpt2"):
        shown("prefill-decode", model="gpt2", prompt=1024)
    assert shown("prefill-decode")["weights and cache / memory of the device"] == pytest.approx(16.1 / 80, abs=2e-3)


@pytest.mark.ledger("fig.5.25")
@pytest.mark.parametrize(("kv_heads", "share"), [(8, 1), (2, 0.25), (1, 0.125)])
def test_shared_heads_shrink_the_cache(kv_heads: int, share: float) -> None:
    assert shown("sharing", kv_heads=kv_heads)["share of the multi-head cache"] == share
    drawn = panel("sharing", "diagram", kv_heads=kv_heads)
    assert len(drawn["nodes"]) == 8 + kv_heads and len(drawn["edges"]) == 8


@pytest.mark.ledger("fig.5.32")
def test_an_adapter_of_rank_8_has_few_weights_and_rank_8() -> None:
    numbers = shown("lora")
    assert numbers["weights of A and B"] == f"{8 * 2 * 4096:,}" and numbers["times fewer"] == 256
    assert numbers["largest change at the start"] == 0
    values = [y for _, y in panel("lora", "lines")["series"][0]["points"]]
    assert len(values) == 64 and values[7] > 1e-4 and max(values[8:]) < 1e-6
    assert min(y for _, y in panel("lora", "lines", rank=64)["series"][0]["points"]) > 1e-6
