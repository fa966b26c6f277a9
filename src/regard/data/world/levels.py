"""Levels of difficulty: the numbers of people, things and events, and the actions and questions that occur.

Level 1 is retrieval of the latest state: people move, take and give things. Level 2 adds dropping, containers, counting
and who is with whom; level 3 weather, lamps, feelings and the order of events; level 4 has longer stories, and
containers that are carried with their contents.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Level:
    people: tuple[int, int]  # minimum and maximum, as in all pairs here
    places: tuple[int, int]
    things: tuple[int, int]
    containers: tuple[int, int]
    events: tuple[int, int]  # after the first sentences, which place all people and things
    hands: int  # the number of things that one person can carry
    questions: int
    actions: dict[str, int]  # relative frequencies
    kinds: tuple[str, ...]  # kinds of question


LEVELS = {
    1: Level(
        people=(3, 4), places=(4, 5), things=(1, 2), containers=(0, 0), events=(1, 5), hands=1, questions=10,
        actions={"move": 4, "take": 4, "give": 2},
        kinds=("where", "who has", "what has", "where thing"),
    ),
    2: Level(
        people=(3, 3), places=(4, 4), things=(3, 4), containers=(1, 1), events=(4, 8), hands=4, questions=10,
        actions={"move": 4, "take": 4, "give": 3, "drop": 1, "put": 3, "pull": 1},
        kinds=("where", "who has", "what has", "where thing", "is in", "inside", "how many", "how many people", "with"),
    ),
    3: Level(
        people=(3, 4), places=(4, 5), things=(3, 4), containers=(1, 1), events=(8, 16), hands=4, questions=12,
        actions={
            "move": 4, "take": 4, "give": 3, "drop": 1, "put": 2, "pull": 1,
            "rain": 1, "clear": 1, "dry": 1, "light": 1, "darken": 1, "feel": 2, "follow feeling": 3, "eat": 3,
        },
        kinds=(
            "where", "who has", "what has", "where thing", "is in", "inside", "how many", "how many people", "with",
            "before", "after", "wet", "why wet", "bright", "feels", "why went",
        ),
    ),
    4: Level(
        people=(4, 6), places=(5, 7), things=(4, 6), containers=(1, 2), events=(16, 32), hands=6, questions=16,
        actions={
            "move": 6, "take": 4, "give": 3, "drop": 1, "put": 3, "pull": 1, "lift": 2,
            "rain": 1, "clear": 1, "dry": 1, "light": 1, "darken": 1, "feel": 2, "follow feeling": 3, "eat": 3,
        },
        kinds=(
            "where", "who has", "what has", "where thing", "is in", "inside", "how many", "how many people", "with",
            "before", "after", "wet", "why wet", "bright", "feels", "why went",
        ),
    ),
}  # fmt: skip
