"""The vector of an ambiguous word depends on its sentence from layer 1 on, and tells its sense; its embedding does not.

SmolLM2 reads beginnings of sentences that end in a word with two senses: "She swam to the muddy bank". The vectors of
the word after every layer are classified: is a vector nearer to the mean of the other vectors of the same sense, or to
that of the other sense? And are its neighbours those of the sense: is it nearer to a word that means the same ("shore")
or to one that means the other ("lender"), each in other sentences of its own sense? All vectors of a layer have their
mean subtracted, and nearness is the cosine. Where the context follows the word, causal attention cannot use it. A model
with the same sizes and random weights shows what words in common would do without training.
"""

# ledger: attn.dynamic

from collections.abc import Sequence
from random import Random

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.labs.experiment import Bench, Check, Findings, Plot
from regard.labs.trained_model import EncodeText, load_trained
from regard.lens import record
from regard.models.decoder import DecoderModule

Sense = tuple[str, tuple[str, ...]]  # a word that means the same, and beginnings of sentences
WORDS: dict[str, tuple[Sense, Sense]] = {
    "bank": (
        ("shore", ("She swam to the muddy", "The boat drifted to the left", "Reeds grew along the river",
                   "The fisherman sat on the", "Frogs jumped into the water from the", "The ducks slept on the")),
        ("lender", ("He asked for a loan at the", "She opened an account at the", "The thief stole cash from the",
                    "My salary is paid by the", "The interest rate was set by the", "They owe money to the")),
    ),
    "bat": (
        ("owl", ("At dusk in the cave flew a", "On its wings through the night came a", "An animal that sleeps is the",
                 "Hanging from the roof of the cave was a", "The vet treated an injured", "Moths are eaten by the")),
        ("racket", ("He hit the ball with a", "In the last inning she swung the", "The player broke his wooden",
                    "The umpire checked the", "For his baseball team he bought a", "Cricket is played with a")),
    ),
    "spring": (
        ("summer", ("The flowers bloom in the", "The birds return every", "After a cold winter comes the",
                    "Farmers sow their seeds in the", "The snow melts in the", "The exams take place in the")),
        ("coil", ("The mattress has a broken", "He stretched the metal", "The clock is driven by a wound",
                  "The weight hangs on an elastic", "The machine needs a new steel", "The pen contains a tiny")),
    ),
    "match": (
        ("game", ("The team won the football", "The referee stopped the", "The fans watched the tennis",
                  "They scored late in the", "The players trained for the", "The stadium was full for the")),
        ("lighter", ("She lit the candle with a", "He struck a", "The fire was started with a",
                     "To light the stove he needed a", "The gas exploded because of a burning", "He was burned by a")),
    ),
    "mouse": (
        ("rat", ("The cat chased the", "In the barn lived a hungry", "The cheese was eaten by a",
                 "The owl caught a small", "The trap caught a grey", "The snake swallowed the")),
        ("keyboard", ("Click the button with the", "My computer came with a wireless", "He plugged in the USB",
                      "Move the cursor with the", "The laptop needs an external", "The gamer bought a new optical")),
    ),
    "plant": (
        ("flower", ("She watered the green", "In the garden grew a tall", "The leaves fell off the",
                    "Sunlight is needed by every", "The gardener bought a small", "Bees visited the")),
        ("factory", ("The workers went on strike at the", "Cars are made in the", "The company closed its steel",
                     "Electricity comes from the power", "The engineers built a chemical", "The manager runs a large")),
    ),
    "letter": (
        ("symbol", ("The alphabet begins with the first", "The word is spelled with a capital", "A vowel is a kind of",
                    "Type each digit and each", "The name ends with the same", "The code has one number and one")),
        ("email", ("The postman delivered a", "She wrote her friend a long", "He sealed the envelope with the",
                   "The lawyer sent us a", "I received in the mail a", "She signed and posted the")),
    ),
    "star": (
        ("planet", ("The telescope was pointed at a", "In the night sky shone a bright", "Astronomers discovered a new",
                    "The galaxy contains many a", "A supernova is an exploding", "The light took years from the")),
        ("actor", ("The movie made her a", "The fans asked for an autograph from the", "Hollywood loved the new",
                   "On the red carpet stood the famous", "The film has a young", "The director hired a")),
    ),
}  # fmt: skip
CHOSEN = 4  # beginnings per sense and seed


@torch.no_grad()
def run(bench: Bench) -> Findings:
    model, encode = load_trained(bench)
    torch.manual_seed(bench.seed)
    models = {"trained": model, "random weights": model.spec.build().eval()}
    words = dict(list(WORDS.items())[: bench.setting(len(WORDS), 2)])
    senses, neighbours = {}, {}
    for name, one in models.items():
        of_words = [word_scores(bench, one, encode, *item) for item in bench.each(name, words.items())]
        senses[name], neighbours[name] = (torch.stack(scores).mean(0) for scores in zip(*of_words, strict=True))
    shift = max(context_after(model, encode, word) for word in words)
    trained, others = senses["trained"], neighbours["trained"]
    best, best_of_others = int(trained.argmax()), int(others.argmax())
    untrained = float(senses["random weights"].max())
    checks = [
        Check("embedding: the vector of a word is the same in every sentence, so the sense is a guess (0.5)",
              f"accuracy {trained[0]:.2f}", abs(float(trained[0]) - 0.5) < 1e-6),
        Check("after layer 1 the sense is recognised above 0.6", f"{trained[1]:.2f}", float(trained[1]) > 0.6),
        Check("after some layer above 0.85", f"{trained[best]:.2f}, after layer {best}", float(trained[best]) > 0.85),
        Check("after some layer the word of the same sense is nearer than that of the other above 0.75",
              f"{others[best_of_others]:.2f}, after layer {best_of_others}", float(others[best_of_others]) > 0.75),
        Check("random weights recognise the sense less often than the best trained layer, by 0.15 or more",
              f"{untrained:.2f}", untrained <= float(trained[best]) - 0.15),
        Check("a context after the word changes no vector", f"by {shift:.0e} at most, relative", shift < 1e-4),
    ]  # fmt: skip
    table = [{"model": name, "layer": layer, "sense": float(score), "neighbour": float(neighbours[name][layer])}
             for name in models for layer, score in enumerate(senses[name])]  # fmt: skip
    plots = [Plot("layer", "accuracy", {name: list(enumerate(scores[name].tolist())) for name in models}, title)
             for title, scores in (("sense", senses), ("nearest word", neighbours))]  # fmt: skip
    return Findings(table, checks, plots, f"{len(words)} words, {CHOSEN} sentences per sense; guessing is 0.5.")


def word_scores(
    bench: Bench, model: DecoderModule, encode: EncodeText, word: str, both: tuple[Sense, Sense]
) -> tuple[Tensor, Tensor]:
    """Accuracies by layer (layers + 1,), the embedding first: of the sense, and of the nearest word."""
    rng = Random(bench.seed)
    drawn = [rng.sample(contexts, len(contexts)) for _, contexts in both]
    x = torch.stack([torch.stack([last_vector(model, encode, f"{text} {word}") for text in texts[:CHOSEN]])
                     for texts in drawn])  # fmt: skip  # (2, CHOSEN, layers + 1, D)
    same = torch.stack([torch.stack([last_vector(model, encode, f"{text} {other}") for text in texts[CHOSEN:]]).mean(0)
                        for (other, _), texts in zip(both, drawn, strict=True)])  # fmt: skip  # (2, layers + 1, D)
    centred = x - x.mean((0, 1))
    same = same - same.mean(0)
    sense, neighbour = [], []
    for i in range(2):
        for j in range(CHOSEN):
            rest = torch.cat([centred[i, :j], centred[i, j + 1 :]]).mean(0)  # (layers + 1, D)
            sense.append(nearer(centred[i, j], rest, centred[1 - i].mean(0)))
            neighbour.append(nearer(centred[i, j], same[i], same[1 - i]))
    return torch.stack(sense).mean(0), torch.stack(neighbour).mean(0)


def nearer(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """(…, D) -> (…,) 1 where x is nearer to a, 0 where to b, and 0.5 where the difference is rounding."""
    difference = F.cosine_similarity(x, a, dim=-1) - F.cosine_similarity(x, b, dim=-1)
    same = x.norm(dim=-1) < 1e-5  # all vectors of the word are equal
    return torch.where(same, 0.5, (difference > 0).float())


def last_vector(model: DecoderModule, encode: EncodeText, text: str) -> Tensor:
    """(layers + 1, D) the residual stream of the last token: its embedding, then after every layer."""
    return vectors(model, encode(text), -1)


def vectors(model: DecoderModule, ids: Sequence[int], position: int) -> Tensor:
    with record(model, ["stack.input", *(f"stack.blocks.{i}" for i in range(len(model.stack.blocks)))]) as recorded:
        model(torch.tensor([ids]))
    return torch.stack([x[0, position] for x in recorded.values()])


def context_after(model: DecoderModule, encode: EncodeText, word: str) -> float:
    """How much the vectors of `The WORD` differ between the continuations ` by the river` and ` that lent us money`."""
    start = encode(f"The {word}")
    one, other = (vectors(model, [*start, *encode(end)], len(start) - 1)
                  for end in (" by the river", " that lent us money"))  # fmt: skip
    return float(((one - other).norm(dim=-1) / one.norm(dim=-1)).max())
