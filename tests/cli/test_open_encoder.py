"""`regard serve` with encoders: embeddings, or the scores of a cross-encoder."""

import json
from pathlib import Path

import pytest
import torch

import regard
from regard.kernels.attention.mask import Full
from regard.language_model import LanguageModel
from regard.models.encoder import Encoder
from regard.models.heads import Classification, Head, MaskedLM
from regard.models.stack import Repeat
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.feedforward import SwiGLU
from regard.parts.input import Tokens
from regard.server.served_model import ServedModel
from regard.text.train import byte
from tests.cli.conftest import regard as run
from tests.server.server_process import save_tiny


def save_encoder(folder: Path, head: Head | None) -> Path:
    block = Block((Sublayer(Attention(heads=2, mask=Full())), Sublayer(SwiGLU(16))))
    spec = Encoder(Tokens(261), 16, (Repeat((block,), 2),), head=head, context=50)
    regard.save(LanguageModel(spec.build(seed=0), byte()), folder)
    return folder


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[ServedModel]:
    """The models of the servers that are started."""
    calls: list[ServedModel] = []
    monkeypatch.setattr("regard.server.run_server.serve", lambda models, *_, **__: calls.extend(models))
    return calls


def test_an_encoder_without_a_head_embeds(tmp_path: Path, served: list) -> None:
    folder = save_encoder(tmp_path / "encoder", None)
    assert run("serve", folder).exit_code == 0
    encoder = served[0].encoder
    assert served[0].engine is None and encoder.score is None and encoder.context == 50
    torch.testing.assert_close(encoder.embed(["Mira"]), regard.load(folder).embed(["Mira"]))


def test_a_head_with_one_output_scores_pairs(tmp_path: Path, served: list) -> None:
    folder = save_encoder(tmp_path / "encoder", Classification(1, pool="mean"))
    result = run("serve", folder, "--context", "40")
    assert result.exit_code == 0
    encoder = served[0].encoder
    assert encoder.embed is None and encoder.context == 40 and "40 tokens  (--context)" in result.stderr
    pairs = [("where", "in the garden"), ("where", "x")]
    values = torch.tensor([prediction.value for prediction in regard.load(folder).classify(pairs)])
    torch.testing.assert_close(torch.tensor(encoder.score(pairs)), values.sigmoid())


def test_a_context_is_for_the_models_that_generate(tmp_path: Path, served: list) -> None:
    encoder, decoder = save_encoder(tmp_path / "encoder", None), save_tiny(tmp_path / "tiny")
    for context in (40, 64):  # less and more than the encoder's
        result = run("serve", decoder, encoder, "--context", context, "--rows", 1)
        assert result.exit_code == 0, result.exception
        generator, reader = served[-2:]
        assert (generator.capacity, reader.capacity) == (context, 50)
        assert "50 tokens  (the model's; --context is for models that generate text)" in result.stderr
        assert result.stderr.index("loading tiny …") < result.stderr.index("loading encoder …")
    refused = run("serve", f"a={decoder}", f"b={encoder}", "--context", 5000)
    assert str(refused.exception).startswith("a: context=5000 exceeds the model's context of 1024 tokens")
    alone = run("serve", encoder, "--context", 5000)
    assert str(alone.exception).startswith("context=5000 exceeds the model's context of 50 tokens; choose at most 50")


def test_other_heads_are_refused(tmp_path: Path, served: list) -> None:
    for head in (MaskedLM(), Classification(3)):
        folder = save_encoder(tmp_path / head.kind, head)
        result = run("serve", folder)
        assert result.exit_code != 0 and "regard predict" in str(result.exception)
    assert not served


def test_the_lens_reads_an_encoder(tmp_path: Path) -> None:
    folder = save_encoder(tmp_path / "encoder", None)
    maps = json.loads(run("lens", folder, "--text", "Mira", "--json").stdout)["maps"]
    assert [(entry["layer"], entry["head"]) for entry in maps] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert all(sum(row) == pytest.approx(1, abs=1e-5) and min(row) > 0 for entry in maps for row in entry["weights"])
    assert "is an encoder; --states" in str(run("lens", folder, "-t", "Mira", "--states").exception)
    assert "(1, 2, 4, 4)" in run("lens", "names", folder, "*.pattern", "-t", "Mira").stdout
