"""Links between the GPUs of a node: PCI addresses, NVLinks and HAMi's score of a pair; pure.

The score of a pair is that of the nearest component above both, plus 100 for each NVLink between
them.
"""

import re
from dataclasses import dataclass

ACROSS_SOCKETS = 10
ON_ONE_SOCKET = 20
UNDER_HOST_BRIDGE = 30
UNDER_SWITCHES = 40
UNDER_ONE_SWITCH = 50
ON_ONE_BOARD = 60
PER_NVLINK = 100
_ADDRESS = re.compile(r"([0-9a-f]+):([0-9a-f]{2}):([0-9a-f]{2})\.([0-7])", re.IGNORECASE)
_ROOT_COMPLEX = re.compile(r"pci[0-9a-f]{4,}:[0-9a-f]{2}")


@dataclass(frozen=True, slots=True, kw_only=True)
class PciLocation:
    """PCI location of one GPU."""

    address: str = ""
    """PCI address, such as `0000:3b:00.0`; empty: unknown."""
    root_complex: str = ""
    """Such as `pci0000:3a`; empty: unknown."""
    numa: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NvLinks:
    """The active NVLinks of one GPU."""

    direct: tuple[str, ...] = ()
    """PCI addresses of the GPUs at the other ends."""
    switched: int = 0
    """Number of links to NVSwitches, which connect all GPUs with each other."""

    def count_to(self, address: str, other: "NvLinks") -> int:
        """Return how many NVLinks connect this GPU with the one at `address`."""
        return sum(one == address for one in self.direct) + min(self.switched, other.switched)


def parse_pci_address(text: str) -> str:
    """Return a PCI address as the kernel writes it, `0000:3b:00.0`; empty if it is invalid."""
    match = _ADDRESS.fullmatch(text.strip("\0 "))
    if match is None:
        return ""
    domain, bus, device, function = match.groups()
    return f"{int(domain, 16):04x}:{bus}:{device}.{function}".lower()


def root_complex_in(path: str) -> str:
    """Return the root complex in a device's sysfs path, `pci0000:3a`; empty if there is none."""
    return next((part for part in path.split("/") if _ROOT_COMPLEX.fullmatch(part)), "")


def link_score(nearest: int, nvlinks: int) -> int:
    """Return a pair's score."""
    return nearest + PER_NVLINK * nvlinks
