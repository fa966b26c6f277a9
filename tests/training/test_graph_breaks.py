"""torch.compile traces the forward of a training step as one graph: documents are packed, losses are collected.

The models in `INTERRUPTED` have graph breaks, only at functions decorated with `outside_graphs`: S4 and S4D split
packed rows into documents, whose number is known only at run time, and torch.compile would unroll the fused operations
of RNN, GRU and LSTM into one operation per token.
"""

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from regard.layout import TokenLayout
from regard.models.base import Model
from regard.models.decoder import Decoder
from regard.models.encoder import Encoder
from regard.models.encoder_decoder import EncoderDecoder
from regard.models.outputs import materialize
from regard.models.stack import without_repeats
from regard.parts.input import Tokens
from tests.laws import MODELS, OTHERS, random_ids

LENGTH = 16
INTERRUPTED = {
    "tied layers", "s4", "s4d", "s4d, bilinear, no gate, then attention", "rnn, gru",
    "rnn with relu, gru with reset before", "lstm, wide, then attention", "shared block",
    "seq2seq", "seq2seq, additive, bidirectional", "seq2seq, general",
}  # fmt: skip
TESTED = ("s4d", "rnn, gru", "lstm, wide, then attention")  # of INTERRUPTED: tracing after graph breaks is slow
# torch.compile raises UserError: the links between its blocks are drawn as a tensor and read as a list.
BIGBIRD = "encoder, bigbird"


def takes_tokens(spec: Model) -> bool:
    first = spec.source if isinstance(spec, EncoderDecoder) else spec
    return isinstance(first, Decoder) or isinstance(first, Encoder) and isinstance(first.input, Tokens)


# Repeated layers would only be traced again.
SPECS = {name: without_repeats(spec) for name, spec in (MODELS | OTHERS).items() if takes_tokens(spec)}


def logits_of(spec: Model, model: nn.Module) -> torch.Tensor:
    """Of two documents per row; encoders get unpacked rows."""
    torch.manual_seed(0)
    tokens = random_ids(2, LENGTH)
    positions = torch.cat([torch.arange(6), torch.arange(LENGTH - 6)]).expand(2, -1)
    segments = torch.cat([torch.zeros(6), torch.ones(LENGTH - 6)]).long().expand(2, -1)
    if isinstance(spec, Decoder):
        outputs = model(tokens, TokenLayout(positions, segments), outputs=True)
    elif isinstance(spec, Encoder):
        outputs = model(tokens, outputs=True)
    else:
        outputs = model(random_ids(2, 9), tokens, outputs=True)
    return materialize(outputs.logits)


def logits_and_gradients(spec: Model, model: nn.Module, forward: nn.Module) -> list[torch.Tensor]:
    model.zero_grad()
    logits = logits_of(spec, forward)
    logits.square().mean().backward()
    return [logits, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")  # of masks, which are constants
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch, after a graph break
@pytest.mark.parametrize("name", [*(name for name in SPECS if name not in INTERRUPTED | {BIGBIRD}), *TESTED])
def test_the_forward_of_training_is_one_graph(name: str) -> None:
    torch._dynamo.reset()
    counters.clear()
    model = SPECS[name].build(0).train()
    compiled = torch.compile(model, backend="eager", fullgraph=name not in INTERRUPTED)
    eager_results = logits_and_gradients(SPECS[name], model, model)
    for eager, result in zip(eager_results, logits_and_gradients(SPECS[name], model, compiled), strict=True):
        torch.testing.assert_close(result, eager)  # on ARM, compiled GELUs have another formula (kernels/gelu.py)
    breaks = counters["graph_break"]
    assert (len(breaks) > 0) == (name in INTERRUPTED)
    assert all("torch.compiler.disable" in reason for reason in breaks), breaks


def test_every_exception_is_a_model() -> None:
    assert set(SPECS) >= INTERRUPTED | {BIGBIRD}
