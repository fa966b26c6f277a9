"""The English of the simulated world: names of people, places and things, and events as sentences.

Places are used after "in the", things after "the". All names are distinct, so that a name in a story is unambiguous.
Each event becomes one sentence, in one of several wordings chosen at random; `read_sentence` is the inverse.
"""

import re
from functools import cache
from random import Random
from typing import NamedTuple

SHE = (
    "Anna", "Beth", "Clara", "Daisy", "Emma", "Fiona", "Grace", "Hana", "Iris", "Julia", "Kate", "Lena",
    "Mary", "Nora", "Olga", "Paula", "Rosa", "Sara",
)  # fmt: skip
HE = (
    "Adam", "Ben", "Carl", "David", "Eric", "Frank", "George", "Hugo", "Ivan", "Jack", "Leo", "Max",
    "Noah", "Oscar", "Peter", "Ravi", "Sam", "Tom",
)  # fmt: skip
PEOPLE = SHE + HE
PRONOUN = dict.fromkeys(SHE, "she") | dict.fromkeys(HE, "he")

INDOORS = (
    "kitchen", "bathroom", "bedroom", "hallway", "cellar", "attic", "office", "library", "school", "bakery",
    "barn", "garage", "workshop", "museum", "theatre", "studio", "tower", "pantry",
)  # fmt: skip
OUTDOORS = ("garden", "park", "forest", "market", "harbour", "courtyard", "meadow", "orchard", "field", "valley")
PLACES = INDOORS + OUTDOORS

FOOD = ("apple", "pear", "cake", "lemon", "banana", "plum", "carrot", "orange")
TOOLS = (
    "ball", "book", "cup", "key", "hat", "coin", "doll", "drum", "rope", "map", "pen", "letter", "candle", "brush",
    "spoon", "plate", "ring", "scarf", "kite", "flute", "clock", "hammer", "mirror", "shell", "ticket", "umbrella",
    "towel", "blanket",
)  # fmt: skip
THINGS = FOOD + TOOLS
CONTAINERS = ("box", "basket", "bag", "crate", "sack", "bucket", "suitcase", "jar", "pot", "barrel")

FEELINGS = ("hungry", "tired", "bored", "sad", "cold", "curious", "lonely", "restless")
NUMBERS = ("none", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")

WORDINGS = {
    "be": ("{who} is in the {where}.", "{who} was in the {where}.", "{who} starts in the {where}."),
    "lie": ("There is {a_what} in the {where}.", "The {what} is in the {where}.", "The {what} lies in the {where}."),
    "move": (
        "{who} went to the {where}.",
        "{who} walked to the {where}.",
        "{who} ran to the {where}.",
        "{who} moved to the {where}.",
    ),
    "take": ("{who} took the {what}.", "{who} picked up the {what}.", "{who} grabbed the {what}."),
    "drop": ("{who} dropped the {what}.", "{who} put down the {what}.", "{who} left the {what} there."),
    "give": (
        "{who} gave the {what} to {where}.",
        "{who} handed the {what} to {where}.",
        "{who} passed the {what} to {where}.",
    ),
    "put": ("{who} put the {what} into the {where}.", "{who} hid the {what} in the {where}."),
    "pull": ("{who} took the {what} out of the {where}.", "{who} removed the {what} from the {where}."),
    "rain": ("It began to rain.", "Rain started to fall."),
    "clear": ("The rain stopped.", "It stopped raining."),
    "dry": ("{who} dried off.", "{who} became dry again."),
    "light": ("{who} turned on the lamp in the {where}.", "{who} lit the lamp in the {where}."),
    "darken": ("{who} turned off the lamp in the {where}.", "{who} put out the lamp in the {where}."),
    "feel": ("{who} was {what}.", "{who} felt {what}."),
    "eat": ("{who} ate the {what}.", "Hungry, {who} ate the {what}."),
}
WITH_MOTIVE = ("Being {why}, {who} went to the {where}.", "{who} went to the {where} because {pronoun} was {why}.")


class Event(NamedTuple):
    verb: str
    who: str = ""
    what: str = ""
    where: str = ""  # a place; the receiver of a gift; the container put into or taken from
    why: str = ""  # the feeling that caused a move


def with_article(noun: str) -> str:
    """The noun with its indefinite article: a ball, an apple."""
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


def write_sentences(events: list[Event], rng: Random) -> list[str]:
    """One sentence per event."""
    return [write_sentence(event, rng) for event in events]


def write_sentence(event: Event, rng: Random) -> str:
    return fill_wording(event, rng.choice(wordings_of(event)))


def wordings_of(event: Event) -> tuple[str, ...]:
    return WITH_MOTIVE if event.why else WORDINGS[event.verb]


def fill_wording(event: Event, wording: str) -> str:
    verb, who, what, where, why = event
    return wording.format(
        who=who,
        what=what,
        where=where,
        why=why,
        a_what=with_article(what) if what else "",
        pronoun=PRONOUN.get(who, ""),
    )


def read_sentence(sentence: str) -> tuple[Event, int]:
    """The event of a sentence and the index of its wording."""
    for verb, wording, pattern in _patterns():
        if match := pattern.fullmatch(sentence):
            fields = match.groupdict()
            fields.pop("pronoun", None)
            return Event(verb, **fields), wording
    raise ValueError(f"{sentence!r} is no sentence of the world; write it as in regard.data.world.english.WORDINGS")


@cache
def _patterns() -> list[tuple[str, int, re.Pattern[str]]]:
    """(verb, index of the wording, regular expression) of all wordings; at most one matches a sentence."""
    wordings = [(verb, number, text) for verb in WORDINGS for number, text in enumerate(WORDINGS[verb])]
    wordings += [("move", number, text) for number, text in enumerate(WITH_MOTIVE)]
    return [(verb, number, re.compile(_as_pattern(text))) for verb, number, text in wordings]


def _as_pattern(wording: str) -> str:
    text = wording.replace("{a_what}", "an? {what}").replace(".", r"\.")
    return re.sub(r"{(\w+)}", r"(?P<\1>\\w+)", text)
