"""Training objectives: each is a function `(model, batch) -> (loss_sum, count, metrics)`; base.py has the interface.

A new objective is one file here, one line in OBJECTIVES, and one line in tests/objectives/test_contract.py.
"""

from regard.objectives.base import Objective
from regard.objectives.classification import classification, relevance
from regard.objectives.contrastive import Contrastive
from regard.objectives.masked import masked
from regard.objectives.next_token import image_text, next_token, translation

OBJECTIVES: dict[str, Objective] = {
    "next_token": next_token,
    "image_text": image_text,
    "masked": masked,
    "translation": translation,
    "classification": classification,
    "relevance": relevance,
    "contrastive": Contrastive("softmax"),
    "sigmoid_contrastive": Contrastive("sigmoid"),
}
