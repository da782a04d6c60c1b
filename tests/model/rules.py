"""Rules of a machine, and the random choice among them: a seed stands for one run; pure.

In each run some rules come often and some not at all, so that runs differ more than their steps.
Rules `apart` come between the others, and are drawn for themselves: a run without any has the steps
that it would have if there were no such rules.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from random import Random
from typing import Any, TypeVar

Draw = Callable[[Random], object]
F = TypeVar("F", bound=Callable[..., None])

FACTORS = (0.0, 0.3, 1.0, 1.0, 3.0)
"""How much more or less often than usual a rule comes in one run."""
APART = (0.0, 0.0, 0.1, 0.3)
"""How many steps of rules `apart` come after each other step in one run, on average."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One kind of step."""

    name: str
    draws: Mapping[str, Draw]
    """Of its arguments."""
    when: Callable[[Any], object]
    """Whether a machine can make such a step now."""
    weight: float
    always: bool
    """Part of every run."""
    apart: bool


@dataclass(frozen=True, slots=True)
class Step:
    """A rule with its arguments."""

    rule: str
    arguments: Mapping[str, object]

    def __str__(self) -> str:
        arguments = ", ".join(f"{name}={value!r}" for name, value in self.arguments.items())
        return f"{self.rule}({arguments})"


def rule(
    when: Callable[[Any], object] = lambda _: True,
    *,
    weight: float = 1.0,
    always: bool = False,
    apart: bool = False,
    **draws: Draw,
) -> Callable[[F], F]:
    """Mark a method as a rule, possible `when` that is true of the machine."""

    def mark(method: F) -> F:
        method.__dict__["rule"] = Rule(method.__name__, draws, when, weight, always, apart)
        return method

    return mark


def rules_of(machine: type) -> dict[str, Rule]:
    """Return the rules of a class and of those that it inherits from, by name."""
    methods = (method for base in reversed(machine.__mro__) for method in vars(base).values())
    rules = (getattr(method, "rule", None) for method in methods)
    return {rule.name: rule for rule in rules if isinstance(rule, Rule)}


def random_steps(machine: object, seed: int, count: int) -> Iterator[Step]:
    """Yield steps that the machine can make; each is made before the next one is chosen."""
    rules = rules_of(type(machine)).values()
    random = Random(seed)  # noqa: S311 - no secret
    random_apart = Random(f"{seed} apart")  # noqa: S311
    share = random_apart.choice(APART)
    steps_apart = _steps_of(machine, random_apart, [rule for rule in rules if rule.apart])
    steps = _steps_of(machine, random, [rule for rule in rules if not rule.apart])
    for step in islice(steps, count):
        yield step
        if random_apart.random() < share:
            yield next(steps_apart)


def _steps_of(machine: object, random: Random, rules: Collection[Rule]) -> Iterator[Step]:
    weights = {
        rule.name: rule.weight * (random.choice(FACTORS) or (0.3 if rule.always else 0.0))
        for rule in rules
    }
    used = [rule for rule in rules if weights[rule.name]]
    while True:
        possible = [rule for rule in used if rule.when(machine)]
        (chosen,) = random.choices(possible, [weights[rule.name] for rule in possible])
        yield Step(chosen.name, {name: draw(random) for name, draw in chosen.draws.items()})


def any_of(*values: object) -> Draw:
    return lambda random: random.choice(values)


def several(draw: Draw, *, at_most: int) -> Draw:
    """Draw a tuple of one to `at_most` of what `draw` returns."""
    return lambda random: tuple(draw(random) for _ in range(random.randint(1, at_most)))


def together(*draws: Draw) -> Draw:
    """Draw a tuple of one of each."""
    return lambda random: tuple(draw(random) for draw in draws)
