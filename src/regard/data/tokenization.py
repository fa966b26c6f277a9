"""The deterministic part of making batches: an example becomes arrays, by an objective and a tokenizer.

Its result can be stored (`regard data prepare`); the fingerprints say whether stored arrays still belong to it.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Protocol

import numpy as np

from regard.text.tokenizer import Tokenizer

FORMAT = 1  # increased when objectives tokenize differently, so that stored arrays are refused


class Tokenizes(Protocol):
    """An objective, which is a spec."""

    def tokenize(self, example: Mapping[str, Any], tokenizer: Tokenizer) -> Mapping[str, np.ndarray]: ...

    def to_dict(self) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Tokenization:
    """A function from an example to its arrays, which can be sent to other processes."""

    objective: Tokenizes
    tokenizer: Tokenizer

    def __call__(self, example: Mapping[str, Any]) -> Mapping[str, np.ndarray]:
        return self.objective.tokenize(example, self.tokenizer)

    def fingerprints(self) -> dict[str, str]:
        tokenizer = self.tokenizer
        ids = [tokenizer.prefix_ids, tokenizer.stop_ids, tokenizer.decoder_start]
        special = [tokenizer.special_tokens_map, tokenizer.chat_template, ids]
        return {
            "objective": fingerprint([FORMAT, self.objective.to_dict()]),
            "tokenizer": fingerprint([tokenizer.core.to_str(), special]),
        }


def fingerprint(value: Any) -> str:
    return blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=16).hexdigest()
