"""The recorded residual stream: norms, large activations and predictions equal their definitions."""

import pytest
import torch

from regard.lens import ablate, attention_maps, logit_lens, record, score_heads
from regard.lens.inputs import check_predicts_next, part_for_text, residual_names
from regard.lens.recorded_attention import copy_with_shared_tensors
from regard.lens.recorded_residual import RecordedResidual
from tests.laws import MODELS, OTHERS, build, randomize_weights

IDS = [3, 1, 4, 1, 5, 9, 2, 6]


@pytest.fixture(scope="module")
def model():
    return build(MODELS["multi-head"], torch.float32)


def test_predictions_equal_the_logit_lens(model, monkeypatch) -> None:
    monkeypatch.setattr("regard.lens.recorded_residual.CHUNK", 1)  # one position at a time
    recorded = RecordedResidual(model, IDS)
    expected = [logits[0].log_softmax(-1) for logits in logit_lens(model, IDS).values()]
    last = expected[-1].argmax(-1, keepdim=True)
    for depth, logp in enumerate(expected):
        found = recorded.predictions(depth, slice(2, 7), top=3)
        torch.testing.assert_close(found.probabilities, logp.topk(3).values.exp()[2:7])
        assert found.top.tolist() == logp.topk(3).indices[2:7].tolist()
        torch.testing.assert_close(found.final, logp.gather(-1, last)[2:7, 0].exp())
        torch.testing.assert_close(found.entropy, -(logp.exp() * logp).sum(-1)[2:7])
        order = logp.argsort(-1, descending=True)
        assert found.rank.tolist() == [row.tolist().index(id) for row, id in zip(order, last[:, 0], strict=True)][2:7]
    assert recorded.predictions(len(expected) - 1).rank.count_nonzero() == 0


def test_norms_are_those_of_the_residual_stream(model) -> None:
    with torch.no_grad(), record(model, residual_names(model)) as recorded:
        model(torch.tensor([IDS]))
    expected = torch.stack([x[0].norm(dim=-1) for x in recorded.values()])
    torch.testing.assert_close(RecordedResidual(model, IDS).norms(), expected)


def test_a_planted_massive_activation_is_found(model) -> None:
    copy = copy_with_shared_tensors(model)

    def plant(module, inputs, output):
        x, losses = output
        change = torch.zeros_like(x)
        change[0, 2, 5] = -1e6
        return x + change, losses

    copy.get_submodule("stack.blocks.0").register_forward_hook(plant)
    recorded = RecordedResidual(copy, IDS)
    first, *others = recorded.largest(4)
    assert (
        (first.position, first.channel, first.massive) == (2, 5, True)
        and first.name != "stack.input"
        and first.value < -9e5
    )
    assert len({(a.position, a.channel) for a in others}) == 3 and not any(a.massive for a in others)
    assert not any(a.massive for a in RecordedResidual(model, IDS).largest())


def test_a_copy_does_not_stop_the_compiled_code_of_other_threads(model) -> None:
    import torch._dynamo.eval_frame as dynamo

    stances = set()

    def run(model) -> set[str]:
        """The stances of torch.compile while each of these functions runs the model."""
        stances.clear()
        handle = model.stack.blocks[0].register_forward_hook(lambda *_: stances.add(dynamo._stance.stance))
        attention_maps(model, IDS)
        score_heads(model, vocab=16, length=4, sequences=1)
        with record(model, "stack.input"), torch.no_grad():
            model(torch.tensor([IDS]))
        with ablate(model, layers=[1]), torch.no_grad():
            model(torch.tensor([IDS]))
        handle.remove()
        return stances

    assert run(copy_with_shared_tensors(model)) == {"default"}
    assert run(model) == {"force_eager"}


@pytest.fixture(scope="module")
def translator():
    model = OTHERS["encoder-decoder"].build(seed=0).eval()
    randomize_weights(model, seed=1)
    return model


def test_the_target_of_an_encoder_decoder_has_a_logit_lens(translator) -> None:
    source, target = IDS, [1, 2, 3]
    recorded = RecordedResidual(translator, (source, target), "target")
    with torch.no_grad():
        expected = translator(torch.tensor([source]), torch.tensor([target]))[0].softmax(-1)
    found = recorded.predictions(len(recorded.streams) - 1)
    torch.testing.assert_close(found.probabilities[:, 0], expected.amax(-1))
    encoder = RecordedResidual(translator, (source, target), "source")
    assert encoder.norms().shape == (len(translator.spec.source.blocks) + 1, len(source))
    with pytest.raises(ValueError, match="no head for tokens"):
        encoder.predictions(0)


def test_models_that_read_no_ids_or_predict_no_token_say_so() -> None:
    with pytest.raises(ValueError, match="reads patches, not text"):
        part_for_text(OTHERS["encoder of images"].build(seed=0))
    with pytest.raises(ValueError, match="predicts no next token"):
        check_predicts_next(OTHERS["encoder"].build(seed=0))
    images = OTHERS["interleaved images"].build(seed=0)
    assert part_for_text(images) is images.get_submodule("decoder")
