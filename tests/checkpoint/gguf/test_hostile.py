"""GGUF files that lie: refused by name, at once, before memory is taken; or read, if what they say can be."""

import os
import resource
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from regard.checkpoint import CheckpointError, load
from regard.checkpoint.gguf import export_gguf
from regard.families import FamilyError
from regard.gguf_header import MOST, MOST_TEXTS, GGUFError, read_header
from regard.spec import SpecError
from regard.text.gguf import gguf_metadata
from regard.text.tokenizer import Tokenizer
from regard.text.train import bpe
from regard.weights.table import WeightsError
from tests.checkpoint.gguf.files import LLAMA, MODELS, tiny

TYPED = (CheckpointError, WeightsError, FamilyError, SpecError)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    """A Llama in Q8_0 with a vocabulary, a Llama with divisors, and a GPT-2 in float16."""
    folder = tmp_path_factory.mktemp("good")
    words = gguf_metadata(bpe(["a text of some words, some of them again"], 280), 300)
    export_gguf(tiny(LLAMA | {"vocab_size": 300}), folder / "0.gguf", "llama", "q8_0", words)
    export_gguf(tiny(MODELS["llama, llama3 rope"]), folder / "1.gguf", "llama", "f16")
    export_gguf(tiny(MODELS["gpt2"]), folder / "2.gguf", "gpt2", "f16")
    return [file.read_bytes() for file in sorted(folder.iterdir())]


def cut(keep: float) -> Callable[[bytes], bytes]:
    return lambda content: content[: int(len(content) * keep)]


def number(before: str, form: str, value: float, skip: int = 0) -> Callable[[bytes], bytes]:
    """Write a number so many bytes behind these words."""

    def change(content: bytes) -> bytes:
        at = content.index(before.encode()) + len(before) + skip
        return content[:at] + struct.pack(f"<{form}", value) + content[at + struct.calcsize(f"<{form}") :]

    return change


def head(form: str, value: int, at: int) -> Callable[[bytes], bytes]:
    return lambda content: content[:at] + struct.pack(f"<{form}", value) + content[at + struct.calcsize(f"<{form}") :]


def renamed(old: str, new: str) -> Callable[[bytes], bytes]:
    assert len(old) == len(new)
    return lambda content: content.replace(old.encode(), new.encode(), 1)


NORM = "output_norm.weight"  # behind a name: dimensions (I), sizes (Q each), type (I), place (Q)
HOSTILE: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "nothing": (cut(0), "too few for a GGUF file"),
    "another file": (renamed("GGUF", "GGML"), "is no GGUF file"),
    "an old version": (head("I", 1, 4), "GGUF version 1; read are 2 and 3"),
    "big-endian": (head("I", 3 << 24, 4), "big-endian"),
    "more tensors than bytes": (head("Q", 1 << 62, 8), f"more than {MOST} are not read"),
    "a tensor too many": (head("Q", 22, 8), "tensor 21|dimensions"),
    "more pairs than bytes": (head("Q", 1 << 40, 16), f"more than {MOST} are not read"),
    "a pair too few": (head("Q", 5, 16), "tensor 0|dimensions|shape"),
    "cut in the header": (cut(0.02), "goes on for .* are left"),
    "cut in the weights": (cut(0.9), "ends at byte .* the file at"),
    "a text longer than the file": (number("general.architecture", "Q", 1 << 60, 4), "general.architecture goes on"),
    "an array longer than the file": (number("ggml.token_type", "Q", 1 << 60, 8), "token_type goes on"),
    "an array of too many texts": (number("ggml.merges", "Q", 1 << 60, 8), f"more than {MOST_TEXTS} in all"),
    "an array of arrays": (number("ggml.token_type", "I", 9, 4), "token_type is an array of type 9"),
    "a value of no type": (number("llama.block_count", "I", 77), "llama.block_count has type 77"),
    "not UTF-8": (number("general.architecture", "B", 0xFF, 12), "general.architecture is not UTF-8"),
    "a key twice": (renamed("llama.context_length", "general.architecture"), "general.architecture stands there twice"),
    "an unknown architecture": (number("general.architecture", "B", ord("x"), 12), "'xlama' have no family"),
    "a missing key": (renamed("llama.embedding_length", "lxxxx.embedding_length"), "llama.embedding_length is missing"),
    "a strange key": (renamed("llama.rope.freq_base", "llama.rope.xxxx_base"), "llama.rope.xxxx_base has no part here"),
    "a width of nothing": (number("llama.embedding_length", "I", 0, 4), "both must be positive"),
    "a width that does not fit": (number("llama.embedding_length", "I", 1 << 20, 4), "asks for .* parameters"),
    "a depth past all measure": (number("llama.block_count", "I", (1 << 32) - 1, 4), "must be at most 10000"),
    "a layer too many": (number("llama.block_count", "I", 3, 4), r"blk\.2\..*is missing"),
    "a layer too few": (number("llama.block_count", "I", 1, 4), r"blk\.1\..*belongs to no part"),
    "other heads": (number("llama.attention.head_count_kv", "I", 4, 4), r"blk\.0\.attn_k\.weight should be \(32, 32\)"),
    "heads of another size": (number("llama.rope.dimension_count", "I", 4, 4), "rope.dimension_count=4 should be 8"),
    "a float for a count": (number("llama.block_count", "I", 6), "num_hidden_layers=.* must be int"),
    "a tensor of no type": (number(NORM, "I", 4321, 12), f"{NORM} has type 4321; read are F32"),
    "broken blocks": (number("blk.0.attn_q.weight", "Q", 31, 4), r"\(32, 31\) has rows that are no whole blocks of 32"),
    "a tensor of no dimension": (number(NORM, "I", 0), f"{NORM} has 0 dimensions"),
    "a tensor of many dimensions": (number(NORM, "I", 1 << 31), f"{NORM} has {1 << 31} dimensions"),
    "a tensor of no size": (number(NORM, "Q", 0, 4), f"{NORM} has shape \\(0,\\)"),
    "a tensor past the file": (number(NORM, "Q", 1 << 61, 4), f"{NORM} .* ends at byte"),
    "a tensor of another size": (number(NORM, "Q", 16, 4), rf"{NORM} should be \(32,\) by the config, found \(16,\)"),
    "a place past the file": (number(NORM, "Q", 1 << 62, 16), f"{NORM} .* ends at byte"),
    "a place in between": (number(NORM, "Q", 33, 16), "places multiples of 32"),
    "two in one place": (number(NORM, "Q", 0, 16), "overlap at byte"),
    "a tensor twice": (renamed("blk.0.attn_q.weight", "blk.0.attn_k.weight"), "blk.0.attn_k.weight stands there twice"),
    "another name": (renamed("blk.1.ffn_up.weight", "blk.1.ffn_xx.weight"), r"blk\.1\.ffn_up\.weight .* is missing"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_refused_by_name(name: str, good: list[bytes], tmp_path: Path) -> None:
    change, message = HOSTILE[name]
    file = tmp_path / "bad.gguf"
    file.write_bytes(change(good[0]))
    start = time.process_time()
    with pytest.raises(TYPED, match=message) as caught:
        load(file)
    assert str(file) in str(caught.value)
    assert time.process_time() - start < 2


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="missing"):
        load(tmp_path / "none.gguf")


def spoil(content: bytes, random: Random, header: int) -> bytes:
    """A few bytes of the header, a number in it, or the end."""
    changed = bytearray(content)
    for _ in range(random.choice([1, 1, 3])):
        at = random.randrange(header)
        if random.random() < 0.5:
            changed[at] = random.randrange(256)
        else:
            number = random.choice([0, 1, 2, 7, 255, 1 << 16, 1 << 31, (1 << 32) - 1, 1 << 40, 1 << 63, (1 << 64) - 1])
            width = random.choice([4, 8])
            changed[at : at + width] = (number % (1 << 8 * width)).to_bytes(width, "little")
    return bytes(changed[: random.randrange(len(changed))] if random.random() < 0.1 else changed)


def peak() -> int:
    """Of this process so far, in KiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


@pytest.mark.parametrize("trials", [500, pytest.param(2500, marks=[pytest.mark.slow, pytest.mark.timeout(900)])])
def test_every_change_is_understood_or_refused(trials: int, good: list[bytes], tmp_path: Path) -> None:
    file, random, refused, slowest, before = tmp_path / "changed.gguf", Random(trials), 0, 0.0, peak()
    ends = []
    for content in good:
        file.write_bytes(content)
        ends.append(min(place.start for place in read_header(file).tensors.values()))
    for _ in range(trials):
        which = random.randrange(len(good))
        file.write_bytes(spoil(good[which], random, ends[which]))
        start = time.process_time()
        for read, typed in ((load, TYPED), (Tokenizer.load, GGUFError)):
            try:
                read(file)
            except typed:
                refused += 1
        slowest = max(slowest, time.process_time() - start)
    assert refused > trials
    assert slowest < 2
    assert peak() - before < 200 << 10


def array(kind: int, count: int, payload: bytes) -> bytes:
    """A file of one array and nothing else."""
    key = b"tokenizer.ggml.tokens"
    return b"".join(
        [b"GGUF", struct.pack("<IQQQ", 3, 0, 1, len(key)), key, struct.pack("<IIQ", 9, kind, count), payload]
    )


@pytest.mark.parametrize(
    "content",
    [
        array(8, MOST_TEXTS, (struct.pack("<Q", 4) + "\U0001f600".encode()) * MOST_TEXTS),
        array(0, 31 << 20, bytes(31 << 20)),
    ],
    ids=["texts", "numbers"],
)
def test_a_header_costs_little_however_full_it_is(content: bytes, tmp_path: Path) -> None:
    """As many texts as are read at all, each wide; and numbers up to the longest header."""
    file = tmp_path / "full.gguf"
    file.write_bytes(content)
    code = """
import resource, sys, time
from regard.gguf_header import read_header
before = resource.getrusage(resource.RUSAGE_SELF)
read_header(sys.argv[1])
after = resource.getrusage(resource.RUSAGE_SELF)
print((after.ru_maxrss - before.ru_maxrss) / 1024, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
"""
    done = subprocess.run([sys.executable, "-c", code, file], capture_output=True, text=True, check=True,
                          env=os.environ | {"PYTHONPATH": "src"})  # fmt: skip
    megabytes, seconds = map(float, done.stdout.split())
    assert megabytes < 200
    assert seconds < 2
