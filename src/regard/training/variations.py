"""The settings of a sweep's trials: every combination of listed values, or random samples of lists and ranges.

    train.lr=1e-3,3e-3        a list of values, written as in TOML
    train.lr=1e-4..1e-2:log   a range, sampled uniformly in the logarithm; without :log uniformly
    data.rows=4..32           whole numbers, because both ends are whole
    model.width=96..192:48    whole numbers with a step: the list 96,144,192

Values are kept as text, as on the command line. A sample depends on the seed and its own number only, so a sweep can be
extended by more trials without changing the earlier ones.
"""

import math
import random
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import product
from typing import TypeAlias

from regard.spec import SpecError, require

MAX_GRID = 10_000  # trials
Values: TypeAlias = Mapping[str, str]  # of one trial, by dotted names


@dataclass(frozen=True)
class ListedValues:
    values: tuple[str, ...]

    def draw(self, generator: random.Random) -> str:
        return generator.choice(self.values)


@dataclass(frozen=True)
class ValueRange:
    low: float
    high: float
    log: bool
    whole: bool  # whole numbers only

    def draw(self, generator: random.Random) -> str:
        if self.log:
            value = math.exp(generator.uniform(math.log(self.low), math.log(self.high)))
        else:
            value = generator.uniform(self.low, self.high)
        if not self.whole:
            return f"{value:.4g}"
        return str(round(value)) if self.log else str(generator.randint(int(self.low), int(self.high)))


def parse_variations(arguments: Iterable[str]) -> dict[str, ListedValues | ValueRange]:
    """The arguments of --vary by their dotted names."""
    variations: dict[str, ListedValues | ValueRange] = {}
    for argument in arguments:
        name, equals, text = argument.removeprefix("--").partition("=")
        require(bool(equals and name and text), f"--vary {argument}: write it as --vary train.lr=1e-3,3e-3")
        require(name not in variations, f"--vary {name} is given twice; list all values in one")
        values = stepped_values(name, text) or (None if ".." in text else tuple(split_values(name, text)))
        variations[name] = parse_range(name, text) if values is None else ListedValues(values)
    require(len(variations) > 0, "nothing is varied; add for example --vary train.lr=1e-3,3e-3")
    return variations


def stepped_values(name: str, text: str) -> tuple[str, ...] | None:
    """The values of LOW..HIGH:STEP; None if the text has another form."""
    form = re.fullmatch(r"(?P<low>[^:]+?)\.\.(?P<high>[^:]+):(?P<step>(?!log$).+)", text)
    if form is None:
        return None
    try:
        low, high, step = (int(form[part]) for part in ("low", "high", "step"))
    except ValueError:
        raise SpecError(
            f"--vary {name}={text}: a range is LOW..HIGH, LOW..HIGH:log, or LOW..HIGH:STEP with whole numbers, such as "
            "96..192:48"
        ) from None
    require(low < high and step > 0, f"--vary {name}={text}: LOW must be below HIGH, and STEP above 0")
    require(
        (high - low) % step == 0,
        f"--vary {name}={text}: steps of {step} from {low} do not meet {high}; end at {high - (high - low) % step}",
    )
    count = (high - low) // step + 1
    require(count <= MAX_GRID, f"--vary {name}={text}: these are {count:,} values; choose a larger step")
    return tuple(map(str, range(low, high + 1, step)))


def parse_range(name: str, text: str) -> ValueRange:
    form = re.fullmatch(r"(?P<low>[^:]+?)\.\.(?P<high>[^:]+)(?P<log>:log)?", text)
    try:
        low, high = (float(form[end]) for end in ("low", "high")) if form else (math.nan, math.nan)
    except ValueError:
        low = high = math.nan
    if form is None or not low < high:
        raise SpecError(f"--vary {name}={text}: a range is LOW..HIGH, LOW..HIGH:log or LOW..HIGH:STEP, LOW below HIGH")
    require(not form["log"] or low > 0, f"--vary {name}={text}: a logarithmic range starts above 0")
    return ValueRange(low, high, bool(form["log"]), all(re.fullmatch(r"[+-]?\d+", form[e]) for e in ("low", "high")))


def split_values(name: str, text: str) -> list[str]:
    """The values of a list, split at commas that are not inside brackets or quotes; repetitions are dropped."""
    parts, depth, quote = [""], 0, ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        depth += (character in "[{") - (character in "]}") if not quote else 0
        if character == "," and not depth and not quote:
            parts.append("")
        else:
            parts[-1] += character
    values = [part.strip() for part in parts]
    require(all(values), f"--vary {name}={text}: a value is empty; separate values by single commas")
    return list(dict.fromkeys(values))


def grid(variations: Mapping[str, ListedValues | ValueRange]) -> list[Values]:
    """Every combination of the listed values; the last name varies fastest."""
    lists = []
    for name, variation in variations.items():
        if isinstance(variation, ValueRange):
            raise SpecError(
                f"--vary {name} is a range; choose the number of random samples with --trials, or list values"
            )
        lists.append(variation.values)
    count = math.prod(map(len, lists))
    require(count <= MAX_GRID, f"these are {count:,} combinations; list fewer values, or sample them with --trials")
    return [dict(zip(variations, values, strict=True)) for values in product(*lists)]


def sample(variations: Mapping[str, ListedValues | ValueRange], trials: int, seed: int) -> list[Values]:
    """`trials` random settings; if all values are listed, no combination is repeated."""
    lists = [variation.values for variation in variations.values() if isinstance(variation, ListedValues)]
    if len(lists) == len(variations) and math.prod(map(len, lists)) <= MAX_GRID:
        combinations = grid(variations)
        random.Random(seed).shuffle(combinations)
        return combinations[:trials]
    settings = []
    for i in range(trials):
        generator = random.Random(f"{seed}, {i}")
        settings.append({name: variation.draw(generator) for name, variation in variations.items()})
    return settings
