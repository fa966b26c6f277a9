"""A register of people: facts, documents that state them, and questions with answers, for retrieval.

    ## Clara Halden

    She works as a carpenter. Clara plays the cello. Her house is in Osterbach. …

    Which instrument does Clara Halden play?        the cello
    Who plays the cello and keeps a goose?          Clara Halden

Facts are drawn at random, so no model knows them before it reads the register. People of held-out registers have other
surnames than those of training. First names and surnames recur, so a person is found only by both.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import product
from random import Random
from typing import NamedTuple

from regard.data.world.english import HE, PRONOUN, SHE

SURNAME_PARTS = (
    ("Hal", "Vel", "Ber", "Mor", "Sten", "Lind", "Tor", "Wal", "Kel", "Ros", "Fen", "Gar", "Nor", "Ash", "Dal", "Win"),
    ("den", "berg", "mark", "ström", "ley", "ton", "vik", "man", "by", "sen", "gard", "holm"),
)
VILLAGE_PARTS = ("Oster", "Wester", "Nieder", "Lang", "Hoch", "Alten"), ("bach", "feld", "hagen", "tal", "dorf")
SURNAMES = tuple(start + end for start, end in product(*SURNAME_PARTS))
VILLAGES = tuple(start + end for start, end in product(*VILLAGE_PARTS))
POSSESSIVE = {"she": "her", "he": "his"}
TRADES = (
    "carpenter", "teacher", "painter", "doctor", "miller", "tailor", "gardener", "plumber", "weaver", "lawyer",
    "printer", "sailor", "dentist", "porter", "potter", "butcher",
)  # fmt: skip
INSTRUMENTS = (
    "the cello", "the trumpet", "the harp", "the violin", "the organ", "the oboe", "the banjo", "the tuba",
    "the guitar", "the clarinet", "the mandolin", "the piano",
)  # fmt: skip
ANIMALS = (
    "goose", "pony", "goat", "parrot", "rabbit", "donkey", "tortoise", "hen", "sheep", "cat", "canary", "hedgehog",
)  # fmt: skip
DISHES = (
    "onion soup", "fried trout", "potato salad", "mushroom pie", "bean stew", "roast duck", "rice pudding",
    "pumpkin bread", "fish cakes", "lentil curry", "cheese noodles", "cherry tart",
)  # fmt: skip
COLOURS = ("red", "blue", "green", "yellow", "white", "brown", "grey", "orange", "purple", "black")
MONTHS = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November",
    "December",
)  # fmt: skip
EVENINGS = ("chess", "knitting", "astronomy", "poetry", "rowing", "fencing", "carving", "singing", "running", "puzzles")


class Attribute(NamedTuple):
    """What a fact is about. `first`: the person's first name; `she` and `her`: the pronouns; `name`: the full name."""

    values: tuple[str, ...]
    sentences: tuple[str, ...]
    questions: tuple[str, ...]
    clause: str = ""  # after "Who", in a question about two facts


ATTRIBUTES = {
    "home": Attribute(
        VILLAGES,
        ("{first} lives in {value}.", "{her} house is in {value}.", "{she} has a home in {value}."),
        ("Where does {name} live?", "In which village is the house of {name}?", "What is the village of {name}?"),
        "lives in {value}",
    ),
    "trade": Attribute(
        TRADES,
        ("{she} works as a {value}.", "{first} is a {value}.", "{first} earns a living as a {value}."),
        ("What is the trade of {name}?", "What does {name} do for a living?", "What is the job of {name}?"),
        "works as a {value}",
    ),
    "instrument": Attribute(
        INSTRUMENTS,
        ("{first} plays {value}.", "{she} practises {value}.", "{she} can play {value}."),
        ("Which instrument does {name} play?", "What does {name} play?", "What kind of music does {name} make?"),
        "plays {value}",
    ),
    "animal": Attribute(
        ANIMALS,
        ("{first} keeps a {value}.", "{she} has a {value} as a pet.", "{her} pet is a {value}."),
        ("Which animal does {name} keep?", "What is the pet of {name}?", "What kind of pet does {name} have?"),
        "keeps a {value}",
    ),
    "dish": Attribute(
        DISHES,
        ("{first} likes {value} best.", "{her} favourite dish is {value}.", "{she} loves to eat {value}."),
        ("What does {name} like to eat?", "What is the favourite dish of {name}?", "Which food does {name} love?"),
        "likes {value} best",
    ),
    "door": Attribute(
        COLOURS,
        ("{her} front door is {value}.", "The door of {first} is {value}.", "{she} painted the front door {value}."),
        ("Which colour is the door of {name}?", "What colour is the front door of {name}?"),
        "has a {value} front door",
    ),
    "birthday": Attribute(
        MONTHS,
        ("{first} was born in {value}.", "{her} birthday is in {value}.", "{she} celebrates a birthday in {value}."),
        ("When is the birthday of {name}?", "In which month was {name} born?"),
        "was born in {value}",
    ),
    "evenings": Attribute(
        EVENINGS,
        ("{first} spends the evenings with {value}.", "{her} hobby is {value}.", "{she} is fond of {value}."),
        ("How does {name} spend the evenings?", "What is the hobby of {name}?", "What is {name} fond of?"),
        "spends the evenings with {value}",
    ),
}  # fmt: skip
FACTS = 5  # of each person
UNKNOWN = "The sources do not say."


@dataclass(frozen=True)
class Person:
    name: str
    facts: tuple[tuple[str, str], ...]  # attribute and value, in the order of the sentences
    sentences: tuple[str, ...]

    @property
    def text(self) -> str:
        return " ".join(self.sentences)

    @property
    def section(self) -> str:
        """As a section of a Markdown document."""
        return f"## {self.name}\n\n{self.text}\n"

    def value(self, attribute: str) -> str | None:
        return dict(self.facts).get(attribute)


class RegisterQuestion(NamedTuple):
    text: str
    answer: str
    person: int  # whose section answers it


def register(seed: int, people: int, split: str = "train") -> list[Person]:
    """Different people with random facts."""
    rng = Random(f"register/{split}/{seed}")
    surnames = [name for name in SURNAMES if split_of_surname(name) == split]
    if not 1 <= people <= len(surnames) * len(PRONOUN):
        raise ValueError(f"people={people} is not between 1 and {len(surnames) * len(PRONOUN)}, the number of names")
    few = rng.sample(surnames, min(len(surnames), max(2, people // 4)))  # so that names recur
    names = [(first, last) for last in few for first in SHE + HE]
    return [draw_person(first, last, rng) for first, last in rng.sample(names, people)]


def split_of_surname(name: str) -> str:
    return "held-out" if blake2b(name.encode(), digest_size=1).digest()[0] < 64 else "train"


def draw_person(first: str, last: str, rng: Random) -> Person:
    facts = tuple((name, rng.choice(ATTRIBUTES[name].values)) for name in rng.sample(list(ATTRIBUTES), FACTS))
    pronoun = PRONOUN[first]
    sentences = []
    for name, value in facts:
        wording = rng.choice(ATTRIBUTES[name].sentences)
        sentence = wording.format(first=first, value=value, she=pronoun, her=POSSESSIVE[pronoun])
        sentences.append(sentence[0].upper() + sentence[1:])
    return Person(f"{first} {last}", facts, tuple(sentences))


def title(part: int) -> str:
    return f"Register, part {part}"


def file_name(part: int) -> str:
    return f"register-{part:03}.md"


def document(people: Sequence[Person], title: str) -> str:
    """A Markdown document with a section per person."""
    return "\n".join([f"# {title}\n", *(person.section for person in people)])


def question_about(people: Sequence[Person], index: int, rng: Random) -> RegisterQuestion:
    """A question by name about one fact of a person."""
    person = people[index]
    attribute, value = rng.choice(person.facts)
    return RegisterQuestion(rng.choice(ATTRIBUTES[attribute].questions).format(name=person.name), value, index)


def question_who(people: Sequence[Person], index: int, rng: Random) -> RegisterQuestion | None:
    """A question whose answer is the name of the person: the only one with these two facts. None if there is none."""
    pairs = [(a, b) for a in people[index].facts for b in people[index].facts if a[0] < b[0]]
    for pair in rng.sample(pairs, len(pairs)):
        if sum(set(pair) <= {*person.facts} for person in people) == 1:
            clauses = [ATTRIBUTES[attribute].clause.format(value=value) for attribute, value in pair]
            return RegisterQuestion(f"Who {' and '.join(clauses)}?", people[index].name, index)
    return None


def unanswered_question(people: Sequence[Person], index: int, rng: Random) -> str:
    """A question about a fact of a person that the register does not have."""
    missing = [name for name in ATTRIBUTES if people[index].value(name) is None]
    return rng.choice(ATTRIBUTES[rng.choice(missing)].questions).format(name=people[index].name)


def draw_question(people: Sequence[Person], rng: Random) -> RegisterQuestion:
    """A question about a random person; one in five has a name as its answer."""
    index = rng.randrange(len(people))
    return (question_who(people, index, rng) if rng.random() < 0.2 else None) or question_about(people, index, rng)
