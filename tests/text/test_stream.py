"""The stream gives the same text as decoding everything at once, in whole characters, and cuts at stop strings."""

from typing import NamedTuple

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from regard.text.stream import Detokenizer, TextStream
from regard.text.tidy import settled, tidied
from regard.text.tokenizer import Tokenizer
from regard.text.train import bpe, byte, character

BYTE = byte()
TOKENIZERS = [BYTE, bpe(["the cat sat on the mat 🙂 né"] * 9, vocab=300), character("abc 🙂")]
EMOJI = "a👩‍👩‍👧é€🙂"


def run(tokenizer, ids, stops=(), after=()):
    stream = Detokenizer(tokenizer, stops, after)
    return [stream.push(id) for id in ids] + [stream.finish()], stream


def test_an_emoji_comes_whole():
    pieces, _ = run(BYTE, BYTE.encode("x🙂y"))
    assert pieces == ["x", "", "", "", "🙂", "y", ""]


@pytest.mark.parametrize("tokenizer", TOKENIZERS, ids=["byte", "bpe", "character"])
@settings(derandomize=True, max_examples=200, deadline=None)
@given(data=st.data())
def test_any_ids_stream_to_their_decoding(tokenizer, data):
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=40))
    pieces, _ = run(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids)


@settings(derandomize=True, max_examples=300, deadline=None)
@given(
    text=st.text(alphabet="ab🙂", max_size=24),
    stops=st.lists(st.text(alphabet="ab🙂", min_size=1, max_size=4), max_size=3),
)
def test_stop_strings_cut_where_a_search_would(text, stops):
    pieces, stream = run(BYTE, BYTE.encode(text), stops)
    found = [(text.find(stop) + len(stop), text.find(stop), stop) for stop in stops if stop in text]
    if not found:
        assert "".join(pieces) == text
        assert stream.stopped is None
        return
    end = min(found)[0]  # the earliest end is seen first; of those that end there, the longest starts first
    start = min(start for stop_end, start, _ in found if stop_end == end)
    assert "".join(pieces) == text[:start]
    assert text[start:].startswith(stream.stopped)


def test_nothing_of_a_stop_string_leaks():
    pieces, stream = run(BYTE, BYTE.encode("go STOP on"), ["STOP", "ON"])
    assert "".join(pieces) == "go "
    assert stream.stopped == "STOP"
    assert all("S" not in piece for piece in pieces)


def test_a_beginning_that_came_to_nothing_is_given_back():
    pieces, stream = run(BYTE, BYTE.encode("a STO"), ["STOP"])
    assert pieces[-1] == "STO"
    assert stream.stopped is None


def fallback():
    """As SentencePiece makes them: words begin with ▁, and what is no piece is written as its bytes."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "▁a"]
    vocab = {piece: id for id, piece in enumerate(pieces)}
    core = tokenizers.Tokenizer(models.BPE(vocab, [("▁", "a")], unk_token="<unk>", byte_fallback=True))
    core.pre_tokenizer = pre_tokenizers.Metaspace()
    spaces = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    core.decoder = decoders.Sequence(spaces)
    return Tokenizer(core)


@pytest.mark.parametrize("text", ["€", "😀€", "a€ a😀a"])
def test_bytes_of_a_fallback_come_as_whole_characters(text):
    tokenizer = fallback()
    ids = tokenizer.encode(text)
    pieces, _ = run(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_a_continuation_keeps_the_space_before_its_first_word():
    tokenizer = fallback()
    prompt, new = tokenizer.encode("a a"), tokenizer.encode("a")
    assert "".join(run(tokenizer, new, after=prompt)[0]) == " a"
    assert "".join(run(tokenizer, new)[0]) == "a"
    half = BYTE.encode("x🙂")
    assert "".join(run(BYTE, half[3:], after=half[:3])[0]) == BYTE.decode(half[3:])  # cut in a character


def test_empty_stop_is_refused():
    with pytest.raises(ValueError, match="empty"):
        Detokenizer(BYTE, [""])


class Generated(NamedTuple):
    id: int
    finish: str | None = None


@pytest.mark.parametrize(
    ("ending", "stops", "text", "finish"),
    [
        ("stop", (), "a STO", "stop"),  # by a stop id, which has no text
        ("length", (), "a STOP", "length"),
        ("length", ("STOP",), "a ", "stop"),  # by a stop string, on the last token
        ("length", ("STOPS",), "a STOP", "length"),  # the beginning of a stop string is returned after all
    ],
)
def test_generated_tokens_become_text_and_a_reason(ending, stops, text, finish):
    *ids, last = BYTE.encode("a STOP")
    stream = TextStream(BYTE, stops)
    deltas = [stream.push(Generated(id)) for id in ids]
    assert stream.finish is None
    deltas.append(stream.push(Generated(last, ending)))
    assert ("".join(deltas), stream.finish) == (text, finish)


def test_a_stop_string_finishes_a_generation_early():
    stream = TextStream(BYTE, ["ST"])
    for id in BYTE.encode("a STOP"):
        stream.push(Generated(id))
        if stream.finish:
            break
    assert stream.finish == "stop" and id == BYTE.encode("T")[0]


def test_cost_per_token_does_not_grow(monkeypatch):
    seen = []
    decode = BYTE.rough
    monkeypatch.setattr(BYTE, "rough", lambda ids, special=False: (seen.append(len(ids)), decode(ids, special))[1])
    run(BYTE, BYTE.encode(EMOJI * 50))
    assert max(seen) < 20


@settings(derandomize=True, max_examples=500, deadline=None)
@given(text=st.text(alphabet="  '.?ntmsverx", max_size=40), cut=st.integers(0, 40))
def test_text_is_tidied_alike_in_parts(text, cut):
    seen = text[:cut]
    at = settled(seen)
    assert tidied(seen[:at]) + tidied(text[at:]) == tidied(text)


@settings(derandomize=True, max_examples=100, deadline=None)
@given(
    words=st.lists(st.sampled_from(["It", "'", "s", "was", "n't", ".", ",", "we", "'ve", "n", "t", "seen", "!", "m"]))
)
def test_a_tidy_stream_gives_what_decoding_gives(words):
    vocab = {word: id for id, word in enumerate(sorted({"?", *words}))}
    core = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="?"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = Tokenizer(core, tidy=True)
    ids = tokenizer.encode(" ".join(words))
    pieces, _ = run(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids) == tidied(" ".join(words))
