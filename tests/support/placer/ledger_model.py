"""A model of the ledger: what it must reply after each call, and random candidates."""

from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st
from msgspec import structs

from shared.model.devices.device import Device, DeviceMode, MigLayout
from shared.model.leases.lease import Lease, MigPlacement, Share, bookings
from shared.model.leases.ledger import Reservation
from shared.model.names import DeviceUuid
from shared.model.requests.request import SharingPolicy
from tests.support.build import mig_layout
from tests.support.choices import among
from tests.support.placer.ledger import NOW, device, share, uuid

NODES = ("a", "b")
GPUS = 2
PODS = tuple(f"p{n}" for n in range(7))
TTL_S = 30
pods = st.sampled_from(PODS)
gpus = st.integers(0, GPUS)
MIG = GPUS
"""Number of the device of each node that is in MIG mode, unless it is flipped."""
LAYOUTS = (mig_layout("thirds", (4_000, 3)), mig_layout("mixed", (9_000, 1), (3_000, 2)))


def described(node: str, gpu: int, *, flipped: bool = False, **changes: object) -> Device:
    """A device of a node: the last is in MIG mode and the others are not, or the reverse."""
    mode = DeviceMode.MIG if (gpu == MIG) != flipped else DeviceMode.HAMI_CORE
    return device(node, gpu, mode=mode, layouts=LAYOUTS, **changes)


@st.composite
def candidates(draw: st.DrawFn) -> tuple[str, list[Share]]:
    """Shares of devices, all of one layout where they are instances, each in its own position."""
    node = draw(among(*NODES))
    count = draw(among(1, 1, 1, 2, 3, 0))
    layout = draw(among(*LAYOUTS))
    positions = draw(st.permutations(range(3)))
    instances = draw(st.sampled_from(({MIG}, {MIG}, {MIG}, {0, MIG}, set())))
    shares = [
        share(
            node,
            draw(gpus),
            mib=draw(among(1, 1, 4_000, 9_000, 16_000)),
            cores=draw(among(0, 0, 0, 30, 100)),
            container=f"c{number}",
            slotted=draw(among(True, True, False)),
            sharing=draw(
                st.sampled_from((SharingPolicy.SHARED, SharingPolicy.SHARED, *SharingPolicy))
            ),
            slots=draw(among(0, 0, 100, 2)),
            init=draw(st.integers(0, 2)) == 0,
        )
        for number in range(count)
    ]
    if shares and shares[0].init:
        positions[0] = draw(st.sampled_from(positions))
    return node, [
        as_instance(share, layout, positions[number]) if share.index in instances else share
        for number, share in enumerate(shares)
    ]


def as_instance(share: Share, layout: MigLayout, position: int) -> Share:
    profile = layout.positions[position]
    return structs.replace(
        share,
        memory_mib=profile.memory_mib,
        sharing=SharingPolicy.SHARED,
        mig=MigPlacement(layout=layout.name, position=position, profile=profile.name),
    )


class Model:
    """What the ledger must answer, the slow and obvious way."""

    def __init__(self) -> None:
        self.leases: dict[str, Lease] = {}
        self.devices = {
            uuid(node, gpu): described(node, gpu) for node in NODES for gpu in range(GPUS + 1)
        }
        self.pods_allowed = dict.fromkeys(NODES, 110)
        self.fences: dict[DeviceUuid, int] = {}
        self.now = NOW

    def held(self, where: DeviceUuid) -> list[tuple[Lease, Any]]:
        return [
            (lease, booking)
            for lease in self.leases.values()
            for booking in bookings(lease.shares)
            if booking.device == where
        ]

    def fits(self, wanted: Reservation, node: str, shares: tuple[Share, ...]) -> bool:
        here = sum(lease.node == node for lease in self.leases.values())
        return here + 1 <= self.pods_allowed[node] and all(
            self.device_fits(wanted, booking, shares) for booking in bookings(shares)
        )

    def device_fits(self, wanted: Reservation, booking: Any, shares: tuple[Share, ...]) -> bool:
        device = self.devices.get(booking.device)
        if device is None or not device.healthy:
            return False
        mine = [s for s in shares if s.device == booking.device]
        if not self.positions_fit(device, mine):
            return False
        held = self.held(booking.device)
        count = sum(other.shares for _, other in held)
        cores = sum(other.cores_percent for _, other in held)
        memory = sum(other.memory_mib for _, other in held)
        slotted = [s for s in mine if s.slotted and not s.mig]
        slots = min((s.slots for s in slotted), default=0) or device.slots
        return not (
            (slotted and count + booking.shares > slots)
            or any(
                set(wanted.anti_affinity_groups) & set(lease.anti_affinity_groups)
                for lease, _ in held
            )
            or memory + booking.memory_mib > device.memory_mib
            or cores + booking.cores_percent > 100
            or (
                booking.sharing in {SharingPolicy.EXCLUSIVE, SharingPolicy.IDLE_DEVICE}
                and count > 0
            )
            or any(other.sharing is SharingPolicy.EXCLUSIVE for _, other in held)
            or (cores >= 100 and booking.sharing is not SharingPolicy.BEST_EFFORT)
        )

    def positions_fit(self, device: Device, mine: list[Share]) -> bool:
        """Instances are on devices in MIG mode, of one layout, none of them taken."""
        there = [
            s for lease in self.leases.values() for s in lease.shares if s.device == device.uuid
        ]
        layouts = {s.mig.layout if s.mig else "" for s in (*mine, *there)}
        taken = {s.mig.position for s in there if s.mig}
        return (
            (device.mode is DeviceMode.MIG) == any(s.mig for s in mine)
            and len(layouts) == 1
            and not any(s.mig and s.mig.position in taken for s in mine)
        )

    def lowest_slots(self, where: DeviceUuid) -> Iterator[int]:
        taken = {
            s.slot for lease in self.leases.values() for s in lease.shares if s.device == where
        }
        return (slot for slot in range(1000) if slot not in taken)

    def check_new(self, lease: Lease) -> None:
        """Slots are the lowest that were free, fences are higher than all before."""
        for where in {s.device for s in lease.shares}:
            mine = [s for s in lease.shares if s.device == where]
            free = self.lowest_slots(where)
            assert all(s.slot == s.mig.position for s in mine if s.mig)
            wanted = {s.slot for s in mine if s.slotted and not s.mig}
            assert wanted == {next(free) for _ in wanted}
            beside = [s.slot for s in mine if s.slotted and not s.init]
            assert len(set(beside)) == len(beside)
            for s in mine:
                assert s.fence > self.fences.get(where, 0)
                self.fences[where] = s.fence
        self.leases[lease.pod] = lease
