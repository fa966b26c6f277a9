"""A report of what a model does with one text, as one HTML file: `regard lens report`.

Predictions, attention, kinds of heads, the logit lens, direct logit attribution, token importance and the residual
stream. The figures are embedded; the file makes no requests, and all text is escaped.
"""

import math
import tempfile
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regard.lens import (
    HeadScores,
    attention_heads,
    attention_layers,
    attention_maps,
    entropy,
    gradient_times_input,
    logit_attribution,
    logit_lens,
    massive_activations,
    rank_collapse,
    relative_weights,
    score_heads,
)
from regard.lens.detectors import longest_length
from regard.lens.inputs import vocab_of
from regard.models.decoder import DecoderModule
from regard.report.lens_plots import head_mosaic, layer_lines, signed_bars
from regard.report.page import Page
from regard.report.plots import attention_grid
from regard.text.tokenizer import Tokenizer

STYLE = """
<style>
.tokens { line-height: 2.1 } .tokens span { padding: .18rem .3rem; margin-right: .15rem; border-radius: .3rem;
white-space: pre; background: #f1f4f8 } .cards { display: flex; flex-wrap: wrap; gap: .8rem; margin: 1.2rem 0 2rem }
.cards div { background: #f1f4f8; border-radius: .6rem; padding: .6rem 1rem } .cards b { display: block;
font-size: 1.25rem } .cards span { color: #52606d; font-size: .85rem } .bar { display: inline-block; height: .7rem;
background: #3b6ea5; border-radius: .2rem; vertical-align: middle } td { font-variant-numeric: tabular-nums }
nav a { margin-right: 1rem; color: #2f5d8f }
code { background: #f1f4f8; padding: .1rem .3rem; border-radius: .25rem; white-space: pre }
table { font-size: .92rem } body { max-width: 60rem } .heads { display: grid; gap: 0 1.5rem;
grid-template-columns: repeat(auto-fit, minmax(20rem, 1fr)) } .heads figure { margin: .6rem 0 }
</style>
"""
LONGEST = 200  # tokens whose maps are drawn


def lens_report(model: Any, tokenizer: Tokenizer, ids: Sequence[int], name: str, out: Path) -> None:
    """Write the report of a decoder or an encoder that reads `ids`. For parts that the model does not have, the report
    says why."""
    if not hasattr(model, "stack"):
        raise ValueError(f"a report shows a decoder or an encoder, not {type(model).__name__}; use regard.lens instead")
    if len(ids) > LONGEST:
        raise ValueError(f"the text has {len(ids)} tokens; a report shows at most {LONGEST}, so shorten it")
    tokens = [tokenizer.decode_token(id) for id in ids]
    page = Page(f"Inside {name}")
    page.parts.insert(0, STYLE)
    device = next(model.parameters()).device
    rows = torch.tensor([list(ids)], device=device)
    summary(page, model, tokens)
    with tempfile.TemporaryDirectory() as folder:
        picture = Path(folder) / "figure.png"
        if isinstance(model, DecoderModule):
            add_predictions(page, model, tokenizer, rows, tokens)
        if any(attention_heads(model)):
            add_attention(page, model, tokenizer, ids, tokens, picture)
        else:
            add_reasons(page, model)
        if isinstance(model, DecoderModule):
            add_logit_lens(page, model, tokenizer, rows)
            add_attribution(page, model, tokenizer, rows, picture)
        add_stream(page, model, rows, tokens, picture)
    page.write(out)


def summary(page: Page, model: Any, tokens: Sequence[str]) -> None:
    parameters = sum(parameter.numel() for parameter in model.parameters())
    kinds = [kind.label for layer in attention_layers(model) for kind in layer.kinds]
    cards = {
        "parameters": f"{parameters:,}",
        "layers": str(len(model.stack.blocks)),
        "heads with a map": str(len(kinds)),
        "tokens": str(len(tokens)),
        "kind of maps": "; ".join(dict.fromkeys(kinds)) or "none",
    }
    inner = "".join(f"<div><b>{escape(value)}</b><span>{escape(name)}</span></div>" for name, value in cards.items())
    page.parts.append(f'<div class="cards">{inner}</div>')


def token_line(page: Page, tokens: Sequence[str], shares: Sequence[float] | None = None) -> None:
    """The tokens as chips; shares from -1 to 1 colour them from orange to blue."""
    chips = []
    for i, token in enumerate(tokens):
        share = 0.0 if shares is None else shares[i]
        colour = f"rgba({'59, 110, 165' if share >= 0 else '217, 130, 43'}, {0.06 + 0.6 * min(1.0, abs(share)):.2f})"
        title = f"{i}" if shares is None else f"{i}: {share:+.2f}"
        chips.append(f'<span style="background: {colour}" title="{title}">{escape(visible(token))}</span>')
    page.parts.append(f'<p class="tokens">{"<wbr>".join(chips)}</p>')


def visible(token: str) -> str:
    return token.replace("\n", "⏎").replace("\t", "⇥") or "∅"


def add_predictions(
    page: Page, model: DecoderModule, tokenizer: Tokenizer, rows: Tensor, tokens: Sequence[str]
) -> None:
    page.heading("What comes next")
    with torch.no_grad():
        probabilities = model(rows)[0, -1].float().softmax(-1)
    best = probabilities.topk(min(8, len(probabilities)))
    cells = "".join(
        f"<tr><td><code>{escape(repr(tokenizer.decode_token(id)))}</code></td><td>{p:.3f}</td>"
        f'<td><span class="bar" style="width: {18 * p:.2f}rem"></span></td></tr>'
        for p, id in zip(best.values.tolist(), best.indices.tolist(), strict=True)
    )
    page.parts.append(f"<table>{cells}</table>")
    page.text(
        "Which tokens matter for the first of them: gradient times input of its logit. Blue tokens raise it, orange "
        "ones lower it."
    )
    answer = int(best.indices[0])
    found = gradient_times_input(model, rows, lambda logits: logits[:, -1, answer])[0]
    token_line(page, tokens, (found / found.abs().max().clamp_min(1e-30)).tolist())


def add_reasons(page: Page, model: Any) -> None:
    """Why no layer has a map of attention."""
    page.heading("Attention")
    reasons = dict.fromkeys(mixer.reason for layer in attention_layers(model) for mixer in layer.mixers if mixer.reason)
    page.text(f"No layer has a map of attention: {'; '.join(reasons) or 'none mixes tokens'}.")


def add_attention(
    page: Page, model: Any, tokenizer: Tokenizer, ids: Sequence[int], tokens: Sequence[str], picture: Path
) -> None:
    maps = attention_maps(model, ids)
    page.heading("Attention")
    if not isinstance(model, DecoderModule):
        token_line(page, tokens)
    head_mosaic(maps, picture)
    page.picture(picture, "Every head: queries down, keys to the right. Each square has its own scale.")
    vocab, start = min(tokenizer.vocab_size, vocab_of(model.spec)), tokenizer.prefix_ids
    scores = score_heads(model, vocab, length=min(24, longest_length(model, vocab, start)), start=start)
    strongest = add_kinds(page, scores)
    page.parts.append('<div class="heads">')
    for kind, (layer, head) in strongest.items():
        weights = maps[layer]
        assert weights is not None
        attention_grid({(layer, head): weights[head]}, [visible(token) for token in tokens], picture)
        page.picture(picture, f"{kind}: layer {layer}, head {head}, on this text.")
    page.parts.append("</div>")
    rows = [relative_weights(weights) for weights in maps if weights is not None]
    entropies = [entropy(weights) for weights in rows]
    uniform = mean_uniform(len(tokens)) if isinstance(model, DecoderModule) else math.log(len(tokens))
    panels = {
        "entropy of attention": {
            "mean of the heads": [float(values.mean()) for values in entropies],
            "sharpest head": [float(values.min()) for values in entropies],
            "uniform": [uniform] * len(rows),
        },
        "weight of the first token": {"mean": [float(weights[..., 0].mean()) for weights in rows]},
    }
    layer_lines(panels, picture, x="layers with a map")
    page.picture(picture, "Entropy in nats: 0 if all weight is on one token. A first token with much weight is a sink.")


def mean_uniform(length: int) -> float:
    return float(torch.arange(1, length + 1).log().mean())


def add_kinds(page: Page, scores: HeadScores) -> dict[str, tuple[int, int]]:
    """The table of head kinds; returns the strongest head of the kinds that were found."""
    page.heading("What the heads do")
    page.text(
        "Scores on random tokens that are repeated once, so that only the kind of the head matters: the mean weight on "
        "the previous token, the first token, the earlier occurrence of the same token, and the token after that one."
    )
    rows, found = [], {}
    for kind, uniform in scores.uniform.items():
        best = scores.find(kind, threshold=0.0)[:4]
        text = ", ".join(f"{layer}.{head} ({score:.2f})" for layer, head, score in best)
        rows.append(((kind, text, f"{uniform:.2f}"), "right" if best and best[0][2] > 0.4 else ""))
        if best and best[0][2] > 0.4:
            found[kind] = best[0][:2]
    page.table(("kind", "strongest heads, layer.head", "uniform attention"), rows)
    page.text(
        "Green: the strongest head has a score above 0.4; its map on this text follows."
        if found
        else "None is above 0.4."
    )
    return found


def add_logit_lens(page: Page, model: DecoderModule, tokenizer: Tokenizer, rows: Tensor) -> None:
    page.heading("Where the prediction arises")
    page.text("The logit lens: what the model's head would predict after each layer, for the token after the text.")
    lines = []
    for name, logits in logit_lens(model, rows, slice(-1, None)).items():
        best = logits[0, -1].float().softmax(-1).topk(min(4, logits.shape[-1]))
        pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        words = [f"{tokenizer.decode_token(id)!r} {p:.2f}" for id, p in pairs]
        lines.append(((name.removeprefix("stack."), *words), ""))
    page.table(("after", "most likely", "second", "third", "fourth"), lines)


def add_attribution(page: Page, model: DecoderModule, tokenizer: Tokenizer, rows: Tensor, picture: Path) -> None:
    with torch.no_grad():
        first, second = model(rows)[0, -1].topk(2).indices.tolist()
    try:
        found = logit_attribution(model, rows[0], token=first, minus=second)
    except ValueError as error:  # norms after the sum, for instance
        page.text(f"There is no direct logit attribution of this model: {error}.")
        return
    values = dict(zip(found.names, found.values[:, 0].tolist(), strict=True))
    largest = sorted(values, key=lambda name: -abs(values[name]))[:24]
    kept = {name.removeprefix("stack."): values[name] for name in values if name in largest}
    signed_bars(kept, picture)
    answer, other = (repr(tokenizer.decode_token(id)) for id in (first, second))
    page.picture(
        picture,
        f"Direct logit attribution: what each sublayer adds to logit({answer}) - logit({other}). The {len(kept)} "
        f"largest of {len(values)} terms, in the order of the layers; all terms sum to {sum(values.values()):.2f}.",
    )


def add_stream(page: Page, model: Any, rows: Tensor, tokens: Sequence[str], picture: Path) -> None:
    page.heading("The residual stream")
    sizes = massive_activations(model, rows)
    panels = {"size of activations": {"largest": list(sizes.largest.values()), "median": list(sizes.median.values())}}
    if rows.shape[1] > 1:
        panels["similarity of tokens"] = {"mean cosine": list(rank_collapse(model, rows).cosine.values())}
    layer_lines(panels, picture, log=("size of activations",))
    page.picture(
        picture, "After each layer: the largest and the median size of an activation, and how alike tokens are."
    )
    if not sizes.found:
        page.text("No activation is massive: above 100 and 1,000 times the median.")
        return
    places = {(one.position, one.channel): one for one in reversed(sizes.found)}
    page.text("Massive activations: above 100 and 1,000 times the median (the largest layer of each).")
    page.table(
        ("token", "position", "channel", "value", "times the median", "after"),
        [
            (
                (
                    repr(tokens[p]),
                    str(p),
                    str(c),
                    f"{one.value:,.0f}",
                    f"{one.ratio:,.0f}",
                    one.name.removeprefix("stack."),
                ),
                "",
            )
            for (p, c), one in list(reversed(places.items()))[:8]
        ],
    )
