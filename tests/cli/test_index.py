"""`regard index` and `regard ask`: from files to cited answers."""

import io
import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from regard import VAE, Attention, Block, Patches, Repeat, Sublayer, save
from regard.cli.ask import answer, print_sources
from regard.cli.index import progress_of_files
from regard.models.encoder import Encoder
from regard.text.source_prompt import PromptSource
from regard.text.train import byte
from tests.cli.conftest import regard

NOTES = """# The farm

## Animals

The horse of the farm is called Bella. She is seven years old.

## Machines

The pump has the number QX-1187. It is repaired by Mister Jensen on Fridays.
"""


@pytest.fixture(scope="module")
def notes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("notes")
    (folder / "farm.md").write_text(NOTES)
    (folder / "sky.html").write_text("<h1>The sky</h1>\n<p>Sunlight is scattered by the air, so the sky is blue.</p>")
    (folder / "broken.txt").write_bytes(b"a\0b")
    result = regard("index", folder, "--out", folder / "notes.index", "--chunk-tokens", 64)
    assert "2 files added, 0 changed, 0 removed, 0 unchanged; 3 chunks embedded, 3 in the index" in result.stdout
    assert "broken.txt is not a text" in result.stderr and "regard ask" in result.stdout
    return folder


def ask(folder: Path, question: str, *options: object) -> list[dict]:
    return json.loads(regard("ask", folder / "notes.index", question, "--json", *options).stdout)["sources"]


@pytest.mark.ledger("rag.embed")
def test_questions_find_their_sources(notes: Path) -> None:
    best = ask(notes, "Who fixes the water machine?", "--method", "vectors")[0]
    assert (best["path"], best["first"], best["last"]) == (str(notes / "farm.md"), 7, 9)
    assert best["section"] == ["The farm", "Machines"]
    assert ask(notes, "Why does the sky look like that?")[0]["path"].endswith("sky.html")
    assert [source["section"] for source in ask(notes, "QX-1187", "--method", "words")] == [["The farm", "Machines"]]
    printed = regard("ask", notes / "notes.index", "How old is the horse?", "--sources", 1).stdout
    assert "[1]" in printed and "farm.md, lines 1 to 5  (The farm > Animals)" in printed and "Bella" in printed
    assert len(ask(notes, "the farm", "--sources", 2)) == 2
    assert "nothing was found" in regard("ask", notes / "notes.index", "xyzzy", "--method", "words").stdout


def test_a_model_answers_from_the_sources(notes: Path, demo_run: Path) -> None:
    arguments = ("ask", notes / "notes.index", "How old is the horse?", "--model", demo_run, "--max-new", 8)
    result = json.loads(regard(*arguments, "--budget", 200, "--json").stdout)
    assert isinstance(result["answer"], str) and result["sources"] and set(result["cited"]) <= {1, 2, 3}
    assert result["finish"] in ("stop", "length")
    printed = regard(*arguments, "--budget", 200)
    assert "farm.md" in printed.stdout
    cut = regard(*arguments[:-1], 1, "--budget", 200)
    assert "the answer was cut off after 1 tokens; raise --max-new" in cut.stderr
    assert "[1]" in regard(*arguments[:-2]).stdout  # the defaults fit into a context of 512 tokens
    too_few = regard(*arguments, "--budget", 16, "--json")
    assert json.loads(too_few.stdout)["sources"] == [] and "no source fits into --budget 16" in too_few.stderr
    assert "need more than the" in str(regard(*arguments, "--budget", 100_000).exception)


def test_a_reader_is_trained_and_answers(notes: Path, demo_run: Path, tmp_path: Path) -> None:
    little = ("--data.length=512", "--data.held_out=1", "--train.steps=2")  # a small model in place of SmolLM2
    trained = regard("train", "reader", "--from", demo_run, *little, "--out", tmp_path / "reader")
    assert trained.exit_code == 0, trained.output
    records = [json.loads(line) for line in (tmp_path / "reader" / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records if "loss" in record] == [1, 2]
    question = ("How old is the horse?", "--model", tmp_path / "reader", "--max-new", 4)
    assert json.loads(regard("ask", notes / "notes.index", *question, "--json").stdout)["answer"]


def test_an_index_is_updated_with_its_settings(notes: Path, tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("One sentence here.")
    index = tmp_path / "my.index"
    regard("index", tmp_path / "a.md", "--out", index, "--chunk-tokens", 40, "--overlap", 4)
    (tmp_path / "a.md").write_text("Another sentence here.")
    again = regard("index", tmp_path / "a.md", "--out", index)
    assert "0 files added, 1 changed" in again.stdout, again.exception
    refused = regard("index", tmp_path / "a.md", "--out", index, "--chunk-tokens", 50).exception
    assert "was made with --chunk-tokens 40, not 50" in str(refused)


def test_mistakes_are_refused_at_once(notes: Path, tmp_path: Path) -> None:
    index = notes / "notes.index"
    errors = {
        ("index", tmp_path / "nowhere"): "nowhere does not exist; give a file, or a folder of documents",
        ("index", notes, "--out", tmp_path / "new.index", "--model", "minilmm"): "did you mean 'minilm'",
        ("index", notes, "--out", tmp_path / "new.index", "--chunk-tokens", 9, "--overlap", 9): "must be less than",
        ("index", notes, "--out", tmp_path / "new.index", "--chunk-tokens", 900): "minilm reads 256 tokens",
        ("index", notes, "--out", notes / "farm.md"): "is not an index",
        ("ask", tmp_path / "none.index", "Who?"): "does not exist; make it: regard index",
        ("ask", notes / "farm.md", "Who?"): "is not an index",
        ("ask", notes, "Who?"): "is a folder; give the file of an index",
        ("ask", index, " "): "the question is empty",
        ("ask", index, "Who?", "--max-new", 5): "add --model, or leave them out",
        ("ask", index, "Who?", "--model", "smol"): "did you mean 'smollm2'",
        ("ask", index, "Who?", "--model", "minilm"): "does not generate text",
    }
    for arguments, message in errors.items():
        assert message in str(regard(*arguments).exception), (arguments, message)
    assert not (tmp_path / "new.index").exists()


@pytest.fixture(scope="module")
def registered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("registered")
    printed = regard("data", "register", "--out", folder / "register", "--people", 30, "--questions", 20).stdout
    assert "2 documents, 30 people, 20 questions" in printed
    regard("index", folder / "register" / "documents", "--out", folder / "my.index")
    return folder


@pytest.fixture(scope="module")
def cross_encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """After one step."""
    run = tmp_path_factory.mktemp("runs") / "reranker"
    trained = regard("train", "reranker", "--data.rows=8", "--data.held_out=1", "--train.steps=1", "--out", run)
    assert trained.exit_code == 0, trained.output
    return run


@pytest.mark.ledger("rag.rerank")
def test_an_index_is_measured_on_questions(registered: Path, cross_encoder: Path, demo_run: Path) -> None:
    arguments = ("eval", "index", registered / "my.index", registered / "register" / "questions.jsonl")
    options = ("--rerank", cross_encoder, "--model", demo_run, "--count", 4, "--max-new", 4)
    result = json.loads(regard(*arguments, *options, "--json").stdout)
    assert result["questions"] == 4 and result["chunks"] == 30
    assert list(result["search"]) == ["words", "vectors", "hybrid", "reranked"]
    outputs = result["answers"]["outputs"]
    assert result["answers"]["correct"] == sum(each["correct"] for each in outputs) / 4
    assert len(outputs) == 4 and result["without_sources"]["correct_and_cited"] == 0
    printed = regard(*arguments).stdout
    assert "20 questions, 30 chunks" in printed and "recall@10" in printed and "hybrid" in printed
    hybrid = json.loads(regard(*arguments, "--json").stdout)["search"]["hybrid"]
    assert hybrid["recall@10"] >= 0.9  # of 30 sections


@pytest.mark.ledger("rag.rerank")
def test_a_cross_encoder_orders_the_results(registered: Path, cross_encoder: Path) -> None:
    from regard import load
    from regard.data.world.register import register

    name = register(0, 30, "held-out")[0].name
    plain, ordered = (
        json.loads(regard("ask", registered / "my.index", f"Who is {name}?", "--json", *options).stdout)["sources"]
        for options in ((), ("--rerank", cross_encoder, "--sources", 20))
    )
    assert name in plain[0]["text"]
    texts = [" > ".join(source["section"]) + "\n" + source["text"] for source in ordered]
    scores = [found.value for found in load(cross_encoder).classify([(f"Who is {name}?", text) for text in texts])]
    assert scores == sorted(scores, reverse=True) and len(scores) == 20
    assert [source["score"] for source in ordered] == pytest.approx(scores, abs=1e-5)


def test_mistakes_of_measuring_are_refused(registered: Path, demo_run: Path, tmp_path: Path) -> None:
    questions, index = registered / "register" / "questions.jsonl", registered / "my.index"
    assert "exists; choose another" in str(regard("data", "register", "--out", registered / "register").exception)
    for option in ("--sources", "--max-new"):
        refused = regard("eval", "index", index, questions, option, 3).exception
        assert "--sources and --max-new are of the answers; add --model" in str(refused)
    refused = regard("eval", "index", index, questions, "--model", demo_run, "--max-new", 200, "--count", 1).exception
    assert "no source fits into the" in str(refused)
    refused = regard("eval", "index", index, questions, "--rerank", demo_run).exception
    assert "gives no score for a pair of texts; train one: regard train reranker" in str(refused)
    (tmp_path / "q.jsonl").write_text('{"question": "Who?", "path": "a.md"}')
    assert "needs an `answer`" in str(
        regard("eval", "index", index, tmp_path / "q.jsonl", "--model", demo_run).exception
    )


def test_files_and_folders_that_are_gone_leave_the_index(tmp_path: Path) -> None:
    docs, out = tmp_path / "docs", tmp_path / "docs.index"
    docs.mkdir()
    (docs / "a.md").write_text("The bell is in the tower.")
    (tmp_path / "b.md").write_text("The secret is under the stone.")
    assert "2 files added" in regard("index", docs, tmp_path / "b.md", "--out", out).stdout
    (tmp_path / "b.md").unlink()
    assert "1 removed" in regard("index", docs, tmp_path / "b.md", "--out", out).stdout
    shutil.rmtree(docs)
    assert "1 removed" in regard("index", docs, "--out", out).stdout
    assert "nothing was found" in regard("ask", out, "bell secret", "--method", "words").stdout
    refused = regard("index", docs / "other", "--out", out)
    assert "does not exist" in str(refused.exception) or "has no documents" in str(refused.exception)


def test_a_folder_of_the_same_name_does_not_enter_the_index_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for parent in ("first", "second"):
        (tmp_path / parent / "docs").mkdir(parents=True)
        (tmp_path / parent / "docs" / "notes.md").write_text(f"The {parent} text.")
    regard("index", "first/docs", "--model", "minilm")
    refused = str(regard("index", "second/docs").exception)
    assert "docs.index has other documents" in refused and "--out docs.index" in refused
    assert "1 file added" in regard("index", "second/docs", "--out", "docs.index").stdout
    assert "2 unchanged" in regard("index", "first/docs", "second/docs").stdout


def test_what_is_no_document_is_reported(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    with_none = regard("index", tmp_path / "docs", "--out", tmp_path / "docs.index")
    assert "has no documents; regard reads .adoc" in str(with_none.exception) and not list(tmp_path.glob("*.index"))
    for name in ("a.md", "n.ipynb", "m.ipynb", "x.docx"):
        (tmp_path / "docs" / name).write_text("one two")
    overlapping = (tmp_path / "docs", tmp_path / "docs" / ".." / "docs")
    printed = regard("index", *overlapping, "--out", tmp_path / "docs.index")
    assert "1 file added" in printed.stdout
    assert "not indexed, because files of these kinds are not read: 2 .ipynb, 1 .docx" in printed.stderr


def test_questions_about_files_that_are_not_in_the_index_are_refused(notes: Path, tmp_path: Path) -> None:
    questions = tmp_path / "q.jsonl"
    questions.write_text('{"question": "How old is the horse?", "path": "nowhere.md"}')
    failed = regard("eval", "index", notes / "notes.index", questions)
    assert "the index has no file 'nowhere.md'" in str(failed.exception)
    questions.write_text('{"question": "How old is the horse?", "path": "farm.md", "line": 1100}')
    failed = regard("eval", "index", notes / "notes.index", questions)
    assert "no chunk of 'farm.md' has line (or page) 1100" in str(failed.exception)
    questions.write_text('{"question": "How old is the horse?", "path": "farm.md"}')
    found = json.loads(regard("eval", "index", notes / "notes.index", questions, "--json").stdout)
    assert found["search"]["words"]["error"] is None and found["search"]["words"]["ranks"] == [1]
    assert "±" not in regard("eval", "index", notes / "notes.index", questions).stdout.partition("± is")[0]


def test_an_empty_index_and_an_empty_question_are_named(tmp_path: Path) -> None:
    (tmp_path / "empty.md").write_text("")
    printed = regard("index", tmp_path / "empty.md", "--out", tmp_path / "empty.index").stdout
    assert "empty.index is empty: the documents have no text" in printed and "try:" not in printed
    assert "the question is empty" in str(regard("ask", tmp_path / "empty.index", " ").exception)


def test_names_of_files_are_no_markup(tmp_path: Path) -> None:
    folder = tmp_path / "a["
    folder.mkdir()
    (folder / "b].txt").write_text("one two")
    (folder / "c]\x1b[31m.txt").write_bytes(b"\0")
    (folder / "d].txt").write_bytes("é".encode("latin-1"))
    result = regard("index", tmp_path, "--out", tmp_path / "my.index")
    assert f"skipped: {folder}/c]\ufffd[31m.txt is not a text" in result.stderr, result.exception
    assert f"not UTF-8, some characters were replaced: {folder}/d].txt" in result.stderr
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    with progress_of_files(console) as progress:
        progress(0, 1, "[/b].txt", 0)
        progress(0, 1, "[/b]\x1b]0;title.txt", 0)
    assert "\x1b]0;" not in console.file.getvalue()


def test_an_empty_file_becomes_an_index(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("One sentence here.")
    (tmp_path / "my.index").touch()
    assert "1 file added" in regard("index", tmp_path / "a.md", "--out", tmp_path / "my.index").stdout


def test_an_index_is_asked_from_another_folder(demo_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.md").write_text("The horse is called Bella.")
    monkeypatch.chdir(demo_run.parent)
    made = regard("index", tmp_path / "a.md", "--out", tmp_path / "my.index", "--model", demo_run.name)
    assert "1 file added" in made.stdout, made.exception
    monkeypatch.chdir(tmp_path)
    assert "Bella" in regard("ask", "my.index", "the horse").stdout


def test_models_that_cannot_embed_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("One sentence here.")
    vision = Encoder(Patches((4, 4), (8, 8)), 8, (Repeat((Block([Sublayer(Attention(2))]),), 1),))
    models = {"vae": VAE((2,), 3), "vision": vision}
    messages = {"vae": "of kind vae; only encoders and decoders embed", "vision": "vision does not read texts"}
    for name, model in models.items():
        save(model.build(0), tmp_path / name, byte())
        refused = regard("index", tmp_path / "a.md", "--out", tmp_path / "my.index", "--model", tmp_path / name)
        assert messages[name] in str(refused.exception), refused.exception
    assert not (tmp_path / "my.index").exists()


def test_a_terminal_gets_no_control_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    hostile = "a\x1b]0;title\x07b"
    source = PromptSource(1, hostile, "line", 1, 1, (hostile,), 0, hostile)
    tokens = [(SimpleNamespace(finish=None), "c\x1b"), (SimpleNamespace(finish="stop"), "[31m [1]")]
    llm = SimpleNamespace(stream_tokens=lambda messages, **sampling: tokens)
    for terminal in (True, False):
        output = io.StringIO()
        output.isatty = lambda terminal=terminal: terminal
        monkeypatch.setattr(sys, "stdout", output)
        print_sources([source], texts=True)
        answer(llm, "Who?", [source], 9, 0.0, as_json=False)
        assert ("\x1b" in output.getvalue() or "\x07" in output.getvalue()) is not terminal
        assert ("c\ufffd[31m" in output.getvalue()) is terminal
