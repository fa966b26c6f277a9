"""Documents: the text of a file, where its sections begin, and which line or page of the file each part is from.

    Markdown, text, code    the text of the file as it is
    HTML                    the visible text; a blank line between blocks; headings h1 to h6
    PDF                     the text of its pages; needs pypdf

Nothing in a document is run or fetched: scripts, styles and links of a page are skipped.
"""

import os
import re
import struct
import zlib
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass, replace
from functools import cached_property
from html.parser import HTMLParser
from io import BytesIO
from pathlib import Path

MARKDOWN = {".md", ".markdown", ".mdx"}
HTML = {".html", ".htm", ".xhtml"}
PDF = {".pdf"}
TEXT = {".txt", ".text", ".rst", ".adoc", ".org", ".tex", ".log", ".csv", ".tsv", ".json", ".jsonl", ".xml"}
CODE = {
    ".py", ".pyi", ".js", ".jsx", ".ts", ".tsx", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".java", ".kt", ".scala",
    ".go", ".rs", ".rb", ".php", ".cs", ".swift", ".lua", ".r", ".jl", ".sh", ".sql", ".toml", ".yaml", ".yml", ".ini",
    ".css", ".mjs", ".vue",
}  # fmt: skip
SUFFIXES = MARKDOWN | HTML | PDF | TEXT | CODE
MAX_BYTES = 64 * 2**20  # of a file

FENCE = re.compile(r" {0,3}(```+|~~~+)")
ATX_HEADING = re.compile(r" {0,3}(#{1,6})(?=[ \t])(.*)")
SURROGATES = re.compile("[\ud800-\udfff]")  # half characters, which cannot be encoded
SKIPPED = {"script", "style", "noscript", "template", "svg", "iframe", "object", "head", "nav"}
CLOSED_BY_END = {"script", "style"}  # whose text is never visible, even if they are not closed
BLOCKS = {
    "p", "div", "section", "article", "main", "header", "footer", "aside", "ul", "ol", "dl", "table", "pre", "form",
    "blockquote", "figure", "figcaption", "hr", "details", "summary", "body", "address",
}  # fmt: skip
LINES = {"li", "tr", "br", "dt", "dd", "caption", "option"}  # that begin on a line of their own
UNCLOSED_TAGS = 20  # tags without an end that are read as text; each costs one search through the rest of the page


class DocumentError(ValueError):
    """A file that cannot be read as a document."""


@dataclass(frozen=True)
class Heading:
    start: int  # of its section in the text
    end: int  # of its own line
    level: int  # from 1
    title: str


@dataclass(frozen=True)
class ParsedDocument:
    text: str
    starts: tuple[int, ...]  # ascending: the text from here on, up to the next start, …
    places: tuple[int, ...]  # … is from this line of the file, counted from 1, or from this page
    headings: tuple[Heading, ...] = ()
    unit: str = "line"  # or "page"
    replaced: bool = False  # bytes that are not UTF-8 became U+FFFD

    def place(self, offset: int) -> int:
        """The line or page of a character."""
        return self.places[max(0, bisect_right(self.starts, offset) - 1)] if self.places else 1

    def after_headings(self, offset: int, stop: int) -> int:
        """The first character that is not in one of the headings from here on; from `stop` on they do not matter."""
        offset = first_letter(self.text, offset)
        i = max(0, bisect_right(self.headings, offset, key=lambda heading: heading.start) - 1)
        while offset < stop and i < len(self.headings) and self.headings[i].start <= offset < self.headings[i].end:
            offset = first_letter(self.text, self.headings[i].end)
            i += 1
        return offset

    @cached_property
    def sections(self) -> list[tuple[str, ...]]:
        """The titles of the section after each heading, the outermost first."""
        open_sections: list[Heading] = []
        sections = []
        for heading in self.headings:
            open_sections = [*(outer for outer in open_sections if outer.level < heading.level), heading]
            sections.append(tuple(outer.title for outer in open_sections))
        return sections

    def section(self, offset: int) -> tuple[str, ...]:
        """The titles of the sections that contain a character, the outermost first."""
        index = bisect_right(self.headings, offset, key=lambda heading: heading.start)
        return self.sections[index - 1] if index else ()


def first_letter(text: str, start: int) -> int:
    """The first character from here on that is not white space."""
    letter = re.compile(r"\S").search(text, start)
    return len(text) if letter is None else letter.start()


def document_files(path: str | Path, skipped: list[str] | None = None) -> Iterator[Path]:
    """The file itself; or all documents in a folder and its subfolders, in order, without hidden ones and links.

    skipped: gets a line for each folder that cannot be read.
    """
    path = Path(path)
    if path.is_file():
        yield path
    elif path.is_dir():
        yield from (file for file in files_below(path, skipped) if file.suffix.lower() in SUFFIXES)
    else:
        problem = "is neither a regular file nor a folder" if path.exists() else "does not exist"
        raise DocumentError(f"{path} {problem}; give a file, or a folder of documents")


def files_below(folder: Path, skipped: list[str] | None = None) -> Iterator[Path]:
    """The regular files; a pipe would block the reader."""
    found = [(str(folder), True)]
    while found:  # not recursive: folders may be nested more deeply than Python's calls
        path, is_folder = found.pop()
        if not is_folder:
            yield Path(path)
            continue
        try:
            with os.scandir(path) as entries:
                visible = sorted((entry for entry in entries if entry.name[0] != "."), key=lambda entry: entry.name)
            for entry in reversed(visible):
                is_folder = entry.is_dir(follow_symlinks=False)
                if is_folder or entry.is_file(follow_symlinks=False):
                    found.append((entry.path, is_folder))
        except OSError as error:
            if skipped is not None:
                skipped.append(str(error))


def other_suffixes(paths: Iterable[str | Path], index: Path) -> Counter[str]:
    """How many files of folders are no documents, by their suffix; the files of the index itself do not count."""
    folders = [Path(path) for path in paths if Path(path).is_dir()]
    files = (file for folder in folders for file in files_below(folder) if file.suffix.lower() not in SUFFIXES)
    others, own = {file.resolve() for file in files}, str(index.resolve())  # a set: folders may overlap
    return Counter(file.suffix.lower() for file in others if not str(file).startswith(own))


def read_bytes(path: Path) -> bytes:
    """DocumentError if the file is too large."""
    size = path.stat().st_size
    if size > MAX_BYTES:
        raise DocumentError(f"{path} has {size} bytes, more than {MAX_BYTES}; split it")
    return path.read_bytes()


def parse_document(data: bytes, suffix: str, name: str) -> ParsedDocument:
    """The document in the bytes of a file; DocumentError if they are no text, or a damaged page or PDF.

    name: of the file, for errors.
    """
    if suffix in PDF:
        return parse_pdf(data, name)
    if b"\0" in data:
        raise DocumentError(f"{name} is not a text: it has bytes that are zero")
    text = data.decode("utf-8-sig", errors="replace").replace("\r\n", "\n").replace("\r", "\n")
    replaced = text.count("\ufffd") > data.count("\ufffd".encode())
    if suffix in HTML:
        try:
            return replace(parse_html(text), replaced=replaced)
        except (AssertionError, ValueError) as error:  # by html.parser: of `<![other[`, and of endless numbers
            raise DocumentError(f"{name} cannot be read as HTML: {error}") from None
    starts = line_starts(text)
    headings = tuple(markdown_headings(text)) if suffix in MARKDOWN else ()
    return ParsedDocument(text, starts, tuple(range(1, len(starts) + 1)), headings, replaced=replaced)


def line_starts(text: str) -> tuple[int, ...]:
    return (0, *(match.end() for match in re.finditer("\n", text)))


def markdown_headings(text: str) -> Iterator[Heading]:
    """Headings that begin with #, outside of fenced code."""
    start, fence = 0, ""
    for line in text.splitlines(keepends=True):
        marker = FENCE.match(line)
        if fence:
            closes = marker is not None and marker[1].startswith(fence) and not line[marker.end() :].strip()
            fence = "" if closes else fence
        elif marker is not None:
            fence = marker[1]
        elif heading := ATX_HEADING.match(line):
            title = heading[2].strip()
            closed = title.rstrip("#")  # as in "## Title ##", but not in "# C#"
            title = closed.rstrip() if not closed or closed[-1].isspace() else title
            yield Heading(start, start + len(line), len(heading[1]), title)
        start += len(line)


class VisibleText(HTMLParser):
    """Collects the visible text of a page.

    skip: elements whose text is not visible.
    """

    def __init__(self, skip: Set[str]) -> None:
        super().__init__(convert_charrefs=True)
        self.skip = skip
        self.parts: list[str] = []
        self.length = 0
        self.starts: list[int] = []
        self.places: list[int] = []
        self.headings: list[Heading] = []
        self.skipped: list[str] = []  # open elements of `skip`, each name once
        self.preformatted = 0
        self.heading: tuple[int, int, int] | None = None  # level, start and first part of an open heading

    def read(self, text: str) -> None:
        """Like `feed` and `close`, which search the rest of the page once more for each tag without an end."""
        self.feed(text)
        for _ in range(UNCLOSED_TAGS):
            if not self.rawdata.startswith("<"):
                break
            rest, self.rawdata = self.rawdata, ""
            self.feed("&lt;" + rest[1:])
        self.rawdata = self.rawdata.replace("<", "&lt;")
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in self.skip and tag not in self.skipped:
            self.skipped.append(tag)
        if tag == "body":
            self.skipped.clear()  # a page may leave out </head>
        if self.skipped:
            return
        self.preformatted += tag == "pre"
        if heading_level(tag):
            self.end_block()
            self.heading = (heading_level(tag), self.length, len(self.parts))
        elif tag in BLOCKS:
            self.end_block()
        elif tag in LINES:
            self.end_line()
        elif tag in ("td", "th"):
            self.write_space()

    def handle_endtag(self, tag: str) -> None:
        if tag in self.skipped:
            del self.skipped[self.skipped.index(tag) :]
        if self.skipped:
            return
        if tag == "pre":
            self.preformatted = max(0, self.preformatted - 1)
        if self.heading is not None and heading_level(tag):
            level, start, part = self.heading
            title = " ".join("".join(self.parts[part:]).split())
            self.headings.append(Heading(start, self.length, level, title))
            self.heading = None
        if tag in BLOCKS or heading_level(tag):
            self.end_block()

    def handle_data(self, data: str) -> None:
        if self.skipped:
            return
        line = self.getpos()[0]
        for i, piece in enumerate(data.split("\n")):
            if i and self.preformatted:
                self.write("\n")
            elif i:
                self.write_space()
            self.write_piece(piece, line + i)

    def write_piece(self, piece: str, line: int) -> None:
        """Text of one line of the file. White space is one space, except in preformatted text."""
        if not self.preformatted:
            if piece[:1].isspace():
                self.write_space()
            words = piece.split()
            piece, trailing = " ".join(words), bool(words) and piece[-1:].isspace()
        else:
            trailing = False
        if piece:
            self.starts.append(self.length)
            self.places.append(line)
            self.write(piece)
        if trailing:
            self.write_space()

    def write(self, text: str) -> None:
        self.parts.append(text)
        self.length += len(text)

    def write_space(self) -> None:
        if self.parts and not self.parts[-1][-1:].isspace():
            self.write(" ")

    def end_line(self) -> None:
        if self.parts and not self.parts[-1].endswith("\n"):
            self.write("\n")

    def end_block(self) -> None:
        self.end_line()
        if self.parts and not (self.parts[-1].endswith("\n\n") or self.parts[-2:] == ["\n", "\n"]):
            self.write("\n")


def heading_level(tag: str) -> int:
    """From 1 to 6; 0: the element is no heading."""
    return int(tag[1]) if len(tag) == 2 and tag[0] == "h" and tag[1] in "123456" else 0


def parse_html(text: str) -> ParsedDocument:
    page = VisibleText(SKIPPED)
    page.read(text)
    while unclosed := set(page.skipped) - CLOSED_BY_END:  # they would swallow the rest of the page
        page = VisibleText(page.skip - unclosed)
        page.read(text)
    return ParsedDocument("".join(page.parts), tuple(page.starts), tuple(page.places), tuple(page.headings))


def parse_pdf(data: bytes, name: str) -> ParsedDocument:
    try:
        from pypdf import PdfReader
        from pypdf.errors import DependencyError, DeprecationError, PyPdfError
    except ModuleNotFoundError:
        raise DocumentError(f"{name}: PDF files need pypdf: pip install 'regard[documents]'") from None
    try:
        pages = [SURROGATES.sub("\ufffd", page.extract_text()) for page in PdfReader(BytesIO(data)).pages]
    except (
        PyPdfError, DependencyError, DeprecationError, ArithmeticError, AssertionError, AttributeError, LookupError,
        OSError, RuntimeError, TypeError, ValueError, struct.error, zlib.error,
    ) as error:  # fmt: skip
        raise DocumentError(f"{name} cannot be read as a PDF: {error}") from None
    starts, text = [], ""
    for page in pages:
        starts.append(len(text))
        text += page.strip() + "\n\n"
    return ParsedDocument(text, tuple(starts), tuple(range(1, len(pages) + 1)), unit="page")
