"""Sinusoids stored in half precision: regard computes them exactly, `transformers` uses the rounded values."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from regard.checkpoint import load
from tests.families.cases import VOCAB, encoder_decoders, encoders
from tests.families.pairs import LIMIT, make_pair
from tests.laws import error

CASES = {"roformer": encoders.CASES["RoFormerModel, 0"], "pegasus": encoder_decoders.CASES["pegasus: scaled"]}


def their_output(model: Any, ids: Tensor) -> Tensor:
    out = model(ids, decoder_input_ids=ids) if model.config.is_encoder_decoder else model(ids)
    return out.logits if "logits" in out else out.last_hidden_state


@pytest.mark.parametrize("model_type", CASES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.no_grad()
def test_logits_differ_from_transformers_only_by_rounded_sinusoids(
    model_type: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    pair = make_pair(CASES[model_type], tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    tables = [name for name in stored if name.endswith("embed_positions.weight")]
    save_file(
        stored | {name: stored[name].to(dtype) for name in tables}, tmp_path / "model.safetensors", {"format": "pt"}
    )
    ids = torch.randint(3, VOCAB, (2, 20), generator=torch.Generator().manual_seed(5))
    ours, theirs = load(tmp_path), type(pair.theirs).from_pretrained(tmp_path, dtype=torch.float32).eval()
    found = ours(ids, ids) if model_type == "pegasus" else ours(ids)
    assert LIMIT < error(found, their_output(theirs, ids)) < 3 * torch.finfo(dtype).eps
    for name in tables:
        theirs.get_parameter(name).copy_(stored[name])
    assert error(found, their_output(theirs, ids)) <= LIMIT
