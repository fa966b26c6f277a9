"""The index on disk: search equals brute force, changes are found, and a killed update continues."""

import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
import unicodedata
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from regard.retrieval.chunks import DocumentChunk
from regard.retrieval.document_index import DocumentIndex, DocumentIndexError, IndexSettings
from regard.retrieval.search import search
from regard.retrieval.update_index import update_index
from tests.retrieval.test_chunks import word_starts

DIM = 24
SETTINGS = IndexSettings("test", "abc", DIM, 32, 8)


def embed(texts: Sequence[str]) -> np.ndarray:
    """Sums of random vectors of the words: texts with common words are near."""
    vectors = np.zeros((len(texts), DIM))
    for row, text in zip(vectors, texts, strict=True):
        for word in text.lower().split():
            row += np.random.default_rng(list(word.encode())).standard_normal(DIM)
    return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)


def write(folder: Path, **files: str) -> None:
    folder.mkdir(exist_ok=True)
    for name, text in files.items():
        (folder / f"{name}.md").write_text(text)


WORDS = "anna ben barn ball garden house red blue cup key river table under behind with gave took"


def sentences(rng: random.Random, count: int) -> str:
    lengths = [rng.randint(3, 9) for _ in range(count)]
    return " ".join(" ".join(rng.choices(WORDS.split(" "), k=length)).capitalize() + "." for length in lengths)


def contents(index: DocumentIndex) -> list[tuple]:
    """Everything in an index, whatever the order in which it was added."""
    query = (
        "SELECT path, start, first, last, section, text, vector, digest FROM files JOIN chunks ON file = files.id "
        "JOIN vectors ON chunk = chunks.id WHERE complete ORDER BY path, start"
    )
    return index.database.execute(query).fetchall()


@pytest.fixture
def index(tmp_path: Path) -> DocumentIndex:
    return DocumentIndex(tmp_path / "index.db", SETTINGS)


@pytest.mark.ledger("rag.store")
def test_search_equals_brute_force(index: DocumentIndex, tmp_path: Path) -> None:
    rng = random.Random(0)
    write(tmp_path / "docs", **{f"d{i}": sentences(rng, 30) for i in range(12)})
    update_index(index, [tmp_path / "docs"], word_starts, embed)
    rows = index.database.execute("SELECT chunk, vector FROM vectors").fetchall()
    assert len(rows) == index.chunk_count() > 60
    for _ in range(20):
        query = embed([sentences(rng, 1)])[0]
        cosines = {id: float(np.frombuffer(vector, np.float32).astype(np.float64) @ query) for id, vector in rows}
        found = index.vectors.nearest(query, 10)
        assert [id for id, _ in found] == sorted(cosines, key=lambda id: -cosines[id])[:10]
        assert all(abs(score - cosines[id]) < 1e-6 for id, score in found)
    assert len(index.vectors.nearest(query, 10_000)) == len(rows) and index.vectors.nearest(query, 0) == []


def test_words_are_found_by_bm25(index: DocumentIndex, tmp_path: Path) -> None:
    write(tmp_path / "docs", a="# Fruit\n\nApples and pears.", b="The naïve baker's cat.", c="Nothing of note. " * 5)
    update_index(index, [tmp_path / "docs"], word_starts, embed)

    def found(query: str) -> list[str]:
        return [Path(hit.path).stem for hit in index.hits([id for id, _ in index.matching(query, 5)])]

    assert found("an apple") == ["a"] and found("naive") == ["b"] and found("fruit") == ["a"]
    assert found("cats or notes")[0] in ("b", "c") and set(found("cats or notes")) == {"b", "c"}
    for hostile in ('"', "a AND (", "NEAR(a b", "text:apples^2", "* - + ^", "", "'; DROP TABLE chunks; --"):
        assert isinstance(found(hostile), list)
    assert found("apples") == ["a"]


def test_a_hit_leads_back_to_its_lines(index: DocumentIndex, tmp_path: Path) -> None:
    rng, folder = random.Random(1), tmp_path / "docs"
    write(folder, a="# One\n\n" + "\n".join(sentences(rng, 3) for _ in range(9)) + "\n## Two\n" + sentences(rng, 9))
    update_index(index, [folder], word_starts, embed)
    lines, hits = (folder / "a.md").read_text().split("\n"), index.hits(list(range(1, index.chunk_count() + 1)))
    for hit in hits:
        place = "\n".join(lines[hit.chunk.first - 1 : hit.chunk.last])
        assert hit.chunk.text in place and hit.path == str(folder / "a.md") and hit.unit == "line"
    assert hits[-1].chunk.section == ("One", "Two")
    assert index.hits([3, 999, 1]) == [hits[2], hits[0]]


def test_only_changes_are_embedded(index: DocumentIndex, tmp_path: Path) -> None:
    folder, embedded = tmp_path / "docs", []

    def counting(texts: Sequence[str]) -> np.ndarray:
        embedded.extend(texts)
        return embed(texts)

    def update() -> tuple[int, ...]:
        embedded.clear()
        report = update_index(index, [folder], word_starts, counting)
        assert report.chunks == len(embedded) and not report.skipped
        index.check()
        return report.added, report.changed, report.unchanged, report.removed

    write(folder, a="The first.", b="The second.", c="The third.")
    assert update() == (3, 0, 0, 0) and len(embedded) == 3
    assert update() == (0, 0, 3, 0) and not embedded
    write(folder, b="Another second.", d="The fourth.")
    (folder / "c.md").unlink()
    os.utime(folder / "a.md", ns=(1, 1))
    assert update() == (1, 1, 1, 1) and len(embedded) == 2
    assert {text for *_, text, _, _ in contents(index)} == {"The first.", "Another second.", "The fourth."}
    assert not index.matching("third", 5) and len(index.matching("second", 5)) == 1
    fresh = DocumentIndex(tmp_path / "fresh.db", SETTINGS)
    update_index(fresh, [folder], word_starts, embed)
    assert contents(fresh) == contents(index)


def test_a_file_outside_of_the_given_folders_is_kept(index: DocumentIndex, tmp_path: Path) -> None:
    write(tmp_path / "one", a="a")
    write(tmp_path / "two", b="b")
    update_index(index, [tmp_path / "one", tmp_path / "two"], word_starts, embed)
    (tmp_path / "one" / "a.md").unlink()
    (tmp_path / "two" / "b.md").unlink()
    (tmp_path / "two" / "c.bad.md").write_bytes(b"\0")
    Path(os.fsdecode(bytes(tmp_path / "two") + b"/d\xff.md")).write_text("d")
    report = update_index(index, [tmp_path / "two"], word_starts, embed)
    assert list(index.files()) == [str(tmp_path / "one" / "a.md")]
    assert "c.bad.md is not a text" in report.skipped[0] and "not UTF-8; rename it" in report.skipped[1]


def test_another_process_sees_complete_files_only(index: DocumentIndex, tmp_path: Path) -> None:
    reader, folder = DocumentIndex(index.path), tmp_path / "docs"
    write(folder, a="Old words here.")
    update_index(index, [folder], word_starts, embed)
    query = embed(["new words"])[0]
    assert [hit.chunk.text for hit in reader.hits([reader.vectors.nearest(query, 1)[0][0]])] == ["Old words here."]
    id, _ = index.begin(str(folder / "a.md"), 1, 1, b"new", "line")
    index.add(id, [DocumentChunk("new words", 0, 1, 1, ())], embed(["new words"]))
    assert len(reader.vectors.nearest(query, 9)) == len(reader.matching("new words", 9)) == 1
    index.finish(id)
    assert [hit.chunk.text for hit in reader.hits([id for id, _ in reader.vectors.nearest(query, 9)])] == ["new words"]
    assert [hit.chunk.text for hit in reader.hits([id for id, _ in reader.matching("words", 9)])] == ["new words"]


def test_two_updates_at_a_time_are_refused(index: DocumentIndex, tmp_path: Path) -> None:
    write(tmp_path / "docs", a="A text.")
    with index.updating(), pytest.raises(DocumentIndexError, match="another process updates"):
        update_index(DocumentIndex(index.path), [tmp_path / "docs"], word_starts, embed)
    assert update_index(index, [tmp_path / "docs"], word_starts, embed).added == 1


SCRIPT = """
import sys, time
from pathlib import Path
from tests.retrieval import test_document_index as t
from regard.retrieval.document_index import DocumentIndex
from regard.retrieval import update_index as u
u.BATCH = 3
def slow(texts):
    time.sleep(0.004)
    return t.embed(texts)
index = DocumentIndex(sys.argv[1], t.SETTINGS)
print("open", flush=True)
u.update_index(index, [sys.argv[2]], t.word_starts, slow)
print("done", flush=True)
"""


@pytest.mark.slow
def test_killed_updates_continue(tmp_path: Path) -> None:
    """`kill -9` at random moments: the index is never damaged, and in the end equals that of an undisturbed run."""
    rng, folder = random.Random(0), tmp_path / "docs"
    write(folder, **{f"d{i}": sentences(rng, 60) for i in range(10)})
    expected = DocumentIndex(tmp_path / "expected.db", SETTINGS)
    update_index(expected, [folder], word_starts, embed)
    sizes, kills = [0], 0
    for attempt in range(40):
        command = [sys.executable, "-c", SCRIPT, str(tmp_path / "index.db"), str(folder)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]) as process:
            assert process.stdout is not None and process.stdout.readline() == "open\n"
            time.sleep(rng.uniform(0.0, 0.1 + 0.03 * attempt))  # later kills let a slow machine finish
            process.send_signal(signal.SIGKILL)
            finished = process.stdout.read() == "done\n"
        index = DocumentIndex(tmp_path / "index.db")
        index.check()
        (size,) = index.database.execute("SELECT count(*) FROM chunks").fetchone()
        sizes.append(size)
        index.close()
        kills += not finished
        if finished:
            break
    assert finished and kills >= 2 and sizes == sorted(sizes)
    assert contents(DocumentIndex(tmp_path / "index.db")) == contents(expected)


def test_settings_are_those_of_the_index(index: DocumentIndex, tmp_path: Path) -> None:
    assert DocumentIndex(index.path).settings == SETTINGS
    with pytest.raises(DocumentIndexError, match="made with --chunk-tokens 32, not 64"):
        DocumentIndex(index.path, IndexSettings("test", "abc", DIM, 64, 8))
    with pytest.raises(DocumentIndexError, match="does not exist; make it"):
        DocumentIndex(tmp_path / "nowhere.db")
    file, _ = index.begin("a.md", 0, 0, b"", "line")
    with pytest.raises(ValueError, match="vectors have the shape"):
        index.add(file, [DocumentChunk("a", 0, 1, 1, ())], np.zeros((1, 3)))
    with pytest.raises(ValueError, match="not finite"):
        index.add(file, [DocumentChunk("a", 0, 1, 1, ())], np.full((1, DIM), np.nan))


def test_other_and_damaged_files_are_refused(index: DocumentIndex, tmp_path: Path) -> None:
    (tmp_path / "text.db").write_text("not a database, but long enough to be read as one" * 20)
    other = sqlite3.connect(tmp_path / "other.db")
    other.execute("CREATE TABLE mine(x)")
    other.commit()
    for name in ("text.db", "other.db"):
        for settings in (None, SETTINGS):
            with pytest.raises(DocumentIndexError, match="is not an index"):
                DocumentIndex(tmp_path / name, settings)
    assert other.execute("SELECT count(*) FROM sqlite_schema").fetchone() == (1,)
    write(tmp_path / "docs", a=sentences(random.Random(0), 40))
    update_index(index, [tmp_path / "docs"], word_starts, embed)
    index.database.execute("DELETE FROM vectors WHERE chunk = 1")
    with pytest.raises(DocumentIndexError, match="1 chunks have no vector"):
        index.check()


def damaged(index: DocumentIndex, change: str, *values: object) -> DocumentIndex:
    """The index, opened again after a change of its file."""
    index.database.execute(change, values)
    return DocumentIndex(index.path)


def test_damage_is_reported(index: DocumentIndex, tmp_path: Path) -> None:
    write(tmp_path / "docs", a="A text.", b="Another.")
    update_index(index, [tmp_path / "docs"], word_starts, embed)
    changes = [
        ("UPDATE vectors SET vector = ? WHERE chunk = 1", b"short"),
        ("UPDATE vectors SET vector = ? WHERE chunk = 1", np.full(DIM, np.nan, np.float32).tobytes()),
    ]
    for method in ("vectors", "hybrid"):
        for change in changes:
            with pytest.raises(DocumentIndexError, match="is damaged: .*vector.*; make it again"):
                search(damaged(index, *change), "text", embed, method=method)
    with pytest.raises(DocumentIndexError, match="is damaged: no such table: words; make it again"):
        search(damaged(index, "DROP TABLE words"), "text", None, method="words")
    write(tmp_path / "docs", c="A third.")
    with pytest.raises(DocumentIndexError, match="is damaged: .*no such table: main.words"):
        update_index(index, [tmp_path / "docs"], word_starts, embed)
    with pytest.raises(DocumentIndexError, match="is damaged: the setting dim is None"):
        damaged(index, "DELETE FROM settings WHERE name = 'dim'")


def test_a_locked_index_is_not_called_damaged(index: DocumentIndex, tmp_path: Path) -> None:
    write(tmp_path / "docs", a="A text.")
    other = DocumentIndex(index.path)
    other.database.execute("PRAGMA busy_timeout = 1")
    with index.transaction(), pytest.raises(DocumentIndexError, match="cannot be used: database is locked"):
        update_index(other, [tmp_path / "docs"], word_starts, embed)


def test_an_empty_file_becomes_an_index(tmp_path: Path) -> None:
    (tmp_path / "empty.db").touch()
    assert DocumentIndex(tmp_path / "empty.db", SETTINGS).chunk_count() == 0
    with pytest.raises(DocumentIndexError, match="does not exist; make it"):
        DocumentIndex(tmp_path / "none.db")


def test_another_process_may_create_the_index_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    create = DocumentIndex.create_tables

    def slower(self: DocumentIndex, settings: IndexSettings) -> None:
        monkeypatch.undo()
        DocumentIndex(tmp_path / "index.db", SETTINGS)
        create(self, settings)

    monkeypatch.setattr(DocumentIndex, "create_tables", slower)
    assert DocumentIndex(tmp_path / "index.db", SETTINGS).chunk_count() == 0


def test_a_file_without_text_is_skipped_and_its_earlier_text_removed(index: DocumentIndex, tmp_path: Path) -> None:
    folder = tmp_path / "docs"
    write(folder, a="The first.", b="The second.", c=" \n")
    update_index(index, [folder], word_starts, embed)
    (folder / "a.md").write_bytes(b"PNG\0")
    (folder / "script.html").write_text("<script>let a</script>")
    (folder / "latin.txt").write_bytes("é".encode("latin-1"))
    report = update_index(index, [folder], word_starts, embed)
    assert (report.added, report.removed, report.unchanged) == (1, 1, 2)
    assert report.skipped == [
        f"{folder}/a.md is not a text: it has bytes that are zero; its earlier text was removed from the index",
        f"{folder}/script.html: no text found; text in images, as in a scan, is not read",
    ]
    assert report.replaced == [f"{folder}/latin.txt"] and not index.matching("first", 5)
    index.check()


def test_files_of_a_folder_that_cannot_be_read_are_kept(
    index: DocumentIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "docs"
    write(folder, a="The first.")
    update_index(index, [folder], word_starts, embed)

    def denied(path: object) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "scandir", denied)
    stat = os.stat
    monkeypatch.setattr(
        os, "stat", lambda path, **options: "a.md" in str(path) and denied(path) or stat(path, **options)
    )
    report = update_index(index, [folder], word_starts, embed)
    assert report.removed == 0 and "Permission denied" in report.skipped[0] and len(index.files()) == 1


def test_what_is_stored_of_a_file_that_is_gone_before_it_is_complete_is_removed(
    index: DocumentIndex, tmp_path: Path
) -> None:
    folder = tmp_path / "docs"
    write(folder, a="The first.", b="The zebra.", c="The zebra again.")

    for name in ("b", "c"):
        file = index.begin(str(folder / f"{name}.md"), 10, 0, b"", "line")[0]
        index.add(file, [DocumentChunk("The zebra.", 0, 1, 1, ())], embed(["The zebra."]))
    (folder / "b.md").unlink()
    (folder / "c.md").write_bytes(b"PNG\0")
    report = update_index(index, [folder], word_starts, embed)
    assert (report.added, report.removed) == (1, 0) and index.paths() == {f"{folder}/a.md"}
    assert report.skipped == [f"{folder}/c.md is not a text: it has bytes that are zero"]
    [(chunks,)] = index.database.execute("SELECT count(*) FROM chunks")
    assert chunks == 1


def test_counts_of_words_are_those_of_the_current_index(index: DocumentIndex, tmp_path: Path) -> None:
    folder, other = tmp_path / "docs", DocumentIndex(index.path)
    assert index.matching("zebra", 5) == []
    for number, writer in enumerate((index, other), 1):
        write(folder, **{f"file{number}": "The zebra."})
        update_index(writer, [folder], word_starts, embed)
        assert len(index.matching("zebra", 5)) == number
    other.close()


def test_titles_leave_room_for_the_chunk(index: DocumentIndex, tmp_path: Path) -> None:
    embedded = []

    def recording(texts: Sequence[str]) -> np.ndarray:
        embedded.extend(texts)
        return embed(texts)

    write(tmp_path / "docs", a="# The farm\n\n## The old machines\n\nThe pump.")
    update_index(index, [tmp_path / "docs"], word_starts, recording, title_tokens=2)
    (tmp_path / "docs" / "a.md").write_text("# The farm\n\n## The old machines\n\nThe mill.")
    update_index(index, [tmp_path / "docs"], word_starts, recording, title_tokens=0)
    update_index(DocumentIndex(tmp_path / "b.db", SETTINGS), [tmp_path / "docs"], word_starts, recording)
    text = "## The old machines\n\nThe "  # of each second chunk
    assert embedded[1::2] == [
        f"old machines\n{text}pump.", f"{text}mill.", f"The farm > The old machines\n{text}mill.",
    ]  # fmt: skip
    [(best, _)] = index.matching("mill", 1)
    assert index.hits([best])[0].chunk.section == ("The farm", "The old machines")


def test_words_of_a_query_may_be_decomposed(index: DocumentIndex, tmp_path: Path) -> None:
    write(tmp_path / "docs", a="The résumé.")
    update_index(index, [tmp_path / "docs"], word_starts, embed)
    assert len(index.matching(unicodedata.normalize("NFD", "résumé"), 5)) == 1
