"""Alignment of GPUs with CPUs: which NUMA nodes device IDs show to the kubelet's Topology Manager.

The kubelet chooses NUMA nodes by the free IDs before it calls the device plugin. So while a pod
with a lease is about to be admitted, only the IDs of its GPUs show a NUMA node. CPUs that pods have
beyond their leases are reported as not there.
"""

import asyncio
import contextlib
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from services.node_agent.allocate.admission_window import AdmissionWindow, numa_nodes_of
from services.node_agent.kubelet.registration import DevicePlugins
from services.node_agent.node import Node
from shared.dialects.advertised import NumaNodes
from shared.model.clock import until_tick, wait_for_event
from shared.model.devices.device import Device, numa_cpus_name
from shared.model.errors import LeaseholdError, RequestError, UnavailableError
from shared.model.leases.lease import Lease
from shared.model.names import DeviceUuid, PodUid

logger = logging.getLogger(__name__)

SINGLE_NODE = "single-numa-node"
REJECTING = frozenset({"restricted", SINGLE_NODE})
"""They reject pods whose CPUs are not at their GPUs' NUMA node."""
ALIGNING = REJECTING | {"best-effort"}
CPU_LIST = "/sys/devices/system/node/node{}/cpulist"
MOST_NUMA_NODES = 8
"""An ID's entry in the list stays below 128 bytes."""
TAKEN_S = 0.25
"""How long a kubelet may take to apply a list; its binder waits for less than 0.5 s in all."""
LOOK_S = 0.01
"""Interval of looks whether the kubelet has applied a list."""
ALIGN_S = 1.0
"""Interval of comparisons with pods and CPUs while the kubelet aligns devices."""
IDLE_S = 10.0
"""The same while the kubelet aligns nothing."""
COUNT_S = 0.1
"""How long the kubelet may take to list pods before one is bound."""
CPUS_TAKEN = "the kubelet has given the CPUs beside the pod's GPUs to other containers"
LIST_NOT_TAKEN = "the kubelet does not know yet on which NUMA node the pod's GPUs are"


def shown_numa_nodes(
    devices: Mapping[DeviceUuid, Device], coming: Iterable[Lease]
) -> dict[DeviceUuid, NumaNodes]:
    """A device shows none if a NUMA node of its lease is not known."""
    own = {device.uuid: device.numa for device in devices.values()}
    leases = tuple(coming) if len(set(own.values())) > 1 else ()
    if not leases:
        return {uuid: (numa,) for uuid, numa in own.items() if numa is not None}
    shown: dict[DeviceUuid, NumaNodes] = {}
    for lease in leases:
        nodes = numa_nodes_of(lease, devices)
        for share in lease.shares if nodes else ():
            merged = sorted({*nodes, *shown.get(share.device, ())})
            shown[share.device] = tuple(merged[:MOST_NUMA_NODES])
    return shown


def parse_cpu_list(text: str) -> frozenset[int]:
    """Parse CPUs as the kernel lists them. Raises ValueError.

    >>> sorted(parse_cpu_list("0-3,8"))
    [0, 1, 2, 3, 8]
    """
    parts = (part.partition("-") for part in text.strip().split(",") if part)
    return frozenset(
        cpu for first, _, last in parts for cpu in range(int(first), int(last or first) + 1)
    )


def _cpus_of(numa: int) -> frozenset[int]:
    with contextlib.suppress(OSError, ValueError):
        return parse_cpu_list(Path(CPU_LIST.format(numa)).read_text())
    return frozenset()


class NumaAlignment:
    def __init__(self, node: Node, plugins: DevicePlugins, window: AdmissionWindow) -> None:
        self.node = node
        self.plugins = plugins
        self.window = window
        self._registrations = 0
        self._policy = ""
        self._taken: Mapping[DeviceUuid, NumaNodes] = {}
        self._sent_at = 0.0
        self._cpus: Mapping[int, int] = {}
        self._is_known = False
        self._late_at = node.clock.ticks() + 2 * node.timing.status_late_s

    @property
    def is_known(self) -> bool:
        """Until the kubelet's requirements are known, no pod must come."""
        return self._is_known or all(device.numa is None for device in self.node.devices)

    @property
    def is_starting(self) -> bool:
        """The kubelet may start after the agent."""
        return not self.is_known and self.node.clock.ticks() < self._late_at

    def described(self, devices: Iterable[Device]) -> tuple[Device, ...]:
        one_numa = self._policy == SINGLE_NODE
        cpus = self._cpus
        return tuple(
            replace(device, one_numa=one_numa, numa_cpus=cpus.get(device.numa))
            if device.numa is not None
            else device
            for device in devices
        )

    async def wait(self) -> None:
        is_known = self._is_known and self._registrations == self.plugins.registrations
        idle = is_known and not self.window.aligns_numa
        await wait_for_event(self.plugins.registered, until_tick(IDLE_S if idle else ALIGN_S))
        self.plugins.registered.clear()

    async def refresh(self) -> None:
        registrations = self.plugins.registrations
        if registrations != self._registrations:
            try:
                policy = await self.node.kubelet.topology_policy()
            except RequestError as error:
                policy = ""
                logger.info("GPUs are not aligned with CPUs, as the policy is unknown: %s", error)
            except UnavailableError as error:
                logger.debug("the kubelet's topology manager policy: %s", error)
                return
            self._registrations = registrations
            self._policy = policy
            self.window.aligns_numa = policy in ALIGNING
            self.node.report_due.set()
        await self.align()
        await self._recount()

    async def _recount(self) -> None:
        if not self.node.leases.synced:
            return
        cpus = await self._count_cpus() if self._policy in REJECTING else {}
        if cpus and self._kubelet_has_just_started():  # it lists no pods, also none without leases
            if not self._is_known:
                return
            cpus = {numa: min(n, self._cpus.get(numa, n)) for numa, n in cpus.items()}
        was_known, self._is_known = self._is_known, self._registrations > 0
        if cpus != self._cpus or was_known != self._is_known:
            self._cpus = cpus
            self.node.report_due.set()

    def _kubelet_has_just_started(self) -> bool:
        with contextlib.suppress(OSError):
            age_s = self.node.clock.now() - self.plugins.kubelet.stat().st_mtime
            return 0 <= age_s < self.node.timing.status_late_s
        return True

    async def short_of_cpus(self, leases: Sequence[Lease]) -> tuple[PodUid, ...]:
        names = {numa: numa_cpus_name(numa) for numa in self._cpus}
        if not any(name in lease.resources for lease in leases for name in names.values()):
            return ()
        with contextlib.suppress(TimeoutError, LeaseholdError):
            async with asyncio.timeout(COUNT_S):
                await self._recount()
        asked = {lease.pod for lease in leases}
        others = [lease for pod, lease in self.node.leases.leases.items() if pod not in asked]
        left = {
            name: self._cpus.get(numa, 0) - sum(lease.resources.get(name, 0) for lease in others)
            for numa, name in names.items()
        }
        short = []
        for lease in leases:
            wanted = {name: lease.resources.get(name, 0) for name in left}
            if any(cpus > max(0, left[name]) for name, cpus in wanted.items()):
                short.append(lease.pod)
            else:
                left = {name: left[name] - cpus for name, cpus in wanted.items()}
        return tuple(short)

    async def align(self) -> bool:
        """Return whether the kubelet has taken the lists.

        One that shows no new list for `status_late_s` counts as having taken it: else no pod would
        ever come.
        """
        shown: dict[DeviceUuid, NumaNodes] = {}
        if self.window.aligns_numa and self.node.snapshot and self.node.leases.synced:
            shown = shown_numa_nodes(self.node.snapshot.devices, self.window.coming().values())
        if shown == self._taken == self.plugins.numa:
            return True
        if shown != self.plugins.numa:
            self._sent_at = self.node.clock.ticks()
        self.plugins.show_numa(shown)
        try:
            async with asyncio.timeout(TAKEN_S):
                while not await self._is_taken():  # noqa: ASYNC110 - no event says so
                    await asyncio.sleep(LOOK_S)
        except TimeoutError:
            return self.node.clock.ticks() > self._sent_at + self.node.timing.status_late_s
        self._taken = self.plugins.numa  # another call may have sent a newer list
        return True

    async def _is_taken(self) -> bool:
        try:
            allocatable = await self.node.pod_resources.list_allocatable()
        except LeaseholdError as error:
            logger.debug("the kubelet does not show what it knows of devices: %s", error)
            return True
        return self.plugins.are_shown(allocatable.numa)

    async def _count_cpus(self) -> dict[int, int]:
        """Return none if the kubelet gives no CPUs exclusively."""
        pod_resources = self.node.pod_resources
        allocatable = (await pod_resources.list_allocatable()).cpus
        if not allocatable:
            return {}
        held = (await pod_resources.list_holdings()).cpus
        leased: dict[tuple[str, str], Mapping[str, int]] = {
            (lease.namespace, lease.name): lease.resources
            for lease in self.node.leases.leases.values()
            if lease.claim is None
        }
        nodes = {device.numa for device in self.node.devices if device.numa is not None}
        cpus_of = {numa: _cpus_of(numa) for numa in nodes}
        left = {numa: len(allocatable & cpus) for numa, cpus in cpus_of.items() if cpus}
        for pod, own in held.items():
            of_lease = leased.get(pod, {})
            for numa in left:
                beyond = len(own & cpus_of[numa]) - of_lease.get(numa_cpus_name(numa), 0)
                left[numa] -= max(0, beyond)
        return {numa: max(0, cpus) for numa, cpus in left.items()}
