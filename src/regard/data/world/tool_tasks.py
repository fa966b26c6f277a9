"""Tasks of the world that need tools, with traces of their solutions.

    arithmetic    What is 347 times 58?                           calculator
    look-up       Where is the ball? What does the ball cost?     sql, on a database of this world
    both          What is 12 times the price of the ball?         sql, then calculator

Every world has its own facts, which only its database holds. The split of a look-up is that of its world; a task of
`arithmetic` is held out if a hash of its numbers says so. Messages have the form of models whose template has no tools
(regard/text/generic_tools.py). One example in four has no tools and gives the answer at once, so that a model also
learns what it can do without them.
"""

import sqlite3
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from regard.data.world import draw_worlds
from regard.data.world.facts import remaining_things
from regard.data.world.simulation import World
from regard.text.generic_tools import with_generic_tools

TABLES = ("CREATE TABLE people(name TEXT, place TEXT)", "CREATE TABLE things(name TEXT, place TEXT, price INTEGER)")
LARGEST_PRICE = 99
OPERATORS = {"plus": "+", "minus": "-", "times": "*"}
SolvingCall = tuple[str, str]  # the name of a tool, and its only argument


class Facts(NamedTuple):
    """What the database of a world holds."""

    people: tuple[tuple[str, str], ...]  # name, place
    things: tuple[tuple[str, str, int], ...]  # name, place, price

    def write(self, path: Path) -> None:
        """As a new SQLite file."""
        connection = sqlite3.connect(path)
        with connection:
            for statement in TABLES:
                connection.execute(statement)
            connection.executemany("INSERT INTO people VALUES (?, ?)", self.people)
            connection.executemany("INSERT INTO things VALUES (?, ?, ?)", self.things)
        connection.close()


class ToolTask(NamedTuple):
    kind: str
    question: str
    answer: str
    calls: tuple[SolvingCall, ...]  # that solve it
    results: tuple[str, ...]  # of the calls
    facts: Facts


def tool_task(seed: int, level: int, split: str) -> ToolTask:
    world, rng = next(each for each in draw_worlds(seed, level, split) if remaining_things(each[0]))
    facts = Facts(
        tuple((person, world.at[person]) for person in world.people),
        tuple((thing, world.place(thing), rng.randint(2, LARGEST_PRICE)) for thing in remaining_things(world)),
    )
    kind = rng.choice(list(KINDS))
    question, calls, results, answer = KINDS[kind](world, facts, rng, split)
    return ToolTask(kind, question, answer, calls, results, facts)


TaskParts = tuple[str, tuple[SolvingCall, ...], tuple[str, ...], str]  # question, calls, results, answer


def arithmetic(world: World, facts: Facts, rng: Random, split: str) -> TaskParts:
    while True:
        word = rng.choice(list(OPERATORS))
        a, b = sorted((number(rng), number(rng)), reverse=True)
        if is_held_out(a, word, b) == (split == "held-out"):
            break
    value = str({"plus": a + b, "minus": a - b, "times": a * b}[word])
    wording = rng.choice(("What is {} {} {}?", "How much is {} {} {}?", "Compute {} {} {}."))
    return wording.format(a, word, b), (calculation(f"{a} {OPERATORS[word]} {b}"),), (value,), value


def number(rng: Random) -> int:
    """Of two to four digits, equally often."""
    digits = rng.randint(2, 4)
    return rng.randrange(10 ** (digits - 1), 10**digits)


def is_held_out(a: int, word: str, b: int) -> bool:
    """One of eight."""
    return blake2b(f"{a} {word} {b}".encode(), digest_size=1).digest()[0] < 32


def place_of_person(world: World, facts: Facts, rng: Random, split: str) -> TaskParts:
    name, place = rng.choice(facts.people)
    return f"Where is {name}?", (selection("place", "people", name),), (f"place\n{place}",), f"the {place}"


def place_of_thing(world: World, facts: Facts, rng: Random, split: str) -> TaskParts:
    name, place, _ = rng.choice(facts.things)
    return f"Where is the {name}?", (selection("place", "things", name),), (f"place\n{place}",), f"the {place}"


def price(world: World, facts: Facts, rng: Random, split: str) -> TaskParts:
    name, _, value = rng.choice(facts.things)
    wording = rng.choice(("What does the {} cost?", "How much is the {}?"))
    return wording.format(name), (selection("price", "things", name),), (f"price\n{value}",), str(value)


def total(world: World, facts: Facts, rng: Random, split: str) -> TaskParts:
    name, _, value = rng.choice(facts.things)
    count = rng.randint(2, 99)
    calls = (selection("price", "things", name), calculation(f"{count} * {value}"))
    results = (f"price\n{value}", str(count * value))
    return f"What is {count} times the price of the {name}?", calls, results, results[1]


KINDS: dict[str, Callable[[World, Facts, Random, str], TaskParts]] = {
    "arithmetic": arithmetic,
    "place of a person": place_of_person,
    "place of a thing": place_of_thing,
    "price": price,
    "total": total,
}


def calculation(expression: str) -> SolvingCall:
    return "calculator", expression


def selection(column: str, table: str, name: str) -> SolvingCall:
    return "sql", f"SELECT {column} FROM {table} WHERE name = '{name}'"


ARGUMENTS = {"calculator": "expression", "sql": "query"}
DESCRIPTIONS = {  # those of the tools in regard/agents, which this package does not import; a test compares them
    "calculator": (
        "Evaluates an arithmetic expression.",
        "Numbers with + - * / // % ** ( ), and abs, round, min, max, sqrt, exp, log, log10, sin, cos, tan, floor, ceil",
    ),
    "sql": (f"Queries a database. Tables: {'; '.join(TABLES)}", "One SELECT statement of SQLite"),
}


def described_tool(name: str) -> dict[str, Any]:
    """In OpenAI's format."""
    (description, argument), key = DESCRIPTIONS[name], ARGUMENTS[name]
    schema = {
        "type": "object", "properties": {key: {"type": "string", "description": argument}}, "required": [key],
        "additionalProperties": False,
    }  # fmt: skip
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


def tool_trace(seed: int, level: int, split: str) -> dict[str, Any]:
    """A conversation: a question, calls with their results, and the answer; one in four is without tools."""
    task = tool_task(seed, level, split)
    messages: list[dict[str, Any]] = [{"role": "user", "content": task.question}]
    answer = {"role": "assistant", "content": task.answer}
    if Random(f"tools/{level}/{seed}").random() < 0.25:
        return {"messages": [*messages, answer]}
    for (name, argument), result in zip(task.calls, task.results, strict=True):
        function = {"name": name, "arguments": {ARGUMENTS[name]: argument}}
        messages += [
            {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]},
            {"role": "tool", "content": result},
        ]
    return {"messages": with_generic_tools([*messages, answer], [described_tool(name) for name in DESCRIPTIONS])}
