"""How GPUs lie to each other on their node: words of the driver and of the kernel, in ours; pure.

A pair's score is HAMi's: by the nearest thing above both, plus 100 for each NVLink between them.
"""

import re
from collections.abc import Iterable

ACROSS_SOCKETS = 10
ON_ONE_SOCKET = 20
UNDER_HOST_BRIDGE = 30
UNDER_SWITCHES = 40
UNDER_ONE_SWITCH = 50
ON_ONE_BOARD = 60
PER_NVLINK = 100
_BUS = re.compile(r"([0-9a-f]+):([0-9a-f]{2}):([0-9a-f]{2})\.([0-7])", re.IGNORECASE)
_ROOT = re.compile(r"pci[0-9a-f]{4,}:[0-9a-f]{2}")


def parse_pci_address(text: str) -> str:
    """Write a PCI address as the kernel does, `0000:3b:00.0`; empty: it is none."""
    match = _BUS.fullmatch(text.strip("\0 "))
    if match is None:
        return ""
    domain, bus, device, function = match.groups()
    return f"{int(domain, 16):04x}:{bus}:{device}.{function}".lower()


def root_complex_in(path: str) -> str:
    """Return the root complex in a device's place in sysfs, `pci0000:3a`; empty: none is named."""
    return next((part for part in path.split("/") if _ROOT.fullmatch(part)), "")


def count_nvlinks(
    own: Iterable[str], own_switched: int, other_bus: str, other_switched: int
) -> int:
    """Return how many NVLinks join two GPUs.

    `own` are the addresses at the far ends of one GPU's direct links, `*_switched` how many links
    lead to NVSwitches, which join everybody with everybody.
    """
    return sum(bus == other_bus for bus in own) + min(own_switched, other_switched)


def link_score(nearest: int, nvlinks: int) -> int:
    """Return a pair's score."""
    return nearest + PER_NVLINK * nvlinks
