"""The CDI specifications of a node, as the simulated container runtime reads them."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import msgspec

from simcluster.apimachinery.objects import Json


def read_specifications(directory: Path) -> Iterator[Json]:
    """Yield the specifications in a directory; one may be removed meanwhile."""
    for path in sorted(directory.glob("*.json")):
        with contextlib.suppress(FileNotFoundError):
            yield msgspec.json.decode(path.read_bytes())
