"""An index of many chunks: its speed, memory, interruptions and searches: `python -m benchmarks.indexing`.

Text is generated into files of 200 chunks, and indexed by processes that are killed at random times. Measured:

    memory   the largest of the process, after every tenth of the files
    kills    the index passes its check, and equals one that was made at once, chunk by chunk and vector by vector
    search   the median and the 95th percentile of the time of a search without the embedding, and the first one's time
    exact    the results by vectors equal those of brute force in float64

By default a vector is the mean of random vectors of a text's words, so that the time is the index's own; with --model
a model embeds the texts.
"""

import argparse
import multiprocessing
import random
import resource
import shutil
import signal
import statistics
import tempfile
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from regard.retrieval.document_index import DocumentIndex, IndexSettings
from regard.retrieval.search import search
from regard.retrieval.update_index import Embed, TokenStarts, update_index

DIM, LIMIT, CHUNKS_PER_FILE, WORDS = 384, 64, 200, 20_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chunks", type=int, default=100_000)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--searches", type=int, default=100)
    parser.add_argument("--model", help="embed by this model, for instance minilm")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="regard-indexing-"))
    try:
        measure(folder, options)
    finally:
        shutil.rmtree(folder)


def measure(folder: Path, options: argparse.Namespace) -> None:
    documents = folder / "documents"
    write_documents(documents, options.chunks)
    start, rng = time.perf_counter(), random.Random(0)
    whole = folder / "whole.index"
    run_process(whole, documents, options.model)
    seconds = time.perf_counter() - start
    index = DocumentIndex(whole)
    count = index.chunk_count()
    print(
        f"{count:,} chunks in {seconds:.0f} s, {count / seconds:.0f} per second; {whole.stat().st_size / 2**20:.0f} MiB"
    )
    resumed = folder / "resumed.index"
    for _ in range(options.kills):
        run_process(resumed, documents, options.model, rng.uniform(0.1, 0.9) * count / options.kills)
    run_process(resumed, documents, options.model)
    other = DocumentIndex(resumed)
    other.check()
    assert contents(index) == contents(other), "the index that was continued after kills differs"
    print(f"killed {options.kills} times: the index passes its check and has the same chunks and vectors")
    other.close()
    measure_searches(index, embedder(options.model)[0], options.searches)
    index.close()


def run_process(path: Path, documents: Path, model: str | None, kill_at: float | None = None) -> None:
    """Update the index in a process of its own. kill_at: the number of chunks after which it is killed."""
    processes = multiprocessing.get_context("spawn")
    embedded = processes.Value("q", 0)
    process = processes.Process(target=update, args=(path, documents, model, embedded, kill_at is None))
    process.start()
    while process.is_alive():
        if kill_at is not None and embedded.value >= kill_at:
            time.sleep(0.05 * (kill_at % 1))  # anywhere within a batch
            process.kill()
        process.join(0.02)
    assert process.exitcode == (0 if kill_at is None else -signal.SIGKILL), f"the update ended with {process.exitcode}"


def update(path: Path, documents: Path, model: str | None, embedded: Any, report: bool) -> None:
    embed, starts, dim = embedder(model)
    reported = 0

    def progress(done: int, files: int, file: str, chunks: int) -> None:
        nonlocal reported
        embedded.value = chunks
        if report and 10 * done // files > reported:
            reported = 10 * done // files
            memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            print(f"  {done:,} of {files:,} files: at most {memory:.0f} MiB", flush=True)

    index = DocumentIndex(path, IndexSettings(model or "words", "benchmark", dim, LIMIT, 8))
    update_index(index, [documents], starts, embed, progress)
    index.close()


def embedder(model: str | None) -> tuple[Embed, TokenStarts, int]:
    if model is not None:
        from regard.cli.index import embedder as model_embedder
        from regard.cli.index import starts_of
        from regard.load_model import load

        llm = load(model)
        embed = model_embedder(llm)
        return embed, starts_of(llm), embed(["text"]).shape[1]
    vectors = np.random.default_rng(0).standard_normal((4096, DIM), np.float32)

    def embed_words(texts: Sequence[str]) -> np.ndarray:
        means = np.stack([vectors[[zlib.crc32(w.encode()) % 4096 for w in text.split()]].mean(0) for text in texts])
        return means / np.linalg.norm(means, axis=1, keepdims=True)

    return embed_words, word_starts, DIM


def word_starts(text: str) -> list[int]:
    starts = [0] if text and not text[0].isspace() else []
    return starts + [i for i in range(1, len(text)) if text[i - 1].isspace() and not text[i].isspace()]


def write_documents(folder: Path, chunks: int) -> None:
    """Words with frequencies like those of a text, in sentences and paragraphs of about one chunk."""
    folder.mkdir()
    rng = np.random.default_rng(1)
    for number in range(-(-chunks // CHUNKS_PER_FILE)):
        ids = np.minimum(rng.zipf(1.3, (CHUNKS_PER_FILE, 4, 14)), WORDS)
        paragraphs = (" ".join(" ".join(f"w{i}" for i in sentence) + "." for sentence in part) for part in ids)
        (folder / f"{number:05}.txt").write_text("\n\n".join(paragraphs), encoding="utf-8")


def contents(index: DocumentIndex) -> list[tuple]:
    """All chunks by file and place, with a checksum of the vector."""
    rows = index.database.execute(
        "SELECT path, start, text, vector FROM files JOIN chunks ON file = files.id JOIN vectors ON chunk = chunks.id "
        "WHERE complete ORDER BY path, start"
    )
    return [(path, start, zlib.crc32(text.encode()), zlib.crc32(vector)) for path, start, text, vector in rows]


def measure_searches(index: DocumentIndex, embed: Embed, count: int) -> None:
    rng, ids = random.Random(2), [id for (id,) in index.database.execute("SELECT id FROM chunks")]
    texts = [hit.chunk.text.split() for hit in index.hits(rng.sample(ids, count))]
    queries = [" ".join(rng.sample(words, min(8, len(words)))) for words in texts]
    embedded = {query: embed([query]) for query in queries}
    for method in ("vectors", "words", "hybrid"):
        seconds = []
        for query in queries:
            start = time.perf_counter()
            search(index, query, lambda texts: embedded[texts[0]], 10, method)
            seconds.append(time.perf_counter() - start)
        first, warm = seconds[0], sorted(seconds[1:])
        median, most = 1e3 * statistics.median(warm), 1e3 * warm[int(0.95 * len(warm))]
        print(f"search by {method}: {median:.1f} ms, 95 %: {most:.1f} ms, the first {1e3 * first:.0f} ms")
    chunks, vectors = index.vectors.all_vectors()
    for vector in embedded.values():
        cosines = vectors.astype(np.float64) @ vector[0].astype(np.float64)
        found = [cosine for _, cosine in index.vectors.nearest(vector[0], 10)]
        assert np.allclose(found, np.sort(cosines)[::-1][:10], atol=1e-6), "not the nearest vectors"
    print(f"the 10 nearest of {len(chunks):,} vectors are those of brute force, in {count} searches")


if __name__ == "__main__":
    main()
