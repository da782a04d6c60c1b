"""Which containers of a pod run at the same time, and what they use together; pure.

https://kubernetes.io/docs/concepts/workloads/pods/sidecar-containers/#resource-sharing-within-containers
"""

from collections.abc import Iterable
from fractions import Fraction
from typing import TypeVar

Amount = TypeVar("Amount", int, Fraction)


def peak(amounts: Iterable[tuple[Amount, bool]], nothing: Amount) -> Amount:
    """Return the most that a pod uses at any time, given each container's amount in spec order.

    The boolean is true for an init container that ends before the next container starts. Others,
    sidecars among them, run until the pod ends: beside all later containers.
    """
    running = most = nothing
    for amount, ends_first in amounts:
        if ends_first:
            most = max(most, running + amount)
        else:
            running += amount
    return max(most, running)
