"""An independent oracle: it answers a question from the question's text and the list of events.

The simulation updates a state with every event. The oracle keeps no state and searches backward for the last relevant
event, so the two share neither code nor method.
"""

import re

from regard.data.world import Event
from regard.data.world.english import CONTAINERS, NUMBERS, OUTDOORS, PEOPLE, PLACES, THINGS

MOVING_VERBS = ("lie", "take", "drop", "give", "put", "pull", "eat")


def last_index(events: list[Event], *verbs: str, **fields: str) -> int:
    """The index of the last event with one of the verbs and these fields; -1 if there is none."""
    for index in reversed(range(len(events))):
        event = events[index]
        if event.verb in verbs and all(getattr(event, name) == value for name, value in fields.items()):
            return index
    return -1


def person_place(events: list[Event], person: str) -> str:
    return events[last_index(events, "be", "move", who=person)].where


def holder(events: list[Event], thing: str) -> str:
    """The person, container or place that directly holds the thing; empty if it was eaten."""
    index = last_index(events, *MOVING_VERBS, what=thing)
    event = events[index]
    if event.verb in ("take", "pull"):
        return event.who
    if event.verb == "drop":
        return person_place(events[:index], event.who)
    return "" if event.verb == "eat" else event.where


def thing_place(events: list[Event], thing: str) -> str:
    owner = holder(events, thing)
    if owner in PEOPLE:
        return person_place(events, owner)
    return thing_place(events, owner) if owner in CONTAINERS else owner


def contents(events: list[Event], owner: str) -> list[str]:
    """The things that the owner holds, ordered by the last event that moved each."""
    things = {event.what for event in events if event.verb in MOVING_VERBS}
    return sorted(
        (thing for thing in things if holder(events, thing) == owner),
        key=lambda thing: last_index(events, *MOVING_VERBS, what=thing),
    )


def people(events: list[Event]) -> list[str]:
    return [event.who for event in events if event.verb == "be"]


def is_wet(events: list[Event], person: str) -> bool:
    """Whether the person was outdoors in the rain since they last dried off."""
    for end in range(len(events), 0, -1):
        past = events[:end]
        raining = last_index(past, "rain") > last_index(past, "clear")
        if last_index(past, "be", "move", who=person) < 0:
            return False
        if raining and person_place(past, person) in OUTDOORS:
            return True
        if past[-1].verb == "dry" and past[-1].who == person:
            return False
    return False


def feeling(events: list[Event], person: str) -> str:
    for event in reversed(events):
        if event.who == person and (event.verb == "eat" or event.why):
            return ""
        if event.who == person and event.verb == "feel":
            return event.what
    return ""


def visited_places(events: list[Event], person: str) -> list[str]:
    return [event.where for event in events if event.verb in ("be", "move") and event.who == person]


def enumeration(names: list[str]) -> str:
    if not names:
        return "nothing"
    names = [f"the {name}" for name in names]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def answer(question: str, events: list[Event]) -> str:
    def match_groups(pattern: str) -> tuple[str, ...]:
        match = re.fullmatch(pattern, question)
        return match.groups() if match else ()

    def yes_or_no(condition: bool) -> str:
        return "yes" if condition else "no"

    if names := match_groups(r"Where is (the )?(\w+)\?"):
        return f"the {thing_place(events, names[1]) if names[0] else person_place(events, names[1])}"
    if names := match_groups(r"Who has the (\w+)\?"):
        return holder(events, names[0]) if holder(events, names[0]) in PEOPLE else "nobody"
    if names := match_groups(r"What does (\w+) have\?"):
        return enumeration(contents(events, names[0]))
    if names := match_groups(r"What is in the (\w+)\?"):
        return enumeration(contents(events, names[0]))
    if names := match_groups(r"How many things does (\w+) have\?"):
        return NUMBERS[len(contents(events, names[0]))]
    if names := match_groups(r"How many people are in the (\w+)\?"):
        return NUMBERS[sum(person_place(events, person) == names[0] for person in people(events))]
    if names := match_groups(r"Is (\w+) in the (\w+)\?"):
        return yes_or_no(person_place(events, names[0]) == names[1])
    if names := match_groups(r"Is the (\w+) in the (\w+)\?"):
        return yes_or_no(thing_place(events, names[0]) == names[1])
    if names := match_groups(r"Does (\w+) have the (\w+)\?"):
        return yes_or_no(holder(events, names[1]) == names[0])
    if names := match_groups(r"Who is with (\w+)\?"):
        place = person_place(events, names[0])
        others = [who for who in people(events) if who != names[0] and person_place(events, who) == place]
        return " ".join(others) or "nobody"
    if names := match_groups(r"Where was (\w+) before the (\w+)\?"):
        path = visited_places(events, names[0])
        return f"the {path[path.index(names[1]) - 1]}"
    if names := match_groups(r"Where did (\w+) go after the (\w+)\?"):
        path = visited_places(events, names[0])
        return f"the {path[path.index(names[1]) + 1]}"
    if names := match_groups(r"Is (\w+) wet\?"):
        return yes_or_no(is_wet(events, names[0]))
    if names := match_groups(r"Why is (\w+) wet\?"):
        return "because of the rain" if is_wet(events, names[0]) else "not wet"
    if names := match_groups(r"Is the lamp in the (\w+) on\?"):
        return yes_or_no(last_index(events, "light", where=names[0]) > last_index(events, "darken", where=names[0]))
    if names := match_groups(r"Is (\w+) (\w+)\?"):
        return yes_or_no(feeling(events, names[0]) == names[1])
    if names := match_groups(r"Why did (\w+) go to the (\w+)\?"):
        return f"because {names[0]} was {events[last_index(events, 'move', who=names[0], where=names[1])].why}"
    raise AssertionError(f"the oracle does not know the question {question!r}")


def mentioned_names(text: str) -> set[str]:
    return set(re.findall(r"\w+", text)) & {*PEOPLE, *PLACES, *THINGS, *CONTAINERS}
