"""The text of files, and the line or page that each part of it is from."""

import os
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regard.retrieval.documents import DocumentError, document_files, parse_document, parse_html, read_bytes
from regard.text.source_prompt import PromptSource

PAGE = """<!DOCTYPE html>
<html><head><title>Not shown</title><style>p { color: red }</style>
<script>alert("never")</script></head>
<body><h1>The   <b>house</b></h1>
<p>Anna is in
the barn &amp; Ben&#39;s <i>here</i>.</p>
<ul><li>one<li>two</ul>
<pre>
  x = 1
  y = 2
</pre>
<h2>Garden</h2><table><tr><td>a</td><td>b</td></tr><tr><td>c</td></tr></table>
<noscript>hidden</noscript><p>The end.</p></body></html>
"""


def test_the_visible_text_of_a_page() -> None:
    page = parse_html(PAGE)
    for line in ("The house", "Anna is in the barn & Ben's here.", "one", "two", "  x = 1", "a b", "c", "The end."):
        assert line in [found.rstrip() for found in page.text.split("\n")], (line, page.text)
    assert not any(word in page.text for word in ("never", "color", "Not shown", "hidden"))
    assert page.text.split("\n\n")[0] == "The house"


def test_places_are_lines_of_the_file() -> None:
    page, lines = parse_html(PAGE), PAGE.split("\n")
    for words in ("Anna", "barn", "two", "y = 2", "Garden", "The end"):
        assert words in lines[page.place(page.text.index(words)) - 1], words
    assert page.section(page.text.index("Anna")) == ("The house",)
    assert page.section(page.text.index("The end")) == ("The house", "Garden")


def test_headings_of_markdown_outside_of_code() -> None:
    text = "intro\n\n# One #\ntext\n```\n# no heading\n```\n### Three\n## Two\n~~~~\n```\n# none\n~~~~\n#none\n"
    page = parse_document(text.encode(), ".md", "test")
    assert [(heading.level, heading.title) for heading in page.headings] == [(1, "One"), (3, "Three"), (2, "Two")]
    assert text[page.after_headings(text.index("### Three"), len(text)) :].startswith("~~~~")
    assert page.after_headings(0, len(text)) == 0 and page.after_headings(text.index("# One"), len(text)) == text.index(
        "text"
    )
    assert page.section(0) == () and page.section(text.index("Three")) == ("One", "Three")
    assert page.section(text.index("## Two")) == ("One", "Two")
    assert not parse_document(text.encode(), ".txt", "test").headings
    titles = parse_document(b"# C#\n## F# ##\n## #\n## a #b\n", ".md", "test").headings
    assert [heading.title for heading in titles] == ["C#", "F#", "", "a #b"]


@given(st.text(max_size=200))
def test_any_text_is_read(text: str) -> None:
    """A document of any suffix has a place for every character."""
    data = text.encode("utf-8", "surrogatepass").replace(b"\0", b"")
    for suffix in (".md", ".html", ".py"):
        page = parse_document(data, suffix, "test")
        lines = data.decode("utf-8-sig", "replace").replace("\r\n", "\n").replace("\r", "\n").count("\n") + 1
        assert all(1 <= page.place(i) <= lines for i in range(len(page.text)))


def test_ends_of_lines_and_encodings() -> None:
    page = parse_document(b"\xef\xbb\xbfa\r\nb\rc\xff\n", ".txt", "test")
    assert page.text == "a\nb\nc\N{REPLACEMENT CHARACTER}\n" and page.place(4) == 3 and page.replaced
    assert not parse_document("é \ufffd".encode(), ".txt", "test").replaced
    assert parse_document("<p>é".encode("latin-1"), ".html", "test").replaced
    with pytest.raises(DocumentError, match="picture.txt is not a text"):
        parse_document(b"a\0b", ".txt", "picture.txt")


def test_pages_of_a_pdf(tmp_path: Path) -> None:
    pypdf = pytest.importorskip("pypdf", reason="pypdf is not installed")
    writer = pypdf.PdfWriter()
    for _ in range(2):
        writer.add_blank_page(100, 100)
    writer.write(tmp_path / "empty.pdf")
    page = parse_document(read_bytes(tmp_path / "empty.pdf"), ".pdf", "empty.pdf")
    assert page.unit == "page" and page.places == (1, 2) and not page.text.strip()
    for damaged in (b"", b"%PDF-1.7\nnothing", (tmp_path / "empty.pdf").read_bytes()[:200]):
        with pytest.raises(DocumentError, match="damaged.pdf cannot be read as a PDF"):
            parse_document(damaged, ".pdf", "damaged.pdf")


def test_files_of_a_folder(tmp_path: Path) -> None:
    for name in ("b.md", "a.txt", "sub/c.py", ".hidden/d.md", "picture.png", "sub/.e.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    os.symlink(tmp_path / "b.md", tmp_path / "link.md")
    os.symlink(tmp_path, tmp_path / "sub" / "loop")
    assert [str(path.relative_to(tmp_path)) for path in document_files(tmp_path)] == ["a.txt", "b.md", "sub/c.py"]
    assert list(document_files(tmp_path / "picture.png")) == [tmp_path / "picture.png"]  # named by the user
    with pytest.raises(DocumentError, match="does not exist"):
        list(document_files(tmp_path / "nowhere"))


def test_large_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regard.retrieval.documents.MAX_BYTES", 3)
    (tmp_path / "a.txt").write_text("four")
    with pytest.raises(DocumentError, match="has 4 bytes, more than 3"):
        read_bytes(tmp_path / "a.txt")


def test_only_regular_files_are_documents(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.txt")
    (tmp_path / "a.txt").write_text("a")
    assert list(document_files(tmp_path)) == [tmp_path / "a.txt"]
    with pytest.raises(DocumentError, match="pipe.txt is neither a regular file nor a folder"):
        list(document_files(tmp_path / "pipe.txt"))


def test_folders_that_cannot_be_read_are_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a/x.md", "b/y.md", "c.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")

    def scandir(path: str, read=os.scandir):  # root may read every folder
        if path.endswith("a"):
            raise PermissionError(13, "Permission denied", path)
        return read(path)

    monkeypatch.setattr(os, "scandir", scandir)
    skipped: list[str] = []
    assert [path.name for path in document_files(tmp_path, skipped)] == ["y.md", "c.md"]
    assert skipped == [f"[Errno 13] Permission denied: '{tmp_path}/a'"]


def test_folders_may_be_nested_deeply(tmp_path: Path) -> None:
    folders = [tmp_path / "d"]
    folders += [Path(f"{folders[0]}{'/d' * i}") for i in range(1, 1100)]
    for folder in folders:
        folder.mkdir()
    last = folders[-1] / "a.md"
    last.write_text("x")
    assert list(document_files(tmp_path)) == [last]
    last.unlink()
    for folder in reversed(folders):  # shutil.rmtree is recursive
        folder.rmdir()


def test_what_pypdf_does_not_support_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    pypdf = pytest.importorskip("pypdf", reason="pypdf is not installed")
    for error in (NotImplementedError, OverflowError, pypdf.errors.DependencyError, pypdf.errors.DeprecationError):
        monkeypatch.setattr(pypdf, "PdfReader", Mock(side_effect=error("AES-256")))
        with pytest.raises(DocumentError, match="secret.pdf cannot be read as a PDF: AES-256"):
            parse_document(b"%PDF", ".pdf", "secret.pdf")


def test_half_characters_of_a_pdf_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    pypdf = pytest.importorskip("pypdf", reason="pypdf is not installed")
    page = SimpleNamespace(extract_text=lambda: "a\ud800b")
    monkeypatch.setattr(pypdf, "PdfReader", lambda data: SimpleNamespace(pages=[page]))
    assert parse_document(b"%PDF", ".pdf", "a.pdf").text == "a\ufffdb\n\n"


def test_elements_without_an_end_hide_nothing_else() -> None:
    assert parse_html("<nav>menu<p>text</p>").text.split() == ["menu", "text"]
    assert parse_html("<head><title>t</title><p>a<svg>b<nav>c</nav>").text.split() == ["t", "ab"]
    assert parse_html("<nav>menu</nav><p>text").text == "text"
    assert parse_html("<p>a<script>let b<p>c").text == "a"
    assert parse_html("<p>x<!-- y</p><p>z <e f").text.split() == ["x<!--", "y", "z", "<e", "f"]
    for page in (b"<![other[ a ]]>", b"&#" + b"9" * 5000 + b";"):
        with pytest.raises(DocumentError, match="page.html cannot be read as HTML"):
            parse_document(page, ".html", "page.html")


def test_hostile_documents_take_linear_time() -> None:
    start = time.process_time()
    heading = parse_document(b"# a" + b" " * 2000 + b"b\n", ".md", "a.md").headings[0]
    assert heading.title.split() == ["a", "b"]
    for tag in ("<p ", "<!--", "</a", "<?", "<p a='", "<svg>", "</nav>"):
        parse_html(f"{tag * 10_000} end")
    prompt = PromptSource(1, "a.md", "line", 1, 1, (), 0, "<" + " " * 20_000 + "x").prompt
    assert "<   " in prompt and time.process_time() - start < 5  # more than a minute if quadratic
