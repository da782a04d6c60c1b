"""When each leased share was last used.

A share is not used by a process that only holds memory. A moment at which use could not be observed
counts as use.
"""

import asyncio
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from services.node_agent.files import replace_file
from services.node_agent.isolation.region import Region
from services.node_agent.usage.measurements import MeasuredContainer, MeasuredShare
from shared.model.bounds import Amount, Seconds
from shared.model.errors import UNDECODABLE
from shared.model.leases.lease import ShareKey

logger = logging.getLogger(__name__)

UNOBSERVED_S = 60.0
"""An agent that was away for longer has missed what happened meanwhile."""
SAVE_S = 15.0
"""Interval of writes: less than an agent may be away without a gap in its observations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LastUse:
    used_at: Seconds
    memory_bytes: Amount = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LastUses:
    observed_at: Seconds
    shares: tuple[tuple[ShareKey, LastUse], ...] = ()


class IdleShares:
    def __init__(self) -> None:
        self._uses: dict[ShareKey, LastUse] = {}
        self._observed_from: float | None = None
        self._observed_at = 0.0
        self._missed = False
        """Between the restored record and the first scan, something may have happened."""

    def restore(self, record: LastUses, now: float) -> None:
        self._uses = dict(record.shares)
        self._missed = not 0 <= now - record.observed_at <= UNOBSERVED_S
        self._observed_from = None if self._missed else record.observed_at

    @property
    def record(self) -> LastUses:
        return LastUses(observed_at=self._observed_at, shares=tuple(self._uses.items()))

    @property
    def since(self) -> Mapping[ShareKey, float]:
        return {
            key: use.used_at for key, use in self._uses.items() if use.used_at < self._observed_at
        }

    def observe(self, containers: Iterable[MeasuredContainer], now: float) -> None:
        if self._observed_from is None:
            self._observed_from = now
        self._uses = {
            measured.key_of(share): self._use_of(measured, share, now)
            for measured in containers
            for share in measured.shares
        }
        self._observed_at = now
        self._missed = False

    def _use_of(self, measured: MeasuredContainer, share: MeasuredShare, now: float) -> LastUse:
        kernels = _kernel_time(measured)
        before = self._uses.get(measured.key_of(share))
        if self._missed and kernels is None:
            before = None
        used_at = max(measured.container.allocated_at, self._observed_from or now)
        if before is not None:
            used_at = before.used_at
        if _is_in_use(share, before, kernels):
            used_at = now
        used_at = min(max(used_at, kernels or 0.0), now)
        return LastUse(used_at=used_at, memory_bytes=share.measured_bytes)


def _is_in_use(share: MeasuredShare, before: LastUse | None, kernels: float | None) -> bool:
    if share.driver_percent or (share.driver_percent is None and kernels is None):
        return True
    return before is not None and before.memory_bytes != share.measured_bytes


def _kernel_time(measured: MeasuredContainer) -> float | None:
    """Return 0 for never, None if it is not known."""
    region = measured.region
    if not isinstance(region, Region) or not region.layout.has_last_kernel:
        return None
    return region.last_kernel_at or 0.0


class LastUseFile:
    def __init__(self, path: Path, *, save_s: float = SAVE_S) -> None:
        self.path = path
        self.save_s = save_s
        self._saved_at = float("-inf")

    async def load(self) -> LastUses | None:
        try:
            data = await asyncio.to_thread(self.path.read_bytes)
            return msgspec.json.decode(data, type=LastUses)
        except FileNotFoundError:
            return None
        except (OSError, *UNDECODABLE) as error:
            logger.warning("%s is not used: since when shares are idle starts anew: %s",
                           self.path, error)  # fmt: skip
            return None

    async def save(self, record: LastUses) -> None:
        if abs(record.observed_at - self._saved_at) < self.save_s:
            return
        try:
            await asyncio.to_thread(replace_file, self.path, msgspec.json.encode(record))
            self._saved_at = record.observed_at
        except OSError as error:
            logger.debug("%s was not written: %s", self.path, error)
