"""Damaged GGUF files raise a typed error that names the fault, quickly and without allocating much memory."""

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
from regard.gguf_header import MAX_ENTRIES, MAX_STRINGS, GGUFError, read_header
from regard.spec import SpecError
from regard.text.tokenizer import Tokenizer
from regard.text.train import bpe
from regard.text.write_gguf import gguf_metadata
from regard.weights.table import WeightsError
from tests.checkpoint.gguf.tiny_models import LLAMA, MODELS, build_tiny

TYPED_ERRORS = (CheckpointError, WeightsError, FamilyError, SpecError)


@pytest.fixture(scope="module")
def valid_files(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    """A Llama in Q8_0 with a tokenizer, a Llama with RoPE divisors, and a GPT-2 in float16."""
    folder = tmp_path_factory.mktemp("valid")
    tokenizer = gguf_metadata(bpe(["a text of some words, some of them again"], 280), 300)
    export_gguf(build_tiny(LLAMA | {"vocab_size": 300}), folder / "0.gguf", "llama", "q8_0", tokenizer)
    export_gguf(build_tiny(MODELS["llama, llama3 rope"]), folder / "1.gguf", "llama", "f16")
    export_gguf(build_tiny(MODELS["gpt2"]), folder / "2.gguf", "gpt2", "f16")
    return [file.read_bytes() for file in sorted(folder.iterdir())]


def truncate(fraction: float) -> Callable[[bytes], bytes]:
    return lambda content: content[: int(len(content) * fraction)]


def overwrite(key: str, format: str, value: float, skip: int = 0) -> Callable[[bytes], bytes]:
    """Overwrite the number that is `skip` bytes after the key."""

    def change(content: bytes) -> bytes:
        offset = content.index(key.encode()) + len(key) + skip
        return overwrite_at(format, value, offset)(content)

    return change


def overwrite_at(format: str, value: float, offset: int) -> Callable[[bytes], bytes]:
    number = struct.pack(f"<{format}", value)
    return lambda content: content[:offset] + number + content[offset + len(number) :]


def rename(old: str, new: str) -> Callable[[bytes], bytes]:
    assert len(old) == len(new)
    return lambda content: content.replace(old.encode(), new.encode(), 1)


NORM = "output_norm.weight"  # in the header its dimensions (I), sizes (Q each), type (I) and offset (Q) follow
DAMAGED: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "an empty file": (truncate(0), "too few for a GGUF file"),
    "another format": (rename("GGUF", "GGML"), "is not a GGUF file"),
    "an old version": (overwrite_at("I", 1, 4), "GGUF version 1 is not supported; use a file of version 2 or 3"),
    "big-endian": (overwrite_at("I", 3 << 24, 4), "big-endian"),
    "more tensors than bytes": (overwrite_at("Q", 1 << 62, 8), f"at most {MAX_ENTRIES} are read"),
    "one tensor too many": (overwrite_at("Q", 22, 8), "tensor 21|dimensions"),
    "more metadata than bytes": (overwrite_at("Q", 1 << 40, 16), f"at most {MAX_ENTRIES} are read"),
    "one metadata entry too few": (overwrite_at("Q", 5, 16), "tensor [01]|dimensions|shape"),
    "truncated in the header": (truncate(0.02), "has .* bytes, but only .* are left"),
    "truncated in the data": (truncate(0.9), "ends at byte .* the file has"),
    "a string past the end": (overwrite("general.architecture", "Q", 1 << 60, 4), "architecture has .* bytes, but"),
    "an array longer than the file": (overwrite("ggml.token_type", "Q", 1 << 60, 8), "token_type has .* bytes, but"),
    "too many strings": (overwrite("ggml.merges", "Q", 1 << 60, 8), f"at most {MAX_STRINGS} in all arrays"),
    "an array of arrays": (overwrite("ggml.token_type", "I", 9, 4), "token_type is an array of type 9"),
    "a value of an unknown type": (overwrite("llama.block_count", "I", 77), "llama.block_count has type 77"),
    "not UTF-8": (overwrite("general.architecture", "B", 0xFF, 12), "general.architecture is not UTF-8"),
    "a duplicate key": (rename("llama.context_length", "general.architecture"), "general.architecture occurs twice"),
    "an unknown architecture": (overwrite("general.architecture", "B", ord("x"), 12), "'xlama' are not supported"),
    "a missing key": (rename("llama.embedding_length", "lxxxx.embedding_length"), "llama.embedding_length is missing"),
    "an unknown key": (rename("llama.rope.freq_base", "llama.rope.xxxx_base"), "llama.rope.xxxx_base is not supported"),
    "a width of zero": (overwrite("llama.embedding_length", "I", 0, 4), "must both be positive"),
    "a width larger than the file": (overwrite("llama.embedding_length", "I", 1 << 20, 4), "config has .* parameters"),
    "a depth of 2^32": (overwrite("llama.block_count", "I", (1 << 32) - 1, 4), "must be at most 10000"),
    "one layer too many": (overwrite("llama.block_count", "I", 3, 4), r"blk\.2\..*is missing"),
    "one layer too few": (overwrite("llama.block_count", "I", 1, 4), r"blk\.1\..*belongs to no part"),
    "other kv_heads": (overwrite("llama.attention.head_count_kv", "I", 4, 4), r"attn_k\.weight should be \(32, 32\)"),
    "another head_dim": (overwrite("llama.rope.dimension_count", "I", 4, 4), "rope.dimension_count=4 contradicts .*=8"),
    "a float for a count": (overwrite("llama.block_count", "I", 6), "num_hidden_layers=.* must be int"),
    "an unknown tensor type": (overwrite(NORM, "I", 4321, 12), f"{NORM} has type 4321; the supported types are F32"),
    "partial blocks": (overwrite("blk.0.attn_q.weight", "Q", 31, 4), r"\(32, 31\) has rows .* not a multiple of .* 32"),
    "a tensor without dimensions": (overwrite(NORM, "I", 0), f"{NORM} has 0 dimensions"),
    "a tensor of many dimensions": (overwrite(NORM, "I", 1 << 31), f"{NORM} has {1 << 31} dimensions"),
    "an empty tensor": (overwrite(NORM, "Q", 0, 4), f"{NORM} has shape \\(0,\\)"),
    "a tensor larger than the file": (overwrite(NORM, "Q", 1 << 61, 4), f"{NORM} .* ends at byte"),
    "a smaller tensor": (overwrite(NORM, "Q", 16, 4), rf"{NORM} should be \(32,\) by the config, found \(16,\)"),
    "an offset past the end": (overwrite(NORM, "Q", 1 << 62, 16), f"{NORM} .* ends at byte"),
    "an unaligned offset": (overwrite(NORM, "Q", 33, 16), "offsets multiples of 32"),
    "two tensors with one offset": (overwrite(NORM, "Q", 0, 16), "overlap at byte"),
    "a duplicate tensor": (rename("blk.0.attn_q.weight", "blk.0.attn_k.weight"), "blk.0.attn_k.weight occurs twice"),
    "a renamed tensor": (rename("blk.1.ffn_up.weight", "blk.1.ffn_xx.weight"), r"blk\.1\.ffn_up\.weight .* is missing"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_file_is_refused(name: str, valid_files: list[bytes], tmp_path: Path) -> None:
    change, message = DAMAGED[name]
    file = tmp_path / "damaged.gguf"
    file.write_bytes(change(valid_files[0]))
    start = time.process_time()
    with pytest.raises(TYPED_ERRORS, match=message) as caught:
        load(file)
    assert str(file) in str(caught.value)
    assert time.process_time() - start < 2


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="missing"):
        load(tmp_path / "none.gguf")


def mutate(content: bytes, random: Random, header_size: int) -> bytes:
    """Change bytes or numbers of the header, or truncate the file."""
    changed = bytearray(content)
    for _ in range(random.choice([1, 1, 3])):
        offset = random.randrange(header_size)
        if random.random() < 0.5:
            changed[offset] = random.randrange(256)
        else:
            number = random.choice([0, 1, 2, 7, 255, 1 << 16, 1 << 31, (1 << 32) - 1, 1 << 40, 1 << 63, (1 << 64) - 1])
            width = random.choice([4, 8])
            changed[offset : offset + width] = (number % (1 << 8 * width)).to_bytes(width, "little")
    return bytes(changed[: random.randrange(len(changed))] if random.random() < 0.1 else changed)


def peak_memory() -> int:
    """The peak resident memory of this process in KiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


@pytest.mark.parametrize("trials", [500, pytest.param(2500, marks=[pytest.mark.slow, pytest.mark.timeout(900)])])
def test_every_mutation_is_loaded_or_refused(trials: int, valid_files: list[bytes], tmp_path: Path) -> None:
    file, random, refused, slowest, before = tmp_path / "mutated.gguf", Random(trials), 0, 0.0, peak_memory()
    header_sizes = []
    for content in valid_files:
        file.write_bytes(content)
        header_sizes.append(min(info.start for info in read_header(file).tensors.values()))
    for _ in range(trials):
        index = random.randrange(len(valid_files))
        file.write_bytes(mutate(valid_files[index], random, header_sizes[index]))
        start = time.process_time()
        for read, errors in ((load, TYPED_ERRORS), (Tokenizer.load, GGUFError)):
            try:
                read(file)
            except errors:
                refused += 1
        slowest = max(slowest, time.process_time() - start)
    assert refused > trials
    assert slowest < 2
    assert peak_memory() - before < 200 << 10


def file_with_array(type_id: int, count: int, payload: bytes) -> bytes:
    """A file whose only metadata is one array."""
    key = b"tokenizer.ggml.tokens"
    return b"".join(
        [b"GGUF", struct.pack("<IQQQ", 3, 0, 1, len(key)), key, struct.pack("<IIQ", 9, type_id, count), payload]
    )


@pytest.mark.parametrize(
    "content",
    [
        file_with_array(8, MAX_STRINGS, (struct.pack("<Q", 4) + "\U0001f600".encode()) * MAX_STRINGS),
        file_with_array(0, 31 << 20, bytes(31 << 20)),
    ],
    ids=["strings", "numbers"],
)
def test_the_largest_accepted_header_uses_little_memory(content: bytes, tmp_path: Path) -> None:
    """One header has the maximum number of strings of four-byte characters, the other the maximum number of bytes."""
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
    result = subprocess.run([sys.executable, "-c", code, file], capture_output=True, text=True, check=True,
                          env=os.environ | {"PYTHONPATH": "src"})  # fmt: skip
    megabytes, seconds = map(float, result.stdout.split())
    assert megabytes < 200
    assert seconds < 2
