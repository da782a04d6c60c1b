"""The numbers of a node's simulated GPUs, by which their device files are named."""

from collections.abc import Iterable
from pathlib import Path

from shared.model.errors import UnavailableError
from simcluster.gpu_driver.control import device_uuids
from simcluster.kubelet.containers.runtime_devices import ALL


class GpuNumbers:
    """The GPUs and MIG instances of one node's driver; none before it is there."""

    def __init__(self, state: Path) -> None:
        self._state = state
        self._numbers: dict[str, int] = {}

    def of(self, names: Iterable[str]) -> list[int]:
        """Return the numbers of the GPUs that these are, or are instances of."""
        wanted = list(names)
        if any(name not in self._numbers for name in wanted):
            self._numbers = self._read()
        if ALL in wanted:
            return sorted(set(self._numbers.values()))
        return sorted({self._numbers[name] for name in wanted if name in self._numbers})

    def _read(self) -> dict[str, int]:
        """Return the number of each GPU by its UUID, those of its instances, and its number."""
        if not self._state.is_file():
            return {}
        try:
            gpus = device_uuids(self._state)
        except UnavailableError:
            return {}
        return {name: number for number, uuids in enumerate(gpus) for name in (*uuids, str(number))}
