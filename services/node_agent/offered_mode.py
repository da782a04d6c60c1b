"""How the node's GPUs are offered, by amounts or as replicas: that changes while none is in use."""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace

from services.node_agent.allocate.admission_window import AdmissionWindow
from services.node_agent.allocate.allocation import HONOURED_STATES
from services.node_agent.gpus import inventory
from services.node_agent.gpus.inventory import Gpu, SharingConfig
from services.node_agent.gpus.replica_mode import ReplicaMode, choose_mode
from services.node_agent.node import Node
from services.node_agent.records.device_guard import share_holders
from shared.model.devices.device import Device
from shared.model.devices.replicas import Replicas, is_replica
from shared.model.errors import UnavailableError

logger = logging.getLogger(__name__)


class OfferedMode:
    def __init__(self, node: Node, window: AdmissionWindow) -> None:
        self.node = node
        self.window = window
        self._chosen = ReplicaMode()
        self._advertised: Replicas | None = None
        """None if GPUs are advertised by amounts."""

    @property
    def problem(self) -> str:
        return self._chosen.problem

    async def choose(
        self, config: SharingConfig, gpus: Sequence[Gpu], before: Iterable[Device]
    ) -> SharingConfig:
        """The leases are requested before a change: the agent is not sent those only reserved."""
        devices = tuple(before)
        mode = self._choose(config, gpus, devices, self._share_holders())
        if self._is_change(mode.replicas):
            mode = self._choose(config, gpus, devices, await self._holders_in_ledger())
        if mode.problem and mode.problem != self._chosen.problem:
            logger.warning(mode.problem)
            self.node.config_errors.append(mode.problem)
            self.node.report_due.set()
        self._chosen = mode
        return self.in_force(config)

    def in_force(self, config: SharingConfig) -> SharingConfig:
        return replace(config, replicas=self._chosen.replicas)

    def advertise(self, replicas: Replicas | None) -> bool:
        """Return False if a pod has been admitted since that was chosen."""
        fits = self._share_holders() == set() or (replicas is None and self._has_only_amounts())
        if self._is_change(replicas) and not fits:
            self._chosen = ReplicaMode(replicas=self._advertised)
            return False
        self._advertised = replicas
        return True

    def _choose(
        self,
        config: SharingConfig,
        gpus: Sequence[Gpu],
        before: Sequence[Device],
        holders: set[str] | None,
    ) -> ReplicaMode:
        return choose_mode(
            config,
            inventory.visible_gpus(gpus, config),
            before,
            holders=holders,
            only_amounts=self._has_only_amounts(),
            missing_mps=lambda gpu: self.node.enforcers.missing("mps", gpu, config),
        )

    def _is_change(self, replicas: Replicas | None) -> bool:
        return bool(self.node.devices) and replicas != self._advertised

    async def _holders_in_ledger(self) -> set[str] | None:
        try:
            await self.node.lease_sync.sync()
        except UnavailableError:
            return None
        return self._share_holders()

    def _has_only_amounts(self) -> bool:
        bound = (
            lease for lease in self.node.leases.leases.values() if lease.state in HONOURED_STATES
        )
        given = (entry.lease for entry in self.node.checkpoint.entries)
        modes = {
            is_replica(share.mode)
            for lease in (*bound, *given, *self.window.in_flight().values())
            for share in lease.shares
            if share.mig is None
        }
        return modes == {False}

    def _share_holders(self) -> set[str] | None:
        """Return None if not known."""
        checkpoint = self.node.checkpoint
        leases = self.node.leases
        if not leases.synced or checkpoint.lost:
            return None
        admitted = self.window.in_flight().values()
        return share_holders(checkpoint.entries, (*leases.leases.values(), *admitted))
