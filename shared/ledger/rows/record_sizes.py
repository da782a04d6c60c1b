"""The largest records of the ledger, for Python and Lua; pure.

Anything larger is refused where it is encoded, and again where a function writes it.
"""

from shared.model.errors import RequestError

MOST_LEASE_BYTES = 131_072
"""Half of Kubernetes' limit of a pod's annotations, one of which is a copy of the lease."""
MOST_GROUPS_BYTES = 8_192
MOST_DEVICE_BYTES = 1_048_576
MOST_NODE_BYTES = 65_536
MOST_NODE_RESOURCES = 1_000
"""Lua's stack has room for the amounts of so many."""
MOST_SLOT = 65_535
MOST_NAME_BYTES = 1_024
MOST_MIB = 2**31 - 1
MOST_AMOUNT = 2**53 - 1
"""The highest number that a function counts exactly."""
MOST_REPELLING_BYTES = 262_144
MOST_SCHEDULER_REASON = 4_096
MOST_WAITING_BYTES = 1_048_576
"""NATS carries no larger message."""


def check_size(what: str, size: int, most: int) -> None:
    if size > most:
        raise RequestError(too_large(what, size, most))


def too_large(what: str, size: int, most: int) -> str:
    return f"{what} would have {size} bytes, and the ledger stores at most {most}"


def check_amount(what: str, amount: int) -> None:
    if abs(amount) > MOST_AMOUNT:
        raise RequestError(f"the amount of {what} is {amount}; the limit is {MOST_AMOUNT}")


LIMITS = {name: value for name, value in sorted(globals().items()) if name.startswith("MOST_")}
"""As `constants.lua` has them."""
