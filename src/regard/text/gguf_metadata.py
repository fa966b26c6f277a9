"""A tokenizer as the metadata of a GGUF file, of the kinds that gguf.py reads."""

import json
from typing import Any

from regard.gguf_header import GGUFError
from regard.text.gguf import PREFIX
from regard.text.sentencepiece import BYTE, CONTROL, NORMAL, OWN, UNUSED
from regard.text.splits import split_name
from regard.text.tokenizer import Tokenizer

LOWEST = -1e9  # the score of a piece that no join makes
BYTES = frozenset(f"<0x{byte:02X}>" for byte in range(256))


def metadata(tokenizer: Tokenizer, vocab: int) -> dict[str, Any]:
    """The vocabulary as GGUF keeps it, filled up to the `vocab` rows of the model."""
    state = json.loads(tokenizer.core.to_str())
    model = state["model"]
    if model["type"] != "BPE" or tokenizer.vocab_size > vocab:
        fault = f"a vocabulary by {model['type']}" if model["type"] != "BPE" else f"{tokenizer.vocab_size} tokens"
        raise GGUFError(f"GGUF cannot hold {fault} for a model of {vocab}; write it without, or train BPE or bytes")
    pieces = {id: piece for piece, id in tokenizer.core.get_vocab(with_added_tokens=True).items()}
    added = {token["id"]: CONTROL if token["special"] else OWN for token in state["added_tokens"]}
    types = [NORMAL if id in pieces else UNUSED for id in range(vocab)]
    for id, type in added.items():
        types[id] = type
    joins = [" ".join(merge) if isinstance(merge, list) else merge for merge in model["merges"]]
    written: dict[str, Any] = {"tokens": [pieces.get(id, f"[PAD{id}]") for id in range(vocab)]}
    if model["byte_fallback"]:
        ranks = {merge.replace(" ", ""): -float(rank) for rank, merge in reversed([*enumerate(joins)])}
        written |= {"model": "llama", "scores": [ranks.get(piece, LOWEST) for piece in written["tokens"]]}
        types = [BYTE if piece in BYTES else type for piece, type in zip(written["tokens"], types, strict=True)]
        written["add_space_prefix"] = "▁" in json.dumps(state["normalizer"], ensure_ascii=False).partition("Prepend")[2]
    else:
        written |= {"model": "gpt2", "pre": split_name(state["pre_tokenizer"], state["normalizer"]), "merges": joins}
    written["token_type"] = types
    marks = {"bos": tokenizer.bos, "eos": tokenizer.eos, "padding": tokenizer.pad}
    written |= {f"{name}_token_id": id for name, id in marks.items() if id is not None}
    others = [id for id in tokenizer.stops if id != tokenizer.eos]
    written |= {"eot_token_id": others[0]} if others else {}
    written["add_bos_token"] = tokenizer.bos is not None and tokenizer.opening == (tokenizer.bos,)
    template = {} if tokenizer.chat_template is None else {"tokenizer.chat_template": tokenizer.chat_template}
    return {f"{PREFIX}{key}": value for key, value in written.items()} | template
