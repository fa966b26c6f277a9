"""Events as English sentences, each in one of several wordings chosen at random."""

from random import Random

from regard.data.world.names import PRONOUN, article
from regard.data.world.simulation import Event

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


def write_sentences(events: list[Event], rng: Random) -> list[str]:
    """One sentence per event."""
    return [write_sentence(event, rng) for event in events]


def write_sentence(event: Event, rng: Random) -> str:
    wordings = WITH_MOTIVE if event.why else WORDINGS[event.verb]
    verb, who, what, where, why = event
    return rng.choice(wordings).format(
        who=who, what=what, where=where, why=why, a_what=article(what) if what else "", pronoun=PRONOUN.get(who, "")
    )
