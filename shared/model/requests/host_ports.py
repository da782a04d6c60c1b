"""Ports of a node that pods reserve, counted as resources of the node; pure.

A pod that reserves a port on all addresses takes all of the port's resource. On a single address it
takes one part of it, and all of a resource of that address. So pods conflict as for kube-scheduler.
"""

from collections.abc import Iterable, Mapping

HOST_PORT_PREFIX = "host port "
HOST_PORT_PARTS = 1024
"""For as many pods that reserve a port on different addresses."""
TOO_MANY = f"{HOST_PORT_PREFIX}*"
"""More ports are in use than are counted."""
ALL_ADDRESSES = frozenset({"", "0.0.0.0"})  # noqa: S104 - as pods write it

MOST_IN_USE = 128

HostPorts = tuple[tuple[str, int], ...]


def host_ports(ports: Iterable[tuple[str, int, str]]) -> HostPorts:
    """Return the resources of ports, given by protocol, number and address, sorted by name.

    >>> host_ports([("TCP", 80, "")])
    (('host port TCP/80', 1024),)
    """
    amounts: dict[str, int] = {}
    for protocol, number, address in ports:
        name = f"{HOST_PORT_PREFIX}{protocol or 'TCP'}/{number}"
        if address in ALL_ADDRESSES:
            amounts[name] = HOST_PORT_PARTS
        else:
            amounts.setdefault(name, 1)
            amounts[f"{name} {address}"] = HOST_PORT_PARTS
    return tuple(sorted(amounts.items()))


def ports_in_use(used: Mapping[str, int]) -> dict[str, int]:
    ports = {
        name: amount
        for name, amount in used.items()
        if amount > 0 and name.startswith(HOST_PORT_PREFIX)
    }
    return ports if len(ports) <= MOST_IN_USE else {TOO_MANY: HOST_PORT_PARTS}


def has_ports(wanted: HostPorts, free: Mapping[str, int]) -> bool:
    """Return whether the ports are free; `free` has what is in use of each, below 0."""
    return free.get(TOO_MANY, 0) >= 0 and all(
        free.get(name, 0) + HOST_PORT_PARTS >= amount for name, amount in wanted
    )
