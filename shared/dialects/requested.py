"""A container's amounts of resources, in limits or requests; pure.

An amount of 0 requests nothing: templates write it where no GPU is wanted. It is left out here, so
that for every other rule it is as if the resource were not there.
"""

from collections.abc import Mapping

from shared.dialects import GPU_RESOURCES
from shared.dialects.nvidia.dialect import PRIORITY
from shared.model.errors import RequestError
from shared.model.quantity import parse_quantity, parse_resources

LEVELS = frozenset({PRIORITY})
"""Resources whose 0 is a value. They request nothing by themselves."""


def parse_requested(resources: Mapping[str, str | int | float]) -> dict[str, int]:
    """Parse amounts into integers, without those that are 0.

    Raises RequestError with the resource for a malformed quantity and one too large to count, and
    for an amount of GPUs that is negative or not a whole number.
    """
    amounts = parse_resources(resources)
    for name in amounts.keys() & GPU_RESOURCES:
        exact = parse_quantity(resources[name])
        if exact < 0 or exact.denominator != 1:
            raise RequestError(f"{name} must be a whole number of 0 or more, got {resources[name]}")
    return {name: amount for name, amount in amounts.items() if amount or name in LEVELS}


def requests_gpu(amounts: Mapping[str, int]) -> bool:
    """Return whether some amount is of a resource of a dialect."""
    return any(amount and name in GPU_RESOURCES for name, amount in amounts.items())
