"""The largest records of the ledger, for Python and Lua; pure.

Anything larger is refused where it is encoded, and again where a function writes it.
"""

from shared.model.errors import RequestError

MOST_LEASE_BYTES = 131_072
"""Half of what Kubernetes allows all annotations of a pod, one of which is a copy of the lease."""
MOST_GROUPS_BYTES = 8_192
"""Of a lease."""
MOST_DEVICE_BYTES = 1_048_576
"""Groups of 128 leases, and the slots."""
MOST_NODE_BYTES = 65_536
"""Names and amounts of resources."""
MOST_NODE_RESOURCES = 1_000
"""Lua's stack has room for the amounts of so many."""
MOST_SLOT = 65_535
"""The highest slot of a device, or position of an MIG instance."""
MOST_NAME_BYTES = 1_024
"""Of a node, or the UUID of a device."""
MOST_MIB = 2**31 - 1
"""Of a device, or of what leases use of it."""
MOST_AMOUNT = 2**53 - 1
"""The highest number that a function counts exactly."""
MOST_REPELLING_BYTES = 262_144
"""Of the anti-affinity of pods that kube-scheduler starts on a node, which the watcher has not
reported yet."""
MOST_SCHEDULER_REASON = 4_096
"""Characters of the reason that kube-scheduler reports for a waiting pod."""
MOST_WAITING_BYTES = 1_048_576
"""Of a waiting pod with its verdict; NATS carries no larger message."""


def check_size(what: str, size: int, most: int) -> None:
    """Raise RequestError if something has more bytes than the ledger stores."""
    if size > most:
        raise RequestError(too_large(what, size, most))


def too_large(what: str, size: int, most: int) -> str:
    return f"{what} would have {size} bytes, and the ledger stores at most {most}"


def check_amount(what: str, amount: int) -> None:
    """Raise RequestError for a number that a function does not count exactly."""
    if abs(amount) > MOST_AMOUNT:
        raise RequestError(f"the amount of {what} is {amount}; the limit is {MOST_AMOUNT}")


LIMITS = {name: value for name, value in sorted(globals().items()) if name.startswith("MOST_")}
"""As `constants.lua` has them."""
