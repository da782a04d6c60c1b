"""The life of a pod in time: which of its containers run at each moment."""

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

Container = TypeVar("Container")


def moments(
    containers: Iterable[Container], ends_first: Callable[[Container], bool]
) -> Iterator[tuple[Container, ...]]:
    """Start the containers in spec order as a kubelet does: it waits for init containers to end."""
    running: list[Container] = []
    for container in containers:
        running.append(container)
        yield tuple(running)
        if ends_first(container):
            running.pop()


def most_at_once(
    containers: Iterable[Container],
    ends_first: Callable[[Container], bool],
    amount: Callable[[Container], int],
) -> int:
    """Return the largest sum of an amount over all moments."""
    return max((sum(map(amount, now)) for now in moments(containers, ends_first)), default=0)
