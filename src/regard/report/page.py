"""HTML reports: a self-contained page of headings, paragraphs, tables and embedded pictures, and the demo's report.

All text is escaped.
"""

import base64
from collections.abc import Iterable
from html import escape
from pathlib import Path
from typing import Any

from regard.checkpoint.atomic_folder import write_file
from regard.evals.world import GradedAnswer, counts_by_kind
from regard.lens import attention_maps
from regard.models.decoder import DecoderModule
from regard.report.plots import attention_grid, loss_curve
from regard.text.chat import encode_chat
from regard.text.tokenizer import Tokenizer

STYLE = """
body { font: 16px/1.55 system-ui, sans-serif; max-width: 52rem; margin: 3rem auto; padding: 0 1.2rem; color: #1f2933 }
h1 { font-weight: 650; letter-spacing: -.02em } h2 { margin-top: 2.5rem; font-weight: 600 }
figure { margin: 1.5rem 0 } img { max-width: 100% } figcaption { color: #616e7c; font-size: .9rem }
table { border-collapse: collapse; display: block; max-width: 100%; overflow-x: auto }
td, th { padding: .3rem .9rem .3rem 0; text-align: left; vertical-align: top;
border-bottom: 1px solid #e4e7eb } .big { font-size: 2.6rem; font-weight: 650 }
.right { color: #2f855a } .wrong { color: #c53030 }
"""


class Page:
    def __init__(self, title: str):
        self.title = title
        self.parts = [f"<h1>{escape(title)}</h1>"]

    def heading(self, text: str) -> None:
        self.parts.append(f"<h2>{escape(text)}</h2>")

    def text(self, text: str, style: str = "") -> None:
        self.parts.append(f'<p class="{escape(style)}">{escape(text)}</p>')

    def picture(self, path: Path, caption: str) -> None:
        data = base64.b64encode(path.read_bytes()).decode()
        image = f'<img alt="{escape(caption)}" src="data:image/png;base64,{data}">'
        self.parts.append(f"<figure>{image}<figcaption>{escape(caption)}</figcaption></figure>")

    def table(self, header: Iterable[str], rows: Iterable[tuple[Iterable[str], str]]) -> None:
        """Each row is (cells, CSS class)."""
        head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
        body = "".join(
            f'<tr class="{escape(style)}">' + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>"
            for cells, style in rows
        )
        self.parts.append(f"<table><tr>{head}</tr>{body}</table>")

    def write(self, path: Path) -> None:
        head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        head += f"<title>{escape(self.title)}</title><style>{STYLE}</style>"
        text = f"<!doctype html><html lang=en><head>{head}</head><body>{''.join(self.parts)}</body></html>"
        write_file(path, text.encode())


def write_report(
    out: Path,
    answers: list[GradedAnswer],
    table_rows: int,
    summary: dict[str, Any],
    model: DecoderModule,
    tokenizer: Tokenizer,
) -> None:
    """Write the report of `regard demo` with its pictures into the run's directory: loss, answers and attention maps.

    table_rows: the number of answers in the table.
    """
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
            for a in answers[:table_rows]
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
    """Add the attention maps of all heads for one question, and the head with the largest weight in the last row."""
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
