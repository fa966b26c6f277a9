"""The teacher of distillation: another decoder with the same vocabulary, loaded once and frozen."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from regard.data.batch import Batch
from regard.models.base import Model
from regard.models.decoder import Decoder
from regard.objectives.base import LossResult, Objective
from regard.objectives.distillation import Distillation
from regard.spec import require
from regard.text.tokenizer import Tokenizer
from regard.text.tokenizer_folder import has_tokenizer
from regard.training.base_model import check_setting, fingerprint_model, load_model, root_of
from regard.training.run import newest_checkpoint


@dataclass(frozen=True)
class TaughtObjective:
    """Distillation with its teacher, as a function of a model and a batch."""

    objective: Distillation
    teacher: nn.Module

    @property
    def scope(self) -> Literal["token", "batch"]:
        return self.objective.scope

    def __call__(self, model: nn.Module, batch: Batch) -> LossResult:
        return self.objective.distill(model, self.teacher, batch)


def with_teacher_path(objective: Objective) -> Objective:
    """The objective with the folder and the fingerprint of its teacher, so that a resumed run has the same one."""
    if not isinstance(objective, Distillation):
        return objective
    require(
        objective.teacher != "",
        "objective.teacher is not set; distillation needs the model to learn from: a run, a folder or a packaged name",
    )
    folder = newest_checkpoint(Path(objective.teacher)).absolute()
    return replace(
        objective, teacher=str(folder), teacher_weights=objective.teacher_weights or fingerprint_model(folder)
    )


def load_teacher(
    objective: Distillation, student: Model, tokenizer: Tokenizer, device: torch.device
) -> TaughtObjective:
    """Raises ValueError unless the teacher is a decoder with the vocabulary of the student."""
    folder = Path(objective.teacher)
    check_setting(f"objective.teacher={folder}", folder, objective.teacher_weights)
    teacher = load_model(folder).requires_grad_(False).to(device)
    spec = teacher.spec
    if not isinstance(spec, Decoder):
        raise ValueError(f"objective.teacher={objective.teacher} is no decoder; choose a model that predicts tokens")
    assert isinstance(student, Decoder), "checked by Distillation.check_model"
    if spec.vocab != student.vocab:
        raise ValueError(
            f"objective.teacher={objective.teacher} has a vocabulary of {spec.vocab} tokens, and the model one of "
            f"{student.vocab}; choose a teacher with the model's tokenizer"
        )
    if has_tokenizer(root_of(folder)):
        check_same_tokens(objective.teacher, Tokenizer.load(root_of(folder)), tokenizer)
    return TaughtObjective(objective, teacher)


def check_same_tokens(name: str, teacher: Tokenizer, student: Tokenizer) -> None:
    ours, theirs = (tokenizer.core.get_vocab(with_added_tokens=True) for tokenizer in (student, teacher))
    differing = sorted(token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token))
    if differing:
        token = differing[0]
        raise ValueError(
            f"objective.teacher={name} has another vocabulary: {token!r} is its token {theirs.get(token)}, and "
            f"{ours.get(token)} of the model; choose a teacher with the model's tokenizer"
        )
