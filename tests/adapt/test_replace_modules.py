"""replace_modules: exactly the matching modules are replaced, each once, and replacements are not searched."""

import torch
from torch import nn

from regard.adapt import replace_modules


class Doubled(nn.Module):
    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return 2 * self.inner(x)


def is_linear(name: str, module: nn.Module) -> bool:
    return isinstance(module, nn.Linear)


def test_matching_modules_are_replaced_and_their_names_returned(make_model, ids):
    model = make_model()
    original = model(ids)
    names = replace_modules(model, lambda name, module: name == "head", lambda name, module: Doubled(module))
    assert names == ["head"]
    assert torch.equal(model(ids), 2 * original)
    assert model.head.inner.weight is model.embedding.weight


def test_modules_can_be_replaced_again(make_model):
    model = make_model()
    first = replace_modules(model, is_linear, lambda name, module: Doubled(module))
    assert len(first) == 2 * 7 + 1
    second = replace_modules(model, is_linear, lambda name, module: Doubled(module))
    assert second == [f"{name}.inner" for name in first]


def test_replaced_modules_are_not_searched():
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 2))
    assert replace_modules(model, lambda name, module: True, lambda name, module: nn.Identity()) == ["0", "1"]


def test_a_shared_module_stays_shared():
    shared = nn.Linear(2, 2)
    model = nn.Sequential(shared, nn.ReLU(), shared)
    assert replace_modules(model, is_linear, lambda name, module: Doubled(module)) == ["0", "2"]
    assert model[0] is model[2]


def test_eval_mode_is_kept():
    model = nn.Sequential(nn.Linear(2, 2)).eval()
    replace_modules(model, is_linear, lambda name, module: Doubled(module))
    assert not model[0].training
