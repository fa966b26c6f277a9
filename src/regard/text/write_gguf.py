"""A tokenizer as the metadata of a GGUF file, which gguf.py reads."""

import json
from typing import Any

from regard.gguf_header import GGUFError
from regard.text.gguf import PREFIX
from regard.text.pre_tokenization import gguf_name
from regard.text.sentencepiece import BYTE, CONTROL, NORMAL, UNUSED, USER_DEFINED
from regard.text.tokenizer import Tokenizer

UNMERGED_SCORE = -1e9  # for pieces that no merge produces
BYTE_PIECES = frozenset(f"<0x{byte:02X}>" for byte in range(256))


def gguf_metadata(tokenizer: Tokenizer, vocab: int) -> dict[str, Any]:
    """The tokenizer as metadata, padded with unused tokens to the model's `vocab` embeddings."""
    state = json.loads(tokenizer.core.to_str())
    model = state["model"]
    if model["type"] != "BPE" or tokenizer.vocab_size > vocab:
        fault = f"a {model['type']} vocabulary" if model["type"] != "BPE" else f"{tokenizer.vocab_size} tokens"
        raise GGUFError(
            f"GGUF cannot hold {fault} for a model with vocab={vocab}; write the file without a tokenizer, or train a "
            "bpe or byte tokenizer"
        )
    pieces = {id: piece for piece, id in tokenizer.core.get_vocab(with_added_tokens=True).items()}
    types = [NORMAL if id in pieces else UNUSED for id in range(vocab)]
    for token in state["added_tokens"]:
        types[token["id"]] = CONTROL if token["special"] else USER_DEFINED
    merges = [" ".join(merge) if isinstance(merge, list) else merge for merge in model["merges"]]
    values: dict[str, Any] = {"tokens": [pieces.get(id, f"[PAD{id}]") for id in range(vocab)]}
    if model["byte_fallback"]:
        ranks = {merge.replace(" ", ""): -float(rank) for rank, merge in reversed([*enumerate(merges)])}
        values |= {"model": "llama", "scores": [ranks.get(piece, UNMERGED_SCORE) for piece in values["tokens"]]}
        types = [BYTE if piece in BYTE_PIECES else type for piece, type in zip(values["tokens"], types, strict=True)]
        values["add_space_prefix"] = "▁" in json.dumps(state["normalizer"], ensure_ascii=False).partition("Prepend")[2]
    else:
        values |= {"model": "gpt2", "pre": gguf_name(state["pre_tokenizer"], state["normalizer"]), "merges": merges}
    values["token_type"] = types
    ids = {"bos": tokenizer.bos, "eos": tokenizer.eos, "padding": tokenizer.pad}
    values |= {f"{name}_token_id": id for name, id in ids.items() if id is not None}
    other_stops = [id for id in tokenizer.stop_ids if id != tokenizer.eos]
    values |= {"eot_token_id": other_stops[0]} if other_stops else {}
    values["add_bos_token"] = tokenizer.bos is not None and tokenizer.prefix_ids == (tokenizer.bos,)
    template = {} if tokenizer.chat_template is None else {"tokenizer.chat_template": tokenizer.chat_template}
    return {f"{PREFIX}{key}": value for key, value in values.items()} | template
