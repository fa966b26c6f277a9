"""Probes equal scikit-learn's logistic regression; control labels depend on the token id only."""

import numpy as np
import pytest
import torch

from regard.lens import control_labels, fit_probe


@pytest.mark.ledger("lens.probe")
@pytest.mark.parametrize("l2", [0.1, 1.0, 30.0])
def test_a_probe_equals_scikit_learn(l2: float) -> None:
    linear_model = pytest.importorskip("sklearn.linear_model", reason="scikit-learn is not installed")
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(200, 6, generator=generator) + 3
    labels = ((x - 3) @ torch.randn(6, 3, generator=generator) + torch.randn(200, 3, generator=generator)).argmax(-1)
    probe = fit_probe(x, labels, l2)
    reference = linear_model.LogisticRegression(C=1 / l2, tol=1e-10, max_iter=10_000).fit(x.double().numpy(), labels)
    assert np.abs(probe.weight.numpy() - reference.coef_).max() < 1e-4
    assert probe.accuracy(x, labels) == reference.score(x.double().numpy(), labels.numpy())


@pytest.mark.ledger("lens.probe")
def test_a_probe_finds_a_linear_property_and_no_control_task() -> None:
    generator = torch.Generator().manual_seed(0)
    table, ids = torch.randn(400, 16, generator=generator), torch.randint(400, (3000,), generator=generator)
    labels = (table[ids, 0] > 0).long()
    control = control_labels(ids, labels)
    assert torch.equal(control, control_labels(ids, labels)) and 0.4 < control.double().mean() < 0.6
    assert all(len(control[ids == id].unique()) == 1 for id in ids.unique().tolist())
    known = ids < 300  # the labels of other tokens are not seen in training
    accuracy, chance = (
        fit_probe(table[ids[known]], target[known]).accuracy(table[ids[~known]], target[~known])
        for target in (labels, control)
    )
    assert accuracy > 0.95 and chance < 0.65


def test_shapes_that_do_not_match_are_refused() -> None:
    with pytest.raises(ValueError, match="must be"):
        fit_probe(torch.zeros(3, 4), torch.zeros(4, dtype=torch.long))
