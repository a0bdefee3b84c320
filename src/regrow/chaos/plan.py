"""The language of `regrow run --chaos`, and its parser.

A plan is a list of rules, separated by semicolons:

    kill rank=1 at=30s; stop rank=2 for=5s every=60s; mtbf=120s seed=7

A rule that begins with the name of a fault injects this fault, once (`at`) or repeatedly (`every`).
A rule with `mtbf` injects random faults with that mean time between two of them. `seed` chooses the
random numbers of the whole plan, so a plan injects the same faults in every run and on every node.

Times need a unit (ms, s, m, h), because a number without one is read differently by different
people. An error names the position of the word that is wrong.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

WORKER_FAULTS = frozenset({"raise", "hang", "slow", "gil", "segfault"})
"""Faults that a worker injects into itself, so the worker has to import regrow."""
HOST_FAULTS = frozenset({"fill", "cut", "delay"})
"""Faults of the host of a rank: they concern all ranks of the host."""
LINK_FAULTS = frozenset({"cut", "delay"})
"""Faults of the network of a host."""

_WHEN = frozenset({"rank", "at", "every", "times"})
_KEYS: Mapping[str, frozenset[str]] = {
    "kill": _WHEN,
    "stop": _WHEN | {"for"},
    "raise": _WHEN,
    "hang": _WHEN | {"for"},
    "slow": _WHEN | {"for", "by"},
    "gil": _WHEN | {"for"},
    "segfault": _WHEN,
    "fill": _WHEN | {"for", "path"},
    "cut": _WHEN | {"for"},
    "delay": _WHEN | {"for", "by"},
}
_NEEDED: Mapping[str, tuple[str, ...]] = {
    "fill": ("path", "for"),
    "cut": ("for",),
    "delay": ("by", "for"),
}
_OF_ITS_OWN = frozenset({"mtbf", "seed"})
_RANDOM_KEYS = frozenset({"mtbf", "seed", "faults", "rank", "for"})
_MAY_BE_RANDOM = ("kill", "stop", "raise", "hang", "slow", "gil", "segfault", "cut")
DEFAULT_RANDOM = ("kill", "stop", "raise")
"""Faults that a random rule draws from, unless it has `faults`: every job recovers from these."""
DEFAULT_FOR_S = {"stop": 5.0, "slow": 10.0, "cut": 5.0}
"""Seconds of a random fault without `for`. `hang` and `gil` last until the worker is ended."""
DEFAULT_SLOWDOWN = 4.0
"""A worker that is `slow` without `by` runs Python for a quarter of the time."""
LONGEST_S = 86_400.0
"""Longest time in a plan, in seconds (one day)."""
SHORTEST_GAP_S = 0.1
"""Shortest time between two faults of one rule, in seconds."""
_MOST_RULES = 100
_MOST_RANKS = 1 << 20
_MOST_SLOWDOWN = 1000.0
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_TIME = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h)")
_WORD = re.compile(r"[^\s;]+")


@dataclass(frozen=True, slots=True)
class Rule:
    """One fault, injected once or repeatedly."""

    fault: str
    rank: int | None = None
    """Global rank; None draws a rank for each injection."""
    at_s: float | None = None
    """Seconds to the first injection; None: `every_s`."""
    every_s: float | None = None
    """Seconds between two injections; None injects once."""
    times: int | None = None
    """Most injections; None repeats until the job ends."""
    for_s: float | None = None
    """Seconds that the fault lasts; None: until the worker ends."""
    slowdown: float = DEFAULT_SLOWDOWN
    """Of `slow`: how many times longer Python code takes."""
    latency_s: float = 0.0
    """Of `delay`: seconds that are added to each packet that leaves the host."""
    path: str = ""
    """Of `fill`: a folder on the file system to fill."""


@dataclass(frozen=True, slots=True)
class RandomFaults:
    """Random faults; the gaps between them are exponentially distributed."""

    mtbf_s: float
    """Mean seconds between two faults of the job."""
    faults: tuple[str, ...] = DEFAULT_RANDOM
    """Each fault is drawn from these, with equal probability."""
    rank: int | None = None
    for_s: float | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """All faults of a job."""

    rules: tuple[Rule | RandomFaults, ...]
    seed: int = 0

    @property
    def faults(self) -> frozenset[str]:
        """All faults that the plan may inject."""
        return frozenset(
            fault
            for rule in self.rules
            for fault in ((rule.fault,) if isinstance(rule, Rule) else rule.faults)
        )

    @property
    def paths(self) -> tuple[str, ...]:
        """The folders that `fill` fills."""
        return tuple(rule.path for rule in self.rules if isinstance(rule, Rule) and rule.path)


def parse(text: str, most_ranks: int | None = None) -> Plan:
    """Parse a plan.

    Args:
        text: the plan.
        most_ranks: the most ranks that the job may have, if known.

    Raises:
        ValueError: the text is no plan; the message names the position (from 1) and the word.
    """
    rules: list[Rule | RandomFaults] = []
    seed: int | None = None
    start = 0
    for part in text.split(";"):
        words = [_Word(m[0], start + m.start() + 1) for m in _WORD.finditer(part)]
        start += len(part) + 1
        if not words:
            continue
        if len(rules) == _MOST_RULES:
            raise words[0].wrong(f"a plan has at most {_MOST_RULES} rules")
        name = "" if "=" in words[0].text else words[0].text
        values = _values(name, words[1:] if name else words)
        if "seed" in values:
            if seed is not None:
                raise values["seed"].wrong("the plan has a seed already")
            seed = _whole(values["seed"], (1 << 63) - 1)
        if name:
            rules.append(_rule(words[0], values, most_ranks))
        elif "mtbf" in values:
            rules.append(_random(values, most_ranks))
        elif values.keys() != {"seed"}:
            raise words[0].wrong("a rule begins with a fault, or has mtbf=TIME")
    if not rules:
        raise ValueError("the plan has no fault; give for example 'kill rank=1 at=30s'")
    return Plan(tuple(rules), seed or 0)


@dataclass(frozen=True, slots=True)
class _Word:
    text: str
    position: int

    @property
    def value(self) -> str:
        return self.text.partition("=")[2]

    def wrong(self, why: str) -> ValueError:
        return ValueError(f"at character {self.position}, {self.text!r}: {why}")


def _values(fault: str, words: list[_Word]) -> dict[str, _Word]:
    """Return the words of a rule by their keys."""
    values: dict[str, _Word] = {}
    for word in words:
        key, equals, value = word.text.partition("=")
        if not equals or not value:
            raise word.wrong("not KEY=VALUE")
        allowed = _KEYS.get(fault, frozenset()) if fault else _RANDOM_KEYS
        if (not fault or fault in _KEYS) and key not in allowed:
            rule = fault or "a rule without a fault"
            why = f"{rule} takes {', '.join(sorted(allowed))}, not {key}"
            hint = f"; {key}= is a rule of its own: write a semicolon before it"
            raise word.wrong(why + hint if key in _OF_ITS_OWN else why)
        if key in values:
            raise word.wrong(f"{key} is given twice")
        values[key] = word
    return values


def _rule(first: _Word, values: dict[str, _Word], most_ranks: int | None) -> Rule:
    fault = first.text
    if fault not in _KEYS:
        raise first.wrong(f"not a fault; the faults are {', '.join(_KEYS)}")
    missing = [f"{key}=" for key in _NEEDED.get(fault, ()) if key not in values]
    if not values.keys() & {"at", "every"}:
        missing.append("at= (once) or every=")
    if missing:
        raise first.wrong(f"needs {', '.join(missing)}")
    if "times" in values and "every" not in values:
        raise values["times"].wrong("only with every=")
    by = values.get("by")
    return Rule(
        fault,
        rank=_rank(values.get("rank"), most_ranks),
        at_s=_time(values.get("at")),
        every_s=_time(values.get("every"), SHORTEST_GAP_S),
        times=_whole(values["times"], 1 << 31, least=1) if "times" in values else None,
        for_s=_time(values.get("for"), 0.001),
        slowdown=_factor(by) if by is not None and fault == "slow" else DEFAULT_SLOWDOWN,
        latency_s=(_time(by, 0.001) or 0.0) if fault == "delay" else 0.0,
        path=values["path"].value if "path" in values else "",
    )


def _random(values: dict[str, _Word], most_ranks: int | None) -> RandomFaults:
    mtbf = _time(values["mtbf"], SHORTEST_GAP_S)
    assert mtbf is not None
    faults: tuple[str, ...] = DEFAULT_RANDOM
    if "faults" in values:
        faults = tuple(values["faults"].value.split(","))
        for fault in faults:
            if fault not in _MAY_BE_RANDOM:
                raise values["faults"].wrong(f"{fault!r} is not one of {', '.join(_MAY_BE_RANDOM)}")
    rank = _rank(values.get("rank"), most_ranks)
    return RandomFaults(mtbf, faults, rank, _time(values.get("for"), 0.001))


def _rank(word: _Word | None, most_ranks: int | None) -> int | None:
    if word is None or word.value == "any":
        return None
    rank = _whole(word, _MOST_RANKS)
    if most_ranks is not None and rank >= most_ranks:
        raise word.wrong(f"the job has at most {most_ranks} ranks, numbered from 0")
    return rank


def _whole(word: _Word, most: int, least: int = 0) -> int:
    if not re.fullmatch(r"[0-9]{1,19}", word.value) or not least <= int(word.value) <= most:
        raise word.wrong(f"not a whole number from {least} to {most}")
    return int(word.value)


def _factor(word: _Word) -> float:
    try:
        value = float(word.value)
    except ValueError:
        value = math.nan
    if not 1.0 < value <= _MOST_SLOWDOWN:
        raise word.wrong(f"not a factor above 1 and up to {_MOST_SLOWDOWN:g}, such as 4")
    return value


def _time(word: _Word | None, least: float = 0.0) -> float | None:
    """Return seconds."""
    if word is None:
        return None
    found = _TIME.fullmatch(word.value)
    if found is None or len(word.value) > 20:
        raise word.wrong("not a time; give a number with a unit, such as 500ms, 30s, 5m or 1h")
    seconds = float(found[1]) * _UNITS[found[2]]
    if not least <= seconds <= LONGEST_S:
        raise word.wrong(f"not between {least:g} s and {LONGEST_S:g} s")
    return seconds
