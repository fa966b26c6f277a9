"""The report of `regard demo`: one HTML page with the loss curve, some answers, and attention maps."""

from pathlib import Path
from typing import Any

from regard.evals.world import GradedAnswer, counts_by_kind
from regard.lens import attention_maps
from regard.models.decoder import DecoderModule
from regard.report.page import Page
from regard.report.plots import attention_grid, loss_curve
from regard.text.chat import encode_chat
from regard.text.tokenizer import Tokenizer


def write_report(
    out: Path,
    answers: list[GradedAnswer],
    shown: int,
    summary: dict[str, Any],
    model: DecoderModule,
    tokenizer: Tokenizer,
) -> None:
    """Write report.html and its pictures into the run's directory; `shown` is how many answers the table has."""
    page = Page("A small model of a small world")
    page.text(f"{summary['exact_match']:.1%}", "big")
    page.text(
        f"of {len(answers)} questions about held-out stories were answered exactly, "
        f"by {summary['parameters']:,} parameters after {summary['train_seconds']:.0f} seconds of training."
    )
    loss_curve(out / "metrics.jsonl", out / "loss.png")
    page.picture(out / "loss.png", "Training and held-out loss.")
    page.heading("Questions and answers")
    page.table(
        ["story", "question", "model's answer", "correct answer"],
        [
            ((a.story.text, a.question.text, a.answer, a.question.answer), "right" if a.correct else "wrong")
            for a in answers[:shown]
        ],
    )
    page.heading("By kind of question")
    page.table(
        ["kind", "correct", "asked"],
        [((kind, str(correct), str(asked)), "") for kind, (correct, asked) in counts_by_kind(answers).items()],
    )
    add_attention(page, out, answers[0], model, tokenizer)
    page.write(out / "report.html")


def add_attention(page: Page, out: Path, graded: GradedAnswer, model: DecoderModule, tokenizer: Tokenizer) -> None:
    """The maps of all heads on one question, and the head with the largest weight in its last row."""
    prompt = f"{graded.story.text} {graded.question.text}"
    ids = encode_chat(tokenizer, [{"role": "user", "content": prompt}])
    tokens = [tokenizer.decode_token(id) for id in ids]
    layers = enumerate(attention_maps(model, ids))
    maps = {(i, h): weights[h] for i, weights in layers if weights is not None for h in range(len(weights))}
    page.heading("Attention")
    attention_grid(maps, tokens, out / "attention.png")
    page.picture(out / "attention.png", f"All heads on: {prompt}")
    sharpest = max(maps, key=lambda head: float(maps[head][-1].max()))
    attention_grid({sharpest: maps[sharpest]}, tokens, out / "head.png")
    page.picture(
        out / "head.png",
        f"The head whose last token attends most strongly to a single token; the answer is {graded.question.answer!r}.",
    )
