"""What containers were given, and whether it is more than there is: the judge's own sums; pure."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from tests.model.kubelet import KubeletRecord
from tests.model.mig import parse_instance
from tests.model.raw_ledger import RawLease
from tests.model.world import DEVICE_MIB, SLOTS

ALL_CORES = 100


@dataclass(frozen=True, slots=True)
class Given:
    """What a container was given, read from its environment."""

    pod: str
    device: str
    memory_mib: int
    cores_percent: int
    slices: range = range(0)
    """Memory slices of the MIG instance that it is; empty: it is none."""


def is_as_leased(lease: RawLease, given: Given) -> bool:
    return [(s.device, s.memory_mib, s.cores_percent) for s in lease.shares] == [
        (given.device, given.memory_mib, given.cores_percent)
    ]


def instance_conflicts(leases: Iterable[RawLease]) -> Iterator[str]:
    """S1: no two leases have one position of a device; those of a device have one layout."""
    holders: dict[tuple[str, int], str] = {}
    layouts: dict[str, str] = {}
    for lease, share in ((each, share) for each in leases for share in each.shares):
        if layouts.setdefault(share.device, share.layout) != share.layout:
            yield f"S1: {share.device} is leased as {layouts[share.device]} and {share.layout}"
        if share.layout:
            holder = holders.setdefault((share.device, share.position), lease.pod)
            if holder != lease.pod:
                yield f"S1: {holder} and {lease.pod} lease position {share.position} of {share}"


def excess(what: str, parts: Iterable[Given]) -> Iterator[str]:
    by_device: dict[str, list[Given]] = {}
    for part in parts:
        by_device.setdefault(part.device, []).append(part)
    for device, here in by_device.items():
        memory, cores = (sum(p.memory_mib for p in here), sum(p.cores_percent for p in here))
        if memory > DEVICE_MIB or cores > ALL_CORES or len(here) > SLOTS:
            holders = ", ".join(f"{part.pod} {part.memory_mib} MiB" for part in here)
            yield f"{what} {memory} of {DEVICE_MIB} MiB of {device}: {holders}"
        slices = Counter(number for part in here for number in part.slices)
        if max(slices.values(), default=0) > 1 or 0 < sum(bool(p.slices) for p in here) < len(here):
            yield f"{what} slices of {device} twice: {here}"


def given_to(record: KubeletRecord) -> Given:
    environment, instance = record.given or {}, parse_instance(record.visible)
    if instance is not None:
        slices = range(instance.start, instance.start + instance.slices)
        return Given(record.pod.uid, instance.device, instance.memory_mib, 0, slices)
    return Given(
        pod=record.pod.uid,
        device=environment["NVIDIA_VISIBLE_DEVICES"],
        memory_mib=int(environment["CUDA_DEVICE_MEMORY_LIMIT_0"].removesuffix("m")),
        cores_percent=int(environment["CUDA_DEVICE_SM_LIMIT"]),
    )
