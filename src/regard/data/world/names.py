"""The names of people, places and things in the simulated world.

Places are used after "in the", things after "the". All names are distinct, so that a name in a story is unambiguous.
"""

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


def article(noun: str) -> str:
    """The noun with its indefinite article: a ball, an apple."""
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"
