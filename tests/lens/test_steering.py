"""A steering vector is the difference of means, and steering equals a forward with the vector added."""

import pytest
import torch

from regard.lens import record, steer, steering_vector

NAME = "stack.blocks.1"


def test_the_vector_is_the_difference_of_mean_activations(make_model) -> None:
    model, texts = make_model(), [[1, 2, 3], [4, 5], [6, 7, 8, 9], [10]]
    found = []
    for ids in texts:
        with torch.no_grad(), record(model, NAME) as recorded:
            model(torch.tensor([ids]))
        found.append(recorded[NAME][0, -1])
    exact = (found[0] + found[1]) / 2 - (found[2] + found[3]) / 2
    assert torch.allclose(steering_vector(model, NAME, texts[:2], texts[2:]), exact, atol=1e-12)


def test_steering_adds_the_vector_at_the_positions(make_model, ids) -> None:
    model, vector = make_model(), torch.randn(16, generator=torch.Generator().manual_seed(0)).double()
    with torch.no_grad():
        hook = model.stack.blocks[1].register_forward_hook(lambda _, args, out: (out[0] + 2.5 * vector, *out[1:]))
        exact = model(ids)
        hook.remove()
        plain = model(ids)
        with steer(model, NAME, vector, scale=2.5):
            steered = model(ids)
        with steer(model, NAME, vector, positions=slice(-1, None)):
            last = model(ids)
    assert torch.equal(steered, exact) and not torch.allclose(steered, plain)
    assert torch.equal(last[:, :-1], plain[:, :-1]) and not torch.allclose(last[:, -1], plain[:, -1])


def test_bad_arguments_are_refused(make_model, ids) -> None:
    with pytest.raises(ValueError, match="at least one text"):
        steering_vector(make_model(), NAME, [[1]], [])
    model = make_model()
    with pytest.raises(ValueError, match=r"needs \(16,\)"), steer(model, NAME, torch.zeros(3)):
        model(ids)
