"""A gap is filled from both sides; the 80/10/10 mix keeps predictions from relying on a symbol that never occurs later.

Encoders of one size predict 15 % of the tokens of stories of the small world. One attends to both sides; the other two
attend to one side only: to the left with a causal mask, to the right with the same mask on reversed rows. A fourth
attends to both sides, and all its chosen tokens become [MASK]: 100/0/0 instead of 80 % [MASK], 10 % random tokens and
10 % kept. Measured on held-out stories: the loss of the chosen tokens, all of them masked; on stories without [MASK],
the accuracy of predicting each token where it stands; and after fine-tuning on few labelled passages, whose last event
has to be named, the accuracy on others.

Devlin et al. 2018.
"""

# ledger: tr.mlm.why

from dataclasses import replace
from functools import partial
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from regard.data.batch import Batch
from regard.data.world import stories
from regard.data.world.tasks import event_kind
from regard.kernels.attention.mask import Causal, Full
from regard.labs.experiment import Bench, Check, Findings, Plot
from regard.labs.fit import accuracy, fit, generator
from regard.labs.tasks import whole_rows
from regard.models.encoder import Encoder, EncoderModule
from regard.models.heads import Classification, MaskedLM
from regard.models.stack import Repeat
from regard.objectives.classification import classification
from regard.objectives.masked import MaskedTokens, masked
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.feedforward import SwiGLU
from regard.parts.input import Tokens
from regard.parts.norm import LayerNorm
from regard.parts.position.rope import Rope
from regard.text.tokenizer import Tokenizer
from regard.text.train import bpe

VOCAB, WIDTH, ROW, PASSAGE = 768, 64, 64, 40  # PASSAGE: the largest number of tokens of a labelled passage
MIX, ALWAYS = MaskedTokens(), MaskedTokens(mask=1.0, random=0.0)
ENCODERS = {"both": MIX, "left": MIX, "right": MIX, "both, 100/0/0": ALWAYS}
KINDS = ("move", "take", "drop", "give", "put", "pull", "be", "lie")


def run(bench: Bench) -> Findings:
    steps, rows = bench.training(1200, 2), bench.setting(16, 2)
    texts = {split: [story.text for story in islice(stories(2, split), bench.setting(count, 20))]
             for split, count in (("train", 3000), ("held-out", 300))}  # fmt: skip
    tokenizer = bpe(texts["train"], VOCAB, MIX.special_tokens)
    train, held_out = (torch.tensor(tokenizer.encode("\n".join(split))) for split in texts.values())
    labelled, unseen = (passages(tokenizer, bench.seed, *part) for part in (("train", bench.setting(128, 8)),
                        ("held-out", bench.setting(512, 8))))  # fmt: skip
    rows_of = {}
    for name, objective in ENCODERS.items():
        torch.manual_seed(bench.seed)
        model, reverse = spec_of(name).build(), name == "right"
        make_batch = partial(
            masked_rows, ids=train, objective=objective, tokenizer=tokenizer, rows=rows, reverse=reverse
        )
        fit(bench, name, model, make_batch, steps, objective=masked)
        test = masked_rows(generator(0), held_out, ALWAYS, tokenizer, bench.setting(128, 2), reverse)
        with torch.no_grad():
            loss, count, _ = masked(model, test)
        unmasked = whole_rows(test.targets, test.targets, torch.ones(test.targets.shape))
        rows_of[name] = {"loss": (loss / count).item(), "without [MASK]": accuracy(model, unmasked)}
        if name.startswith("both"):
            rows_of[name]["fine-tuned"] = fine_tuned(bench, name, model, labelled, unseen)
    table = [
        {"encoder": name} | {key: values.get(key, "") for key in rows_of["both"]} for name, values in rows_of.items()
    ]
    loss = {name: values["loss"] for name, values in rows_of.items()}
    mix, always = rows_of["both"], rows_of["both, 100/0/0"]
    checks = [
        *(Check(f"attending to both sides has a lower loss than to the {side} only",
                f"{loss['both']:.3f} and {loss[side]:.3f}", loss["both"] < loss[side]) for side in ("left", "right")),
        Check("without [MASK] in the input the mix predicts more tokens correctly than 100/0/0, by 0.05 or more",
              f"{mix['without [MASK]']:.3f} and {always['without [MASK]']:.3f}",
              mix["without [MASK]"] >= always["without [MASK]"] + 0.05),
        Check("after fine-tuning the mix is more accurate than 100/0/0",
              f"{mix['fine-tuned']:.3f} and {always['fine-tuned']:.3f}", mix["fine-tuned"] > always["fine-tuned"]),
    ]  # fmt: skip
    pair = {"80/10/10": mix, "100/0/0": always}
    measures = ("without [MASK]", "fine-tuned")
    bars = {name: [(i, values[key]) for i, key in enumerate(measures)] for name, values in pair.items()}
    plots = [
        Plot("", "nats per masked token", {"": list(enumerate(loss.values()))}, "held-out stories", groups=tuple(loss)),
        Plot("", "accuracy", bars, groups=measures),
    ]  # fmt: skip
    return Findings(table, checks, plots, f"Each encoder was trained on {steps * rows * ROW:,} tokens.")


def spec_of(name: str) -> Encoder:
    mask = Full() if name.startswith("both") else Causal()
    block = Block((Sublayer(Attention(4, mask=mask, position=Rope())), Sublayer(SwiGLU(2 * WIDTH))))
    return Encoder(Tokens(VOCAB), WIDTH, (Repeat((block,), 2),), norm=LayerNorm(), head=MaskedLM())


def masked_rows(
    rng: torch.Generator, ids: Tensor, objective: MaskedTokens, tokenizer: Tokenizer, rows: int, reverse: bool = False
) -> Batch:
    """Rows that start at random positions, in which some tokens are chosen; `reverse`: from the last token on."""
    starts = torch.randint(len(ids) - ROW, (rows, 1), generator=rng)
    window = ids[starts + torch.arange(ROW)].flatten().numpy()
    seed = int(torch.randint(2**31, (1,), generator=rng))
    item = objective.masked_item(window, np.arange(len(window)), tokenizer, np.random.default_rng(seed))
    parts = (torch.from_numpy(item[name]).view(rows, ROW) for name in ("tokens", "targets", "weights"))
    return whole_rows(*(part.flip(1) if reverse else part for part in parts))


def passages(tokenizer: Tokenizer, seed: int, split: str, count: int) -> Batch:
    """Passages of two sentences and the index of the last event's kind in KINDS."""
    drawn = (event_kind((seed << 20) + index, 2, split) for index in range(100 * count))
    examples = list(islice((e for e in drawn if e["label"] in KINDS), count))
    ids = [tokenizer.encode(e["text"])[:PASSAGE] for e in examples]
    tokens = torch.tensor([row + [0] * (PASSAGE - len(row)) for row in ids])
    valid = torch.tensor([[True] * len(row) + [False] * (PASSAGE - len(row)) for row in ids])
    return Batch(tokens=tokens, valid=valid, labels=torch.tensor([KINDS.index(e["label"]) for e in examples]))


def fine_tuned(bench: Bench, name: str, pretrained: EncoderModule, labelled: Batch, unseen: Batch) -> float:
    """The accuracy on unseen passages after training on the labelled ones."""
    torch.manual_seed(bench.seed)
    model = replace(pretrained.spec, head=Classification(len(KINDS), "mean")).build()
    body = {key: tensor for key, tensor in pretrained.state_dict().items() if not key.startswith("head.")}
    model.load_state_dict(body, strict=False)

    def draw(rng: torch.Generator) -> Batch:
        chosen = torch.randint(len(labelled.labels), (16,), generator=rng)
        return Batch(**{key: tensor[chosen] for key, tensor in labelled.items()})

    fit(bench, f"{name}, fine-tuned", model, draw, bench.training(100, 2), 1e-3, objective=classification)
    with torch.no_grad():
        _, count, metrics = classification(model, unseen)
    return (metrics["accuracy"] / count).item()
