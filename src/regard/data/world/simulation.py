"""The simulation: a state, the events that change it, and the actions that are possible in it.

All locations are in one dictionary, `at`: a person is at a place; a thing is at a place, a person or a container; a
container is at a place or a person. Following `at` from a thing leads to its place. The contents of a person or
container are ordered by arrival, because `at` keeps insertion order.
"""

from random import Random

from regard.data.world.english import CONTAINERS, FEELINGS, FOOD, OUTDOORS, PEOPLE, PLACES, THINGS, Event
from regard.data.world.levels import Level


class World:
    """The state after all events so far; only `apply` changes it."""

    def __init__(self, people: list[str], places: list[str], things: list[str], containers: list[str]):
        self.people, self.places, self.things, self.containers = people, places, things, containers
        self.at: dict[str, str] = {}
        self.visited: dict[str, list[str]] = {person: [] for person in people}
        self.motives: dict[tuple[str, str], str] = {}  # (person, place) -> the feeling that caused the move
        self.feeling: dict[str, str] = {}
        self.wet: set[str] = set()
        self.lit: set[str] = set()
        self.raining = False
        self.events: list[Event] = []

    def place(self, name: str) -> str:
        while name in self.at:
            name = self.at[name]
        return name

    def contents(self, name: str) -> list[str]:
        return [inner for inner, outer in self.at.items() if outer == name]

    def company(self, place: str) -> list[str]:
        return [person for person in self.people if self.at[person] == place]

    def apply(self, event: Event) -> None:
        verb, who, what, where, why = event
        self.events.append(event)
        match verb:
            case "be" | "move":
                self._place_in(who, where)
                self.visited[who].append(where)
                self.motives.pop((who, where), None)
                if why:
                    self.motives[who, where] = why
                    del self.feeling[who]
            case "lie" | "put":
                self._place_in(what, where)
            case "take" | "pull":
                self._place_in(what, who)
            case "drop":
                self._place_in(what, self.at[who])
            case "give":
                self._place_in(what, where)
            case "eat":
                del self.at[what], self.feeling[who]
            case "feel":
                self.feeling[who] = what
            case "light":
                self.lit.add(where)
            case "darken":
                self.lit.discard(where)
            case "rain" | "clear":
                self.raining = verb == "rain"
            case "dry":
                self.wet.discard(who)
        if self.raining:
            self.wet.update(person for person in self.people if self.at[person] in OUTDOORS)

    def _place_in(self, inner: str, outer: str) -> None:
        self.at.pop(inner, None)  # inserted again, so that it is the last of its new contents
        self.at[inner] = outer


Options = list[Event]  # the events that an action allows in the current state


def move(world: World, hands: int) -> Options:
    return [Event("move", who, where=where) for who in world.people for where in world.places if where != world.at[who]]


def take(world: World, hands: int) -> Options:
    return _pick_up(world, hands, world.things)


def lift(world: World, hands: int) -> Options:
    return _pick_up(world, hands, world.containers)


def _pick_up(world: World, hands: int, things: list[str]) -> Options:
    free = [who for who in world.people if len(world.contents(who)) < hands]
    return [Event("take", who, what) for who in free for what in things if world.at.get(what) == world.at[who]]


def drop(world: World, hands: int) -> Options:
    return [Event("drop", who, what) for who in world.people for what in world.contents(who)]


def give(world: World, hands: int) -> Options:
    return [
        Event("give", who, what, other)
        for who in world.people
        for what in world.contents(who)
        for other in world.company(world.at[who])
        if other != who and len(world.contents(other)) < hands
    ]


def put(world: World, hands: int) -> Options:
    return [
        Event("put", who, what, container)
        for who in world.people
        for what in world.contents(who)
        for container in world.containers
        if what not in world.containers and _within_reach(world, who, container)
    ]


def pull(world: World, hands: int) -> Options:
    return [
        Event("pull", who, what, container)
        for who in world.people
        for container in world.containers
        if len(world.contents(who)) < hands and _within_reach(world, who, container)
        for what in world.contents(container)
    ]


def _within_reach(world: World, who: str, container: str) -> bool:
    return world.at[container] in (who, world.at[who])


def rain(world: World, hands: int) -> Options:
    return [] if world.raining else [Event("rain")]


def clear(world: World, hands: int) -> Options:
    return [Event("clear")] if world.raining else []


def dry(world: World, hands: int) -> Options:
    return [
        Event("dry", who)
        for who in world.people
        if who in world.wet and not (world.raining and world.at[who] in OUTDOORS)
    ]


def light(world: World, hands: int) -> Options:
    rooms = [(who, world.at[who]) for who in world.people if world.at[who] not in OUTDOORS]
    return [Event("light", who, where=room) for who, room in rooms if room not in world.lit]


def darken(world: World, hands: int) -> Options:
    return [Event("darken", who, where=world.at[who]) for who in world.people if world.at[who] in world.lit]


def feel(world: World, hands: int) -> Options:
    return [Event("feel", who, what) for who in world.people if who not in world.feeling for what in FEELINGS]


def follow_feeling(world: World, hands: int) -> Options:
    return [
        Event("move", who, where=where, why=why)
        for who, why in world.feeling.items()
        for where in world.places
        if why != "hungry" and where != world.at[who]
    ]


def eat(world: World, hands: int) -> Options:
    hungry = [who for who, feeling in world.feeling.items() if feeling == "hungry"]
    return [Event("eat", who, what) for who in hungry for what in world.contents(who) if what in FOOD]


ACTIONS = {
    "move": move, "take": take, "lift": lift, "drop": drop, "give": give, "put": put, "pull": pull, "rain": rain,
    "clear": clear, "dry": dry, "light": light, "darken": darken, "feel": feel, "follow feeling": follow_feeling,
    "eat": eat,
}  # fmt: skip


def simulate(level: Level, rng: Random) -> World:
    """A world in which people and things have been placed and a random number of events have happened."""
    world = World(
        rng.sample(PEOPLE, rng.randint(*level.people)),
        rng.sample(PLACES, rng.randint(*level.places)),
        rng.sample(THINGS, rng.randint(*level.things)),
        rng.sample(CONTAINERS, rng.randint(*level.containers)),
    )
    for person in world.people:
        world.apply(Event("be", person, where=rng.choice(world.places)))
    for thing in world.containers + world.things:
        world.apply(Event("lie", what=thing, where=rng.choice(world.places)))
    end = len(world.events) + rng.randint(*level.events)
    names, weights = list(level.actions), list(level.actions.values())
    while len(world.events) < end:
        options = ACTIONS[rng.choices(names, weights)[0]](world, level.hands)
        if options:
            world.apply(rng.choice(options))
    return world
