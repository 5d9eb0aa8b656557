"""The demo's traffic: an endless, seeded stream of chat prompts in three domains, written for this project.

Like the traffic of a real product it repeats itself: questions come from few templates with varying parts.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

DOMAINS = ("math", "code", "support")

_NAMES = ("Ada", "Ben", "Cleo", "Finn", "Mia", "Otto")
_THINGS = ("apples", "books", "coins", "stamps")
_FUNCTIONS = (
    ("sum", "a list of numbers"),
    ("maximum", "a list of numbers"),
    ("length", "a string"),
    ("reverse", "a list"),
    ("average", "a list of numbers"),
    ("last element", "a list"),
)
_PRODUCTS = ("phone", "laptop", "printer", "router", "tablet")
_PROBLEMS = ("does not turn on", "is very slow", "shows an error", "does not connect to the network")


@dataclass(frozen=True)
class Prompt:
    """One chat request: `domain` is the tag it travels under."""

    domain: str
    text: str

    @property
    def messages(self) -> list[dict[str, str]]:
        """The request's `messages`."""
        return [{"role": "user", "content": self.text}]


def _math(r: random.Random) -> str:
    name, thing = r.choice(_NAMES), r.choice(_THINGS)
    a, b = r.randint(2, 40), r.randint(2, 40)
    return f"{name} has {a} {thing} and buys {b} more. How many {thing} does {name} have now? Show the steps."


def _code(r: random.Random) -> str:
    what, of = r.choice(_FUNCTIONS)
    name = r.choice(("compute", "get", "find"))
    return f"Write a Python function named {name}_{what.replace(' ', '_')} that returns the {what} of {of}."


def _support(r: random.Random) -> str:
    return f"My {r.choice(_PRODUCTS)} {r.choice(_PROBLEMS)}. What should I do? Answer in a numbered list."


_MAKERS = {"math": _math, "code": _code, "support": _support}


def prompts(seed: int, domains: tuple[str, ...] = DOMAINS) -> Iterator[Prompt]:
    """Endless prompts, the domains in turn; the same seed gives the same stream."""
    r = random.Random(seed)
    while True:
        for domain in domains:
            yield Prompt(domain, _MAKERS[domain](r))
