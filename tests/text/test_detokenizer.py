"""Streamed text equals the text of all ids decoded at once, in complete characters, and ends at stop strings."""

from typing import NamedTuple

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from regard.text.detokenizer import CONTEXT, Detokenizer, TextStream, clean_up_boundary
from regard.text.tokenizer import Tokenizer, clean_up_tokenization
from regard.text.train import bpe, byte, character

BYTE = byte()
TOKENIZERS = [BYTE, bpe(["the cat sat on the mat 🙂 né"] * 9, vocab=300), character("abc 🙂")]
EMOJI = "a👩‍👩‍👧é€🙂"


def run(tokenizer, ids, stop_strings=(), prompt_ids=()):
    stream = Detokenizer(tokenizer, stop_strings, prompt_ids)
    return [stream.push(id) for id in ids] + [stream.finish()], stream


def test_an_emoji_is_released_when_it_is_complete():
    chunks, _ = run(BYTE, BYTE.encode("x🙂y"))
    assert chunks == ["x", "", "", "", "🙂", "y", ""]


@pytest.mark.parametrize("tokenizer", TOKENIZERS, ids=["byte", "bpe", "character"])
@given(data=st.data())
def test_streamed_text_equals_decoded_text(tokenizer, data):
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=40))
    chunks, _ = run(tokenizer, ids)
    assert "".join(chunks) == tokenizer.decode(ids)


@given(
    text=st.text(alphabet="ab🙂", max_size=24),
    stops=st.lists(st.text(alphabet="ab🙂", min_size=1, max_size=4), max_size=3),
)
def test_text_ends_at_the_first_stop_string(text, stops):
    chunks, stream = run(BYTE, BYTE.encode(text), stops)
    found = [(text.find(stop) + len(stop), text.find(stop), stop) for stop in stops if stop in text]
    if not found:
        assert "".join(chunks) == text
        assert stream.matched_stop is None
        return
    end = min(found)[0]  # of several matches, the one that ends first; of those with the same end, the longest
    start = min(start for stop_end, start, _ in found if stop_end == end)
    assert "".join(chunks) == text[:start]
    assert text[start:].startswith(stream.matched_stop)


def test_no_part_of_a_stop_string_is_released():
    chunks, stream = run(BYTE, BYTE.encode("go STOP on"), ["STOP", "ON"])
    assert "".join(chunks) == "go "
    assert stream.matched_stop == "STOP"
    assert all("S" not in chunk for chunk in chunks)


def test_an_incomplete_stop_string_is_released_at_the_end():
    chunks, stream = run(BYTE, BYTE.encode("a STO"), ["STOP"])
    assert chunks[-1] == "STO"
    assert stream.matched_stop is None


def byte_fallback_tokenizer():
    """As in SentencePiece: words begin with ▁, and characters without a piece are encoded as bytes."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "▁a"]
    vocab = {piece: id for id, piece in enumerate(pieces)}
    core = tokenizers.Tokenizer(models.BPE(vocab, [("▁", "a")], unk_token="<unk>", byte_fallback=True))
    core.pre_tokenizer = pre_tokenizers.Metaspace()
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    core.decoder = decoders.Sequence(steps)
    return Tokenizer(core)


@pytest.mark.parametrize("text", ["€", "😀€", "a€ a😀a", "€" * 40, "é€😀" * 9, "a" * 15 + "€" * 9])
def test_byte_fallback_releases_complete_characters(text):
    tokenizer = byte_fallback_tokenizer()
    ids = tokenizer.encode(text)
    chunks, _ = run(tokenizer, ids)
    assert "".join(chunks) == tokenizer.decode(ids) == text
    assert not any("\ufffd" in chunk for chunk in chunks)


def test_a_continuation_keeps_the_space_before_its_first_word():
    tokenizer = byte_fallback_tokenizer()
    prompt, new = tokenizer.encode("a a"), tokenizer.encode("a")
    assert "".join(run(tokenizer, new, prompt_ids=prompt)[0]) == " a"
    assert "".join(run(tokenizer, new)[0]) == "a"
    assert "".join(run(tokenizer, new, prompt_ids=tokenizer.encode("€€€€"))[0]) == " a"
    ids = BYTE.encode("x🙂")  # the prompt ends inside a character
    assert "".join(run(BYTE, ids[3:], prompt_ids=ids[:3])[0]) == BYTE.decode(ids[3:])


def test_an_empty_stop_string_is_refused():
    with pytest.raises(ValueError, match="empty"):
        Detokenizer(BYTE, [""])


class Generated(NamedTuple):
    id: int
    finish: str | None = None


@pytest.mark.parametrize(
    ("ending", "stops", "text", "finish"),
    [
        ("stop", (), "a STO", "stop"),  # a stop id has no text
        ("length", (), "a STOP", "length"),
        ("length", ("STOP",), "a ", "stop"),  # the last token completes a stop string
        ("length", ("STOPS",), "a STOP", "length"),  # an incomplete stop string is released at the end
    ],
)
def test_generated_tokens_become_text_and_a_finish_reason(ending, stops, text, finish):
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


def test_few_ids_are_decoded_for_each_token(monkeypatch):
    lengths = []
    decode = BYTE.decode
    monkeypatch.setattr(BYTE, "decode", lambda ids, **options: (lengths.append(len(ids)), decode(ids, **options))[1])
    ids = BYTE.encode(EMOJI * 50)
    run(BYTE, ids)
    assert max(lengths) <= 2 * CONTEXT + 4  # an emoji has four ids
    assert len(lengths) < 1.2 * len(ids)


@given(text=st.text(alphabet="  '.?ntmsverx", max_size=40), cut=st.integers(0, 40))
def test_clean_up_in_two_parts_equals_clean_up_of_the_whole(text, cut):
    boundary = clean_up_boundary(text[:cut])
    parts = text[:boundary], text[boundary:]
    assert "".join(map(clean_up_tokenization, parts)) == clean_up_tokenization(text)


@given(
    words=st.lists(st.sampled_from(["It", "'", "s", "was", "n't", ".", ",", "we", "'ve", "n", "t", "seen", "!", "m"]))
)
def test_cleaned_up_stream_equals_decoded_text(words):
    vocab = {word: id for id, word in enumerate(sorted({"?", *words}))}
    core = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="?"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = Tokenizer(core, clean_up_tokenization_spaces=True)
    ids = tokenizer.encode(" ".join(words))
    chunks, _ = run(tokenizer, ids)
    assert "".join(chunks) == tokenizer.decode(ids) == clean_up_tokenization(" ".join(words))


def test_a_single_stop_string_needs_no_list():
    assert "".join(run(BYTE, BYTE.encode("one, two"), ", ")[0]) == "one"
    with pytest.raises(ValueError, match="empty"):
        Detokenizer(BYTE, "")
