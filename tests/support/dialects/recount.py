"""A brute-force model of a cluster: what live leases hold, counted from each pod's request.

It trusts nothing but which devices, slots and positions a lease names: amounts are those that the
pod asked for (`tests.support.dialects.mixes`), not those of the lease.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

from services.node_agent.allocate.allocation import NodeSnapshot, container_setup
from services.node_agent.mig.layouts import KNOWN_GEOMETRIES
from shared.dialects.dialect import ContainerSetup, Paths
from shared.model.devices.device import Device, DeviceMode
from shared.model.leases.lease import Lease, Share
from shared.model.names import DeviceUuid, NodeName
from tests.support.dialects.mixes import MIB, ExpectedPod, ExpectedShare
from tests.support.lifecycle import moments, most_at_once

PATHS = Paths(library="/l/libvgpu.so", preload="/l/preload", containers="/c")


LAYOUTS = next(
    geometries.layouts for geometries in KNOWN_GEOMETRIES if "A100-SXM4-40GB" in geometries.models
)


def _device(node: str, index: int, **fields: Any) -> Device:
    defaults: dict[str, Any] = {"model": "Tesla T4", "memory_mib": 15109, "slots": 4}
    return Device(uuid=DeviceUuid(f"GPU-{node}-{index}"), index=index, **(defaults | fields))


def _partitioned(node: str, index: int, **fields: Any) -> Device:
    return _device(
        node,
        index,
        model="NVIDIA A100-SXM4-40GB",
        memory_mib=40960,
        mode=DeviceMode.MIG,
        layouts=LAYOUTS,
        **fields,
    )


NODES: Mapping[NodeName, tuple[Device, ...]] = {
    NodeName("a"): (*(_device("a", n) for n in range(3)), _partitioned("a", 3)),
    NodeName("b"): (
        _device("b", 0, unit_mib=10, memory_mib=16384),
        _partitioned("b", 1, unit_mib=10),
        _device("b", 2, unit_mib=10, memory_mib=8005),
    ),
}
"""Devices in both modes side by side; the second node has units of 10 MiB."""
LABELS = {"koordinator.sh/gpu-isolation-provider": "HAMi-core"}
"""Of both nodes: the library is installed."""
SERVED = (
    "volcano.sh/vgpu-number",
    "leasehold.dev/share",
    "volcano.sh/gpu-number",
    "tencent.com/vcuda-core",
    "nvidia.com/gpu",
    "koordinator.sh/gpu.shared",
)


@dataclass(frozen=True, slots=True)
class HeldShare:
    """One container's share of one device."""

    pod: str
    part: ExpectedShare
    share: Share


@dataclass(slots=True)
class Recount:
    """The devices by node, and the pods that hold leases."""

    nodes: Mapping[NodeName, tuple[Device, ...]]
    live: dict[str, tuple[ExpectedPod, Lease]] = field(default_factory=dict)
    ill: set[DeviceUuid] = field(default_factory=set)

    def on(self, uuid: DeviceUuid) -> list[HeldShare]:
        return [
            HeldShare(pod, expected.part(share.container), share)
            for pod, (expected, lease) in self.live.items()
            for share in lease.shares
            if share.device == uuid
        ]

    def add(self, pod: str, expected: ExpectedPod, lease: Lease) -> None:
        """Add a new lease; assert that it is the pod's request and that the devices were free."""
        assert_shares_as_requested(expected, lease, {d.uuid: d for d in self.nodes[lease.node]})
        for uuid in {share.device for share in lease.shares}:
            before = self.on(uuid)
            assert uuid not in self.ill, f"{pod} was given {uuid}, which is unhealthy"
            for share in lease.shares:
                if share.device == uuid and share.mig is None:
                    part = expected.part(share.container)
                    assert not (part.alone or part.idle) or not before, f"{uuid} was not idle"
                    assert not any(held.part.alone for held in before), f"{uuid} was held alone"
                    reserved = concurrent_sum(before, lambda h: h.part.cores)
                    assert reserved < 100 or part.joins_reserved, f"no core of {uuid} was left"
        self.live[pod] = (expected, lease)
        for uuid in {share.device for share in lease.shares}:
            device = device_of(self.nodes, uuid)
            held = self.on(uuid)
            self.assert_device_consistent(device)
            for part in (holding.part for holding in held if holding.pod == pod):
                if part.slots is not None and device.mode is DeviceMode.HAMI_CORE:
                    assert concurrent_sum(held, one_each) <= (part.slots or device.slots), (
                        f"too many: {held}"
                    )

    def remove(self, pod: str) -> None:
        del self.live[pod]

    def assert_consistent(self) -> None:
        """Assert that no device is overcommitted."""
        for devices in self.nodes.values():
            for device in devices:
                self.assert_device_consistent(device)

    def assert_device_consistent(self, device: Device) -> None:
        held = self.on(device.uuid)
        if device.mode is DeviceMode.MIG:
            assert_instances_valid(device, held)
            return
        assert not any(holding.share.mig for holding in held)
        granted = concurrent_sum(held, lambda h: h.part.memory(device))
        limited = concurrent_sum(held, lambda h: h.share.limit_bytes)
        booked = concurrent_sum(held, lambda h: h.share.memory_mib)
        cores = concurrent_sum(held, lambda h: h.part.cores)
        where = f"{device.uuid} of {device.memory_mib} MiB: {held}"
        assert granted <= device.memory_mib * MIB, f"{granted} bytes are promised of {where}"
        assert limited <= device.memory_mib * MIB, f"limits are {limited} bytes on {where}"
        assert booked <= device.memory_mib, f"{booked} MiB are booked on {where}"
        assert cores <= 100, f"{cores} % are reserved of {where}"
        assert_sharing_allowed(held)
        assert_slots_distinct(device, held)


def fits(expected: ExpectedPod) -> bool:
    """Return whether a pod of one container fits on some node, while nothing else is there."""
    [part] = expected.parts
    modes = {DeviceMode.HAMI_CORE} | ({DeviceMode.MIG} if part.instances else set())
    if expected.mode:
        modes &= {DeviceMode(expected.mode)}
    return any(
        sum(device_fits(part, device) for device in devices if device.mode is mode) >= part.gpus
        for devices in NODES.values()
        for mode in modes
    )


def device_fits(part: ExpectedShare, device: Device) -> bool:
    """Return whether one share of a container fits on a device, or on an instance of it."""
    if device.mode is DeviceMode.HAMI_CORE:
        return mib(part.memory(device)) <= device.memory_mib
    need = needed_of_instance(part, device)
    return any(
        profile.memory_mib >= need for layout in device.layouts for profile in layout.positions
    )


def device_of(nodes: Mapping[NodeName, tuple[Device, ...]], uuid: DeviceUuid) -> Device:
    return next(d for devices in nodes.values() for d in devices if d.uuid == uuid)


def mib(amount: int) -> int:
    """Bytes as MiB, rounded up."""
    return -(-amount // MIB)


def needed_of_instance(part: ExpectedShare, device: Device) -> int:
    """MiB that an instance must have at least."""
    if part.all_memory:
        return max(p.memory_mib for layout in device.layouts for p in layout.positions)
    return mib(part.memory(device))


def concurrent_sum(held: Iterable[HeldShare], amount: Callable[[HeldShare], int]) -> int:
    """Sum up the most that each pod uses of an amount at one time."""
    return sum(
        most_at_once(of_pod, lambda holding: holding.part.init, amount)
        for of_pod in by_pod(held).values()
    )


def one_each(_: HeldShare) -> int:
    return 1


def by_pod(held: Iterable[HeldShare]) -> dict[str, list[HeldShare]]:
    pods: dict[str, list[HeldShare]] = {}
    for holding in held:
        pods.setdefault(holding.pod, []).append(holding)
    return pods


def run_together(share: HeldShare, other: HeldShare, held: Iterable[HeldShare]) -> bool:
    """Whether two shares are ever in use at the same time."""
    if share.pod != other.pod:
        return True
    own = by_pod(held)[share.pod]
    return any(share in now and other in now for now in moments(own, lambda entry: entry.part.init))


def assert_sharing_allowed(held: list[HeldShare]) -> None:
    """Exclusive shares share a device only with containers of the same pod at other times."""
    for holding in held:
        if not holding.part.alone:
            continue
        for other in held:
            alone = other is holding or not run_together(holding, other, held)
            assert alone, f"{holding} is not alone: {other}"


def assert_slots_distinct(device: Device, held: list[HeldShare]) -> None:
    """No slot is given twice at a time, and each is among those that its dialect has."""
    for share, other in combinations([h for h in held if h.share.slot is not None], 2):
        distinct = share.share.slot != other.share.slot or not run_together(share, other, held)
        assert distinct, f"a slot of {device.uuid} is taken twice: {held}"
    for holding in held:
        most = holding.part.slots
        assert (most is None) == (not holding.share.slotted)
        if most is not None and holding.share.slot is not None:
            assert holding.share.slot < (most or device.slots)


def assert_instances_valid(device: Device, held: list[HeldShare]) -> None:
    """Instances are of one layout, none is held twice, and each is that of the layout."""
    assert len({h.share.mig.layout for h in held if h.share.mig}) <= 1
    holders: dict[int, list[HeldShare]] = {}
    for holding in held:
        place = holding.share.mig
        assert place is not None, f"{holding} holds no instance of {device.uuid}"
        layout = next(layout for layout in device.layouts if layout.name == place.layout)
        profile = layout.positions[place.position]
        assert (profile.name, profile.memory_mib) == (place.profile, holding.share.memory_mib)
        assert profile.memory_mib >= needed_of_instance(holding.part, device)
        holders.setdefault(place.position, []).append(holding)
    for position, several in holders.items():
        for share, other in combinations(several, 2):
            distinct = not run_together(share, other, held)
            assert distinct, f"instance {position} is held twice: {several}"


def assert_shares_as_requested(
    expected: ExpectedPod, lease: Lease, devices: Mapping[DeviceUuid, Device]
) -> None:
    """The shares are exactly the pod's request, rounded up to MiB or to an instance."""
    assert {share.container for share in lease.shares} == {
        part.container for part in expected.parts
    }
    for part in expected.parts:
        shares = lease.shares_of(part.container)
        assert len({share.device for share in shares}) == len(shares) == part.gpus
        for share in shares:
            device = devices[share.device]
            assert (share.mig is not None) == (device.mode is DeviceMode.MIG)
            if share.mig is None:
                wanted = part.memory(device)
                assert share.limit_bytes == wanted, f"{share} is not {wanted} bytes"
                assert share.memory_mib == mib(wanted)
                assert share.cores_percent == part.cores
            else:
                assert part.instances
                assert not share.whole
                assert share.memory_mib >= needed_of_instance(part, device)
    app = [s.device for s in lease.shares if not expected.part(s.container).init]
    assert len({devices[share.device].mode for share in lease.shares}) == 1
    assert not expected.mode or {devices[s.device].mode for s in lease.shares} == {expected.mode}
    assert not expected.one_device or len({share.device for share in lease.shares}) == 1
    assert not expected.distinct or len(set(app)) == len(app)


def setup_of(lease: Lease, container: str, devices: tuple[Device, ...]) -> ContainerSetup:
    """What Allocate returns; instances are named after device and position."""
    node = NodeSnapshot(
        name=lease.node,
        devices={d.uuid: d for d in devices},
        served={},
        paths=PATHS,
        instances={
            (s.device, s.mig.position): f"MIG-{s.device}-{s.mig.position}"
            for s in lease.shares
            if s.mig
        },
    )
    return container_setup(lease, container, node)


def assert_environment(expected: ExpectedPod, lease: Lease, devices: tuple[Device, ...]) -> None:
    """What Allocate returns for each container is its request."""
    by_uuid = {device.uuid: device for device in devices}
    for part in expected.parts:
        env = dict(setup_of(lease, part.container, devices).environment)
        shares = sorted(lease.shares_of(part.container), key=lambda share: share.index)
        seen = env["NVIDIA_VISIBLE_DEVICES"].split(",")
        limits = {k: v for k, v in env.items() if k.startswith("CUDA_DEVICE_MEMORY_LIMIT")}
        wanted = [part.memory(by_uuid[s.device]) for s in shares if s.mig is None]
        if shares[0].mig:
            assert sorted(seen) == sorted(f"MIG-{s.device}-{s.slot}" for s in shares)
            assert not any(name.startswith("CUDA_") for name in env)
        elif expected.dialect == "volcano-gpushare":
            held = {str(share.index) for share in lease.shares}
            assert set(seen) == held, "the guide's pods see the cards of all their containers"
            unit = shares[0].unit_mib
            allocated = len(shares) * unit if part.alone else sum(wanted) // MIB
            assert int(env["VOLCANO_GPU_ALLOCATED"]) == allocated
        else:
            assert sorted(seen) == sorted(share.device for share in shares)
            if not limits:
                everything = wanted == [by_uuid[s.device].memory_mib * MIB for s in shares]
                assert part.alone or (everything and part.cores in {0, 100})
            elif expected.dialect == "koordinator":
                assert bytes_of(limits["CUDA_DEVICE_MEMORY_LIMIT"]) == min(wanted)
            else:
                order = [by_uuid[DeviceUuid(uuid)].index for uuid in seen]
                assert order == sorted(order), "limits are counted in CUDA's order"
                told_bytes = [
                    bytes_of(limits[f"CUDA_DEVICE_MEMORY_LIMIT_{n}"]) for n in range(len(seen))
                ]
                assert told_bytes == wanted
            if limits:
                assert int(env.get("CUDA_DEVICE_SM_LIMIT", "0")) == part.cores


def bytes_of(text: str) -> int:
    """A limit as HAMi-core reads it."""
    return int(text[:-1]) * MIB if text.endswith("m") else int(text)
