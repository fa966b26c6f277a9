"""An invented second language, and the translation of the world's English sentences into it.

    English           Anna gave the cup to Beth.
    second language   Ukazik nigen zasule Zoleta.        Beth-to cup-object give-past-she Anna

The order is oblique, object, verb, subject. There are no articles. Nouns have a case (subject, object, in, to, from),
whose ending depends on the last letter of the stem. The verb has a tense and agrees with the subject, which follows it;
feelings agree with the subject too. Names have a capital letter, the beginning of a sentence has none.

The translation is a function of the English sentence. Wordings with the same meaning have the same translation, so the
other direction is no function; an English candidate is correct if its translation equals the given sentence.
"""

import re

from regard.data.world.english import HE, SHE, read_sentence

PEOPLE_STEMS = {
    "Anna": "Zoleta", "Beth": "Ukazi", "Clara": "Tokul", "Daisy": "Dalel", "Emma": "Zuvi", "Fiona": "Jafo",
    "Grace": "Firu", "Hana": "Fugom", "Iris": "Fabe", "Julia": "Jotom", "Kate": "Onifit", "Lena": "Hegal",
    "Mary": "Kulo", "Nora": "Vogok", "Olga": "Nupar", "Paula": "Udelos", "Rosa": "Upofa", "Sara": "Ubusiv",
    "Adam": "Hoke", "Ben": "Mekur", "Carl": "Ajufo", "David": "Netik", "Eric": "Opuka", "Frank": "Nelam",
    "George": "Hasot", "Hugo": "Hudir", "Ivan": "Pabu", "Jack": "Fosa", "Leo": "Rifom", "Max": "Atubu",
    "Noah": "Norov", "Oscar": "Bifol", "Peter": "Jujil", "Ravi": "Lukiv", "Sam": "Ronek", "Tom": "Lomut",
}  # fmt: skip
PLACE_STEMS = {
    "kitchen": "jidas", "bathroom": "zonek", "bedroom": "aruzi", "hallway": "disi", "cellar": "hozel",
    "attic": "medu", "office": "felo", "library": "juder", "school": "komed", "bakery": "borota", "barn": "galek",
    "garage": "ribi", "workshop": "ziviv", "museum": "fodet", "theatre": "jezom", "studio": "puku",
    "tower": "polem", "pantry": "ajevu", "garden": "budu", "park": "jakav", "forest": "onejo", "market": "ralo",
    "harbour": "hadep", "courtyard": "upisev", "meadow": "nevak", "orchard": "lulur", "field": "mikit",
    "valley": "aleger",
}  # fmt: skip
THING_STEMS = {
    "apple": "tavo", "pear": "lobar", "cake": "saru", "lemon": "fogal", "banana": "heka", "plum": "apadev",
    "carrot": "tovu", "orange": "saden", "ball": "solu", "book": "ratur", "cup": "nige", "key": "hiso",
    "hat": "lefi", "coin": "bides", "doll": "retu", "drum": "tujem", "rope": "guges", "map": "ruvum",
    "pen": "dokov", "letter": "dojo", "candle": "piba", "brush": "kotat", "spoon": "ramov", "plate": "dugon",
    "ring": "gavom", "scarf": "suhat", "kite": "zunu", "flute": "pusi", "clock": "neler", "hammer": "adanik",
    "mirror": "munam", "shell": "mijot", "ticket": "jefa", "umbrella": "zonon", "towel": "vipo", "blanket": "zifum",
    "box": "ziba", "basket": "porin", "bag": "sefo", "crate": "zupo", "sack": "omasi", "bucket": "luso",
    "suitcase": "kazil", "jar": "ukupak", "pot": "orabe", "barrel": "morok", "lamp": "hoju", "rain": "dosak",
}  # fmt: skip
FEELING_STEMS = {
    "hungry": "zubut", "tired": "gover", "bored": "terek", "sad": "pidos", "cold": "opekav", "curious": "digen",
    "lonely": "mujur", "restless": "nokiv",
}  # fmt: skip
VERB_STEMS = {
    "be": "tif", "start": "deh", "lie": "deb", "go": "mok", "walk": "dek", "run": "hasim", "take": "fup",
    "drop": "olaz", "leave": "kir", "give": "zas", "put": "togol", "hide": "mig", "remove": "hitus", "begin": "fil",
    "stop": "rinuv", "dry": "azof", "light": "kelol", "extinguish": "gedem", "eat": "rohen",
}  # fmt: skip
PARTICLES = {"there": "ojivu", "because": "mibu"}
NOUN_STEMS = PEOPLE_STEMS | PLACE_STEMS | THING_STEMS

CASES = {  # endings after a vowel and after a consonant
    "subject": ("", ""), "object": ("n", "an"), "in": ("l", "il"), "to": ("k", "ek"), "from": ("s", "us"),
}  # fmt: skip
TENSES = {"present": "am", "past": "ul"}
AGREEMENT = dict.fromkeys(SHE, "e") | dict.fromkeys(HE, "o")  # all other subjects: "i"

# One clause per English wording, in the order of `english.WORDINGS`; the key "motive" is `english.WITH_MOTIVE`.
# A word is a field of the event or an English stem, with its case or tense; the last word is the subject.
CLAUSES = {
    "be": ("where.in be.present who", "where.in be.past who", "where.in start.present who"),
    "lie": ("where.in lie.present what",) * 3,
    "move": ("where.to go.past who", "where.to walk.past who", "where.to run.past who", "where.to go.past who"),
    "take": ("what.object take.past who",) * 3,
    "drop": ("what.object drop.past who", "what.object drop.past who", "there what.object leave.past who"),
    "give": ("where.to what.object give.past who",) * 3,
    "put": ("where.to what.object put.past who", "where.in what.object hide.past who"),
    "pull": ("where.from what.object remove.past who",) * 2,
    "rain": ("begin.past rain",) * 2,
    "clear": ("stop.past rain",) * 2,
    "dry": ("dry.past who",) * 2,
    "light": ("where.in lamp.object light.past who",) * 2,
    "darken": ("where.in lamp.object extinguish.past who",) * 2,
    "feel": ("what be.past who",) * 2,
    "eat": ("what.object eat.past who", "hungry what.object eat.past who"),
    "motive": ("because why where.to go.past who",) * 2,
}


def translate(text: str) -> str:
    """The translation of one or more English sentences."""
    return " ".join(translate_sentence(sentence) for sentence in re.split(r"(?<=\.) ", text))


def translate_sentence(sentence: str) -> str:
    event, wording = read_sentence(sentence)
    clause = CLAUSES["motive" if event.why else event.verb][wording]
    words = [word.partition(".")[::2] for word in clause.split()]
    words = [(event._asdict().get(stem, stem), form) for stem, form in words]
    subject = words[-1][0]
    return " ".join(inflect(stem, form, subject, sentence) for stem, form in words) + "."


def inflect(stem: str, form: str, subject: str, sentence: str) -> str:
    """The word for an English stem, in this case or tense, in agreement with the subject."""
    agreement = AGREEMENT.get(subject, "i")
    if form in TENSES:
        return VERB_STEMS[stem] + TENSES[form] + agreement
    if stem in FEELING_STEMS:
        return FEELING_STEMS[stem] + agreement
    if stem in PARTICLES:
        return PARTICLES[stem]
    if stem not in NOUN_STEMS:
        raise ValueError(f"{stem!r} in {sentence!r} is no word of the world; see regard.data.world.english")
    noun = NOUN_STEMS[stem]
    return noun + CASES[form or "subject"][noun[-1] not in "aeiou"]
