"""A self-contained HTML page: headings, paragraphs, tables and embedded pictures. All text is escaped."""

import base64
from collections.abc import Iterable
from html import escape
from pathlib import Path

STYLE = """
body { font: 16px/1.55 system-ui, sans-serif; max-width: 52rem; margin: 3rem auto; padding: 0 1.2rem; color: #1f2933 }
h1 { font-weight: 650; letter-spacing: -.02em } h2 { margin-top: 2.5rem; font-weight: 600 }
figure { margin: 1.5rem 0 } img { max-width: 100% } figcaption { color: #616e7c; font-size: .9rem }
table { border-collapse: collapse } td, th { padding: .3rem .9rem .3rem 0; text-align: left; vertical-align: top;
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
        head = f'<meta charset="utf-8"><title>{escape(self.title)}</title><style>{STYLE}</style>'
        path.write_text(
            f"<!doctype html><html lang=en><head>{head}</head><body>{''.join(self.parts)}</body></html>", "utf-8"
        )
